"""Dtypes that numpy lacks, in and out of ONNX Runtime; partitions of models that use them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from irpar import api
from irpar.ir import DType
from irpar.runtime.engines.ort_values import from_ort, to_ort

BF16 = ml_dtypes.bfloat16
KNOWN_TO_ORT = {
    *(getattr(TensorProto, name) for name in ("FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16", "BOOL", "INT4", "UINT4")),
    *(getattr(TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)),
    *(TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2FNUZ),
}
"""Dtypes that ONNX Runtime makes tensors of."""


@pytest.mark.parametrize("dtype", sorted(map(DType, KNOWN_TO_ORT), key=str), ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (), (1,)])
def test_arrays_come_back_as_they_were(dtype: DType, shape: tuple[int, ...]) -> None:
    low = -1 if dtype.is_float or dtype.text.startswith("i") else 0
    array = np.random.default_rng(0).integers(low, 2, shape).astype(dtype.numpy)
    found = from_ort(to_ort(array, dtype))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def saved(path: Path, nodes: list, inputs: dict, outputs: dict, constants: dict, opset: int = 21) -> Path:
    """A model; inputs and outputs are name to (dtype, shape)."""
    ends = [[helper.make_tensor_value_info(n, *spec) for n, spec in end.items()] for end in (inputs, outputs)]
    held = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(
        [helper.make_node(*node[:3], **(node[3:] or [{}])[0]) for node in nodes], "g", *ends, held
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


def partitioned(path: Path, **annotations: list) -> api.Partition:
    module = api.load(path)
    api.annotate(module, annotations)
    return api.partition(module, "tp=2")


def test_bf16_matmul_against_float32_on_rounded_inputs(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, w, v = (random.standard_normal(shape).astype(BF16) for shape in ((4, 64), (64, 64), (64, 64)))
    nodes = [("MatMul", ["x", "w"], ["h"]), ("Relu", ["h"], ["r"]), ("MatMul", ["r", "v"], ["y"])]
    kind = TensorProto.BFLOAT16
    path = saved(tmp_path / "m.onnx", nodes, {"x": (kind, [4, 64])}, {"y": (kind, [4, 64])}, {"w": w, "v": v})
    made = partitioned(path, w=[None, ["tp"]], v=[["tp"], None])
    assert made.plan.totals["collectives"] == 1
    hidden = np.maximum(x.astype(np.float32) @ w.astype(np.float32), 0).astype(BF16).astype(np.float32)
    expected = hidden @ v.astype(np.float32)
    got = made.run({"x": x}, engine="numpy")["y"]
    assert got.dtype == BF16
    # Each rank's sum and their sum are rounded: 8 bits of mantissa, of the larger of the two sums.
    error = np.abs(got.astype(np.float32) - expected)
    scale = np.abs(hidden) @ np.abs(v.astype(np.float32))
    assert (error <= scale * 2.0**-8).all()
    assert made.verify(engine="numpy").result == "equal"


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_bf16_inputs_and_outputs_are_verified(tmp_path: Path, engine: api.Engine) -> None:
    w = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    wide, narrow = TensorProto.FLOAT, TensorProto.BFLOAT16
    nodes = [
        ("Cast", ["x"], ["f"], {"to": wide}),
        ("MatMul", ["f", "w"], ["h"]),
        ("Cast", ["h"], ["y"], {"to": narrow}),
    ]
    path = saved(tmp_path / "m.onnx", nodes, {"x": (narrow, [4, 8])}, {"y": (narrow, [4, 6])}, {"w": w})
    made = partitioned(path, w=[["tp"], None])
    assert made.plan.totals["collectives"] == 1
    made.verify(engine=engine).check()
    assert made.bisect(engine=engine).first is None


@pytest.mark.parametrize("engine", ["ort", "numpy"])
@pytest.mark.parametrize("cut", [{"q": [None, ["tp"]]}, {"q": [["tp"], None]}, {"x": [None, ["tp"]]}], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(64, 64), (7, 5)])
def test_weights_of_4_bits(
    tmp_path: Path, engine: api.Engine, cut: dict[str, list], axis: int, shape: tuple[int, int]
) -> None:
    random = np.random.default_rng(0)
    q = random.integers(-8, 8, shape).astype(ml_dtypes.int4)
    s = random.random(shape[axis], np.float32) + 0.5
    nodes = [("DequantizeLinear", ["q", "s"], ["w"], {"axis": axis}), ("MatMul", ["x", "w"], ["y"])]
    kind, (rows, columns) = TensorProto.FLOAT, shape
    path = saved(tmp_path / "m.onnx", nodes, {"x": (kind, [4, rows])}, {"y": (kind, [4, columns])}, {"q": q, "s": s})
    partitioned(path, **cut).save(tmp_path / "out")
    made = api.Partition.open(tmp_path / "out")
    made.verify(engine=engine).check()
    x = random.standard_normal((4, rows), np.float32)
    exact = x.astype(np.float64) @ (q.astype(np.float64) * np.expand_dims(s, 1 - axis))
    # ONNX Runtime's own kernel for such products would round x to 8 bits.
    np.testing.assert_allclose(made.run({"x": x}, engine=engine)["y"], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_4_bits_in_and_out(tmp_path: Path, engine: api.Engine) -> None:
    s = np.full(1, 0.5, np.float32)
    nodes = [
        ("DequantizeLinear", ["q", "one"], ["f"]),
        ("MatMul", ["f", "w"], ["h"]),
        ("QuantizeLinear", ["h", "one"], ["y"], {"output_dtype": TensorProto.INT4}),
    ]
    kind = TensorProto.INT4
    w = np.eye(5, dtype=np.float32)
    constants = {"one": s.reshape(()), "w": w}
    path = saved(tmp_path / "m.onnx", nodes, {"q": (kind, [3, 5])}, {"y": (kind, [3, 5])}, constants)
    made = partitioned(path, q=[["tp"], None])
    q = np.random.default_rng(0).integers(-8, 8, (3, 5)).astype(ml_dtypes.int4)
    np.testing.assert_array_equal(made.run({"q": q}, engine=engine)["y"], q)
    made.verify(engine=engine).check()


@pytest.mark.parametrize("engine", ["ort", "numpy"])
@pytest.mark.parametrize("kind", [ml_dtypes.int2, ml_dtypes.uint2])
def test_weights_of_2_bits(tmp_path: Path, engine: api.Engine, kind: type) -> None:
    random = np.random.default_rng(0)
    q, s = random.integers(0, 2, (8, 6)).astype(kind), np.full((), 0.5, np.float32)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", [4, 8]), ("y", [4, 6]))
    ]
    nodes = [helper.make_node("DequantizeLinear", ["q", "s"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    element = TensorProto.INT2 if kind is ml_dtypes.int2 else TensorProto.UINT2
    held = helper.make_tensor("q", element, q.shape, q.astype(np.float32).ravel().tolist())
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [held, numpy_helper.from_array(s, "s")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13), tmp_path / "m.onnx")
    made = partitioned(tmp_path / "m.onnx", q=[None, ["tp"]])
    x = random.standard_normal((4, 8), np.float32)
    np.testing.assert_allclose(made.run({"x": x}, engine=engine)["y"], x @ (q.astype(np.float32) * s), rtol=1e-5)
    verified = made.verify(engine=engine)
    assert verified
    assert not verified.notes
