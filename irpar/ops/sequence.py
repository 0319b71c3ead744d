"""Sequences of tensors: whole on every device; what is read of a list that is written out has a gradient."""

from collections.abc import Sequence

from irpar.ir import Graph, Node, Value, tensor_type

from .facts import CannotTellError, int_attribute, needed, needed_ints, operand
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


def _collected(node: Node) -> Value | None:
    """What a Loop appends to an empty sequence in each trip, as one more result of it, which collects that.

    Returns:
        [trips, ...]; None where the sequence comes from elsewhere.
    """
    source = needed(node, 0)
    loop = source.node
    if loop is None or loop.identity != ("", "Loop"):
        return None
    body = loop.attributes["body"]
    assert isinstance(body, Graph)
    before, after = body.inputs[2 + source.index], body.outputs[1 + source.index]
    start, insert = needed(loop, 2 + source.index).node, after.node
    is_list = start is not None and start.identity == ("", "SequenceEmpty") and len(before.users) == 1
    if not is_list or insert is None or insert.identity != ("", "SequenceInsert") or operand(insert, 2) is not None:
        return None
    row = needed(insert, 1)
    found = tensor_type(row.type)
    if needed(insert, 0) is not before or row.owner is not body or found is None or not found.shape:
        return None
    # Rows that are put together agree in all dims but that along which they are; there they must have one size too.
    if not int_attribute(node, "new_axis", 0) and found.shape[int_attribute(node, "axis")] is None:
        return None
    body.set_outputs([*body.outputs, row], [*body.output_names, f"{row.name}_{len(body.outputs)}"])
    return loop.add_result(Value(f"{row.name}_rows", found.with_shape((None, *(found.shape or ())))))


def _joined_rows(node: Node, rows: Value, w: GradientWriter) -> Value:
    """The rows of a collected list along the axis."""
    rank = len(w.dims(rows))
    axis = int_attribute(node, "axis")
    is_stacked = bool(int_attribute(node, "new_axis", 0))
    axis += (rank if is_stacked else rank - 1) if axis < 0 else 0
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    turned = w.transpose(rows, order)
    if is_stacked:
        return turned
    kept: list[int | tuple[Value, int]] = [(turned, dim) for dim in range(rank)]
    kept[axis : axis + 2] = [-1]
    return w.reshaped(turned, kept)


def _joined(node: Node, writer: GradientWriter) -> list[Value]:
    """Concat, of tensors with one more dim where they are stacked."""
    rows = _collected(node)
    if rows is not None:
        return [_joined_rows(node, rows, writer)]
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
