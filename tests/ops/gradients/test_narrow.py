"""Gradients of float16: counts and squares that are too large for it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from irpar.ir import DType, Graph, TensorType
from irpar.ops.gradients.writer import GradientWriter, NoGradientError
from tests.ops.gradients.proof import Array, feeds_of, gradients_of, module_of, run
from tests.ops.rule_proof import Sample

HALF = np.float16
MANY = 70_000
"""Above 65504, the greatest float16."""
SCALE = 1000
"""Of the gradient that comes in: its share is then a normal float16."""


def gradient(sample: Sample, symbols: Mapping[tuple[int, int], str] | None = None, scale: float = 1) -> Array:
    """The gradient of the first operand, by that of the first result."""
    module = module_of(sample, None, symbols)
    made = gradients_of(module, ["x0"], ["y0"])
    feeds = feeds_of(sample, None)
    found = run(made, {**feeds, "grad.y0": np.full(run(module, feeds)["y0"].shape, scale, HALF)})
    assert found["grad.x0"].dtype == HALF
    return found["grad.x0"].astype(np.float64)


def loss(op: str, *more: Array, **attributes: Any) -> Sample:
    results = 2 if op == "SoftmaxCrossEntropyLoss" else 1
    operands = (np.zeros((MANY, 2), HALF), np.zeros(MANY, np.int64), *more)
    return Sample(op, operands, attributes, version=13, results=results)


ONES = np.ones(MANY, HALF)
MEANS = [
    Sample("ReduceMean", (ONES,), {"keepdims": 0}, version=18),
    Sample("ReduceMean", (ONES, np.array([0])), {"keepdims": 0}, version=18),
    Sample("ReduceMax", (ONES,), {"keepdims": 0}, version=18),
    Sample("GlobalAveragePool", (ONES.reshape(1, 1, 250, 280),), version=1),
    Sample("AveragePool", (ONES.reshape(1, 1, 250, 280),), {"kernel_shape": (250, 280)}, version=19),
    loss("NegativeLogLikelihoodLoss"),
    loss("NegativeLogLikelihoodLoss", ignore_index=-1),
    loss("NegativeLogLikelihoodLoss", np.ones(2, HALF)),
    loss("SoftmaxCrossEntropyLoss"),
]


@pytest.mark.parametrize("sample", MEANS, ids=str)
def test_a_share_of_more_elements_than_float16_counts(sample: Sample) -> None:
    total = np.abs(gradient(sample, scale=SCALE)).sum()
    assert total == pytest.approx(SCALE, rel=1e-2)


@pytest.mark.parametrize("sample", [MEANS[0], MEANS[3], MEANS[5]], ids=str)
def test_the_count_may_be_found_when_the_model_runs(sample: Sample) -> None:
    last = len(sample.arrays[0].shape) - 1 if sample.op == "GlobalAveragePool" else 0
    places = {(0, last): "n", (1, 0): "n"} if sample.op.endswith("Loss") else {(0, last): "n"}
    assert np.abs(gradient(sample, places, scale=SCALE)).sum() == pytest.approx(SCALE, rel=1e-2)


X = np.array([300, -300, 2], HALF)
SQUARED = [
    (Sample("Gelu", (X,), {"approximate": "tanh"}, version=20), [1, 0, 1.0861]),
    (Sample("Gelu", (X,), version=20), [1, 0, 1.0852]),
    (Sample("Asinh", (X,), version=9), [1 / 300, 1 / 300, 1 / 5**0.5]),
    (Sample("Acosh", (np.abs(X),), version=9), [1 / 300, 1 / 300, 1 / 3**0.5]),
    (Sample("Atan", (X,), version=7), [1 / 90001, 1 / 90001, 1 / 5]),
    (Sample("Softsign", (X,), version=1), [1 / 301**2, 1 / 301**2, 1 / 9]),
    (Sample("FastGelu", (X,), domain="com.microsoft", version=1), [1, 0, 1.0861]),
]


@pytest.mark.parametrize(("sample", "expected"), SQUARED, ids=str)
def test_squares_that_float16_does_not_have(sample: Sample, expected: list[float]) -> None:
    np.testing.assert_allclose(gradient(sample), expected, rtol=1e-2, atol=1e-6)


def test_norms_of_numbers_whose_squares_float16_does_not_have() -> None:
    x, g = np.array([[300, 400]], HALF), np.array([[1, 2]], HALF)
    sample = Sample("LpNormalization", (x,), {"axis": 1}, version=22)
    found = run(gradients_of(module_of(sample, None), ["x0"]), {"x0": x, "grad.y0": g})["grad.x0"]
    np.testing.assert_allclose(found, [[-0.00064, 0.00048]], rtol=1e-2)


def test_a_number_that_would_be_infinite_is_refused_and_a_bound_is_the_greatest_number() -> None:
    graph = Graph("numbers")
    like = graph.add_input("x", TensorType(DType.F16, (2,)))
    writer = GradientWriter(graph, {"": 21})
    with pytest.raises(NoGradientError, match="the number 70000, which is infinite as f16"):
        writer.mul(like, 70_000)
    bounds = [writer.bound(number, like).data for number in (1e9, -1e9)]
    assert [float(bound.numpy()) for bound in bounds if bound is not None] == [65504, -65504]
    infinite = writer.number(-np.inf, like).data
    assert infinite is not None
    assert infinite.numpy() == -np.inf
