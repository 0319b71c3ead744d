"""Models of older opsets, whose meaning the version converter changes without a word."""

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import irpar
from irpar.onnx_io import OnnxError, to_module, to_proto
from tests.conformance.cases import assert_close
from tests.conformance.round_trips import run

RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((2, 3, 6, 5), np.float32)


def of_node(version: int, node: onnx.NodeProto, *arrays: np.ndarray, constant: bool = True) -> onnx.ModelProto:
    """A model of one node whose first operand is an input; the others are constants or inputs as well."""
    names = [f"x{index}" for index in range(len(arrays))]
    count = 1 if constant else len(arrays)
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(names[:count], arrays, strict=False)
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in list(zip(names, arrays, strict=True))[count:]],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=7)


def scales(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


RESIZES = {
    "enlarged": scales(1, 1, 2, 3),
    "reduced": scales(1, 1, 0.5, 0.6),
    "both": scales(1, 1, 0.43, 1.7),
}


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("factors", RESIZES)
def test_resize_of_opset_10_takes_elements_from_the_same_places(factors: str, mode: str, constant: bool) -> None:
    arrays = (X, RESIZES[factors])
    made = of_node(10, helper.make_node("Resize", ["x0", "x1"], ["y"], mode=mode), *arrays, constant=constant)
    check(made, list(arrays[: 1 if constant else 2]))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_upsample_takes_elements_from_the_same_places(mode: str) -> None:
    of_9 = of_node(9, helper.make_node("Upsample", ["x0", "x1"], ["y"], mode=mode), X, scales(1, 1, 2, 3))
    check(of_9, [X])
    check(of_node(7, helper.make_node("Upsample", ["x0"], ["y"], mode=mode, scales=[1.0, 1.0, 3.0, 2.0]), X), [X])


def check(made: onnx.ModelProto, inputs: list[np.ndarray]) -> None:
    """The written model gives what ONNX Runtime computes on the given one."""
    expected = run(made, inputs)
    assert expected is not None
    found = run(to_proto(to_module(made)), inputs)
    assert found is not None
    for left, right in zip(found, expected, strict=True):
        assert_close(left, right, 1e-5, 1e-5)


def test_resizes_in_a_branch() -> None:
    def branch(name: str, mode: str) -> onnx.GraphProto:
        node = helper.make_node("Resize", ["x", "s"], [name], mode=mode)
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])

    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch("a", "nearest"), else_branch=branch("b", "linear"))],
        "g",
        [
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(scales(1, 1, 0.5, 2), "s")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)], ir_version=7)
    for predicate in (True, False):
        check(made, [np.array(predicate), X])


@pytest.mark.parametrize("version", [1, 6])
@pytest.mark.parametrize("constant", [True, False])
def test_the_slope_of_prelu_was_one_number_a_channel(version: int, constant: bool) -> None:
    square, slope = X[:, :, :3, :3], scales(0.1, 0.2, 0.3)
    made = of_node(version, helper.make_node("PRelu", ["x0", "x1"], ["y"]), square, slope, constant=constant)
    found = run(to_proto(to_module(made)), [square] if constant else [square, slope])
    assert found is not None
    np.testing.assert_allclose(found[0], np.where(square < 0, square * slope[:, None, None], square), rtol=1e-6)


def test_a_slope_of_unknown_rank_is_refused() -> None:
    made = of_node(6, helper.make_node("PRelu", ["x0", "x1"], ["y"]), X, scales(1, 2, 3))
    made.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(OnnxError, match=r"(?s)PRelu before opset 7 needs operands of known rank.*do: export"):
        to_module(made)


def scan(lengths: str = "", **attributes: object) -> onnx.ModelProto:
    """Sums of a sequence, step by step, of opset 8."""
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Mul", ["t", "k"], ["r"])],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "se"],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "tr"],
    )
    node = helper.make_node("Scan", [lengths, "s0", "x"], ["y", "z"], body=body, num_scan_inputs=1, **attributes)
    inputs = [helper.make_tensor_value_info("s0", TensorProto.FLOAT, [3, 2])]
    inputs.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 4, 2]))
    if lengths:
        inputs.append(helper.make_tensor_value_info(lengths, TensorProto.INT64, [3]))
    graph = helper.make_graph(
        [node],
        "g",
        inputs,
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 2]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, [3, 4, 2]),
        ],
        [numpy_helper.from_array(np.float32([2.0]), "k")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=4)


@pytest.mark.parametrize("backward", [0, 1])
def test_scan_of_opset_8_keeps_its_batch_dim(backward: int) -> None:
    state, x = RANDOM.standard_normal((3, 2), np.float32), RANDOM.standard_normal((3, 4, 2), np.float32)
    found = run(to_proto(to_module(scan(directions=[backward]))), [state, x])
    steps = state[:, None] + np.cumsum(x[:, ::-1] if backward else x, axis=1)
    assert found is not None
    np.testing.assert_allclose(found[0], steps[:, -1], rtol=1e-5)
    np.testing.assert_allclose(found[1], 2 * steps, rtol=1e-5)


def test_scan_with_sequence_lengths_is_refused() -> None:
    with pytest.raises(OnnxError, match=r'(?s)sequence lengths is not supported.*Scan of "y".*do: export'):
        to_module(scan("lengths"))


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (9, "g (float[1, 2, 3, 4] x, float[4] s) => (float[1, 2, 6, 8] z) { y = Upsample(x, s) z = Relu(y) }"),
        (10, "g (float[6, 5] x, int64[5, 3] i, float[5, 3] s) => (float[6, 5] z) { y = Scatter(x, i, s) z = Relu(y) }"),
    ],
)
def test_results_keep_their_names(version: int, text: str) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["": {version}]> {text}')
    assert {"y", "z"} <= {value.source_name for value in to_module(model).graph.values()}


@pytest.mark.parametrize("version", [9, 10])
@pytest.mark.parametrize(
    "node", ["Clip<max=6.0, min=-0.5>(a)", 'Pad<mode="constant", pads=[0, 0, 1, 1], value=2.0>(a)']
)
def test_numbers_that_were_attributes_have_the_type_of_the_data(version: int, node: str) -> None:
    """A ReLU6 of float16, as converters to 16 bits leave it in old models."""
    made = onnx.parser.parse_model(
        f'<ir_version: 4, opset_import: ["" : {version}]> '
        f"g (float16[2, 4] x) => (float16[m, n] y) {{ a = Neg(x)  y = {node} }}"
    )
    x = np.linspace(-8, 8, 8, dtype=np.float16).reshape(2, 4)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    (found,) = irpar.partition(to_module(made), {"x": 1}).run({"x": x}).values()
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, expected)
