"""Sums that a loop carries: each trip writes what it has added over what it found, in one block that the loop makes.

z = Expand(0, [8, 8])    s, y = Scan(z, xs) { s, x -> Add(s, g), ... }    z is a view of a number, which takes no memory
"""

from collections.abc import Iterator
from dataclasses import dataclass

from irpar.analysis.engines import writes_out
from irpar.analysis.looping import LOOPS, Looping
from irpar.ir import DType, Graph, Node, Value, tensor_type
from irpar.ops import traits

_WRITTEN = (DType.F32, DType.F64)
"""Of smaller floats kernels compute wider ones."""


@dataclass(frozen=True)
class Sum:
    """A sum of which all trips write one block.

    Attributes:
        operand: the place of what it begins as among the operands of the loop.
        before, after: in the body, as a trip finds it and leaves it.
        final: what the loop gives.
        start: what it begins as, where that is one number spread to a shape for it alone, which takes no memory; None:
            it is held beside the block.
    """

    operand: int
    before: Value
    after: Value
    final: Value
    start: Value | None

    @property
    def nbytes(self) -> int:
        """Of the block."""
        return self.before.tensor_type.nbytes


def sums_of(node: Node) -> tuple[Sum, ...]:
    """Those of a Loop or a Scan; none of another node."""
    is_loop = node.identity in LOOPS and not (node.op_type == "Scan" and 0 < node.version < 9)
    return tuple(_sums(LOOPS[node.identity](node))) if is_loop else ()


def sums_in(body: Graph) -> tuple[Sum, ...]:
    """Those of the loop that a graph is the body of, if it is one."""
    return () if body.parent is None else sums_of(body.parent)


def _sums(loop: Looping) -> Iterator[Sum]:
    for number, ((start, before, after), final) in enumerate(zip(loop.carried, loop.finals, strict=True)):
        found = loop.addition(number)
        type_ = tensor_type(before.type)
        if found is None or start is None or type_ is None or type_ != tensor_type(after.type):
            continue
        if type_.is_static and type_.dtype in _WRITTEN and writes_out(found[0]):
            yield Sum(loop.place(number), before, after, final, _spread_number(start))


def _spread_number(value: Value) -> Value | None:
    """The number that is spread, of a value that shows nothing else and that one node reads alone."""
    while value.use_count == 1 and value.node is not None:
        if value.node.identity == ("", "Expand"):
            number = tensor_type(value.node.inputs[0].type)
            return value if number is not None and number.is_static and number.size == 1 else None
        if not traits(value.node).view:
            return None
        value = value.node.inputs[0]
    return None
