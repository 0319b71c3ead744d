"""ONNX's own type inference for single nodes."""

from collections.abc import Sequence

import onnx
from onnx.shape_inference import InferenceError, infer_node_outputs

from irpar.ir import UNKNOWN, Attribute, DType, Expr, Graph, Node, Tensor, TensorType, Type, Value
from irpar.onnx_io.attributes import write_attribute
from irpar.onnx_io.errors import OnnxError
from irpar.onnx_io.tensors import write_tensor
from irpar.onnx_io.types import TypeReader, write_type
from irpar.ops.effects import schema_of

from .type_merge import TypeInferenceError

MAX_DATA = 1024
"""Lists of more indices are not shown to the inference, which asks for shapes, axes and the like only."""

MAX_NUMBERS = 8
"""The same for other numbers, such as the scales of a Resize; so no weights are read."""


class OnnxInference:
    """Infers result types by ONNX's schemas; nodes that agree in everything that counts share one answer."""

    def __init__(self) -> None:
        self._known: dict[object, Sequence[Type]] = {}

    def result_types(self, node: Node) -> Sequence[Type]:
        """What ONNX infers for the results of a node without nested graphs; UNKNOWN where it cannot tell.

        Raises:
            TypeInferenceError: ONNX refuses operands whose types are known.
        """
        key = key_of(node)
        if key is not None and key in self._known:
            return self._known[key]
        types = _infer(node)
        if key is not None:
            self._known[key] = types
        return types


def key_of(node: Node) -> object:
    """What the answer depends on; None where that is too much to compare."""
    attributes = [(name, _attribute_key(value)) for name, value in node.attributes.items()]
    if any(key is None for _, key in attributes):
        return None
    operands = [None if value is None else _operand_key(value) for value in node.operands]
    return node.domain, node.op_type, node.version, tuple(attributes), tuple(operands), len(node.results)


def _attribute_key(value: Attribute) -> object:
    if isinstance(value, Tensor):
        return _data_key(value) if value.size <= MAX_DATA else None
    if isinstance(value, Graph):
        return None
    try:
        hash(value)
    except TypeError:
        return None
    return type(value), value


def _operand_key(value: Value) -> object:
    return value.type if value.data is None or not _is_shown(value) else (value.type, _data_key(value.data))


def _data_key(data: Tensor | None) -> object:
    return None if data is None else (data.dtype, data.shape, data.numpy().tobytes())


def _is_shown(value: Value) -> bool:
    data = value.data
    if data is None or data.dtype is DType.STR:
        return False
    return data.size <= (MAX_DATA if data.dtype.is_index else MAX_NUMBERS)


def _infer(node: Node) -> Sequence[Type]:
    unknown = [UNKNOWN] * len(node.results)
    schema = schema_of(node.domain, node.op_type, node.version)
    if schema is None or schema.deprecated:
        return unknown
    proto = node_proto(node)
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for name, value in zip(proto.input, node.operands, strict=True):
        if value is None:
            continue
        types[name] = onnx.TypeProto()
        write_type(value.type, types[name])
        if _is_shown(value) and value.data is not None:
            data[name] = onnx.TensorProto()
            write_tensor(value.data, data[name])
    opsets = [onnx.helper.make_opsetid(node.domain, schema.since_version if not node.version else node.version)]
    try:
        found = infer_node_outputs(schema, proto, types, data, opset_imports=opsets)
    except (InferenceError, onnx.checker.ValidationError, ValueError) as error:  # ValueError: of types that are unknown
        if not all(isinstance(value.type, TensorType) and value.type.shape is not None for value in node.inputs):
            return unknown
        raise _refusal(node, str(error)) from error
    reader = TypeReader(_symbols(node))
    try:
        return [reader.read(found[name]) if name in found else UNKNOWN for name in proto.output]
    except OnnxError as error:
        raise _refusal(node, f"the result would have a {error.what}") from error


def node_proto(node: Node) -> onnx.NodeProto:
    """A NodeProto of a node without nested graphs, its operands called by their places: `o0`, `o1` ... -> `r0` ..."""
    proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
    proto.input.extend("" if value is None else f"o{index}" for index, value in enumerate(node.operands))
    proto.output.extend(f"r{index}" for index in range(len(node.results)))
    for name, value in node.attributes.items():
        write_attribute(name, value, proto.attribute.add(), _refuse_graph)
    return proto


def _refuse_graph(graph: Graph, proto: onnx.GraphProto) -> None:
    raise ValueError(f"graph {graph.name} in a node that is taken alone")


def _symbols(node: Node) -> set[str]:
    found: set[str] = set()
    for value in node.inputs:
        if isinstance(value.type, TensorType):
            for dim in value.type.shape or ():
                if isinstance(dim, Expr):
                    found |= dim.symbols()
    return found


def _refusal(node: Node, reason: str) -> TypeInferenceError:
    reason = reason.replace("[ShapeInferenceError]", "").replace("[TypeInferenceError]", "").strip()
    return TypeInferenceError(
        f"the operands of {node.op_type} do not fit: {reason}",
        where=f"node {node.label}: {node!r}",
        notes=tuple(f"operand %{value.name} : {value.type}" for value in node.inputs),
        do="mend the model, or the sizes given for its symbols",
    )
