"""A U-Net-like denoiser: residual blocks with group norms and a time embedding, skips joined by Concat."""

import math
from dataclasses import dataclass

import numpy as np

from .builder import Dim, GraphBuilder
from .config import ModelConfig, require
from .layers import linear_with_bias
from .weights import NUMPY_DTYPES, WeightStore


@dataclass(frozen=True, kw_only=True)
class UnetConfig(ModelConfig):
    """A U-Net-like denoiser.

    Attributes:
        image: height and width of the input in pixels.
        channels: of input and output.
        width: channels of the first level; each further one has twice as many at half the height and width.
        levels: resolutions.
        groups: of a group norm; divides `width`.
        time_width: of the time embedding; even.
    """

    image: int = 16
    channels: int = 3
    width: int = 16
    levels: int = 3
    groups: int = 4
    time_width: int = 32

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("image", "channels", "width", "levels", "groups", "time_width")
        shrink = 2 ** (self.levels - 1)
        require(self.image % shrink == 0, f"image {self.image} is not divisible by {shrink}: each level halves it")
        require(self.width % self.groups == 0, f"width {self.width} is not divisible by groups {self.groups}")
        require(self.time_width % 2 == 0, f"time_width {self.time_width} is odd: it is half sines and half cosines")

    def width_of(self, level: int) -> int:
        """Channels of a level, counted from 0."""
        return self.width << level

    def grows_by_transpose(self, level: int) -> bool:
        """True where the step up to a level is a ConvTranspose: every second one, from the deepest up."""
        return (self.levels - level) % 2 == 0


@dataclass(frozen=True)
class _Place:
    """Where a block stands: the batch, height and width of what it reads, and the embedded time."""

    batch: Dim
    side: int
    time: str


PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "small": {"image": 64, "width": 64, "levels": 4, "groups": 32, "time_width": 256},
    "large": {"image": 64, "channels": 4, "width": 320, "levels": 4, "groups": 32, "time_width": 1280},
}


def build_unet(config: UnetConfig, weights: WeightStore) -> GraphBuilder:
    """Build `sample [batch, channels, image, image], time [batch] -> noise` of the shape of `sample`.

    A step up is a ConvTranspose or Resize and Conv, in turn.
    """
    b = GraphBuilder("unet", config, weights)
    shape = (config.batch_dim, config.channels, config.image, config.image)
    x = b.input("sample", b.elem_type, shape)
    time = b.input("time", b.elem_type, (config.batch_dim,))
    batch = b.size(x, 0) if config.dynamic else config.batch
    with b.scope("time_embed"):
        embedded = _embed_time(b, config, time)
    places = [_Place(batch, config.image // 2**level, embedded) for level in range(config.levels)]
    x = _conv(b, "conv_in", x, config.channels, config.width)
    skips = []
    for level in range(config.levels - 1):
        width = config.width_of(level)
        with b.scope(f"down.{level}"):
            x = _residual(b, config, "block", x, width, width, places[level])
            skips.append(x)
            x = _conv(b, "shrink", x, width, config.width_of(level + 1), stride=2)
    deepest = config.width_of(config.levels - 1)
    x = _residual(b, config, "middle", x, deepest, deepest, places[-1])
    for level in reversed(range(config.levels - 1)):
        width = config.width_of(level)
        with b.scope(f"up.{level}"):
            grow = _grow_by_transpose if config.grows_by_transpose(level) else _grow_by_resize
            x = grow(b, x, config.width_of(level + 1), width)
            x = b.op("Concat", x, skips.pop(), axis=1)
            x = _residual(b, config, "block", x, 2 * width, width, places[level])
    x = _silu(b, _group_norm(b, config, "norm_out", x, config.width, places[0]))
    x = _conv(b, "conv_out", x, config.width, config.channels, gain=1.5)
    b.output("noise", x, b.elem_type, shape)
    return b


def _embed_time(b: GraphBuilder, config: UnetConfig, time: str) -> str:
    """Sines and cosines of the time at many frequencies, through a perceptron: `[B] -> [B, time_width]`."""
    half = config.time_width // 2
    frequencies = np.exp(-math.log(1e4) * np.arange(half) / half).astype(NUMPY_DTYPES[config.dtype])
    angles = b.op("Mul", b.unsqueeze(time, 1), b.constant("frequencies", frequencies))
    waves = b.op("Concat", b.op("Sin", angles), b.op("Cos", angles), axis=1)
    hidden = _silu(b, linear_with_bias(b, "0", waves, config.time_width, config.time_width))
    return _silu(b, linear_with_bias(b, "1", hidden, config.time_width, config.time_width))


def _residual(b: GraphBuilder, config: UnetConfig, name: str, x: str, fan_in: int, width: int, at: _Place) -> str:
    """Two convolutions with the time added between them, beside a shortcut: `[B,fan_in,I,I] -> [B,width,I,I]`."""
    with b.scope(name):
        inner = _conv(b, "conv1", _silu(b, _group_norm(b, config, "norm1", x, fan_in, at)), fan_in, width)
        shift = linear_with_bias(b, "time", at.time, config.time_width, width)
        inner = b.op("Add", inner, b.unsqueeze(shift, 2, 3))
        inner = _conv(b, "conv2", _silu(b, _group_norm(b, config, "norm2", inner, width, at)), width, width)
        shortcut = x if fan_in == width else _conv(b, "shortcut", x, fan_in, width, kernel=1)
        return b.op("Add", inner, shortcut)


def _conv(
    b: GraphBuilder, name: str, x: str, fan_in: int, fan_out: int, *, kernel: int = 3, stride: int = 1, gain: float = 1
) -> str:
    with b.scope(name):
        std = gain / math.sqrt(fan_in * kernel**2)
        weight = b.weight("weight", (fan_out, fan_in, kernel, kernel), std=std)
        bias = b.weight("bias", (fan_out,), std=0.2)
        sides, pads = (kernel, kernel), (kernel // 2,) * 4
        return b.op("Conv", x, weight, bias, kernel_shape=sides, strides=(stride, stride), pads=pads)


def _grow_by_transpose(b: GraphBuilder, x: str, fan_in: int, fan_out: int) -> str:
    """Twice the height and width: every place becomes 2x2 places."""
    with b.scope("grow"):
        weight = b.weight("weight", (fan_in, fan_out, 2, 2), std=1 / math.sqrt(fan_in))
        bias = b.weight("bias", (fan_out,), std=0.2)
        return b.op("ConvTranspose", x, weight, bias, kernel_shape=(2, 2), strides=(2, 2))


def _grow_by_resize(b: GraphBuilder, x: str, fan_in: int, fan_out: int) -> str:
    """Twice the height and width: every place is repeated, then a convolution."""
    scales = b.constant("scales", np.array([1, 1, 2, 2], np.float32))
    modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return _conv(b, "grow", b.op("Resize", x, "", scales, **modes), fan_in, fan_out)


def _silu(b: GraphBuilder, x: str) -> str:
    return b.op("Mul", x, b.op("Sigmoid", x))


def _group_norm(b: GraphBuilder, config: UnetConfig, name: str, x: str, width: int, at: _Place) -> str:
    """GroupNormalization: one op from opset 21 on, before that InstanceNormalization of groups, as exports have it."""
    with b.scope(name):
        scale, shift = b.weight("weight", (width,), mean=1.0, std=0.1), b.weight("bias", (width,), std=0.1)
        if config.opset >= 21:
            # Where nothing is said, ONNX computes the statistics of float64 in float32.
            stash = {"stash_type": b.elem_type} if config.dtype == "float64" else {}
            return b.op("GroupNormalization", x, scale, shift, num_groups=config.groups, epsilon=1e-5, **stash)
        dtype = NUMPY_DTYPES[config.dtype]
        ones, zeros = (
            b.constant(hint, make(config.groups, dtype)) for hint, make in (("ones", np.ones), ("zeros", np.zeros))
        )
        normed = b.op("InstanceNormalization", b.reshape(x, (at.batch, config.groups, -1)), ones, zeros, epsilon=1e-5)
        normed = b.reshape(normed, (at.batch, width, at.side, at.side))
        scale, shift = (b.unsqueeze(part, 1, 2) for part in (scale, shift))
        return b.op("Add", b.op("Mul", normed, scale), shift)
