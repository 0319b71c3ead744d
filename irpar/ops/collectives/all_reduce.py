"""AllReduce: every member gets the reduction of all operands."""

from collections.abc import Sequence
from math import prod

from irpar.ir import Node

from .arrays import contiguous, cut_flat, equal_shapes
from .dialects import FLOATS, MICROSOFT, TENSORRT, dist_collective
from .local import operand_block, shape_kept
from .record import Array, Atoms, CollectiveOp, Execution, Member, Nested, Settings, Share, Spelling, State, Volume
from .record import rounds as message_rounds
from .reduced_arrays import reduce_arrays
from .states import reduced


def _after(node: Node, state: State, axes: Atoms) -> State | None:
    return reduced(state, axes)


def _elements(node: Node, size: int) -> Share:
    return Share(2 * (size - 1) * prod(operand_block(node)), size)


def _share(n: int) -> Share:
    return Share(2 * (n - 1), n)


def _ring(n: int, size: float) -> Volume:
    """The ring's reduce-scatter, then its all-gather: 2(n - 1) messages of S / n."""
    return Volume(2 * (n - 1), 2 * (n - 1) / n * size)


def _tree(n: int, size: float) -> Volume:
    """Rabenseifner's: halving, then doubling (Thakur et al.)."""
    return Volume(2 * message_rounds(n), 2 * (n - 1) / n * size)


def _doubling(n: int, size: float) -> Volume:
    """Recursive doubling: full operands, the fewest messages (Thakur et al.).

    Where n is no power of two, those beyond it give their operand to a neighbour first, and get the result last.
    """
    folds = 0 if n & (n - 1) == 0 else 2
    messages = n.bit_length() - 1 + folds
    return Volume(messages, messages * size)


def _nested(links: Nested, size: float) -> float:
    """Reduce and scatter inside, reduce across, gather inside."""
    inside = links.inside("reduce_scatter", size) + links.inside("all_gather", size / links.n)
    return inside + links.outside(size / links.n)


def _result(collective: Settings, operands: Sequence[Array], _: int) -> Array:
    return reduce_arrays(operands, collective.reduce)


def _pieces(member: Member) -> list[Array]:
    return cut_flat(contiguous(member.operand), len(member.shapes))


RECORD = CollectiveOp(
    "all_reduce",
    "Reduces over the group; all get the result.",
    shape=shape_kept,
    after=_after,
    elements=_elements,
    share=_share,
    algorithms={"ring": _ring, "tree": _tree, "doubling": _doubling},
    calibrated="ring",
    nested=_nested,
    execution=Execution(_result, equal_shapes, is_shared=True, reads_all=True, pieces=_pieces, returns_pieces=True),
    others=("reduce",),
    spellings={
        MICROSOFT: Spelling("AllReduce", FLOATS, reductions=frozenset({"sum"})),
        TENSORRT: dist_collective("all_reduce", reduces=True),
    },
)
