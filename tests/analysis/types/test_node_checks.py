"""Nodes with operands, results or bodies that their operators do not have."""

import onnx
import pytest
from onnx import TensorProto, helper

from irpar.analysis.types.inference import Inference
from irpar.analysis.types.node_checks import MalformedNodeError
from irpar.ir import Module
from irpar.onnx_io.load import to_module


def value(name: str, shape: tuple[int, ...] = (4, 8), dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def loaded(op: str, operands: list[str], results: list[str], **attributes: object) -> Module:
    graph = helper.make_graph(
        [helper.make_node(op, operands, results, **attributes)],
        "g",
        [value("x"), value("c", (), TensorProto.BOOL), value("n", (), TensorProto.INT64)],
        [helper.make_empty_tensor_value_info(name) for name in results if name],
    )
    return to_module(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))


def body(inputs: list[onnx.ValueInfoProto], count: int) -> onnx.GraphProto:
    """A body with results b0, b1, ...; the first is a truth value where it has inputs, as a Loop wants it."""
    nodes = [
        helper.make_node("Identity", [inputs[1].name if len(inputs) > 1 and not i else "x"], [f"b{i}"])
        for i in range(count)
    ]
    outputs = [helper.make_empty_tensor_value_info(f"b{index}") for index in range(count)]
    return helper.make_graph(nodes, "body", inputs, outputs)


COUNTER = [value("i", (), TensorProto.INT64), value("going", (), TensorProto.BOOL)]
NONE = body([], 0)
BROKEN = {
    "it has 2 results, Relu has 1": lambda: loaded("Relu", ["x"], ["y", "z"]),
    "it has 0 results, Relu has 1": lambda: loaded("Relu", ["x"], [""]),
    "it has 1 operands, Add has 2": lambda: loaded("Add", ["x"], ["y"]),
    "it has 1 operands, Gemm has 2 to 3": lambda: loaded("Gemm", ["x"], ["y"]),
    "it has 0 operands, Concat has 1 or more": lambda: loaded("Concat", [], ["y"], axis=0),
    "operand 1 is left out": lambda: loaded("Add", ["x", ""], ["y"]),
    "its then_branch has 0 outputs, the node asks for 1": lambda: loaded(
        "If", ["c"], ["y"], then_branch=NONE, else_branch=NONE
    ),
    "its else_branch has 2 outputs, the node asks for 1": lambda: loaded(
        "If", ["c"], ["y"], then_branch=body([], 1), else_branch=body([], 2)
    ),
    "it has no graph else_branch": lambda: loaded("If", ["c"], ["y"], then_branch=body([], 1)),
    "its body has 2 inputs, the node asks for 3": lambda: loaded("Loop", ["n", "", "x"], ["y"], body=body(COUNTER, 2)),
    "its body has 2 outputs, the node asks for 3": lambda: loaded(
        "Loop", ["n", "", "x"], ["y", "z"], body=body([*COUNTER, value("v")], 2)
    ),
    "it carries 2 values, its body produces 1": lambda: loaded(
        "Loop", ["n", "", "x", "x"], ["y"], body=body([*COUNTER, value("v"), value("w")], 2)
    ),
    "num_scan_inputs is 3, with 1 operands": lambda: loaded("Scan", ["x"], ["y"], num_scan_inputs=3, body=NONE),
    "its body has 0 inputs, the node asks for 1": lambda: loaded(
        "Scan", ["x"], ["y"], num_scan_inputs=1, body=body([], 1)
    ),
    "scan_input_axes has 2 entries, 1 are needed": lambda: loaded(
        "Scan", ["x"], ["y"], num_scan_inputs=1, scan_input_axes=[0, 1], body=body([value("v", (8,))], 1)
    ),
}


@pytest.mark.parametrize("told", BROKEN)
def test_what_does_not_fit_is_refused(told: str) -> None:
    with pytest.raises(MalformedNodeError, match=told) as caught:
        Inference().graph(BROKEN[told]().graph)
    assert caught.value.where
    assert caught.value.do


def test_results_of_bodies_that_nobody_names_are_no_mistake() -> None:
    module = loaded("Loop", ["n", "", "x"], ["y", ""], body=body([*COUNTER, value("v")], 3))
    Inference().graph(module.graph)
    assert str(module.graph.outputs[0].type) == "f32[4, 8]"
