"""Where the tensors of a generated kernel lie: one space of indices for all, in as few dims as their strides allow.

x0 [8, 128, 768], x1 [768], y0 [8, 128, 768]     two dims: 1024 of strides 768, 0, 768; and 768 of strides 1, 1, 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Strides = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A tensor in memory.

    Attributes:
        shape, dtype: of the tensor.
        strides: in elements.
        alignment: bytes of which its address is a multiple, at most 16.
    """

    shape: Shape
    dtype: "np.dtype[Any]"
    strides: Strides
    alignment: int = 16

    @classmethod
    def contiguous(cls, shape: Shape, dtype: "np.dtype[Any]", alignment: int = 16) -> "Layout":
        """Of elements one after the other."""
        strides: list[int] = []
        step = 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
        return cls(shape, dtype, tuple(strides), alignment)

    def unsqueezed(self, axes: Sequence[int]) -> "Layout":
        """With dims of size 1 at places counted from the last one, which is -1."""
        rank = len(self.shape) + len(axes)
        sizes, strides = iter(self.shape), iter(self.strides)
        places = range(-rank, 0)
        shape = tuple(1 if place in axes else next(sizes) for place in places)
        steps = tuple(0 if place in axes else next(strides) for place in places)
        return Layout(shape, self.dtype, steps, self.alignment)

    def halved(self, rotated: bool = False) -> "Layout":
        """With the last dim as two halves; `rotated`: from the second to the first, where the second begins."""
        if not self.shape:
            return self
        half, stride = self.shape[-1] // 2, self.strides[-1]
        if self.shape[-1] == 1:
            return Layout((*self.shape, 1), self.dtype, (*self.strides, 0), self.alignment)
        between = -half * stride if rotated else half * stride
        strides = (*self.strides[:-1], between, stride)
        return Layout((*self.shape[:-1], 2, half), self.dtype, strides, self.alignment)

    def within(self, space: Shape) -> Strides:
        """Strides over a space that the tensor broadcasts to: 0 along what it lacks, and along dims of size 1."""
        missing = len(space) - len(self.shape)
        own = (0 if size == 1 else stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (*(0 for _ in range(missing)), *own)

    def extent(self) -> int:
        """How far apart elements lie at most, in elements."""
        return sum((size - 1) * abs(stride) for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class Dims:
    """Dims of an index space, outermost first, with the strides of each tensor along them."""

    sizes: Shape
    strides: tuple[Strides, ...]

    @property
    def count(self) -> int:
        """How many indices there are."""
        return int(np.prod(self.sizes, dtype=object)) if self.sizes else 1

    def is_line(self, tensor: int) -> bool:
        """Whether a tensor's elements lie at equal distances, in order of the indices."""
        strides = self.strides[tensor]
        return all(
            outer == inner * size for outer, inner, size in zip(strides[:-1], strides[1:], self.sizes[1:], strict=True)
        )


def merged(sizes: Shape, strides: Sequence[Strides]) -> Dims:
    """Fewest dims: those of size 1 are dropped, and two that lie together in all tensors become one."""
    kept = [dim for dim, size in enumerate(sizes) if size != 1]
    found_sizes: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for dim in kept:
        size = sizes[dim]
        if found_sizes and all(made[-1] == own[dim] * size for made, own in zip(found, strides, strict=True)):
            found_sizes[-1] *= size
            for made, own in zip(found, strides, strict=True):
                made[-1] = own[dim]
        else:
            found_sizes.append(size)
            for made, own in zip(found, strides, strict=True):
                made.append(own[dim])
    return Dims(tuple(found_sizes), tuple(map(tuple, found)))
