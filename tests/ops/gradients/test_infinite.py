"""Gradients that are infinite, as those of a Sqrt at 0: what they do not pass through stays finite."""

import numpy as np

from tests.ops.gradients.proof import gradients_of, module_of, run
from tests.ops.rule_proof import Sample

INF = np.inf


def test_relu_passes_nothing_on_where_it_is_off() -> None:
    """So d sqrt(relu(x)) is 0 for x below 0, as PyTorch has it."""
    made = gradients_of(module_of(Sample("Relu", (np.array([-1.0, 0.0, 2.0]),), version=14)), ["x0"])
    found = run(made, {"x0": np.array([-1.0, 0.0, 2.0]), "grad.y0": np.array([INF, INF, 3.0])})["grad.x0"]
    assert found.tolist() == [0, 0, 3]


def test_maxpool_passes_it_to_the_largest_alone() -> None:
    """Where windows lie side by side: what overlaps is added up."""
    x = np.array([[[1.0, 4.0, 2.0, 3.0]]])
    sample = Sample("MaxPool", (x,), {"kernel_shape": [2], "strides": [2]}, version=12)
    made = gradients_of(module_of(sample), ["x0"])
    found = run(made, {"x0": x, "grad.y0": np.full((1, 1, 2), INF)})["grad.x0"]
    assert found.tolist() == [[[0, INF, 0, INF]]]
