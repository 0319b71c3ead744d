"""Result types against what ONNX's own cases and ONNX Runtime give, and with symbolic dims."""

import warnings
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from irpar.ir import ArrayTensor, Dim, DType, Expr, Graph, Node, TensorType, Type, dtype_of_onnx, symbol
from irpar.ops import OpDef, definition, definitions
from tests.conformance.cases import made_cases

from .rule_proof import Sample
from .samples import SAMPLES

WITHOUT_CASES = {"GlobalLpPool", "MaxRoiPool", "SimplifiedLayerNormalization"}
"""Operators of which ONNX has no case."""


@cache
def _cases() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = made_cases("node")
    known = {found.name for found in definitions() if found.domain == ""}
    return [
        case
        for case in loaded
        if case.model is not None and len(case.model.graph.node) == 1 and case.model.graph.node[0].op_type in known
    ]


def _node(case: Any) -> tuple[Node, list[Type]] | None:
    """The node of a case with every operand constant, and its result types; None where values are no tensors."""
    proto = case.model.graph.node[0]
    inputs, outputs = case.data_sets[0]
    names = [value.name for value in case.model.graph.input]
    arrays = dict(zip(names, inputs, strict=True))
    graph = Graph()
    operands = []
    for name in proto.input:
        array = _array(arrays.get(name))
        if name and array is None:
            return None
        operands.append(graph.add_constant(ArrayTensor(array), name) if name else None)
    if any(_array(value) is None for value in outputs):
        return None
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in proto.attribute}
    for name, value in attributes.items():
        if isinstance(value, onnx.TensorProto):
            attributes[name] = numpy_helper.to_array(value)
    if not all(proto.output):
        return None
    version = next(opset.version for opset in case.model.opset_import if opset.domain in ("", "ai.onnx"))
    node = graph.append(Node(proto.op_type, operands, attributes, results=len(proto.output), version=version))
    return node, [_declared(value) for value in case.model.graph.output]


def _array(value: object) -> object:
    """The numbers of a value; None where it is no tensor."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return value if isinstance(value, (np.ndarray, np.generic)) else None


def _declared(value: onnx.ValueInfoProto) -> TensorType:
    found = value.type.tensor_type
    dtype = dtype_of_onnx(found.elem_type)
    assert dtype is not None
    return TensorType(dtype, tuple(dim.dim_value for dim in found.shape.dim))


def _infer(node: Node) -> list[Type] | None:
    found = definition(node)
    assert found is not None
    types = None if found.infer is None else found.infer(node)
    return None if types is None else list(types)


def _answer(node: Node) -> list[TensorType] | None:
    """The types, or None where some size is not told."""
    types = _infer(node)
    if types is None:
        return None
    found = [type_ for type_ in types if isinstance(type_, TensorType)]
    assert len(found) == len(types)
    return None if any(type_.shape is None or None in type_.shape for type_ in found) else found


def _names() -> list[str]:
    return sorted(found.name for found in definitions() if found.domain == "" and found.infer is not None)


@pytest.mark.parametrize("name", _names())
def test_types_agree_with_the_cases_of_onnx(name: str) -> None:
    answers = 0
    for case in _cases():
        if case.model.graph.node[0].op_type != name:
            continue
        made = _node(case)
        if made is None:
            continue
        node, expected = made
        types = _infer(node)
        assert types is None or types == expected, case.name
        answers += types is not None
    assert answers or name in WITHOUT_CASES


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_types_agree_with_onnx_runtime(sample: Sample) -> None:
    assert _infer(sample.node) == [value.type for value in sample.node.results]


def _symbolic(sample: Sample) -> Node:
    """The node with every dim of 5 of an operand that is no constant called n."""
    graph = Graph()
    operands = []
    for value in sample.node.operands:
        if value is None:
            operands.append(None)
        elif value.data is not None:
            operands.append(graph.add_constant(value.data))
        else:
            dims = tuple(symbol("n") if size == 5 else size for size in value.shape)
            operands.append(graph.add_input("", TensorType(value.dtype, dims)))
    node = sample.node
    results = len(node.results)
    made = Node(node.op_type, operands, node.attributes, results=results, domain=node.domain, version=node.version)
    return graph.append(made)


def _bound(dim: Dim) -> Dim:
    return dim.bind({"n": 5}) if isinstance(dim, Expr) else dim


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_symbolic_types_bind_to_the_static_ones(sample: Sample) -> None:
    types = _answer(_symbolic(sample))
    if types is None:
        return
    for found, value in zip(types, sample.node.results, strict=True):
        assert found.shape is not None
        assert found.with_shape(tuple(map(_bound, found.shape))) == value.type


def _has_symbol(sample: Sample) -> bool:
    return any(value is not None and value.is_input and 5 in value.shape for value in sample.node.operands)


def test_most_operators_answer_with_symbolic_dims() -> None:
    asked = [sample for sample in SAMPLES if _has_symbol(sample)]
    answers = {sample.operator for sample in asked if _answer(_symbolic(sample)) is not None}
    silent = {sample.operator for sample in asked} - answers
    assert silent <= {"DepthToSpace", "SpaceToDepth", "com.microsoft.GroupQueryAttention"}


@pytest.mark.parametrize(
    ("op", "dtypes", "expected"),
    [
        ("FusedMatMul", (DType.F16, DType.F16), [DType.F16]),
        ("MatMulInteger16", (DType.I16, DType.I16), [DType.I32]),
        ("SkipLayerNormalization", (DType.F16, DType.F16, DType.F16), [DType.F16, DType.F32, DType.F32, DType.F16]),
        ("QLinearWhere", (DType.BOOL, DType.U8, DType.F32, DType.U8, DType.U8), [DType.U8]),
    ],
)
def test_dtypes_are_known_where_sizes_are_not(op: str, dtypes: tuple[DType, ...], expected: list[DType]) -> None:
    graph = Graph()
    operands = [graph.add_input("x", TensorType(dtype, None)) for dtype in dtypes]
    node = graph.append(Node(op, operands, results=len(expected), domain="com.microsoft", version=1))
    assert _infer(node) == [TensorType(dtype, None) for dtype in expected]


def test_an_attribute_of_a_call_gives_no_answer() -> None:
    from irpar.ir import RefAttribute

    graph = Graph()
    data = graph.add_input("x", TensorType(dtype_of_onnx(1), (4, 5)))
    node = graph.append(Node("Softmax", [data], version=21))
    node.attributes["axis"] = RefAttribute("axis", 2)
    found = definition(node)
    assert isinstance(found, OpDef)
    assert found.infer is not None
    assert found.infer(node) is None
