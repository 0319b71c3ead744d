"""irpar's collectives as ONNX operator schemas, so that the checker and shape inference know domain `irpar`.

In global view a collective keeps the shape; in local view it changes dims by group sizes, which a node alone does not
tell. Inference therefore leaves those dims open, and the value_info that irpar writes fills them.
"""

from collections.abc import Callable
from typing import Any

import onnx
from onnx import defs

from irpar.ir import DOMAIN, IRPAR_OPSET, dtype_of_text
from irpar.ops.collectives import ATTRIBUTES, COLLECTIVES, CollectiveOp

_ALL_TENSORS = sorted(
    {
        text
        for text in defs.get_schema("Identity", 25).type_constraints[0].allowed_type_strs
        if text.startswith("tensor(")
    }
)


def _inference(changing: tuple[str, ...]) -> Callable[[Any], None]:
    def infer(context: Any) -> None:
        type_ = context.get_input_type(0)
        if type_ is None:
            return
        made = onnx.TypeProto()
        made.CopyFrom(type_)
        dims = made.tensor_type.shape.dim
        if context.get_attribute("shapes") is not None:
            for dim in dims:
                dim.Clear()
        for name in changing:
            attribute = context.get_attribute(name)
            place = attribute.i if attribute is not None else 0
            if -len(dims) <= place < len(dims):
                dims[place].Clear()
        context.set_output_type(0, made)

    return infer


def _infer_from_attributes(context: Any) -> None:
    """The type of a result of no operand, by its attributes dtype and shape."""
    dtype, shape = context.get_attribute("dtype"), context.get_attribute("shape")
    known = None if dtype is None else dtype_of_text(dtype.s.decode(errors="replace"))
    if known is None or shape is None:
        return
    context.set_output_type(0, onnx.helper.make_tensor_type_proto(known.value, list(shape.ints)))


def _schema(name: str, op: CollectiveOp) -> defs.OpSchema:
    identified = () if op.kind is None else ("id",)
    schema = defs.OpSchema(
        name,
        DOMAIN,
        IRPAR_OPSET,
        op.does,
        inputs=[defs.OpSchema.FormalParameter("x", "T", "what this device gives")] * op.operands,
        outputs=[defs.OpSchema.FormalParameter("y", "T", "what this device gets")] * op.results,
        type_constraints=[("T", _ALL_TENSORS, "any tensor")],
        attributes=[
            defs.OpSchema.Attribute(
                name, getattr(defs.OpSchema.AttrType, known.kind), known.text, required=known.is_required
            )
            for name in (*(("axes",) if op.over_axes else ()), *op.dims, *op.others, *identified, *op.uneven)
            for known in (ATTRIBUTES[name],)
        ],
    )
    if op.results:
        infer = _inference(() if op.kind is None else op.dims) if op.operands else _infer_from_attributes
        schema.set_type_and_shape_inference_function(infer)
    return schema


def _copy_schema(name: str, does: str, to: bool = True) -> defs.OpSchema:
    """The schema of a copy between memories of a rank, or of the wait for one: a copy in flight has the type of it."""
    kinds = defs.OpSchema.AttrType
    attributes = [defs.OpSchema.Attribute("id", kinds.INT, "its number in the plan", required=False)]
    if to:
        attributes.append(defs.OpSchema.Attribute("to", kinds.STRING, "device, host or disk", required=True))
    schema = defs.OpSchema(
        name,
        DOMAIN,
        IRPAR_OPSET,
        does,
        inputs=[defs.OpSchema.FormalParameter("x", "T", "what is copied")],
        outputs=[defs.OpSchema.FormalParameter("y", "T", "the same, elsewhere")],
        type_constraints=[("T", _ALL_TENSORS, "any tensor")],
        attributes=attributes,
    )
    schema.set_type_and_shape_inference_function(_inference(()))
    return schema


_COPIES = (
    _copy_schema("Copy", "Copies a tensor to another memory of the rank."),
    _copy_schema("CopyStart", "Begins to copy a tensor to another memory of the rank; Wait gives the copy."),
    _copy_schema("Wait", "Gives what was begun.", to=False),
)


def register() -> None:
    """Tell onnx of irpar's operators, once in a process."""
    for schema in _COPIES:
        if not defs.has(schema.name, DOMAIN):
            defs.register_schema(schema)
    for name, op in COLLECTIVES.items():
        if not defs.has(name, DOMAIN):
            defs.register_schema(_schema(name, op))
