"""irpar's collectives as ONNX operator schemas, so that the checker and shape inference know domain `irpar`.

In global view a collective keeps the shape; in local view it changes dims by group sizes, which a node alone does not
tell. Inference therefore leaves those dims open, and the value_info that irpar writes fills them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import onnx
from onnx import defs

from irpar.ir import IRPAR_OPSET

_ALL_TENSORS = sorted(
    {
        text
        for text in defs.get_schema("Identity", 25).type_constraints[0].allowed_type_strs
        if text.startswith("tensor(")
    }
)

_AttrType = defs.OpSchema.AttrType
_KINDS = {
    "axes": (_AttrType.STRINGS, True, "mesh axes or sub-axes, major first"),
    "id": (_AttrType.INT, True, "unique in the program, equal on all participants"),
    "reduce": (_AttrType.STRING, True, "sum, max, min, prod, and, or"),
    "dim": (_AttrType.INT, True, "the dim that is gathered, scattered or sliced"),
    "split_dim": (_AttrType.INT, True, "the dim whose blocks are sent"),
    "concat_dim": (_AttrType.INT, True, "the dim along which received blocks are joined"),
    "pairs": (_AttrType.INTS, True, "source and target positions in the group, in turn"),
    "shapes": (_AttrType.INTS, False, "shapes of the members' operands, one after the other, where they differ"),
    "root": (_AttrType.INT, True, "position in the group"),
    "sizes": (_AttrType.INTS, False, "block size of each member along dim, where they differ"),
    "split_sizes": (_AttrType.INTS, False, "block size of each member along split_dim, where they differ"),
    "concat_sizes": (_AttrType.INTS, False, "block size of each member along concat_dim, where they differ"),
}

_COLLECTIVES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "AllReduce": (("axes", "reduce", "id"), (), "Reduces over the group; all get the result."),
    "AllGather": (("axes", "dim", "id", "sizes"), ("dim",), "Concatenates the members' blocks along dim."),
    "ReduceScatter": (
        ("axes", "dim", "reduce", "id", "sizes"),
        ("dim",),
        "Reduces over the group, then member i keeps block i along dim.",
    ),
    "AllToAll": (
        ("axes", "split_dim", "concat_dim", "id", "split_sizes", "concat_sizes"),
        ("split_dim", "concat_dim"),
        "Member i sends block j of split_dim to member j and joins what it receives along concat_dim.",
    ),
    "CollectivePermute": (
        ("axes", "pairs", "id", "shapes"),
        (),
        "Sends whole tensors between positions; who receives nothing gets zeros.",
    ),
    "Broadcast": (("axes", "root", "id"), (), "All get the tensor of the root."),
    "AllSlice": (("axes", "dim"), (), "Each keeps its own block along dim; exists in global view only."),
    "MakePartial": (
        ("axes", "reduce"),
        (),
        "The first keeps what all hold, so that reducing gives it again; exists in global view only.",
    ),
}
"""Per collective: its attributes, the attributes that name dims whose size may change, and what it does."""


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


def _schema(name: str, attributes: Iterable[str], changing: tuple[str, ...], doc: str) -> defs.OpSchema:
    schema = defs.OpSchema(
        name,
        "irpar",
        IRPAR_OPSET,
        doc,
        inputs=[defs.OpSchema.FormalParameter("x", "T", "what this device gives")],
        outputs=[defs.OpSchema.FormalParameter("y", "T", "what this device gets")],
        type_constraints=[("T", _ALL_TENSORS, "any tensor")],
        attributes=[
            defs.OpSchema.Attribute(attribute, kind, text, required=required)
            for attribute in attributes
            for kind, required, text in (_KINDS[attribute],)
        ],
    )
    schema.set_type_and_shape_inference_function(_inference(changing))
    return schema


def register() -> None:
    """Tell onnx of irpar's operators, once in a process."""
    for name, (attributes, changing, doc) in _COLLECTIVES.items():
        if not defs.has(name, "irpar"):
            defs.register_schema(_schema(name, attributes, changing, doc))
