"""CollectivePermute: full operands go from member to member."""

from collections.abc import Sequence

from irpar.ir import Node, Shape
from irpar.ops.facts import ints_attribute

from .arrays import equal_shapes, nothing_like
from .local import elements_of_operand, local_shape, members_of
from .record import (
    Array,
    CollectiveOp,
    Empty,
    Execution,
    Member,
    Movement,
    Nested,
    Settings,
    Share,
    Sizes,
    Volume,
)
from .states import unchanged


def _shape(node: Node) -> Shape:
    """The shape of the member whose block this one gets, where `shapes` tells those of all; else the operand's."""
    shape, shapes = local_shape(node), ints_attribute(node, "shapes")
    if shapes is None:
        return shape
    members, pairs = members_of(node), ints_attribute(node, "pairs") or ()
    source = dict(zip(pairs[1::2], pairs[::2], strict=True)).get(members.position)
    if source is None:
        return shape
    return shapes[source * len(shape) : (source + 1) * len(shape)]


def _share(n: int) -> Share:
    return Share(1, 1)


def _direct(n: int, size: float) -> Volume:
    """Each device sends its operand once."""
    return Volume(1, size)


def _nested(links: Nested, size: float) -> float:
    """A message goes inside or across, and all go at once."""
    return max(links.inside("permute", size), links.outside(size))


def source_of(collective: Settings, count: int, position: int) -> int | None:
    """The position that a CollectivePermute sends to `position`; None: nothing comes there.

    Raises:
        ValueError: the pairs do not fit a group of `count`.
    """
    sources, targets = collective.pairs[::2], collective.pairs[1::2]
    inside = all(0 <= place < count for place in collective.pairs)
    if len(sources) != len(targets) or len(set(targets)) != len(targets) or not inside:
        raise ValueError(f"pairs {list(collective.pairs)} do not fit a group of {count}")
    return dict(zip(targets, sources, strict=True)).get(position)


def _result(collective: Settings, operands: Sequence[Array], position: int) -> Array:
    source = source_of(collective, len(operands), position)
    return nothing_like(operands[position]) if source is None else operands[source]


def _shapes(collective: Settings, shapes: Sequence[Sizes]) -> list[Sizes]:
    if collective.shapes is None:
        return equal_shapes(collective, shapes)
    rank, listed = len(shapes[0]), collective.shapes
    if len(listed) != rank * len(shapes):
        return [()] * len(shapes)
    return [listed[member * rank : (member + 1) * rank] for member in range(len(shapes))]


def _moves(member: Member, empty: Empty) -> Movement:
    own, count = member.position, len(member.shapes)
    sources = [source_of(member.collective, count, position) for position in range(count)]
    targets = [position for position, source in enumerate(sources) if source == own and position != own]
    sends = [(targets, member.operand)] if targets else []
    source = sources[own]
    if source == own:
        return Movement(member.operand, sends, [])
    if source is None:
        result = empty(member.operand.shape)
        result[...] = 0
        return Movement(result, sends, [])
    result = empty(member.shapes[source])
    return Movement(result, sends, [(source, result)])


RECORD = CollectiveOp(
    "permute",
    "Sends full tensors between positions; who receives nothing gets zeros.",
    shape=_shape,
    after=unchanged,
    elements=elements_of_operand,
    share=_share,
    algorithms={"direct": _direct},
    nested=_nested,
    execution=Execution(_result, _shapes, gives_operands=True, moves=_moves),
    others=("pairs",),
    uneven={"shapes": None},
    moves_blocks=True,
)
