"""AllToAll: member i sends block j of one dim to member j, and joins what it receives along another."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import Node, Shape, with_dim
from irpar.ops.facts import int_attribute, ints_attribute
from irpar.sharding import ceil_div

from .arrays import blocks_of, check_dim, cut, own_pieces, shapes_of_blocks
from .dialects import MICROSOFT, MOVED, TENSORRT, dist_collective
from .local import gathered, local_shape, members_of, operand_block, padded, part
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
from .states import dim_of, gained, lost


def _shape(node: Node) -> Shape:
    shape = local_shape(node)
    split, concat = int_attribute(node, "split_dim"), int_attribute(node, "concat_dim")
    members = members_of(node)
    divided = with_dim(shape, split, part(shape[split], ints_attribute(node, "split_sizes"), members))
    return with_dim(divided, concat, gathered(shape[concat], ints_attribute(node, "concat_sizes"), members))


def _after(node: Node, state: State, axes: Atoms) -> State | None:
    rest = lost(state, dim_of(node, "concat_dim"), axes)
    return None if rest is None else gained(rest, dim_of(node, "split_dim"), axes)


def _elements(node: Node, size: int) -> Share:
    """All blocks but one of the local buffer, both dims padded."""
    split, concat = int_attribute(node, "split_dim"), int_attribute(node, "concat_dim")
    shape = operand_block(node)
    parts = ints_attribute(node, "split_sizes")
    block = max(parts) if parts else ceil_div(shape[split], size)
    shape = tuple(block if dim == split else count for dim, count in enumerate(shape))
    return Share((size - 1) * padded(shape, concat, ints_attribute(node, "concat_sizes")), 1)


def _share(n: int) -> Share:
    return Share(n - 1, n)


def _direct(n: int, size: float) -> Volume:
    """Pairwise exchange: each device sends each other one its block (Thakur et al.)."""
    return Volume(n - 1, (n - 1) / n * size)


def _tree(n: int, size: float) -> Volume:
    """Bruck's: in round k go the blocks whose distance has bit k; few messages, but blocks travel several times."""
    passed = sum(distance.bit_count() for distance in range(n))
    return Volume(message_rounds(n), passed / n * size)


def _nested(links: Nested, size: float) -> float:
    return links.inside("all_to_all", size) + links.outside(size)


def _result(collective: Settings, operands: Sequence[Array], position: int) -> Array:
    pieces = own_pieces(collective, operands, collective.split_dim, collective.split_sizes, position)
    return np.concatenate(pieces, axis=collective.concat_dim)


def _shapes(collective: Settings, shapes: Sequence[Sizes]) -> list[Sizes]:
    return shapes_of_blocks(collective.concat_sizes, collective.concat_dim, shapes)


def _moves(member: Member, empty: Empty) -> Movement:
    collective, operand, own = member.collective, member.operand, member.position
    split, concat, count = collective.split_dim, collective.concat_dim, len(member.shapes)
    pieces = blocks_of(collective, operand, split, collective.split_sizes, count)
    check_dim(collective, concat, operand.ndim)
    mine = pieces[own].shape[split]
    # Where both are one dim the blocks that come were cut from it, all alike.
    sizes = [mine if split == concat else shape[concat] for shape in member.shapes]
    result = empty(with_dim(with_dim(operand.shape, split, mine), concat, sum(sizes)))
    places = cut(result, sizes, concat)
    places[own][...] = pieces[own]
    others = [position for position in range(count) if position != own]
    return Movement(
        result, [((position,), pieces[position]) for position in others], [(each, places[each]) for each in others]
    )


RECORD = CollectiveOp(
    "all_to_all",
    "Member i sends block j of split_dim to member j and joins what it receives along concat_dim.",
    shape=_shape,
    after=_after,
    elements=_elements,
    share=_share,
    algorithms={"direct": _direct, "tree": _tree},
    nested=_nested,
    execution=Execution(_result, _shapes, moves=_moves),
    dims=("split_dim", "concat_dim"),
    uneven={"split_sizes": ("split_dim", "result"), "concat_sizes": ("concat_dim", "operand")},
    spellings={
        MICROSOFT: Spelling("AllToAll", MOVED, counted=("group_size",), first=("split_dim", "concat_dim")),
        TENSORRT: dist_collective("all_to_all", first=("split_dim", "concat_dim")),
    },
)
