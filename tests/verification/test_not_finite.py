"""Results that are infinite or NaN on one side alone, and outputs that are so altogether."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

import irpar
from irpar.verification import Original, bisect, verify
from irpar.verification.not_finite import explained
from tests.written import model_of_text


def partitioned(folder: Path, text: str) -> irpar.Partition:
    onnx.save(model_of_text(text, (), {}, 17), folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    irpar.annotate(module, {"x": [None, ["p"]]})
    return irpar.partition(module, "p=4")


def test_nans_that_onnx_runtime_passes_over_are_told(tmp_path: Path) -> None:
    made = partitioned(tmp_path, "g (float[2,64] x) => (float[2,1] y) { s = Sqrt(x)  y = ReduceMax<axes=[1]>(s) }")
    x = np.ones((2, 64), np.float32)
    assert made.verify(inputs={"x": x}).result == "equal"
    x[0, 16] = -1  # The first of its block, not of its row.
    verified = made.verify(inputs={"x": x})
    assert verified.result == "equal, but"
    assert verified.but[0].startswith("y: 1 element of float64 is NaN where ONNX Runtime has a number")


def test_an_output_of_infinities_tells_nothing(tmp_path: Path) -> None:
    made = partitioned(tmp_path, "g (float[2,64] x) => (float[2,64] y) { n = Sub(x, x)  y = Reciprocal(n) }")
    assert made.verify().but == ("y: it is all infinite on these inputs, which tells nothing of it",)


def reasons(got: float, expected: float, truth: float, sums: float | None = None) -> list[str]:
    one, other = (np.array([number, 1.0], np.float16) for number in (got, expected))
    return explained(one, [other], np.array([truth, 1.0]), None if sums is None else np.array([sums, 1.0]))[3]


def test_what_is_beyond_the_range_may_be_infinite() -> None:
    told = ["1 element passes the range of f16 in some orders of summation"]
    assert reasons(np.inf, np.nan, 7e4) == told
    assert reasons(np.inf, 65504, 7e4) == told
    assert reasons(5e3, np.inf, 5e3) == told


def test_what_passes_the_range_on_the_way_may_be_infinite() -> None:
    told = ["1 element passes the range of f16 in some orders of summation"]
    assert reasons(np.inf, 5e3, 5e3, 1.4e5) == told
    assert reasons(np.nan, 5e3, 5e3, 1.4e5) == told
    assert reasons(np.inf, 5e3, 5e3, 1.2e5) == []


def test_other_infinities_and_nans_are_wrong() -> None:
    assert reasons(np.inf, 5e3, 5e3) == []
    assert reasons(np.nan, 5e3, 5e3) == []
    assert reasons(-np.inf, np.inf, 7e4) == []
    assert reasons(1.0, np.nan, np.nan) == []
    assert reasons(np.nan, np.inf, np.inf) == []


def test_numbers_beside_an_overflow_of_the_original_are_judged_by_float64() -> None:
    one, other = np.array([2.0, 1.0], np.float16), np.array([np.inf, 1.0], np.float16)
    got, (first, *_), truth, _ = explained(one, [other], np.array([5e3, 1.0]))
    assert (got[0], first[0], truth[0]) == (2.0, 5000.0, 5e3)


HALVES = "g (float16[2,4] x, float16[4,1] w) => (float16[2,1] y) { h = MatMul(x, w)  y = Neg(h) }"
CANCELLING = np.array([60000, 5000, -40000, -40000], np.float16)
"""Of these halves the second passes the range; all of them, in order, do not."""


def halves(folder: Path, numbers: "np.ndarray[Any, Any]") -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {HALVES}')
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(numbers.reshape(4, 1), "w"))
    onnx.save(model, folder / "model.onnx")
    return model


def test_a_sum_that_passes_the_range_in_the_partitions_order_alone(tmp_path: Path) -> None:
    inputs = {"x": np.ones((2, 4), np.float16)}
    for numbers, result in ((CANCELLING, "equal, but"), (CANCELLING / 2, "equal")):
        halves(tmp_path, numbers)
        module = irpar.load(tmp_path / "model.onnx")
        module.shard("w", ["p", None])
        made = irpar.partition(module, "p=2")
        assert made.verify(inputs).result == result
        assert made.bisect(inputs).first is None
        assert np.isfinite(made.run(inputs)["y"]).all() == (result == "equal")


def test_an_infinity_that_no_order_gives_is_told(tmp_path: Path) -> None:
    """A partition of another model, whose weights are too large, beside the original."""
    original = Original.of_module(irpar.onnx_io.to_module(halves(tmp_path, CANCELLING / 2)))
    halves(tmp_path, np.abs(CANCELLING))
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("w", ["p", None])
    executor = irpar.partition(module, "p=2").executor()
    inputs = {"x": np.ones((2, 4), np.float16)}
    assert verify(executor, original, inputs, tolerance=None, seed=0).result == "different"
    assert bisect(executor, original, inputs, tolerance=None, seed=0).first is not None
