"""What rounding explains, and what it does not: partitions beside the original in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

import irpar
from irpar.runtime.errors import NodeError
from irpar.runtime.executor import Executor
from irpar.verification import Original, Verification
from irpar.verification.arithmetic import Nodes, run_float64
from irpar.verification.comparison import units
from irpar.verification.yardstick import FACTOR, MOST_NOISE, Yardstick, _Measure
from tests.written import model_of_text

_RANDOM = np.random.default_rng(0)


def original(text: str, weights: tuple[str, ...] = (), opset: int = 21, **integers: Any) -> Original:
    model = model_of_text(text, weights, integers, opset)
    return Original.of_module(irpar.onnx_io.to_module(model))


def partitioned(folder: Path, model: onnx.ModelProto, cuts: dict[str, Any], mesh: str = "tp=2") -> irpar.Partition:
    onnx.save(model, folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    irpar.annotate(module, cuts)
    return irpar.partition(module, mesh)


def judged(model: Original, inputs: dict[str, Any], change: Any) -> tuple[bool, str, tuple[str, ...]]:
    """Whether a changed result passes, by what it was measured, and what cannot be told of it."""
    expected = model.run(inputs)
    got = {name: change(array.copy()) for name, array in expected.items()}
    found = Yardstick(model, inputs).judge(got, expected)
    (difference,) = found.differences.values()
    return difference.is_equal, difference.measure, found.doubts


DENSE = "g (float[4,512] x, float[512,8] w) => (float[4,8] y) { y = MatMul(x, w) }"


def test_the_bound_is_four_errors_of_the_original_and_8_units() -> None:
    model = original(DENSE, ("w",))
    inputs = {"x": _RANDOM.standard_normal((4, 512)).astype(np.float32)}
    expected = model.run(inputs)["y"]
    truth = run_float64(Nodes(model.module), inputs, ["y"])[0]["y"]
    assert truth.dtype == np.float64
    own = np.abs(expected - truth).max()
    assert 0 < own < units(expected)
    for factor, is_right in ((0.5, True), (40, False)):
        bound = FACTOR * own + units(expected)
        found = judged(model, inputs, lambda y, factor=factor, bound=bound: y + np.float32(factor * bound))
        assert found[:2] == (is_right, "rounding" if factor * bound <= units(expected) else "float64")


SMALL_FAULTS = {
    # All of these are below 1e-4 of 1 + |b|.
    "a sum that one of 10,000 terms is missing of": (DENSE, lambda y: y * np.float32(1 + 5e-5)),
    "probabilities of many classes": (
        "g (float[2,4096] x) => (float[2,4096] y) { y = Softmax(x) }",
        lambda y: np.roll(y, 1, axis=0),
    ),
    "another epsilon": (
        "g (float[4,512] x, float[512] w) => (float[4,512] y) { y = LayerNormalization<epsilon=1e-5>(x, w) }",
        lambda y: y * np.float32(1 - 5e-6),
    ),
}


@pytest.mark.parametrize("name", SMALL_FAULTS)
def test_small_faults_are_told(name: str) -> None:
    text, change = SMALL_FAULTS[name]
    model = original(text, ("w",) if " w)" in text else ())
    shape = next(iter(model.module.graph.inputs)).tensor_type.static_shape
    inputs = {"x": _RANDOM.standard_normal(shape).astype(np.float32)}
    assert judged(model, inputs, change)[0] is False


# The variance of numbers far from zero, computed from two large sums; its float32 result is off by some percent.
CANCELLING = """g (float[4,256] x, float[256,256] w) => (float[4] y) {
  h0 = MatMul(x, w)  h = Add(h0, far)  q = Mul(h, h)  s = ReduceMean<keepdims=0>(q, last)
  m = ReduceMean<keepdims=0>(h, last)  n = Mul(m, m)  y = Sub(s, n) }"""


def cancelling(far: float) -> onnx.ModelProto:
    model = model_of_text(CANCELLING, ("w",), {"last": [1]}, 21)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(far).reshape(1), "far"))
    return model


@pytest.mark.parametrize(("far", "result"), [(100.0, "equal"), (600.0, "equal, but"), (3000.0, "equal, but")])
def test_large_cancellations_raise_no_false_alarm(tmp_path: Path, far: float, result: str) -> None:
    made = partitioned(tmp_path, cancelling(far), {"w": [None, ["tp"]]})
    for seed in range(4):
        verified = made.verify(seed=seed)
        assert verified.result == result
        assert verified.differences[0].relative > 1e-4, "the model does not cancel"
    assert made.bisect().first is None


@pytest.mark.parametrize(("own", "told"), [(0.02, False), (0.03, True), (0.09, True), (0.2, True)])
def test_a_bound_that_allows_much_is_a_doubt(own: float, told: bool) -> None:
    # The original may be off by less than a tenth where four times as much is more.
    truth = np.ones(100)
    found = _Measure("y", True)
    wrong = (truth * (1 + 2 * own)).astype(np.float32)
    assert found.of("y", wrong, [(truth * (1 + own)).astype(np.float32), truth.astype(np.float32)], truth).is_equal
    assert bool(found.doubts) is told is (FACTOR * own > MOST_NOISE)
    integers = np.zeros(100, np.int64)
    found = _Measure("z", True)
    count = round(100 * own)
    original, wrong = (np.where(np.arange(100) < most, 1, integers) for most in (count, 2 * count))
    assert found.of("z", wrong, [original, integers], integers).is_equal
    assert bool(found.doubts) is told


def test_cancellations_do_not_hide_a_wrong_result() -> None:
    model = Original.of_module(irpar.onnx_io.to_module(cancelling(100.0)))
    inputs = {"x": _RANDOM.standard_normal((4, 256)).astype(np.float32)}
    assert judged(model, inputs, lambda y: y * np.float32(1.1))[0] is False


def test_behind_noise_the_tensors_before_it_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = partitioned(tmp_path, cancelling(3000.0), {"w": [None, ["tp"]]})
    executor = made.executor()
    plain = executor.run

    def wrong(inputs: Any, *, fetch: Any = (), check_replicas: bool = False) -> dict[str, Any]:
        # The product is wrong, which its noise hides in the result.
        return {name: a * np.float32(1.001) if name == "h0" else a for name, a in plain(inputs, fetch=fetch).items()}

    monkeypatch.setattr(executor, "run", wrong)
    verified = made.verify()
    assert verified.result == "different"
    assert "h0: differs, made by MatMul of %h0 inside the model" in str(verified)


# The logistic map doubles an error in each trip: after 60 of them float32 knows nothing.
CHAOTIC = """g (float[4,16] x, float[16,16] w) => (float[4,16] y) <int64 n = {60}, bool on = {1}, float r = {3.99},
     float one = {1}> {
  h = MatMul(x, w)  a = Sigmoid(h)
  y = Loop(n, on, a) <body = b (int64 i, bool c, float[4,16] s) => (bool d, float[4,16] z) {
    d = Identity(c)  m = Sub(one, s)  p = Mul(s, m)  z = Mul(r, p) }> }"""


def chaotic() -> onnx.ModelProto:
    return model_of_text(CHAOTIC, ("w",), {}, 21)


def test_chaos_is_told_and_is_no_false_alarm(tmp_path: Path) -> None:
    verified = partitioned(tmp_path, chaotic(), {"x": [None, ["tp"]], "w": [["tp"], None]}).verify()
    assert verified.result == "equal, but"
    assert "rounding may explain differences of" in verified.but[0]
    with pytest.raises(irpar.IrparError, match="not all was compared"):
        verified.check().check(strict=True)


def test_what_has_no_float64_kernel_is_told() -> None:
    text = """g (float[1,8,16] q, float[1,8,16] k, float[1,8,16] v) => (float[1,8,16] y) {
      y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v) }"""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> {text}')
    made = Original.of_module(irpar.onnx_io.to_module(model))
    inputs = {name: _RANDOM.standard_normal((1, 8, 16)).astype(np.float32) for name in "qkv"}
    expected = made.run(inputs)
    for factor, is_right in ((1 + 2e-6, True), (1 + 1e-3, False)):
        found = Yardstick(made, inputs).judge({"y": expected["y"] * np.float32(factor)}, expected)
        assert found.differences["y"].is_equal is is_right
    assert found.notes == (
        "irpar has no float64 kernel of com.microsoft.MultiHeadAttention: the yardstick has what ONNX Runtime gives",
    )


def test_ties_that_rounding_decides_excuse_only_as_many(tmp_path: Path) -> None:
    # The rows of w are equal but for one rounding: which of their products is the largest is chance.
    text = (
        "g (float[64,128] x, float[128,2] w) => (int64[64] y) { h = MatMul(x, w)  y = ArgMax<axis=1, keepdims=0>(h) }"
    )
    weights = np.repeat(_RANDOM.standard_normal((128, 1)), 2, axis=1).astype(np.float32)
    weights[:, 1] *= np.float32(1) + _RANDOM.integers(-1, 2, 128).astype(np.float32) * np.float32(2**-23)
    model = model_of_text(text, ("w",), {}, 21)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, "w"))
    made = Original.of_module(irpar.onnx_io.to_module(model))
    inputs = {"x": _RANDOM.standard_normal((64, 128)).astype(np.float32)}

    def flip(count: int) -> Any:
        return lambda y: np.where(np.arange(64) < count, 1 - y, y)

    assert judged(made, inputs, flip(1))[0] is True
    far = {"x": np.ones((64, 128), np.float32)}
    model.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(np.stack([np.zeros(128), np.ones(128)], 1).astype(np.float32), "w")
    )
    made = Original.of_module(irpar.onnx_io.to_module(model))
    assert judged(made, far, flip(1))[0] is False


def test_rounding_that_cannot_be_tried_inside_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = original(DENSE, ("w",))
    inputs = {"x": _RANDOM.standard_normal((4, 512)).astype(np.float32)}
    expected = model.run(inputs)
    tried = []

    def failing(error: Exception) -> Any:
        def run(nodes: Any, given: Any, names: Any, seed: int) -> Any:
            tried.append(seed)
            raise error

        return run

    refusal = NodeError("Frobnicate failed: no", where="node %y")
    monkeypatch.setattr("irpar.verification.yardstick.run_nudged", failing(refusal))
    found = Yardstick(model, inputs).judge({"y": expected["y"] * np.float32(1.01)}, expected)
    assert not found.differences["y"].is_equal
    (note,) = found.notes
    assert note.startswith("rounding cannot be tried inside the original: ")
    assert note.endswith("Frobnicate failed: no (node %y); its inputs alone are off by it")
    assert tried == [0]
    # What nobody expects is a fault of irpar's, and no answer.
    monkeypatch.setattr("irpar.verification.yardstick.run_nudged", failing(KeyError("y")))
    with pytest.raises(KeyError):
        Yardstick(model, inputs).judge({"y": expected["y"] * np.float32(1.01)}, expected)


HALF = "g (float16[4,512] x, float16[512,8] w) => (float16[4,8] y) { y = MatMul(x, w) }"


def test_smaller_floats_are_measured_by_their_own_units() -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {HALF}')
    made = Original.of_module(irpar.onnx_io.to_module(model))
    inputs = {
        "x": _RANDOM.standard_normal((4, 512)).astype(np.float16),
        "w": _RANDOM.standard_normal((512, 8)).astype(np.float16),
    }
    assert judged(made, inputs, lambda y: y * np.float16(1.002))[0] is True
    assert judged(made, inputs, lambda y: y * np.float16(1.05))[0] is False


def test_an_explicit_tolerance_decides_alone(tmp_path: Path) -> None:
    made = partitioned(tmp_path, cancelling(3000.0), {"w": [None, ["tp"]]})
    verified: Verification = made.verify(tolerance=1e-7)
    assert not verified
    assert verified.differences[0].measure == "tolerance"


def quantised_lstm(
    steps: int, batch: int, width: int, hidden: int, results: tuple[str, ...] = ("y",)
) -> onnx.ModelProto:
    """A model of one DynamicQuantizeLSTM both ways, which quantises the rows of a batch thread by thread."""
    draw = np.random.default_rng(0)
    constants = {
        "w": draw.integers(-60, 60, (2, width, 4 * hidden)).astype(np.int8),
        "r": draw.integers(-60, 60, (2, hidden, 4 * hidden)).astype(np.int8),
        "scale": np.full(2, 0.01, np.float32),
        "zero": np.zeros(2, np.int8),
    }
    operands = ["x", "w", "r", "", "", "", "", "", "scale", "zero", "scale", "zero"]
    node = helper.make_node(
        "DynamicQuantizeLSTM", operands, results, domain="com.microsoft", hidden_size=hidden, direction="bidirectional"
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, batch, width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [steps, 2, batch, hidden])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_number_of_threads_changes_is_no_fault(seed: int) -> None:
    """With one thread ONNX Runtime quantises all rows of the batch by one scale; with more, those of each by their own."""
    model = Original.of_module(irpar.onnx_io.to_module(quantised_lstm(12, 4, 16, 64)))
    inputs = {"x": np.random.default_rng(seed).standard_normal((12, 4, 16)).astype(np.float32)}
    inputs["x"][:, 1] *= 10
    expected = model.run(inputs)
    for threads in (1, 2):
        got = model.run(inputs, threads=threads)
        assert Yardstick(model, inputs).judge(got, expected).differences["y"].is_equal
    wrong = {"y": np.roll(expected["y"], 1, axis=0)}
    assert not Yardstick(model, inputs).judge(wrong, expected).differences["y"].is_equal


def test_nodes_that_threads_change_are_judged_alone(tmp_path: Path) -> None:
    """ONNX Runtime alone computes such a node, and does not give the result of it that nothing reads."""
    made = partitioned(tmp_path, quantised_lstm(12, 4, 16, 64, ("y", "last")), {"x": [None, ["dp"], None]}, "dp=2")
    inputs = {"x": np.random.default_rng(0).standard_normal((12, 4, 16)).astype(np.float32)}
    inputs["x"][:, 1] *= 10
    assert made.bisect(inputs).first is None
    assert made.verify(inputs).is_equal


def test_a_copy_that_is_wrong_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = partitioned(tmp_path, model_of_text(DENSE, ("w",), {}, 21), {"w": [None, ["tp"]], "y": [None, None]})
    assert made.verify().result == "equal"
    plain = Executor._computed

    def wrong(self: Executor, prepared: Any, state: Any, session: int) -> dict[str, Any]:
        # Rank 0, of which the result is taken, is right.
        return {name: block + (state.rank == 1) for name, block in plain(self, prepared, state, session).items()}

    monkeypatch.setattr(Executor, "_computed", wrong)
    verified = made.verify()
    assert verified.result == "different"
    assert "y should be equal on ranks 0 and 1, but" in str(verified)


def test_what_is_not_asked_for_is_not_computed() -> None:
    model = original("g (float[4,8] x) => (float[2] y) <int64[1] n = {2}> { h = Relu(x) y = Reshape(h, n) }")
    given = {"x": np.ones((4, 8), np.float32)}
    values, _ = run_float64(Nodes(model.module), given, ["h"])
    assert values["h"].dtype == np.float64
    with pytest.raises(irpar.IrparError, match="Reshape"):
        run_float64(Nodes(model.module), given, ["y"])


def test_badly_conditioned_inputs_are_told(tmp_path: Path) -> None:
    made = partitioned(tmp_path, cancelling(100.0), {"w": [None, ["tp"]]})
    (note,) = made.verify().notes
    assert "badly conditioned: rounding alone moves y (" in note
    assert note.endswith('real inputs may tell more, give them: inputs={"x": array}')
    (note,) = made.verify({"x": _RANDOM.standard_normal((4, 256)).astype(np.float32)}).notes
    assert "badly conditioned" in note
    assert "real inputs" not in note
    assert not partitioned(tmp_path, cancelling(0.5), {"w": [None, ["tp"]]}).verify().notes
