"""A multi-layer perceptron: fc1, Gelu, fc2, Gelu, ... with widths that alternate between `width` and `hidden`."""

import math
from dataclasses import dataclass

from .builder import GraphBuilder
from .config import ModelConfig
from .layers import gelu, linear_with_bias
from .weights import WeightStore


@dataclass(frozen=True, kw_only=True)
class MlpConfig(ModelConfig):
    """A perceptron of `layers` linear layers.

    Attributes:
        layers: linear layers; odd ones widen to `hidden`, even ones go back to `width`.
        width: features of the input.
        hidden: features between an odd and an even layer.
        gemm: write a linear layer as one Gemm instead of MatMul and Add.
    """

    batch: int = 8
    layers: int = 2
    width: int = 64
    hidden: int = 256
    gemm: bool = False

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("layers", "width", "hidden")


PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "small": {"width": 1024, "hidden": 4096, "layers": 4, "batch": 32},
    "large": {"width": 8192, "hidden": 32768, "layers": 8, "batch": 64},
}


def build_mlp(config: MlpConfig, weights: WeightStore) -> GraphBuilder:
    """Build `x [batch, width] -> y [batch, width or hidden]`; weights `fc1.weight`, `fc1.bias`, `fc2.weight`, ..."""
    b = GraphBuilder("mlp", config, weights)
    x = b.input("x", b.elem_type, (config.batch_dim, config.width))
    sizes = (config.width, config.hidden)
    linear_layer = _gemm if config.gemm else linear_with_bias
    for layer in range(config.layers):
        name, fan_in, fan_out = f"fc{layer + 1}", sizes[layer % 2], sizes[(layer + 1) % 2]
        x = linear_layer(b, name, x, fan_in, fan_out)
        if layer + 1 < config.layers:
            with b.scope(f"act{layer + 1}"):
                x = gelu(b, x)
    b.output("y", x, b.elem_type, (config.batch_dim, sizes[config.layers % 2]))
    return b


def _gemm(b: GraphBuilder, name: str, x: str, fan_in: int, fan_out: int) -> str:
    with b.scope(name):
        weight = b.weight("weight", (fan_in, fan_out), std=1 / math.sqrt(fan_in))
        return b.op("Gemm", x, weight, b.weight("bias", (fan_out,), std=0.2))
