"""Blocks of arrays, as collectives cut and join them; NumPy's, or those of a module like it."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from irpar.ir import with_dim

from .record import Array, Settings, Sizes

CARRIERS: dict[int, type] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Bytes of an element, to a type as which it can be moved: any array module copies these, numpy quicker than others."""


def is_text(dtype: np.dtype[Any]) -> bool:
    """Whether elements are strings, whose size the dtype does not tell: they travel encoded."""
    return dtype.kind in "OUST"


def check_dim(collective: Settings, dim: int, rank: int) -> None:
    """Refuse a dim that tensors of so many dims do not have.

    Raises:
        ValueError: it is none of them.
    """
    if not 0 <= dim < rank:
        raise ValueError(f"{collective.kind} along dim {dim} of a tensor of rank {rank}")


def equal_shapes(_: Settings, shapes: Sequence[Sizes]) -> list[Sizes]:
    """All members hold what the first does."""
    return [shapes[0]] * len(shapes)


def shapes_of_blocks(sizes: Sequence[int] | None, dim: int, shapes: Sequence[Sizes]) -> list[Sizes]:
    """Member i holds `sizes[i]` of a dim (all equal where there are no sizes)."""
    if not 0 <= dim < len(shapes[0]):
        return [()] * len(shapes)
    listed = [shapes[0][dim]] * len(shapes) if sizes is None else list(sizes)
    listed += [-1] * (len(shapes) - len(listed))
    return [with_dim(shapes[0], dim, size) for size in listed[: len(shapes)]]


def block_bounds(whole: int, sizes: Sequence[int] | None, count: int, dim: int = 0) -> list[int]:
    """Where the `count` blocks of a dim begin, and where the last one ends.

    Raises:
        ValueError: the sizes do not fit the dim, or there are none and the blocks are not equal.
    """
    if sizes is None:
        if whole % count:
            raise ValueError(f"dim {dim} of size {whole} has no {count} equal blocks, and no block sizes are given")
        sizes = [whole // count] * count
    if len(sizes) != count or sum(sizes) != whole or min(sizes, default=0) < 0:
        raise ValueError(f"block sizes {list(sizes)} do not fit dim {dim} of size {whole} in a group of {count}")
    return list(accumulate(sizes, initial=0))


def cut(array: Array, sizes: Sequence[int], dim: int) -> list[Array]:
    """Views of blocks of these sizes along a dim."""
    before = (slice(None),) * dim
    return [array[(*before, slice(start, end))] for start, end in pairwise(accumulate(sizes, initial=0))]


def blocks_of(collective: Settings, operand: Array, dim: int, sizes: Sequence[int] | None, count: int) -> list[Array]:
    """Views of the blocks of a dim, as ReduceScatter and AllToAll cut it.

    Raises:
        ValueError: the operand has no such dim or blocks.
    """
    check_dim(collective, dim, operand.ndim)
    bounds = block_bounds(operand.shape[dim], sizes, count, dim)
    return cut(operand, [end - start for start, end in pairwise(bounds)], dim)


def own_pieces(
    collective: Settings, operands: Sequence[Array], dim: int, sizes: Sequence[int] | None, position: int
) -> list[Array]:
    """Views of block `position` of a dim of all operands, as ReduceScatter and AllToAll cut them.

    Raises:
        ValueError: the operands have no such dim or blocks.
    """
    return [blocks_of(collective, operand, dim, sizes, len(operands))[position] for operand in operands]


def nothing_like(operand: Array) -> Array:
    """What a member gets to which nothing is sent."""
    nothing = "" if is_text(operand.dtype) else 0
    return np.full(operand.shape, nothing, operand.dtype)


def contiguous(array: Array) -> Array:
    """The array, its elements one after the other; unlike `np.ascontiguousarray` it leaves a scalar a scalar."""
    return np.asarray(array, order="C")


def cut_flat(array: Array, count: int) -> list[Array]:
    """Views of the elements in order, in `count` pieces of about the same size."""
    flat = array.reshape(-1)
    bounds = [flat.size * place // count for place in range(count + 1)]
    return [flat[start:end] for start, end in pairwise(bounds)]
