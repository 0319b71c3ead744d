"""Comparing results: arrays, sequences and optionals, and what ONNX Runtime's own noise excuses."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from irpar import api
from irpar.comparison import MOST_NOISE, Difference, References, compare, nudged
from irpar.sharding import IrparError

ONE = np.ones((2, 3), np.float32)

PAIRS: list[tuple[Any, Any, str]] = [
    ([ONE, 2 * ONE], [ONE, 2 * ONE], ""),
    ([], [], ""),
    ([ONE, np.zeros(4)], [ONE, np.zeros(4)], ""),
    (None, None, ""),
    ([ONE], [ONE, ONE], "is a sequence of 1, should be a sequence of 2"),
    (ONE, [ONE], "is a tensor, should be a sequence of 1"),
    ([ONE], ONE, "is a sequence of 1, should be a tensor"),
    (None, ONE, "is an absent optional, should be a tensor"),
    (ONE, None, "is a tensor, should be an absent optional"),
    ([ONE, ONE[:1]], [ONE, ONE], "is float32[1, 3], should be float32[2, 3]"),
]


@pytest.mark.parametrize(("got", "expected", "note"), PAIRS)
def test_sequences_and_optionals(got: Any, expected: Any, note: str) -> None:
    found = compare("s", got, expected)
    assert found.is_equal == (not note)
    assert found.note == note


def test_the_worst_entry_of_a_sequence_is_named() -> None:
    found = compare("s", [ONE, ONE, ONE + 3], [ONE, ONE + 1, ONE])
    assert not found.is_equal
    assert found.name == "s[2]"


def judged(got: float, optimized: float, plain: float, moved: float | None = None) -> tuple[Difference, str]:
    """What is made of a result beside those of ONNX Runtime."""
    arrays = [None if number is None else np.full(3, number, np.float32) for number in (optimized, plain, moved)]
    result = np.full(3, got, np.float32)
    return References(*arrays).judge(compare("y", result, arrays[0]), result)


def test_noise_of_onnx_runtime_excuses_what_is_of_its_size_only() -> None:
    assert judged(0.02, 0.0, 0.01)[0].is_equal
    assert not judged(0.05, 0.0, 0.01)[0].is_equal
    # More than this is no rounding: one of the two sides of ONNX Runtime is wrong.
    found, note = judged(1.0, 0.0, 4 * MOST_NOISE)
    assert not found.is_equal
    assert "cannot be told from a wrong result" in note
    # A partition that is equal to ONNX Runtime without optimizations is right.
    found, note = judged(4.0, 0.0, 4.0)
    assert found.is_equal
    assert "the partition is compared with the latter" in note


def test_what_one_rounding_of_the_inputs_moves_is_excused() -> None:
    found, note = judged(0.02, 0.0, 0.0, moved=0.01)
    assert found.is_equal
    assert "off by one rounding" in note
    assert not judged(0.05, 0.0, 0.0, moved=0.01)[0].is_equal
    assert not judged(0.5, 0.0, 0.0, moved=4 * MOST_NOISE)[0].is_equal


def test_cancellation_among_large_numbers() -> None:
    optimized = np.array([1e12, 0.0, 5.0], np.float32)
    plain = optimized + np.array([0, 1e6, 0], np.float32)
    references = References(optimized, plain)

    def judge(off: float) -> Difference:
        got = optimized - np.array([0, off, 0], np.float32)
        return references.judge(compare("y", got, optimized), got)[0]

    assert judge(2e6).is_equal
    assert not judge(4e6).is_equal
    assert not compare("y", optimized - 2e6, optimized).is_equal


def test_nudged_inputs() -> None:
    x = np.linspace(-8, 8, 1000, dtype=np.float32)
    ids = np.arange(5)
    given = {"x": x, "half": x.astype(ml_dtypes.bfloat16), "ids": ids, "s": [x, x]}
    found = nudged(given)
    assert found["ids"] is ids
    for name, eps in (("x", 2.0**-23), ("half", 2.0**-7)):
        moved = np.abs(found[name].astype(np.float64) - given[name].astype(np.float64))
        assert found[name].dtype == given[name].dtype
        assert 0 < moved.max() <= 8.1 * eps
    assert len(found["s"]) == 2
    np.testing.assert_array_equal(nudged(given)["x"], found["x"])


def sequences(path: Path) -> Path:
    """A model that takes a sequence, and gives one of two tensors of different shapes, and an optional."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])
    s = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2, 3])
    t = helper.make_tensor_sequence_value_info("t", TensorProto.FLOAT, None)
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [4, 6]))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("SequenceConstruct", ["x", "h"], ["t"]),
        helper.make_node("Optional", ["h"], ["o"]),
        helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0),
    ]
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32), "w")
    outputs = [t, helper.make_value_info("o", kind), helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph(nodes, "g", [x, s], outputs, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_models_with_sequences_and_optionals(tmp_path: Path, engine: api.Engine) -> None:
    module = api.load(sequences(tmp_path / "m.onnx"))
    module.shard("w", [None, "tp"])
    made = api.partition(module, "tp=2")
    inputs = {"x": np.ones((4, 8), np.float32), "s": [ONE, 2 * ONE]}
    made.verify(inputs, engine=engine).check()
    assert made.bisect(inputs, engine=engine).first is None
    with pytest.raises(IrparError, match="cannot make up input s") as caught:
        made.verify(engine=engine)
    assert "partition.verify({" in caught.value.do
    with pytest.raises(IrparError, match="s is a tensor, expected a sequence"):
        made.run({**inputs, "s": ONE}, engine=engine)
    with pytest.raises(IrparError, match="x is a sequence, expected"):
        made.run({**inputs, "x": [np.ones((4, 8), np.float32), ONE]}, engine=engine)
