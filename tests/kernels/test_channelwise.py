"""Convolutions of each channel with kernels of its own: each form against ONNX Runtime, and when it is chosen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.kernels import blocks, channelwise, lookup
from irpar.kernels.windows import Windows
from tests.budget import budget

from .reference import run_onnxruntime

CONV = lookup("", "Conv", 22)
assert CONV is not None


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[int, ...]]]:
    rank, batch, channels, multiplier = (draw(st.integers(1, high)) for high in (3, 3, 5, 2))

    def dims(low: int, high: int, count: int = rank) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    x, weight = numbers(batch, channels, *dims(5, 12), seed=1), numbers(channels * multiplier, 1, *dims(1, 3), seed=2)
    are_close = draw(st.booleans())
    attributes = {"strides": dims(1, 1 if are_close else 3), "dilations": dims(1, 2), "pads": dims(0, 2, 2 * rank)}
    return x, weight, attributes | {"group": channels}


@settings(max_examples=budget(300), deadline=None, derandomize=True)
@given(
    convolutions(),
    st.sampled_from([(1, 10**9), (10**9, 1), (10**9, 2), (10**9, 10**9)]),
    st.sampled_from([1, 12, 30]),
    st.sampled_from([64, 700, 2**20]),
)
def test_results_are_onnx_runtimes(convolution, least, places, nbytes):
    x, weight, attributes = convolution
    (expected,) = run_onnxruntime("Conv", [x, weight], 18, **attributes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channelwise, "LEAST_WIDTH", least[0])
        patch.setattr(channelwise, "LEAST_CHANNELS", least[1])
        patch.setattr(channelwise, "LEAST_CHANNELS_APART", least[1])
        patch.setattr(channelwise, "LEAST_PLACES", places)
        patch.setattr(blocks, "BLOCK_BYTES", nbytes)
        (y,) = CONV(np, [x, weight], attributes, 1)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


CHOSEN = {
    "_by_rows": [
        ((1, 32, 112, 112), {}),
        ((1, 8, 20, 60), {"dilations": (1, 3)}),
        ((2, 300, 50, 50), {}),
        ((1, 96, 57, 57), {"strides": (2, 2)}),
    ],
    "_by_places": [
        ((1, 576, 14, 14), {}),
        ((1, 128, 28, 28), {"strides": (2, 2)}),
        ((1, 960, 7, 7), {"dilations": (2, 2)}),
        ((1, 400, 33), {}),
        ((1, 128, 4, 4, 4), {"strides": (1, 1, 2)}),
    ],
    "_by_pitch": [
        ((1, 192, 24, 24), {}),
        ((1, 8, 60, 60), {"dilations": (2, 1)}),
        ((1, 400, 64, 24), {}),
        ((1, 400, 9, 9), {"pads": (-1, 0, 0, 0)}),
    ],
    None: [
        ((1, 32, 112, 112), {"strides": (2, 2), "dilations": (2, 1)}),
        ((1, 128, 56, 56), {"strides": (2, 2)}),
        ((1, 300, 9, 9), {"strides": (2, 2), "pads": (-1, 0, 0, 0)}),
    ],
}


@pytest.mark.parametrize(
    ("name", "shape", "attributes"), [(name, *case) for name, cases in CHOSEN.items() for case in cases]
)
def test_form(name, shape, attributes):
    rank = len(shape) - 2
    given = {"strides": None, "dilations": None, "pads": None} | attributes
    found = channelwise.form(shape, 4, Windows.over(shape[2:], (3,) * rank, auto_pad="NOTSET", **given))
    assert (None if found is None else found.convolve.__name__) == name


@pytest.mark.parametrize("shape", [(2, 32, 112, 112), (2, 400, 7, 7), (1, 1000, 14, 14)])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_neighbours_of_infinity_are_finite(shape, strides):
    """What a window does not see does not spoil its sum; and rounding is that of float32."""
    x, weight = numbers(*shape, seed=3), numbers(shape[1], 1, 5, 5, seed=4)
    attributes = {"pads": (2,) * 4, "group": shape[1], "strides": strides}
    (exact,) = CONV(np, [x.astype(np.float64), weight.astype(np.float64)], attributes, 1)
    (y,) = CONV(np, [x, weight], attributes, 1)
    assert np.abs(y - exact).max() < 1e-5
    x[0, 3, 2, 4] = np.inf
    (spoiled,) = CONV(np, [x, weight], attributes, 1)
    (expected,) = CONV(np, [x.astype(np.float64), weight.astype(np.float64)], attributes, 1)
    np.testing.assert_array_equal(np.isfinite(spoiled), np.isfinite(expected))
    np.testing.assert_array_equal(spoiled[np.isfinite(spoiled)], y[np.isfinite(spoiled)])
