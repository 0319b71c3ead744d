"""Sequences of tensors: whole on every device; what is read of a list that is written out has a gradient."""

from collections.abc import Sequence

from irpar.ir import Node, Value

from .facts import CannotTellError, int_attribute, needed, needed_ints
from .gradients.writer import GradientWriter
from .op_def import OpDef
from .registry import define


def _listed(node: Node) -> Sequence[Value]:
    """The tensors of the sequence that a node reads first.

    Raises:
        CannotTellError: it is no list that is written out.
    """
    source = needed(node, 0).node
    if source is None or source.identity != ("", "SequenceConstruct"):
        raise CannotTellError("what its sequence holds")
    return source.inputs


def _joined(node: Node, writer: GradientWriter) -> list[Value]:
    """Concat, of tensors with one more dim where they are stacked."""
    values, axis = _listed(node), int_attribute(node, "axis")
    if not int_attribute(node, "new_axis", 0):
        return [writer.op("Concat", values, {"axis": axis})]
    stacked = [writer.unsqueeze(value, [axis]) for value in values]
    return [writer.op("Concat", stacked, {"axis": axis})]


def _taken(node: Node, writer: GradientWriter) -> list[Value]:
    """The tensor at a known place."""
    values = _listed(node)
    (place,) = needed_ints(node, 1)
    return [writer.op("Identity", [values[place]])]


define(OpDef("", "ConcatFromSequence", decompose=_joined))
define(OpDef("", "SequenceAt", decompose=_taken))
