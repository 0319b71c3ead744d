"""What a collective gives each member of its group, from the operands of all of them: arrays in, arrays out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ..reduction import reduce_arrays
from .base import Array, Collective

Shape = tuple[int, ...]


CARRIERS: dict[int, type] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Bytes of an element, to a type as which it can be moved: any array module copies these, numpy quicker than others."""


def is_text(dtype: np.dtype[Any]) -> bool:
    """Whether elements are strings, whose size the dtype does not tell: they travel encoded."""
    return dtype.kind in "OUST"


def check_dim(collective: Collective, dim: int, rank: int) -> None:
    """Refuse a dim that tensors of so many dims do not have.

    Raises:
        ValueError: it is none of them.
    """
    if not 0 <= dim < rank:
        raise ValueError(f"{collective.kind} along dim {dim} of a tensor of rank {rank}")


def check_root(collective: Collective, count: int) -> None:
    """Refuse a root that a group of so many members does not have.

    Raises:
        ValueError: it is none of them.
    """
    if not 0 <= collective.root < count:
        raise ValueError(f"root {collective.root} is not in a group of {count}")


def resized(shape: Sequence[int], dim: int, size: int) -> Shape:
    """The shape with another size of one dim."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def _equal(_: Collective, shapes: Sequence[Shape]) -> list[Shape]:
    return [shapes[0]] * len(shapes)


def _blocks_of(sizes: Sequence[int] | None, dim: int, shapes: Sequence[Shape]) -> list[Shape]:
    """Member i holds `sizes[i]` of a dim (all equal where there are no sizes)."""
    if not 0 <= dim < len(shapes[0]):
        return [()] * len(shapes)
    listed = [shapes[0][dim]] * len(shapes) if sizes is None else list(sizes)
    listed += [-1] * (len(shapes) - len(listed))
    return [resized(shapes[0], dim, size) for size in listed[: len(shapes)]]


def _gather_shapes(collective: Collective, shapes: Sequence[Shape]) -> list[Shape]:
    return _blocks_of(collective.sizes, collective.dim, shapes)


def _all_to_all_shapes(collective: Collective, shapes: Sequence[Shape]) -> list[Shape]:
    return _blocks_of(collective.concat_sizes, collective.concat_dim, shapes)


def _permute_shapes(collective: Collective, shapes: Sequence[Shape]) -> list[Shape]:
    if collective.shapes is None:
        return _equal(collective, shapes)
    rank, listed = len(shapes[0]), collective.shapes
    if len(listed) != rank * len(shapes):
        return [()] * len(shapes)
    return [listed[member * rank : (member + 1) * rank] for member in range(len(shapes))]


def _all_reduce(collective: Collective, operands: Sequence[Array], _: int) -> Array:
    return reduce_arrays(operands, collective.reduce)


def _all_gather(collective: Collective, operands: Sequence[Array], _: int) -> Array:
    return np.concatenate(operands, axis=collective.dim)


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


def own_pieces(collective: Collective, operands: Sequence[Array], dim: int, position: int) -> list[Array]:
    """Views of block `position` of a dim of all operands, as ReduceScatter and AllToAll cut them.

    Raises:
        ValueError: the operands have no such dim or blocks.
    """
    first = operands[0]
    check_dim(collective, dim, first.ndim)
    sizes = collective.split_sizes if collective.kind == "AllToAll" else collective.sizes
    bounds = block_bounds(first.shape[dim], sizes, len(operands), dim)
    place = (*(slice(None),) * dim, slice(bounds[position], bounds[position + 1]))
    return [operand[place] for operand in operands]


def _reduce_scatter(collective: Collective, operands: Sequence[Array], position: int) -> Array:
    pieces = own_pieces(collective, operands, collective.dim, position)
    return np.ascontiguousarray(reduce_arrays(pieces, collective.reduce))


def _all_to_all(collective: Collective, operands: Sequence[Array], position: int) -> Array:
    pieces = own_pieces(collective, operands, collective.split_dim, position)
    return np.concatenate(pieces, axis=collective.concat_dim)


def source_of(collective: Collective, count: int, position: int) -> int | None:
    """The position that a CollectivePermute sends to `position`; None: nothing comes there.

    Raises:
        ValueError: the pairs do not fit a group of `count`.
    """
    sources, targets = collective.pairs[::2], collective.pairs[1::2]
    inside = all(0 <= place < count for place in collective.pairs)
    if len(sources) != len(targets) or len(set(targets)) != len(targets) or not inside:
        raise ValueError(f"pairs {list(collective.pairs)} do not fit a group of {count}")
    return dict(zip(targets, sources, strict=True)).get(position)


def nothing_like(operand: Array) -> Array:
    """What a member gets to which nothing is sent."""
    nothing = "" if is_text(operand.dtype) else 0
    return np.full(operand.shape, nothing, operand.dtype)


def _permute(collective: Collective, operands: Sequence[Array], position: int) -> Array:
    source = source_of(collective, len(operands), position)
    return nothing_like(operands[position]) if source is None else operands[source]


def _broadcast(collective: Collective, operands: Sequence[Array], _: int) -> Array:
    check_root(collective, len(operands))
    return operands[collective.root]


@dataclass(frozen=True)
class Kind:
    """How one kind of collective is executed.

    Attributes:
        result: from the operands of a group in order of position, what the member at a position gets.
        shapes: the operand shapes that members must have, given those that they have.
        is_shared: all members get the same.
    """

    result: Callable[[Collective, Sequence[Array], int], Array]
    shapes: Callable[[Collective, Sequence[Shape]], list[Shape]]
    is_shared: bool = False


EXECUTED: dict[str, Kind] = {
    "AllReduce": Kind(_all_reduce, _equal, is_shared=True),
    "AllGather": Kind(_all_gather, _gather_shapes, is_shared=True),
    "ReduceScatter": Kind(_reduce_scatter, _equal),
    "AllToAll": Kind(_all_to_all, _all_to_all_shapes),
    "CollectivePermute": Kind(_permute, _permute_shapes),
    "Broadcast": Kind(_broadcast, _equal, is_shared=True),
}
"""By operator."""


def execute(collective: Collective, operands: Sequence[Array]) -> list[Array]:
    """What all members get, in order of position; what all get alike is one array.

    Raises:
        ValueError: the attributes do not fit the operands.
    """
    kind = EXECUTED[collective.kind]
    if kind.is_shared:
        return [kind.result(collective, operands, 0)] * len(operands)
    return [kind.result(collective, operands, position) for position in range(len(operands))]
