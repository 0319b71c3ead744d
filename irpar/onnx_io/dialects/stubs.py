"""Stand-ins for irpar's operators: functions of the model, for tools that do not know the domain `irpar`.

A stub has the types of the operator, so that such tools open, check and infer a part. It does not communicate: what it
gives is NaN (zero or false where there is no NaN), so that nobody takes a run without irpar for a result.
"""

import onnx
from onnx import helper

from irpar.ir import DOMAIN, Graph, InflightType, Module, Node, TensorType, tensor_type

from .marks import STUB, holders, numbered

_OVERLOADS_IR = 10


def add_stubs(model: onnx.ModelProto, module: Module, graph: Graph) -> None:
    """Add a function for each of irpar's operators and shape of its result that the model of a part has.

    Args:
        model: of the part.
        module: what it was made of.
        graph: which of its graphs.
    """
    made: dict[tuple[str, str], onnx.FunctionProto] = {}
    known = numbered(module, graph)
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    for holder in holders(model):
        for proto in holder.node:
            if proto.domain != DOMAIN:
                continue
            number = next(entry.i for entry in proto.attribute if entry.name == "id")
            stub = _stub(proto, known[proto.op_type, number], opset)
            stub = made.setdefault((stub.name, stub.overload), stub)
            for name in (entry.name for entry in proto.attribute):
                if name not in stub.attribute:
                    stub.attribute.append(name)
            proto.overload = stub.overload
    model.functions.extend(made.values())
    model.ir_version = max(model.ir_version, _OVERLOADS_IR)


def _stub(proto: onnx.NodeProto, node: Node, opset: int) -> onnx.FunctionProto:
    """The function that a node calls."""
    result = _type(node) if node.results else None
    function = onnx.FunctionProto(domain=DOMAIN, name=proto.op_type)
    function.doc_string = (
        f"Stands in for irpar's {proto.op_type} in tools that do not know it: the type, not the numbers."
    )
    function.input.extend(["x"] * len(proto.input))
    function.opset_import.append(helper.make_opsetid("", opset))
    function.metadata_props.add(key=STUB, value="true")
    if not node.results:
        return function
    function.output.append("y")
    nothing = helper.make_tensor("nothing", onnx.TensorProto.FLOAT, (), [float("nan")])
    function.node.append(helper.make_node("Constant", [], ["nothing"], value=nothing))
    like: dict[str, int] = {}
    if len(proto.input):
        function.node.append(helper.make_node("CastLike", ["nothing", "x"], ["typed"]))
    else:
        assert result is not None
        like = {"to": result.dtype.value}
        function.node.append(helper.make_node("Cast", ["nothing"], ["typed"], **like))
    operand = tensor_type(node.inputs[0].type) if node.inputs else None
    if result is None or not result.is_static or (operand is not None and operand.shape == result.shape):
        # Whichever that is: one stub has the type of all of them.
        never = helper.make_tensor("never", onnx.TensorProto.BOOL, (), [False])
        function.node.append(helper.make_node("Constant", [], ["never"], value=never))
        function.node.append(helper.make_node("Where", ["never", "x", "typed"], ["y"]))
    else:
        function.overload = "x".join(map(str, (*result.static_shape, *(["", result.dtype.text] if like else []))))
        function.node.append(helper.make_node("Constant", [], ["shape"], value_ints=list(result.static_shape)))
        function.node.append(helper.make_node("Expand", ["typed", "shape"], ["y"]))
    return function


def _type(node: Node) -> TensorType | None:
    kind = node.results[0].type
    return tensor_type(kind.elem if isinstance(kind, InflightType) else kind)
