"""Gradients of models of every family: stock ONNX Runtime in float32 against irpar's kernels in float64."""

import numpy as np
import pytest

import irpar
from irpar.models import build
from irpar.onnx_io import to_module, to_proto
from irpar.passes.autodiff import GRAD
from tests.budget import every
from tests.ops.gradients.proof import run

from .test_float64 import FEW, feeds_of, floats_of_another_dtype, widened

TOLERANCE = 1e-5
"""Of the largest element."""
ZERO = 1e-9
"""Of the largest gradient: what is less in float64 is zero, such as that of a key's bias, which changes no softmax."""


@pytest.mark.parametrize(("name", "settings"), every(2, FEW))
def test_gradients_of_float32_are_those_of_float64(name, settings, inputs, run_model_whole):
    feeds = feeds_of(name, settings, inputs)
    outputs = run(to_module(build(name, **settings)), feeds)
    random = np.random.default_rng(0)
    for output, value in outputs.items():
        feeds[GRAD + output] = random.standard_normal(value.shape).astype(np.float32)
    models = [build(name, dtype=dtype, **settings) for dtype in ("float32", "float64")]
    weights = [tensor.name for tensor in models[0].graph.initializer if not tensor.name.startswith("constants.")]
    single, double = (irpar.gradients(model, wrt=weights) for model in models)
    assert floats_of_another_dtype(double) == set()
    found, expected = run_model_whole(to_proto(single), feeds), run(double, widened(feeds))
    assert found.keys() == expected.keys()
    largest = max(float(np.abs(x).max()) for x in expected.values())
    for key, exact in expected.items():
        own = float(np.abs(exact).max())
        error = float(np.abs(found[key] - exact).max())
        assert error <= TOLERANCE * (own if own > ZERO * largest else largest), key
