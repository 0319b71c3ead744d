"""The engine over ONNX Runtime: weights, dtypes, functions, refusals."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

import irpar
from irpar import models
from irpar.ir import ArrayTensor, DType, ExternalTensor, Module
from irpar.onnx_io import load, to_module
from irpar.runtime.engines import ort as ort_engine
from irpar.runtime.engines import ort_versions
from irpar.runtime.engines.base import Constants
from irpar.runtime.engines.ort import _Weights, segment_model
from irpar.runtime.engines.ort_optimizers import unwanted_optimizers
from irpar.runtime.engines.ort_versions import ALWAYS_LOADED, newest_opset
from irpar.runtime.errors import EngineError
from irpar.runtime.executor import Executor
from irpar.runtime.program import build_program
from irpar.sharding import Mesh
from irpar.verification.inputs import random_inputs
from tests.runtime.programs import module
from tests.written import model_of_text

ONE = Mesh({"x": 1})

WEIGHTS = """
    mesh @m = ["tp"=2]
    graph local @g(%i: i64[3] of [3]) -> (%y, %t) opset 21 ranks [0, 1] {
      %rows = constant : f32[32, 64] of [64@tp, 64] whole data("#rows", 0, 16384)
      %columns = constant : f32[64, 32] of [64, 64@tp] whole data("#columns", 0, 16384)
      %whole = constant : f32[64, 64] of [64, 64] data("#whole", 0, 16384)
      %folded = Neg(%whole) : f32[64, 64] of [64, 64]
      %r = Gather(%rows, %i) {axis=0} : f32[3, 64] of [6@tp, 64]
      %s = Add(%folded, %whole) : f32[64, 64] of [64, 64]
      %u = MatMul(%r, %columns) : f32[3, 32] of [6@tp, 64]
      %y = MatMul(%u, %k) : f32[3, 1] of [6@tp, 1]
      %t = ReduceSum(%s) {keepdims=0} : f32[] of []
    }
"""


def weights_program(tensors: dict[str, ArrayTensor | ExternalTensor]) -> Module:
    """Weights that are sharded by rows, by columns and not at all; one that constant folding reads."""
    text = WEIGHTS.replace(
        "      %folded", '      %k = constant : f32[32, 1] of [32, 1] data("#k", 0, 128)\n      %folded'
    )
    arrays = {name: np.zeros(tensor.shape, np.float32) for name, tensor in tensors.items()}
    loaded = module(text, **arrays)
    for value in loaded.graph.constants:
        value.data = tensors[value.name]
    return loaded


def weight_arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    shapes = {"rows": (64, 64), "columns": (64, 64), "whole": (64, 64), "k": (32, 1)}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def in_file(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, ExternalTensor]:
    """The arrays in one data file, after 64 bytes of something else."""
    found, offset = {}, 64
    with open(path, "wb") as file:
        file.write(b"\1" * offset)
        for name, array in arrays.items():
            found[name] = ExternalTensor(DType.F32, array.shape, path, path.name, offset, array.nbytes)
            file.write(array.tobytes())
            offset += array.nbytes
    return found


def check_weights(loaded: Module, arrays: dict[str, np.ndarray]) -> None:
    i = np.array([0, 5, 31])
    with Executor(loaded, loaded.mesh, engine="ort") as executor:
        outputs = executor.run({"i": i})
    halves = [
        arrays["rows"][32 * rank :][:32][i] @ arrays["columns"][:, 32 * rank :][:, :32] @ arrays["k"] for rank in (0, 1)
    ]
    np.testing.assert_allclose(outputs["y"], np.concatenate(halves), rtol=1e-4, atol=1e-4)
    assert outputs["t"] == 0


def test_weights_in_memory() -> None:
    arrays = weight_arrays()
    check_weights(weights_program({name: ArrayTensor(array) for name, array in arrays.items()}), arrays)


def test_weights_in_a_file(tmp_path: Path) -> None:
    arrays = weight_arrays()
    check_weights(weights_program(in_file(tmp_path / "w.bin", arrays)), arrays)


def test_weights_in_two_folders_and_in_a_linked_file(tmp_path: Path) -> None:
    arrays = weight_arrays()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tensors = in_file(tmp_path / "a" / "w.bin", arrays)
    tensors["whole"] = in_file(tmp_path / "b" / "w.bin", {"whole": arrays["whole"]})["whole"]
    os.link(tmp_path / "a" / "w.bin", tmp_path / "a" / "second_name.bin")
    check_weights(weights_program(tensors), arrays)


def test_whole_rows_are_mapped_from_the_file_and_columns_are_not(tmp_path: Path) -> None:
    loaded = weights_program(in_file(tmp_path / "w.bin", weight_arrays()))
    with Executor(loaded, loaded.mesh, engine="numpy") as executor:
        part = executor.parts[1]
    (segment,) = build_program(loaded.graph).segments
    model = segment_model(segment, loaded.opsets, _Weights(Constants(part)))
    entries = {
        tensor.name.removesuffix("/segment"): {entry.key: entry.value for entry in tensor.external_data}
        for tensor in model.graph.initializer
    }
    assert entries["rows"] == {"location": "w.bin", "offset": str(64 + 32 * 64 * 4), "length": "8192"}
    assert entries["columns"]["location"] == "in-memory"
    assert entries["whole"]["offset"] == str(64 + 2 * 64 * 64 * 4)
    assert entries["k"] == {}


@pytest.mark.parametrize("engine", ["ort", "numpy"])
@pytest.mark.parametrize("family", ["mlp", "gpt", "llama"])
def test_models_like_onnxruntime(family: str, engine: str) -> None:
    model = models.build(family)
    loaded = to_module(model)
    with Executor(loaded, ONE, engine=engine) as executor:
        inputs = random_inputs(executor.inputs, loaded.graph)
        outputs = executor.run(inputs)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for result, expected in zip(outputs.values(), session.run(list(outputs), inputs), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_external_model(tmp_path: Path) -> None:
    models.save(tmp_path / "gpt.onnx", "gpt", weights="external")
    loaded = load(tmp_path / "gpt.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "gpt.onnx"), providers=["CPUExecutionProvider"])
    with Executor(loaded, ONE) as executor:
        inputs = random_inputs(executor.inputs, loaded.graph)
        (result,) = executor.run(inputs).values()
    np.testing.assert_allclose(result, session.run(None, inputs)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f8e4m3fn", ml_dtypes.float8_e4m3fn), ("f16", np.float16)]
)
def test_dtypes_that_numpy_lacks_pass_between_segments(name: str, dtype: type) -> None:
    loaded = module(f"""
        mesh @m = ["x"=2]
        graph local @g(%a: {name}[2] of [4@x]) -> (%y, %z) opset 21 ranks [0, 1] {{
          %b = Cast(%a) {{to=1}} : f32[2] of [4@x]
          %c = Mul(%b, %b) : f32[2] of [4@x]
          %d = Cast(%c) {{to={DType[name.upper()].value}}} : {name}[2] of [4@x]
          %y = irpar.AllGather(%d) {{axes=["x"], dim=0, id=0}} : {name}[4] of [4]
          %z = Cast(%y) {{to=1}} : f32[4] of [4]
        }}
    """)
    a = np.array([1, 2, 3, 4], dtype)
    with Executor(loaded, loaded.mesh) as executor:
        outputs = executor.run({"a": a})
    assert outputs["y"].dtype == dtype
    assert outputs["y"].astype(np.float32).tolist() == [1, 4, 9, 16]
    assert outputs["z"].tolist() == [1, 4, 9, 16]


def test_an_op_without_a_kernel_is_named() -> None:
    loaded = module("""
        graph @g(%a: bf16[2, 2]) -> (%y) opset 21 {
          %y = MatMul(%a, %a) : bf16[2, 2] from "/fc/MatMul"
        }
    """)
    with pytest.raises(EngineError) as caught:
        Executor(loaded, ONE)
    text = str(caught.value)
    assert "ONNX Runtime has no CPU kernel for MatMul" in text
    assert "bf16[2, 2]" in text
    assert "/fc/MatMul" in text
    assert 'engine="numpy"' in text
    a = np.array([[1, 2], [3, 4]], ml_dtypes.bfloat16)
    with Executor(loaded, ONE, engine="numpy") as executor:
        assert executor.run({"a": a})["y"].astype(np.float32).tolist() == [[7, 10], [15, 22]]


def test_an_op_that_is_a_function_without_a_kernel_is_named() -> None:
    """What ONNX Runtime makes of it has no name."""
    loaded = module("""
        graph @g(%a: f64[4]) -> (%y) opset 21 {
          %y = Gelu(%a) : f64[4]
        }
    """)
    with pytest.raises(EngineError, match="has no CPU kernel for Erf") as caught:
        Executor(loaded, ONE)
    assert "Gelu of %y" in str(caught.value)


def test_an_operator_of_a_strange_domain_is_refused() -> None:
    loaded = module("""
        graph @g(%a: f32[2]) -> (%y) opset 21, "my.ops" 1 {
          %y = "my.ops"."Twice"(%a) : f32[2] from "/twice"
        }
    """)
    for engine in ("ort", "numpy"):
        with pytest.raises(EngineError, match=r"no engine can run my\.ops\.Twice"):
            Executor(loaded, ONE, engine=engine)


FUNCTION = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21, "local" : 1]>
    agraph (float[4] x, bool c) => (float[4] y) {
        y = If (c) <
            then_branch = t () => (float[4] a) { a = local.scale <by = 3.0> (x) },
            else_branch = e () => (float[4] b) { b = local.twice (x) }
        >
    }
    <domain: "local", opset_import: ["" : 21]>
    scale <by: float = 2.0> (x) => (y) {
        k = Constant <value_float: float = @by> ()
        y = Mul (x, k)
    }
    <domain: "local", opset_import: ["" : 21, "local" : 1]>
    twice (x) => (y) { y = local.scale (x) }
""")


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_functions_with_attributes_inside_bodies(engine: str) -> None:
    loaded = to_module(FUNCTION)
    x = np.arange(4, dtype=np.float32)
    with Executor(loaded, ONE, engine=engine) as executor:
        np.testing.assert_array_equal(executor.run({"x": x, "c": np.array(True)})["y"], 3 * x)
        np.testing.assert_array_equal(executor.run({"x": x, "c": np.array(False)})["y"], 2 * x)


def test_weights_that_were_cut_short(tmp_path: Path) -> None:
    tensors = in_file(tmp_path / "w.bin", weight_arrays())
    with open(tmp_path / "w.bin", "r+b") as file:
        file.truncate(1000)
    loaded = weights_program(tensors)
    with pytest.raises(Exception, match="external data ends at byte 1000"):
        Executor(loaded, loaded.mesh)


def test_a_required_result_that_nothing_reads_has_a_name() -> None:
    program = module("""
        graph @g(%x: f32[8]) -> (%y) opset 21 {
          %k = constant : i64[1] [2]
          %y, %i = TopK(%x, %k) : f32[2], i64[2]
        }
    """)
    with Executor(program, ONE, engine="ort") as executor:
        np.testing.assert_array_equal(executor.run({"x": np.arange(8, dtype=np.float32)})["y"], [7, 6])


def test_a_zero_point_that_is_left_out_by_an_empty_name() -> None:
    program = module("""
        graph @g(%x: i8[1, 2, 2], %s: f32[]) -> (%d, %y) opset 21 {
          %d = DequantizeLinear(%x, %s, _) : f32[1, 2, 2]
          %y = Transpose(%d) {perm=[0, 2, 1]} : f32[1, 2, 2]
        }
    """)
    with Executor(program, ONE, engine="ort") as executor:
        found = executor.run({"x": np.arange(4, dtype=np.int8).reshape(1, 2, 2), "s": np.float32(0.5)})["y"]
    np.testing.assert_array_equal(found, [[[0, 1], [0.5, 1.5]]])


def _of_opset_28(operator: str) -> Module:
    return module(f"""
        graph @g(%x: f32[8]) -> (%y) opset 28 {{
          %a = Relu(%x) : f32[8]
          %y = {operator}(%a) : f32[8]
        }}
    """)


@pytest.mark.parametrize("newest", sorted({26, min(27, newest_opset()), newest_opset()}))
def test_an_operator_set_that_onnx_runtime_does_not_know_yet(newest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in one that it loads runs; what is new in 28 runs where it knows 28, and is left to it otherwise."""
    monkeypatch.setattr(ort_engine, "newest_opset", lambda: newest)
    x = np.arange(-4, 4, dtype=np.float32)
    with Executor(_of_opset_28("Neg"), ONE, engine="ort") as executor:
        np.testing.assert_array_equal(executor.run({"x": x})["y"], -np.maximum(x, 0))
    if newest_opset() >= 28:
        with Executor(_of_opset_28("Celu"), ONE, engine="ort") as executor:
            np.testing.assert_array_equal(executor.run({"x": x})["y"], np.maximum(x, 0))
    else:
        with pytest.raises(EngineError, match=r"(?s)support for domain ai.onnx is till opset.*numpy"):
            Executor(_of_opset_28("Celu"), ONE, engine="ort").run({"x": x})


def test_an_operator_set_that_onnx_runtime_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_versions, "_loads", lambda opset: opset <= 27)
    newest_opset.cache_clear()
    try:
        assert newest_opset() == 27
    finally:
        newest_opset.cache_clear()
    monkeypatch.undo()
    assert ort_versions._loads(ALWAYS_LOADED)
    assert not ort_versions._loads(1000)


def test_an_attention_may_make_a_cache_that_nothing_reads() -> None:
    text = """
        mesh @m = ["x"=1]
        graph local @g(%q: f32[1, 2, 3, 4], %k: f32[1, 2, 5, 4]) -> (%y) opset 23 ranks [0] {
          %y, %m, %v = Attention(%q, %k, %k, _, %k, %k) : f32[1, 2, 3, 4], f32[1, 2, 10, 4], f32[1, 2, 10, 4]
        }
    """
    given = {"q": np.ones((1, 2, 3, 4), np.float32), "k": np.ones((1, 2, 5, 4), np.float32)}
    loaded = module(text)
    with Executor(loaded, ONE, engine="ort") as executor:
        np.testing.assert_allclose(executor.run(given)["y"], given["q"], rtol=1e-6)


@pytest.mark.parametrize("half", [False, True])
def test_running_statistics_of_a_batch_are_not_written_over_those_before(half: bool) -> None:
    """On two ranks that share a session, twice, from constants and from arrays of the caller."""
    text = """
        mesh @m = ["x"=2]
        graph local @g(%x: f32[3, 2, 4], %mean: f32[2]) -> (%y, %m, %v) opset 21 ranks [0, 1] {
          %s = constant : f32[2] [1.0, 2.0]
          %var = constant : f32[2] [1.0, 3.0]
          %y, %m, %v = BatchNormalization(%x, %s, %s, %mean, %var) {momentum=0.5, training_mode=1} : f32[3, 2, 4], f32[2], f32[2]
        }
    """  # fmt: skip
    if half:
        text = (
            text.replace("%x: f32", "%x: f16")
            .replace(": f32[3", ": f16[3")
            .replace("f32[2] [1.0, 2.0]", "f16[2] [1.0, 2.0]")
        )
    program = module(text)
    dtype = np.float16 if half else np.float32
    x, mean = np.arange(24, dtype=dtype).reshape(3, 2, 4), np.array([1, -1], np.float32)
    with Executor(program, program.mesh, engine="ort") as executor:
        runs = [executor.run({"x": x, "mean": mean}, check_replicas=True) for _ in range(2)]
    wide = x.astype(np.float32)
    for found in runs:
        np.testing.assert_allclose(found["m"], (mean + wide.mean(axis=(0, 2))) / 2, rtol=1e-6)
        np.testing.assert_allclose(found["v"], (np.array([1, 3]) + wide.var(axis=(0, 2))) / 2, rtol=1e-6)
    np.testing.assert_array_equal(mean, [1, -1])


@pytest.mark.parametrize("mark", [' meta {"irpar.recompute": "again"}', ""])
def test_what_is_computed_again_in_a_body_stays_apart(mark: str) -> None:
    looped = module(f"""
    mesh @m = ["x"=1]
    graph local @g(%s: f32[4], %x: f32[2, 4]) -> (%y) opset 21 ranks [0] {{
      %y = Scan(%s, %x) {{body=graph @body(%t: f32[4], %i: f32[4]) -> (%u) {{
        %a = Exp(%i) : f32[4]
        %b = Exp(%i) : f32[4]{mark}
        %c = Mul(%a, %b) : f32[4]
        %u = Add(%t, %c) : f32[4]
      }}, num_scan_inputs=1}} : f32[4]
    }}
    """)
    (segment,) = build_program(looped.graph).segments
    walked = [inner for node in segment.nodes for inner in ort_engine._walk(node)]
    assert ("CommonSubexpressionElimination" in unwanted_optimizers(walked)) == bool(mark)


def test_constants_of_a_model_that_was_optimized_before_are_named_apart(tmp_path: Path) -> None:
    """Those that ONNX Runtime made of it have the names of those that it makes of a segment."""
    text = """g (float[2,8,16] x, float[16,48] w, float[48] b) => (float[2,8,16] y) {
      p = MatMul(x, w)  a = Add(p, b)  q, k, v = Split<axis = 2, num_outputs = 3>(a)  s = Mul(q, k)  y = Add(s, v) }"""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(model_of_text(text, ["w", "b"]).SerializeToString(), options)
    module = irpar.load(tmp_path / "optimized.onnx")
    module.shard("gemm_output_reshape_arg", [None, None])
    irpar.partition(module, {"a": 2}).verify(engine="ort").check()
