"""Local programs: operators on blocks of what their rules need whole give what they give on whole tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import irpar
from irpar.ir.text import parse_module
from irpar.ops import definition, definitions, factor_rule, spread_factors

MESHES = ({"p": 2}, {"p": 3}, {"p": 4}, {"p": 2, "q": 2})
OPERATORS = sorted(found.name for found in definitions() if found.spread is not None)
OPSETS = {"RMSNormalization": 23, "CumProd": 26}


@st.composite
def nodes(draw: st.DrawFn, name: str) -> tuple[onnx.NodeProto, dict[str, np.ndarray], int]:
    """A node, its operands, and a dim of the first of them along which it works."""
    rank = draw(st.integers(3, 4)) if name == "InstanceNormalization" else draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(rank)]
    axis = draw(st.integers(0, rank - 1))
    attributes: dict[str, Any] = {}
    others: dict[str, np.ndarray] = {}
    results = ["y"]
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def normals(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes).astype(np.float32)

    size = shape[axis] = draw(st.integers(24, 50))
    match name:
        case "LayerNormalization" | "RMSNormalization":
            first = draw(st.integers(0, axis))
            attributes = {"axis": first, "epsilon": 1e-3}
            others = {"scale": normals(*shape[first:])}
            if name == "LayerNormalization":
                if draw(st.booleans()):
                    others["shift"] = normals(*shape[first:])
                results += ["mean", "inverse"] if draw(st.booleans()) else []
        case "InstanceNormalization":
            shape[axis], axis = 2, draw(st.integers(2, rank - 1))
            shape[axis] = size
            others = {"scale": normals(shape[1]), "shift": normals(shape[1])}
        case "MeanVarianceNormalization":
            attributes = {"axes": sorted({axis, draw(st.integers(0, rank - 1))})}
        case "ReduceL2" | "ReduceLogSum" | "ReduceLogSumExp":
            attributes = {"keepdims": draw(st.integers(0, 1))}
            others = {"axes": np.array(sorted({axis, draw(st.integers(0, rank - 1))}))}
        case "LpNormalization":
            attributes = {"axis": axis, "p": draw(st.integers(1, 2))}
        case "ArgMax" | "ArgMin":
            attributes = {
                "axis": axis,
                "keepdims": draw(st.integers(0, 1)),
                "select_last_index": draw(st.integers(0, 1)),
            }
        case "TopK":
            attributes = {"axis": axis, "largest": draw(st.integers(0, 1))}
            others = {"k": np.array([draw(st.integers(1, size))])}
            results = ["y", "places"]
        case "CumSum" | "CumProd":
            attributes = {"exclusive": draw(st.integers(0, 1)), "reverse": draw(st.integers(0, 1))}
            others = {"axis": np.array(axis)}
        case _:
            attributes = {"axis": axis}
    data = normals(*shape)
    if name in ("ArgMax", "ArgMin", "TopK", "Hardmax"):
        data = np.round(data * 2)  # with equal elements
    if name == "ReduceLogSum":
        data = np.abs(data)
    if name == "CumProd":
        data = np.clip(np.abs(data), 0.7, 1.3).astype(np.float32)
    node = helper.make_node(name, ["x", *others], results, **attributes)
    return node, {"x": data, **others}, axis


def partitioned(
    node: onnx.NodeProto, operands: dict[str, np.ndarray], axis: int, mesh: dict[str, int], folder: Path
) -> irpar.Partition:
    """The partition of a model of the node alone, whose first operand is cut along a dim by all axes."""
    opset = OPSETS.get(node.op_type, 21)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, operands["x"].shape)]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in operands.items() if name != "x"]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = helper.make_graph([node], "g", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.save(onnx.shape_inference.infer_shapes(model), folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    module.shard("x", [list(mesh) if dim == axis else None for dim in range(operands["x"].ndim)])
    return irpar.partition(module, irpar.Mesh(mesh))


def spread_out(
    node: onnx.NodeProto, operands: dict[str, np.ndarray], axis: int, mesh: dict[str, int], folder: Path
) -> irpar.Partition:
    """The same by the local program, whatever it costs: a TopK of many may be cheaper whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("irpar.analysis.placement.program_cost", lambda *_: (0, 0))
        return partitioned(node, operands, axis, mesh, folder)


def check(partition: irpar.Partition, data: np.ndarray, folder: Path) -> None:
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_outputs()]
    expected = dict(zip(names, session.run(names, {"x": data}), strict=True))
    for engine in ("ort", "numpy"):
        got = partition.run({"x": data}, engine=engine)
        for name, whole in expected.items():
            np.testing.assert_allclose(got[name], whole, rtol=2e-4, atol=2e-5, err_msg=f"{name} by {engine}")
        assert partition.executor(engine).log.differences(partition.plan.collectives) == []


CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
@given(data=st.data())
def test_blocks_of_what_is_needed_whole(name: str, data: st.DataObject, tmp_path: Path) -> None:
    node, operands, axis = data.draw(nodes(name))
    mesh = data.draw(st.sampled_from(MESHES))
    partition = spread_out(node, operands, axis, mesh, tmp_path)
    check(partition, operands["x"], tmp_path)
    assert all("works along" in entry["reason"] for entry in partition.plan.collectives), "it was made whole"


@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
@given(data=st.data())
def test_what_is_priced_is_what_is_sent(name: str, data: st.DataObject, tmp_path: Path) -> None:
    node, operands, axis = data.draw(nodes(name))
    mesh = data.draw(st.sampled_from(MESHES))
    partition = spread_out(node, operands, axis, mesh, tmp_path)
    whole = irpar.load(tmp_path / "model.onnx").graph.first
    assert whole is not None
    found = definition(whole)
    assert found is not None
    assert found.spread is not None
    parts = int(np.prod(list(mesh.values())))
    blocks = [
        tuple(-(-size // parts) if dim == axis and index == 0 else size for dim, size in enumerate(value.shape))
        for index, value in enumerate(whole.inputs)
    ]
    priced = [(sent.kind, sent.bytes) for sent in found.spread.sends(whole, blocks, parts)]
    assert priced == [(entry["kind"], entry["bytes"]) for entry in partition.plan.collectives]


def test_the_cheaper_of_both_is_taken(tmp_path: Path) -> None:
    """Where the statistics are no smaller than the data, the data is gathered."""
    node = helper.make_node("Softmax", ["x"], ["y"], axis=1)
    data = np.random.default_rng(0).standard_normal((6, 2)).astype(np.float32)
    partition = partitioned(node, {"x": data}, 1, {"p": 2}, tmp_path)
    assert [entry["kind"] for entry in partition.plan.collectives] == ["all_gather"]
    check(partition, data, tmp_path)


@pytest.mark.parametrize(
    ("text", "spread"),
    [
        ("%y = Softmax(%x) : i64[4, 8]", 0),
        ("%y = Softmax(%x) {axis=0} : f32[4, 8]", 1),
        ("%y = MatMul(%x, %x) : f32[4, 8]", 0),
    ],
)
def test_which_factors_may_be_cut(text: str, spread: int) -> None:
    dtype = "i64" if "i64" in text else "f32"
    shape = "[8, 8]" if "MatMul" in text else "[4, 8]"
    text = text.replace("[4, 8]", shape)
    graph = parse_module(f"graph @g(%x: {dtype}{shape}) -> (%y) opset 21 {{\n  {text}\n}}").graph
    assert graph.first is not None
    rule = factor_rule(graph.first)
    assert rule is not None
    assert len(spread_factors(graph.first, rule)) == spread
