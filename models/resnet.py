"""A ResNet-like image classifier: Conv, BatchNormalization, MaxPool, residual stages, GlobalAveragePool, Gemm."""

import math
from dataclasses import dataclass

from .builder import GraphBuilder
from .config import ModelConfig, require
from .weights import WeightStore

EXPANSION = 4
"""How much wider the output of a bottleneck block is than its inner convolutions."""


@dataclass(frozen=True, kw_only=True)
class ResnetConfig(ModelConfig):
    """A ResNet-like image classifier.

    Attributes:
        image: height and width of the input in pixels.
        channels: of the input.
        classes: width of the logits.
        width: channels of the first stage; each further one has twice as many at half the height and width.
        blocks: residual blocks of each stage.
        bottleneck: blocks of 1x1, 3x3 and 1x1 convolutions instead of two 3x3 ones.
    """

    image: int = 32
    channels: int = 3
    classes: int = 16
    width: int = 16
    blocks: tuple[int, ...] = (2, 2)
    bottleneck: bool = False

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("image", "channels", "classes", "width")
        require(len(self.blocks) > 0, "blocks must name at least one stage")
        require(min(self.blocks) >= 1, f"every stage needs at least 1 block, got {self.blocks}")


_IMAGENET: dict[str, object] = {"image": 224, "classes": 1000, "width": 64, "batch": 8}
PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "bottleneck": {"bottleneck": True, "width": 8},
    "small": {"blocks": (2, 2, 2, 2), **_IMAGENET},
    "50": {"blocks": (3, 4, 6, 3), "bottleneck": True, **_IMAGENET},
    "101": {"blocks": (3, 4, 23, 3), "bottleneck": True, **_IMAGENET},
}


def build_resnet(config: ResnetConfig, weights: WeightStore) -> GraphBuilder:
    """Build `pixels [batch, channels, image, image] -> logits [batch, classes]`; BatchNormalization as in inference."""
    b = GraphBuilder("resnet", config, weights)
    shape = (config.batch_dim, config.channels, config.image, config.image)
    x = b.input("pixels", b.elem_type, shape)
    with b.scope("stem"):
        x = b.op("Relu", _conv_norm(b, "", x, config.channels, config.width, kernel=7, stride=2))
        x = b.op("MaxPool", x, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    block = _bottleneck if config.bottleneck else _basic
    fan_in = config.width
    for stage, count in enumerate(config.blocks):
        inner = config.width * 2**stage
        for index in range(count):
            with b.scope(f"layer{stage + 1}.{index}"):
                x = block(b, x, fan_in, inner, 2 if stage and not index else 1)
            fan_in = inner * (EXPANSION if config.bottleneck else 1)
    features = b.op("Flatten", b.op("GlobalAveragePool", x), axis=1)
    with b.scope("fc"):
        # Features are sums of what Relus left, all positive: small weights keep the logits of order 1.
        weight = b.weight("weight", (config.classes, fan_in), std=0.5 / math.sqrt(fan_in))
        logits = b.op("Gemm", features, weight, b.weight("bias", (config.classes,), std=0.2), transB=1)
    b.output("logits", logits, b.elem_type, (config.batch_dim, config.classes))
    return b


def _conv_norm(
    b: GraphBuilder, name: str, x: str, fan_in: int, fan_out: int, *, kernel: int, stride: int = 1, gain: float = 1.0
) -> str:
    """`<name>conv` without a bias and `<name>bn`, which scales by about `gain`; pads keep height and width / stride."""
    with b.scope(f"{name}conv"):
        # Twice the variance makes up for the half that the Relu before takes away.
        std = math.sqrt(2 / (fan_in * kernel**2))
        filters = b.weight("weight", (fan_out, fan_in, kernel, kernel), std=std)
        sides, pads = (kernel, kernel), (kernel // 2,) * 4
        x = b.op("Conv", x, filters, kernel_shape=sides, strides=(stride, stride), pads=pads)
    with b.scope(f"{name}bn"):
        scale = b.weight("weight", (fan_out,), mean=gain, std=0.1)
        shift, mean = (b.weight(part, (fan_out,), std=0.1) for part in ("bias", "running_mean"))
        variance = b.weight("running_var", (fan_out,), mean=1.0, std=0.05)
        return b.op("BatchNormalization", x, scale, shift, mean, variance, epsilon=1e-5)


def _basic(b: GraphBuilder, x: str, fan_in: int, width: int, stride: int) -> str:
    """Two 3x3 convolutions beside a shortcut."""
    inner = b.op("Relu", _conv_norm(b, "1.", x, fan_in, width, kernel=3, stride=stride))
    inner = _conv_norm(b, "2.", inner, width, width, kernel=3, gain=0.5)
    return b.op("Relu", b.op("Add", inner, _shortcut(b, x, fan_in, width, stride)))


def _bottleneck(b: GraphBuilder, x: str, fan_in: int, width: int, stride: int) -> str:
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the last one widens."""
    wide = width * EXPANSION
    inner = b.op("Relu", _conv_norm(b, "1.", x, fan_in, width, kernel=1))
    inner = b.op("Relu", _conv_norm(b, "2.", inner, width, width, kernel=3, stride=stride))
    inner = _conv_norm(b, "3.", inner, width, wide, kernel=1, gain=0.5)
    return b.op("Relu", b.op("Add", inner, _shortcut(b, x, fan_in, wide, stride)))


def _shortcut(b: GraphBuilder, x: str, fan_in: int, fan_out: int, stride: int) -> str:
    """The input itself where it fits, else a 1x1 convolution of it."""
    if fan_in == fan_out and stride == 1:
        return x
    return _conv_norm(b, "shortcut.", x, fan_in, fan_out, kernel=1, stride=stride)
