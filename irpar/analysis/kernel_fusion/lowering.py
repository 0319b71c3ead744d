"""Nodes as steps of an expression: whether a node can be, and what writes them."""

from collections.abc import Set

from irpar.ir import Node, Value, tensor_type
from irpar.kernels import has_kernel
from irpar.kernels.expression import DTYPES
from irpar.ops.facts import CannotTellError

from .drafts import Lowered, Ref
from .elementwise_steps import ELEMENTWISE
from .row_steps import ROWS

_LOWER = {**ELEMENTWISE, **ROWS}


def lowered(node: Node, read: Set[Value]) -> Lowered | None:
    """A node as steps; None where it has none: an operator, a dtype, a shape or an attribute that is not covered.

    Args:
        node: it.
        read: the values that something reads.
    """
    lower = _LOWER.get(node.identity)
    if lower is None or node.callee is not None or not has_kernel(node.domain, node.op_type, node.version):
        return None
    wanted = [value for value in node.results if value in read]
    if not wanted or not all(map(_is_covered, (*node.inputs, *wanted))):
        return None
    made = Lowered(node, frozenset(wanted), space=max((value.shape for value in wanted), key=len))
    try:
        found = lower(node, made)
    except CannotTellError:
        return None
    made.results = {
        value: given
        for value, given in zip(node.results, found, strict=False)
        if value in read and isinstance(given, Ref)
    }
    return made if len(made.results) == len(wanted) else None


def _is_covered(value: Value) -> bool:
    type_ = tensor_type(value.type)
    is_known = type_ is not None and type_.is_static and type_.dtype.text in DTYPES
    return is_known and 0 not in value.shape
