"""Roundings that are tried, and nodes that are computed from what they read."""

import ml_dtypes
import numpy as np

import irpar
from irpar.verification.arithmetic import Nodes, Nudges, PlainArrays, run_float64
from tests.written import model_of_text


def test_floats_are_off_by_a_rounding_of_their_dtype() -> None:
    x = np.linspace(-8.1, 8, 1000, dtype=np.float32)
    for array, eps in ((x, 2.0**-23), (x.astype(ml_dtypes.bfloat16), 2.0**-7)):
        found = Nudges(0).of(array)
        assert found.dtype == array.dtype
        assert 0 < np.abs(found.astype(np.float64) - array.astype(np.float64)).max() <= 8.2 * eps
        np.testing.assert_array_equal(Nudges(0).of(array), found)
        assert (Nudges(1).of(array) != found).any()
    assert len(Nudges(0).of([x, x])) == 2
    assert Nudges(0).of(None) is None


def test_numbers_that_are_exact_stay() -> None:
    """Counts and places, and floats of 8 bits, which are codes."""
    kept = [
        np.arange(5),
        np.arange(5.0, dtype=np.float32),
        np.array([True]),
        np.array([0.25, 0.3], ml_dtypes.float8_e4m3fn),
    ]
    for array in kept:
        np.testing.assert_array_equal(Nudges(0).of(array), array)


def test_nodes_are_computed_from_what_is_given() -> None:
    model = model_of_text(
        "g (float[4,8] x, float[8,8] w) => (float[4,8] y) { a = MatMul(x, w)  b = Relu(a)  y = Add(b, a) }", ("w",)
    )
    nodes = Nodes(irpar.onnx_io.to_module(model))
    ones = np.ones((4, 8), np.float32)
    found = nodes.run(PlainArrays(nodes.module.opsets), {"a": -ones, "b": 3 * ones}, ["y"])
    np.testing.assert_array_equal(found["y"], 2 * ones)
    wide, narrow = run_float64(nodes, {"x": 0 * ones, "b": ones}, ["y", "b"])
    assert (wide["y"].dtype, narrow) == (np.float64, [])
    # The producer of what is asked for runs.
    np.testing.assert_array_equal(wide["b"], 0 * ones)
