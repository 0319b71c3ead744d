"""Which values depend on others in a way that has a derivative."""

from collections.abc import Iterable

from irpar.ir import Node, OptionalType, SequenceType, Type, Value, tensor_type
from irpar.ir.graph import captured_or_read
from irpar.ops import definition
from irpar.ops.gradients.zero import zero


def is_real(type_: Type) -> bool:
    """Whether a value may have a gradient: floats, what holds them, and what is not known yet."""
    if isinstance(type_, (SequenceType, OptionalType)):
        return is_real(type_.elem)
    found = tensor_type(type_)
    return found is None or found.dtype.is_float


def is_flat(node: Node) -> bool:
    """Whether nothing flows back through a node: its derivative is zero wherever it has one."""
    found = definition(node)
    return found is not None and found.gradient is zero


def dependents(nodes: Iterable[Node], wanted: Iterable[Value]) -> set[Value]:
    """The values that depend on wanted ones in a way that has a derivative, the wanted ones included."""
    found = set(wanted)
    for node in nodes:
        if is_flat(node) or not any(value in found for value in captured_or_read(node)):
            continue
        found.update(value for value in node.results if is_real(value.type))
    return found
