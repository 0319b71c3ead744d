"""Convolution of each channel with kernels of its own, on a device: one thread sums up one element of the result.

As matrix products these would be one tiny product for each channel.
"""

from functools import cache
from typing import Any

from .registry import Array, ArrayModule
from .windows import Windows

Ints = tuple[int, ...]

MOST_SPATIAL_DIMS = 3

GEOMETRY = ("n0", "n1", "n2", "k0", "k1", "k2", "o0", "o1", "o2", "s0", "s1", "s2", "d0", "d1", "d2", "p0", "p1", "p2")
"""Sizes of the operand, the kernel and the result; strides, dilations, padding in front: of three spatial dims."""

SOURCE = """
    long long rest = i;
    const long long at2 = (rest % o2) * s2 - p2; rest /= o2;
    const long long at1 = (rest % o1) * s1 - p1; rest /= o1;
    const long long at0 = (rest % o0) * s0 - p0; rest /= o0;
    const long long feature = rest % features;
    const long long image = ((rest / features) * (features / multiplier) + feature / multiplier) * n0 * n1 * n2;
    T total = 0;
    for (long long a = 0; a < k0; ++a) {
        const long long x0 = at0 + a * d0;
        if (x0 < 0 || x0 >= n0) continue;
        for (long long b = 0; b < k1; ++b) {
            const long long x1 = at1 + b * d1;
            if (x1 < 0 || x1 >= n1) continue;
            for (long long c = 0; c < k2; ++c) {
                const long long x2 = at2 + c * d2;
                if (x2 < 0 || x2 >= n2) continue;
                total += x[image + (x0 * n1 + x1) * n2 + x2] * weight[((feature * k0 + a) * k1 + b) * k2 + c];
            }
        }
    }
    y = total;
"""


def is_depthwise(x: Array, weight: Array, group: int) -> bool:
    """Whether each channel is a group of its own, of at most three spatial dims."""
    return bool(group > 1 and group == x.shape[1] and x.ndim - 2 <= MOST_SPATIAL_DIMS)


@cache
def _kernel(xp: ArrayModule) -> Any:
    numbers = ", ".join(f"int64 {name}" for name in ("features", "multiplier", *GEOMETRY))
    return xp.ElementwiseKernel(f"raw T x, raw T weight, {numbers}", "T y", SOURCE, "irpar_depthwise")


def geometry(spatial: Ints, windows: Windows) -> Ints:
    """What `SOURCE` must know, in the order of its parameters; dims that are missing have one element."""
    before = tuple(pair[0] for pair in windows.pads)
    fields = (spatial, windows.kernel, windows.counts, windows.strides, windows.dilations, before)
    fill = (1, 1, 1, 1, 1, 0)
    missing = MOST_SPATIAL_DIMS - len(spatial)
    return tuple(n for field, one in zip(fields, fill, strict=True) for n in ((one,) * missing + tuple(field)))


def depthwise(xp: ArrayModule, x: Array, weight: Array, windows: Windows) -> Array:
    """The convolution of x (batch, channels, *spatial) with weight (features, 1, *kernel), in x's dtype."""
    features = weight.shape[0]
    result = xp.empty((x.shape[0], features, *windows.counts), dtype=x.dtype)
    if result.size:
        numbers = geometry(x.shape[2:], windows)
        operands = xp.ascontiguousarray(x), xp.ascontiguousarray(weight)
        _kernel(xp)(*operands, features, features // x.shape[1], *numbers, result)
    return result
