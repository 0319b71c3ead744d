"""Which values depend on others in a way that has a derivative."""

from collections.abc import Iterable, Iterator

from irpar.ir import Node, OptionalType, SequenceType, Type, Value, tensor_type
from irpar.ir.graph import captured_or_read
from irpar.ops import definition
from irpar.ops.gradients.zero import StraightThrough, zero


def is_real(type_: Type) -> bool:
    """Whether a value may have a gradient: floats, what holds them, and what is not known yet."""
    if isinstance(type_, (SequenceType, OptionalType)):
        return is_real(type_.elem)
    found = tensor_type(type_)
    return found is None or found.dtype.is_float


def is_flat(node: Node, *, straight_through: bool = False) -> bool:
    """Whether nothing flows back through a node: its derivative is zero wherever it has one.

    Args:
        node: the node.
        straight_through: whether rounding counts as the identity.
    """
    found = definition(node)
    if found is not None and isinstance(found.gradient, StraightThrough):
        return not straight_through
    return found is not None and found.gradient is zero


def reached(node: Node) -> Iterator[Value]:
    """The results of a node that depends on wanted values, as far as they may have a gradient."""
    found = definition(node)
    is_rounded = found is not None and isinstance(found.gradient, StraightThrough)
    yield from (value for value in node.results if is_rounded or is_real(value.type))


def dependents(nodes: Iterable[Node], wanted: Iterable[Value], *, straight_through: bool = False) -> set[Value]:
    """The values that depend on wanted ones in a way that has a derivative, the wanted ones included."""
    found = set(wanted)
    for node in nodes:
        is_flat_here = is_flat(node, straight_through=straight_through)
        if not is_flat_here and any(value in found for value in captured_or_read(node)):
            found.update(reached(node))
    return found
