"""A ViT-like image classifier: patches by a convolution, a class token, pre-LayerNorm blocks with biases."""

import math
from dataclasses import dataclass

from .attention import attend, project_heads
from .builder import Dim, GraphBuilder
from .config import TransformerConfig, require
from .layers import gelu, layer_norm, linear_with_bias, merge_heads
from .weights import WeightStore


@dataclass(frozen=True, kw_only=True)
class VitConfig(TransformerConfig):
    """A ViT-like image classifier.

    Attributes:
        image: height and width of the input in pixels.
        patch: height and width of a patch; divides `image`.
        channels: of the input.
        classes: width of the logits.
        ffn: width between the two linear layers of an MLP; None is 4 * hidden.
    """

    image: int = 16
    patch: int = 4
    channels: int = 3
    classes: int = 16
    ffn: int | None = None

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("image", "patch", "channels", "classes")
        self.require_positive_if_given("ffn")
        require(self.image % self.patch == 0, f"image {self.image} is not divisible by patch {self.patch}")

    @property
    def ffn_dim(self) -> int:
        """Width between the two linear layers of an MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image // self.patch) ** 2


_VIT: dict[str, object] = {"image": 224, "patch": 16, "classes": 1000, "batch": 8}
PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "small": {"layers": 12, "hidden": 384, "heads": 6, **_VIT},
    "base": {"layers": 12, "hidden": 768, "heads": 12, **_VIT},
    "large": {"layers": 24, "hidden": 1024, "heads": 16, **_VIT},
}


def build_vit(config: VitConfig, weights: WeightStore) -> GraphBuilder:
    """Build `pixels [batch, channels, image, image] -> logits [batch, classes]`."""
    b = GraphBuilder("vit", config, weights)
    shape = (config.batch_dim, config.channels, config.image, config.image)
    pixels = b.input("pixels", b.elem_type, shape)
    batch = b.size(pixels, 0) if config.dynamic else config.batch
    x = _embed(b, config, pixels, batch)
    for layer in range(config.layers):
        with b.scope(f"blocks.{layer}"):
            x = b.op("Add", x, _attention(b, config, layer_norm(b, "norm1", x, config.hidden), batch))
            x = b.op("Add", x, _mlp(b, config, layer_norm(b, "norm2", x, config.hidden)))
    x = layer_norm(b, "norm", x, config.hidden)
    first = b.op("Gather", x, b.constant("index", 0), axis=1)
    logits = linear_with_bias(b, "head", first, config.hidden, config.classes)
    b.output("logits", logits, b.elem_type, (config.batch_dim, config.classes))
    return b


def _embed(b: GraphBuilder, config: VitConfig, pixels: str, batch: Dim) -> str:
    """Patches as tokens, behind a class token, with positions: `[B,C,I,I] -> [B,1+P,D]`."""
    hidden = config.hidden
    with b.scope("patch_embed"):
        fan_in = config.channels * config.patch**2
        kernel = b.weight("weight", (hidden, config.channels, config.patch, config.patch), std=1 / math.sqrt(fan_in))
        sides = (config.patch, config.patch)
        x = b.op("Conv", pixels, kernel, b.weight("bias", (hidden,), std=0.2), kernel_shape=sides, strides=sides)
        x = b.op("Transpose", b.reshape(x, (batch, hidden, config.patches)), perm=(0, 2, 1))
    token = b.op("Expand", b.weight("cls_token", (1, 1, hidden), std=1.0), b.shape((batch, 1, hidden)))
    x = b.op("Concat", token, x, axis=1)
    return b.op("Add", x, b.weight("pos_embed", (1, config.patches + 1, hidden), std=0.5))


def _attention(b: GraphBuilder, config: VitConfig, x: str, batch: Dim) -> str:
    """Self-attention `[B,S,D] -> [B,S,D]`."""
    with b.scope("attn"):
        seq = config.patches + 1
        query, key, value = (project_heads(b, config, name, x, batch, seq) for name in ("q", "k", "v"))
        merged = merge_heads(b, attend(b, query, key, value, config.head_dim), batch, seq, config.hidden)
        gain = 1 / math.sqrt(config.layers)
        return linear_with_bias(b, "proj", merged, config.hidden, config.hidden, gain=gain)


def _mlp(b: GraphBuilder, config: VitConfig, x: str) -> str:
    """The feed-forward part of a block, `[B,S,D] -> [B,S,D]`."""
    with b.scope("mlp"):
        x = linear_with_bias(b, "fc1", x, config.hidden, config.ffn_dim)
        with b.scope("act"):
            x = gelu(b, x)
        return linear_with_bias(b, "fc2", x, config.ffn_dim, config.hidden, gain=1 / math.sqrt(config.layers))
