"""ReduceScatter: member i gets block i, along a dim, of the reduction of all operands."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import Node, Shape, with_dim
from irpar.ops.facts import int_attribute, ints_attribute

from .arrays import blocks_of, equal_shapes, own_pieces
from .dialects import TENSORRT, dist_collective
from .local import block_of, local_shape, members_of, padded, part
from .record import Array, Atoms, CollectiveOp, Execution, Member, Nested, Settings, Share, State, Volume
from .record import rounds as message_rounds
from .reduced_arrays import reduce_arrays
from .states import dim_of, gained, reduced


def shape_of_part(node: Node) -> Shape:
    """This member's block of the operand."""
    shape, dim = local_shape(node), int_attribute(node, "dim")
    return with_dim(shape, dim, part(shape[dim], ints_attribute(node, "sizes"), members_of(node)))


def _after(node: Node, state: State, axes: Atoms) -> State | None:
    rest = reduced(state, axes)
    return None if rest is None else gained(rest, dim_of(node), axes)


def _elements(node: Node, size: int) -> Share:
    dim, sizes = int_attribute(node, "dim"), ints_attribute(node, "sizes")
    return Share((size - 1) * padded(block_of(node, node.result), dim, sizes), 1)


def _share(n: int) -> Share:
    return Share(n - 1, n)


def _ring(n: int, size: float) -> Volume:
    """n - 1 times a block goes on to the next device, which adds its own (Chan et al.)."""
    return Volume(n - 1, (n - 1) / n * size)


def _tree(n: int, size: float) -> Volume:
    """Recursive halving (Thakur et al.); for any n Bruck's all-gather backwards (Bruck & Ho)."""
    return Volume(message_rounds(n), (n - 1) / n * size)


def _nested(links: Nested, size: float) -> float:
    """Inside first: what is left to reduce across is small."""
    return links.inside("reduce_scatter", size) + links.outside(size / links.n)


def _result(collective: Settings, operands: Sequence[Array], position: int) -> Array:
    pieces = own_pieces(collective, operands, collective.dim, collective.sizes, position)
    return np.ascontiguousarray(reduce_arrays(pieces, collective.reduce))


def _pieces(member: Member) -> list[Array]:
    return blocks_of(
        member.collective, member.operand, member.collective.dim, member.collective.sizes, len(member.shapes)
    )


RECORD = CollectiveOp(
    "reduce_scatter",
    "Reduces over the group, then member i keeps block i along dim.",
    shape=shape_of_part,
    after=_after,
    elements=_elements,
    share=_share,
    algorithms={"ring": _ring, "tree": _tree},
    calibrated="ring",
    nested=_nested,
    execution=Execution(_result, equal_shapes, pieces=_pieces),
    dims=("dim",),
    others=("reduce",),
    uneven={"sizes": ("dim", "result")},
    spellings={TENSORRT: dist_collective("reduce_scatter", reduces=True, first=("dim",))},
)
