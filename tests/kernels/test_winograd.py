"""Convolutions by Winograd's tiles against ONNX Runtime, and what is left to columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.kernels import blocks, lookup, winograd
from irpar.kernels.windows import Windows
from tests.budget import budget, pairs

from .reference import run_onnxruntime

Array = np.ndarray

CONV = lookup("", "Conv", 22)
assert CONV is not None


def numbers(*shape: int, seed: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def windows_over(x: Array, pads: tuple[int, ...] = (1, 1, 1, 1)) -> Windows:
    return Windows.over(x.shape[2:], (3, 3), strides=None, dilations=None, pads=pads, auto_pad="NOTSET")


@settings(max_examples=budget(200), deadline=None, derandomize=True)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.tuples(st.integers(3, 12), st.integers(3, 12)),
    st.tuples(*[st.integers(0, 3)] * 4),
    st.sampled_from([64, 2**12, 2**14, 2**20]),
)
def test_results_are_onnx_runtimes(batch, channels, features, spatial, pads, nbytes):
    x, weight = numbers(batch, channels, *spatial, seed=1), numbers(features, channels, 3, 3, seed=2)
    (expected,) = run_onnxruntime("Conv", [x, weight], 18, pads=pads)
    y = np.full(expected.shape, np.nan, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", nbytes)
        patch.setattr(winograd, "LEAST_COLUMNS", 1)
        assert winograd.convolve(x, winograd.transformed_kernels(weight), windows_over(x, pads), y)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def by_columns(x: Array, weight: Array, attributes: dict[str, tuple[int, ...]]) -> Array:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "is_fit", lambda *_: False)
        return CONV(np, [x, weight], attributes, 1)[0]


@pytest.mark.parametrize(("sizes", "scale"), pairs([(64, 64, 48), (96, 80, 40), (128, 512, 14)], [1e-6, 1.0, 1e6]))
def test_rounds_like_sums_of_products(sizes, scale):
    channels, features, size = sizes
    x, weight = numbers(1, channels, size, size, seed=3) * np.float32(scale), numbers(features, channels, 3, 3, seed=4)
    x = np.maximum(x, 0)
    exact = by_columns(x.astype(np.float64), weight.astype(np.float64), {"pads": (1, 1, 1, 1)})
    assert winograd.is_fit(x, weight, 1, windows_over(x))
    by_tiles = CONV(np, [x, weight], {"pads": (1, 1, 1, 1)}, 1)[0]
    errors = [np.sqrt(np.mean((y - exact) ** 2)) for y in (by_tiles, by_columns(x, weight, {"pads": (1, 1, 1, 1)}))]
    assert 0 < errors[0] < 2 * errors[1]


@pytest.mark.parametrize(("spoiled", "operand"), pairs([np.inf, -np.inf, np.nan, 3e38, 1e4, -1e4], [0, 1]))
def test_what_stands_out_does_not_spoil_its_neighbours(spoiled, operand):
    """One number that is not finite, or much greater than others, changes nothing in results that do not see it."""
    x, weight = numbers(4, 64, 24, 24, seed=5), numbers(64, 64, 3, 3, seed=6)
    (x, weight)[operand][0, 4, 1, 2] = spoiled
    (y,) = CONV(np, [x, weight], {"pads": (1, 1, 1, 1)}, 1)
    expected = by_columns(x, weight, {"pads": (1, 1, 1, 1)})
    if operand:
        expected, y = expected[:, 1:], y[:, 1:]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_left_alone():
    x, weight = numbers(4, 64, 24, 24, seed=7), numbers(64, 64, 3, 3, seed=8)
    same = windows_over(x)
    assert winograd.is_fit(x, weight, 1, same)
    assert winograd.is_fit(x.astype(np.float64), weight.astype(np.float64), 1, same)
    assert not winograd.is_fit(x, weight[:, :32], 2, same)
    assert not winograd.is_fit(x, weight[:32], 1, same)
    assert not winograd.is_fit(x[:0], weight, 1, same)
    assert not winograd.is_fit(x[:1], weight, 1, same)
    assert not winograd.is_fit(x.astype(np.int32), weight.astype(np.int32), 1, same)
    assert not winograd.is_fit(x, weight, 1, windows_over(x, (-1, 1, 1, 1)))
    assert not winograd.is_fit(x[:, :, :8, :8], weight, 1, windows_over(x[:, :, :8, :8]))
    assert not winograd.is_fit(
        np.tile(x[:1, :, :8, :8], (2, 8, 1, 1)), np.tile(weight, (8, 8, 1, 1)), 1, windows_over(x[:, :, :8, :8])
    )
    for attributes in ({"strides": (2, 2)}, {"dilations": (1, 2)}, {"kernel": (3, 1)}, {"kernel": (3, 3, 3)}):
        kernel = attributes.pop("kernel", (3, 3))
        given = {"strides": None, "dilations": None, "pads": None} | attributes
        windows = Windows.over((24,) * len(kernel), kernel, auto_pad="VALID", **given)
        assert not winograd.is_fit(x, weight, 1, windows)


def test_integers_are_summed_exactly():
    """Tiles take halves and quarters of weights: integer convolutions are products all the same."""
    generator = np.random.default_rng(9)
    x, weight = (generator.integers(0, 256, shape, np.uint8) for shape in ((4, 64, 24, 24), (64, 64, 3, 3)))
    kernel = lookup("", "ConvInteger", 10)
    (y,) = kernel(np, [x, weight], {"pads": (1, 1, 1, 1)}, 1)
    np.testing.assert_array_equal(
        y, by_columns(x.astype(np.float64), weight.astype(np.float64), {"pads": (1, 1, 1, 1)})
    )


def test_zeros_give_zeros():
    x, weight = np.zeros((4, 64, 24, 24), np.float32), numbers(64, 64, 3, 3, seed=10)
    (y,) = CONV(np, [x, weight], {"pads": (1, 1, 1, 1)}, 1)
    assert not y.any()
