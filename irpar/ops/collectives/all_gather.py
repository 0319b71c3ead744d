"""AllGather: every member gets the blocks of all, joined along a dim."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import Node, Shape, with_dim
from irpar.ops.facts import int_attribute, ints_attribute

from .arrays import check_dim, cut, shapes_of_blocks
from .dialects import MICROSOFT, MOVED, TENSORRT, dist_collective
from .local import gathered, local_shape, members_of, operand_block, padded
from .record import (
    Array,
    Atoms,
    CollectiveOp,
    Empty,
    Execution,
    Member,
    Movement,
    Nested,
    Settings,
    Share,
    Sizes,
    Spelling,
    State,
    Volume,
)
from .record import rounds as message_rounds
from .states import dim_of, lost


def _shape(node: Node) -> Shape:
    shape, dim = local_shape(node), int_attribute(node, "dim")
    return with_dim(shape, dim, gathered(shape[dim], ints_attribute(node, "sizes"), members_of(node)))


def _after(node: Node, state: State, axes: Atoms) -> State | None:
    return lost(state, dim_of(node), axes)


def _elements(node: Node, size: int) -> Share:
    dim, sizes = int_attribute(node, "dim"), ints_attribute(node, "sizes")
    return Share((size - 1) * padded(operand_block(node), dim, sizes), 1)


def _share(n: int) -> Share:
    return Share(n - 1, 1)


def _ring(n: int, size: float) -> Volume:
    """n - 1 times the block that came last goes on to the next device (Thakur et al.)."""
    return Volume(n - 1, (n - 1) * size)


def _tree(n: int, size: float) -> Volume:
    """Recursive doubling; where n is no power of two Bruck's way, of equal cost (Thakur et al.)."""
    return Volume(message_rounds(n), (n - 1) * size)


def _nested(links: Nested, size: float) -> float:
    """Across first, while blocks are small."""
    return links.outside(size) + links.inside("all_gather", size * links.across)


def _result(collective: Settings, operands: Sequence[Array], _: int) -> Array:
    return np.concatenate(operands, axis=collective.dim)


def _shapes(collective: Settings, shapes: Sequence[Sizes]) -> list[Sizes]:
    return shapes_of_blocks(collective.sizes, collective.dim, shapes)


def _moves(member: Member, empty: Empty) -> Movement:
    dim, own = member.collective.dim, member.position
    check_dim(member.collective, dim, member.operand.ndim)
    sizes = [shape[dim] for shape in member.shapes]
    result = empty(with_dim(member.operand.shape, dim, sum(sizes)))
    places = cut(result, sizes, dim)
    places[own][...] = member.operand
    others = [position for position in range(len(sizes)) if position != own]
    return Movement(result, [(others, member.operand)], [(position, places[position]) for position in others])


RECORD = CollectiveOp(
    "all_gather",
    "Concatenates the members' blocks along dim.",
    shape=_shape,
    after=_after,
    elements=_elements,
    share=_share,
    algorithms={"ring": _ring, "tree": _tree},
    calibrated="ring",
    nested=_nested,
    execution=Execution(_result, _shapes, is_shared=True, reads_all=True, moves=_moves),
    dims=("dim",),
    uneven={"sizes": ("dim", "operand")},
    spellings={
        MICROSOFT: Spelling("AllGather", MOVED, named={"axis": "dim"}, counted=("group_size",)),
        TENSORRT: dist_collective("all_gather", first=("dim",)),
    },
)
