"""com.microsoft's elementwise operators and normalisations, which ONNX Runtime makes of several of ONNX's."""

import math

from .activation import sigmoid_of
from .elementwise import erf_of
from .gemm import product
from .operands import in_compute_dtype, mean_over, narrow, widen
from .registry import Array, ArrayModule, kernel
from .temporaries import arrays_like

DOMAIN = "com.microsoft"


def _gelu(xp: ArrayModule, x: Array) -> Array:
    return 0.5 * x * (1 + erf_of(xp, x * x.dtype.type(math.sqrt(0.5))))


@kernel("Gelu", since=1, domain=DOMAIN, temporaries=arrays_like(4))
@in_compute_dtype
def gelu(xp: ArrayModule, x: Array) -> Array:
    """Gaussian error linear unit."""
    return _gelu(xp, x)


@kernel("BiasGelu", since=1, domain=DOMAIN, temporaries=arrays_like(5, 0))
@in_compute_dtype
def bias_gelu(xp: ArrayModule, x: Array, bias: Array) -> Array:
    """Gelu of x + bias."""
    return _gelu(xp, x + bias)


@kernel("FastGelu", since=1, domain=DOMAIN, temporaries=arrays_like(4.5, 0))
def fast_gelu(xp: ArrayModule, x: Array, bias: Array | None = None) -> Array:
    """Gelu of x + bias by tanh."""
    wide = widen(x) if bias is None else widen(x) + widen(bias)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    return narrow(0.5 * wide * (1 + xp.tanh(inner)), x.dtype)


@kernel("QuickGelu", since=1, domain=DOMAIN, temporaries=arrays_like(2.5))
@in_compute_dtype
def quick_gelu(xp: ArrayModule, x: Array, *, alpha: float = 1.702) -> Array:
    """x * sigmoid(alpha * x)."""
    return x * sigmoid_of(xp, alpha * x)


@kernel("BiasSplitGelu", since=1, domain=DOMAIN, temporaries=arrays_like(3.5, 0))
@in_compute_dtype
def bias_split_gelu(xp: ArrayModule, x: Array, bias: Array) -> Array:
    """The left half of x + bias times Gelu of its right half."""
    left, right = xp.split(x + bias, 2, axis=-1)
    return left * _gelu(xp, right)


@kernel("BiasAdd", since=1, domain=DOMAIN, temporaries=arrays_like(1.5, 0))
@in_compute_dtype
def bias_add(xp: ArrayModule, x: Array, bias: Array, skip: Array) -> Array:
    """x + bias + skip."""
    return x + bias + skip


def _complex(xp: ArrayModule, x: Array) -> Array:
    if x.shape[-1] != 2:
        raise ValueError(f"the last dim must hold the 2 parts of a number, not {x.shape[-1]}")
    return widen(x)[..., 0] + 1j * widen(x)[..., 1]


def _parts(xp: ArrayModule, x: Array, like: Array) -> Array:
    return narrow(xp.stack([x.real, x.imag], axis=-1), like.dtype)


@kernel("ComplexMul", since=1, domain=DOMAIN, temporaries=arrays_like(2.5))
def complex_mul(xp: ArrayModule, a: Array, b: Array) -> Array:
    """Products of complex numbers."""
    return _parts(xp, _complex(xp, a) * _complex(xp, b), a)


@kernel("ComplexMulConj", since=1, domain=DOMAIN, temporaries=arrays_like(2.5))
def complex_mul_conj(xp: ArrayModule, a: Array, b: Array) -> Array:
    """Products with the conjugates of the second numbers."""
    return _parts(xp, _complex(xp, a) * _complex(xp, b).conj(), a)


# -- normalisations -------------------------------------------------------------------------------------------------


@kernel("SimplifiedLayerNormalization", since=1, temporaries=arrays_like(1.5, 0))
def simplified_layer_normalization(
    xp: ArrayModule, x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Array, Array]:
    """Unit root mean square over the dims from `axis` on; gives y and 1 / root mean square."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    wide = widen(x)
    inverse = 1 / xp.sqrt(mean_over(wide * wide, axes) + epsilon)
    return narrow(wide * inverse * widen(scale), scale.dtype), inverse.astype("float32")


@kernel("SkipLayerNormalization", since=1, domain=DOMAIN, temporaries=arrays_like(3.5, 0))
def skip_layer_normalization(
    xp: ArrayModule,
    x: Array,
    skip: Array,
    gamma: Array,
    beta: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Array, Array, Array, Array]:
    """The sum of the operands with zero mean and unit variance over the last dim; the sum is the last result."""
    total = _sum(x, skip, bias)
    mean = mean_over(total, (-1,))
    centred = total - mean
    inverse = 1 / xp.sqrt(mean_over(centred * centred, (-1,)) + epsilon)
    y = centred * inverse * widen(gamma)
    if beta is not None:
        y = y + widen(beta)
    return narrow(y, x.dtype), mean.astype("float32"), inverse.astype("float32"), narrow(total, x.dtype)


@kernel("SkipSimplifiedLayerNormalization", since=1, domain=DOMAIN, temporaries=arrays_like(2.5, 0))
def skip_simplified_layer_normalization(
    xp: ArrayModule, x: Array, skip: Array, gamma: Array, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array, Array, Array, Array]:
    """The sum of the operands with unit root mean square over the last dim; the sum is the last result."""
    total = _sum(x, skip, bias)
    inverse = 1 / xp.sqrt(mean_over(total * total, (-1,)) + epsilon)
    y = narrow(total * inverse * widen(gamma), x.dtype)
    return y, xp.zeros_like(inverse).astype("float32"), inverse.astype("float32"), narrow(total, x.dtype)


def _sum(x: Array, skip: Array, bias: Array | None) -> Array:
    total = widen(x) + widen(skip)
    return total if bias is None else total + widen(bias)


def _normalized_groups(
    xp: ArrayModule, x: Array, gamma: Array, beta: Array, groups: int, activation: int, epsilon: float, last: int
) -> Array:
    """Groups of channels with zero mean and unit variance over them and all places; then SiLU, if asked for."""
    if activation not in (0, 1):
        raise ValueError(f"activation {activation} is neither 0 nor 1")
    data = xp.moveaxis(x, -1, 1) if last else x
    grouped = data.reshape(data.shape[0], groups, -1)
    centred = grouped - mean_over(grouped, (-1,))
    normalized = (centred / xp.sqrt(mean_over(centred * centred, (-1,)) + epsilon)).reshape(data.shape)
    around = (-1,) + (1,) * (data.ndim - 2)
    y = normalized * widen(gamma).reshape(around) + widen(beta).reshape(around)
    y = y * sigmoid_of(xp, y) if activation else y
    return xp.moveaxis(y, 1, -1) if last else y


@kernel("GroupNorm", since=1, domain=DOMAIN, temporaries=arrays_like(4.5, 0))
def group_norm(
    xp: ArrayModule,
    x: Array,
    gamma: Array,
    beta: Array,
    *,
    groups: int,
    activation: int,
    epsilon: float = 1e-5,
    channels_last: int = 1,
) -> Array:
    """Zero mean and unit variance of groups of channels."""
    y = _normalized_groups(xp, widen(x), gamma, beta, groups, activation, epsilon, channels_last)
    return narrow(y, x.dtype)


@kernel("SkipGroupNorm", since=1, domain=DOMAIN, temporaries=arrays_like(4.5, 0))
def skip_group_norm(
    xp: ArrayModule,
    x: Array,
    gamma: Array,
    beta: Array,
    skip: Array,
    bias: Array | None = None,
    *,
    groups: int,
    activation: int,
    epsilon: float = 1e-5,
    channels_last: int = 1,
) -> tuple[Array, Array]:
    """Zero mean and unit variance of groups of channels of x + skip + bias; the sum is the second result."""
    around = x.ndim - 2
    shift = widen(skip)
    if skip.ndim == 2:
        shift = (
            shift.reshape(skip.shape[0], *([1] * around), -1)
            if channels_last
            else shift.reshape(*skip.shape, *([1] * around))
        )
    total = widen(x) + shift
    if bias is not None:
        total = total + (widen(bias) if channels_last else widen(bias).reshape((-1,) + (1,) * around))
    y = _normalized_groups(xp, total, gamma, beta, groups, activation, epsilon, channels_last)
    return narrow(y, x.dtype), narrow(total, x.dtype)


# -- products -------------------------------------------------------------------------------------------------------


def _ordered(xp: ArrayModule, x: Array, transposed: int, batch_transposed: int) -> Array:
    if x.ndim < 2:
        return x
    if batch_transposed:
        x = xp.moveaxis(x, 0, -2)
    return xp.swapaxes(x, -1, -2) if transposed else x


@kernel("FusedMatMul", since=1, domain=DOMAIN)
def fused_matmul(
    xp: ArrayModule,
    a: Array,
    b: Array,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
    out: Array | None = None,
) -> Array:
    """alpha * A @ B; dim 0 of an operand goes behind its batch dims, then its last two dims change places, if asked."""
    left, right = _ordered(xp, a, transA, transBatchA), _ordered(xp, b, transB, transBatchB)
    return product(xp, left, right, alpha=alpha, out=out)
