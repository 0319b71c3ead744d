"""Geometry of the sliding windows that convolutions and pools share."""

from dataclasses import dataclass

import numpy as np

from .operands import one_of
from .pad import pad_array
from .registry import Array, ArrayModule

Ints = tuple[int, ...]
_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


@dataclass(frozen=True)
class Windows:
    """Where windows lie over the spatial dims of a tensor.

    Attributes:
        kernel: extent of a window per spatial dim.
        strides: step between windows.
        dilations: step between the elements of a window.
        pads: explicit padding (before, after) per spatial dim.
        extra: padding after the explicit one that `ceil_mode` needs for its last window.
        counts: number of windows per spatial dim.
    """

    kernel: Ints
    strides: Ints
    dilations: Ints
    pads: tuple[tuple[int, int], ...]
    extra: Ints
    counts: Ints

    @classmethod
    def over(
        cls,
        spatial: Ints,
        kernel: Ints,
        *,
        strides: Ints | None,
        dilations: Ints | None,
        pads: Ints | None,
        auto_pad: str,
        ceil_mode: bool = False,
    ) -> "Windows":
        """Windows over spatial dims of the given sizes, from a node's attributes (None where it does not set one)."""
        one_of("auto_pad", auto_pad, _AUTO_PADS)
        rank = len(spatial)
        strides, dilations, pads = strides or (1,) * rank, dilations or (1,) * rank, pads or (0,) * (2 * rank)
        if not len(kernel) == len(strides) == len(dilations) == rank or len(pads) != 2 * rank:
            given = f"kernel {kernel}, strides {strides}, dilations {dilations} and pads {pads}"
            raise ValueError(f"{given} do not fit {rank} spatial dims")
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        pairs, extra, counts = [], [], []
        for axis, size in enumerate(spatial):
            step = strides[axis]
            pair = (pads[axis], pads[rank + axis])
            if auto_pad != "NOTSET":
                pair = _auto_pad(size, reach[axis], step, auto_pad)
            count = _count(size, reach[axis], step, pair, ceil_mode)
            pairs.append(pair)
            counts.append(count)
            extra.append(max((count - 1) * step + reach[axis] - size - sum(pair), 0))
        return cls(kernel, strides, dilations, tuple(pairs), tuple(extra), tuple(counts))

    def view(self, xp: ArrayModule, x: Array, fill: object) -> Array:
        """All windows of x (batch, channels, *spatial): a read-only view (batch, channels, *kernel, *counts)."""
        return self.over_padded(self.with_pads(xp, x, fill), xp)

    def padded(self, spatial: Ints) -> Ints:
        """The spatial dims with their padding."""
        return tuple(n + sum(pair) + more for n, pair, more in zip(spatial, self.pads, self.extra, strict=True))

    @property
    def is_padded(self) -> bool:
        """Whether there is anything around an operand, or cut off it."""
        return any(map(any, self.pads)) or any(self.extra)

    def shapes_along(self, spatial: Ints) -> list[Ints]:
        """The spatial dims with their padding, and then each time one dim more with as many places as windows."""
        padded = self.padded(spatial)
        return [(*self.counts[:axis], *padded[axis:]) for axis in range(len(padded) + 1)]

    def along(self, axis: int) -> "Windows":
        """The windows along one spatial dim alone."""
        fields = (self.kernel, self.strides, self.dilations, self.pads, self.extra, self.counts)
        return Windows(*((field[axis],) for field in fields))  # type: ignore[arg-type]

    def with_pads(self, xp: ArrayModule, x: Array, fill: object, out: Array | None = None) -> Array:
        """x with its padding around, in `out` where that fits; itself where there is none."""
        pads = [(0, 0), (0, 0)]
        pads += [(before, after + more) for (before, after), more in zip(self.pads, self.extra, strict=True)]
        return pad_array(xp, x, pads, "constant", fill, out) if self.is_padded else x

    def over_padded(self, x: Array, xp: ArrayModule = np) -> Array:
        """All windows of an operand that has its padding, as `view` gives them."""
        lead, spatial = x.strides[:2], x.strides[2:]
        strides = (
            *lead,
            *(s * d for s, d in zip(spatial, self.dilations, strict=True)),
            *(s * step for s, step in zip(spatial, self.strides, strict=True)),
        )
        return xp.lib.stride_tricks.as_strided(x, (*x.shape[:2], *self.kernel, *self.counts), strides)

    @property
    def kernel_axes(self) -> Ints:
        """The axes of `view` that run over the elements of a window."""
        return tuple(range(2, 2 + len(self.kernel)))


def _auto_pad(size: int, reach: int, step: int, auto_pad: str) -> tuple[int, int]:
    if auto_pad == "VALID":
        return 0, 0
    total = max((-(-size // step) - 1) * step + reach - size, 0)
    small, large = total // 2, total - total // 2
    return (small, large) if auto_pad == "SAME_UPPER" else (large, small)


def _count(size: int, reach: int, step: int, pair: tuple[int, int], ceil_mode: bool) -> int:
    room = size + sum(pair) - reach
    if not ceil_mode:
        return max(room // step + 1, 0)
    count = max(-(-room // step) + 1, 0)
    # a window that would start in the padding on the right is left out
    return count - 1 if count and (count - 1) * step >= size + pair[0] else count
