"""Convolutions and pools block by block against sums over all windows at once, in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.kernels import Kept, blocks, columns, lookup
from irpar.kernels.windows import Windows
from tests.budget import budget

MANY = settings(max_examples=budget(200), deadline=None, derandomize=True)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[tuple[int, ...], Windows]:
    rank = draw(st.integers(1, 3))

    def dims(low: int, high: int, count: int = rank) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    spatial = dims(4, 8)
    kernel, strides, dilations, pads = dims(1, 3), dims(1, 3), dims(1, 2), dims(-1, 2, 2 * rank)
    windows = Windows.over(spatial, kernel, strides=strides, dilations=dilations, pads=pads, auto_pad="NOTSET")
    return spatial, windows


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@MANY
@given(
    geometries(),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([64, 700, 2**20]),
)
def test_convolution(geometry, batch, group, depth, multiplier, nbytes):
    spatial, windows = geometry
    x, weight = (
        numbers(batch, group * depth, *spatial, seed=1),
        numbers(group * multiplier, depth, *windows.kernel, seed=2),
    )
    y = np.full((batch, len(weight), *windows.counts), np.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", nbytes)
        patch.setattr(columns, "LEAST_COLUMNS", 1)
        columns.convolve(x, weight, group, windows, Kept(), y)
    view = windows.view(np, x, 0).reshape(batch, group, depth, *windows.kernel, *windows.counts)
    kernel, counts = "ijk"[: len(spatial)], "uvw"[: len(spatial)]
    weights = weight.reshape(group, multiplier, depth, *windows.kernel)
    expected = np.einsum(f"bgd{kernel}{counts},gmd{kernel}->bgm{counts}", view, weights).reshape(y.shape)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)


@MANY
@given(geometries(), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.sampled_from([64, 2**20]))
def test_max_pool(geometry, batch, channels, has_nan, nbytes):
    spatial, windows = geometry
    x = numbers(batch, channels, *spatial, seed=3)
    if has_nan and x.size:
        x.reshape(-1)[x.size // 2] = np.nan
    attributes = {
        "kernel_shape": windows.kernel,
        "strides": windows.strides,
        "dilations": windows.dilations,
        "pads": tuple(pair[side] for side in (0, 1) for pair in windows.pads),
    }
    pool = lookup("", "MaxPool", 22)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", nbytes)
        (y,) = pool(np, [x], attributes, 1)
    np.testing.assert_array_equal(y, windows.view(np, x, -np.inf).max(axis=windows.kernel_axes), strict=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scratch_of_one_dtype_serves_the_next(dtype):
    """A thread's memory is used again for convolutions of other shapes and dtypes, whose padding must be zeros."""
    conv, kind = lookup("", "Conv", 22), np.dtype(dtype)
    for size in (9, 4, 6):
        x, weight = numbers(2, 3, size, size, seed=size), numbers(3, 1, 3, 3, seed=5)
        attributes = {"group": 3, "pads": (1, 1, 1, 1)}
        (expected,) = conv(np, [x, weight], attributes, 1)
        (y,) = conv(np, [x.astype(kind), weight.astype(kind)], attributes, 1)
        np.testing.assert_allclose(y.astype(np.float64), expected, rtol=0, atol=0.2)
