"""Products of 8-bit numbers: exact by floats of either width, and wrapping around where int32 ends."""

import numpy as np
import pytest

from irpar.kernels import lookup


def _kernel(op_type: str, *operands: np.ndarray) -> np.ndarray:
    found = lookup("", op_type, 21)
    assert found is not None
    (result,) = found(np, operands, {}, 1)
    return np.asarray(result)


def _extremes(dtype: type, shape: tuple[int, ...], seed: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.random.default_rng(seed).choice(np.array([limits.min, limits.max - 1, limits.max], dtype), shape)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("depth", [0, 1, 258, 259, 1000, 40_000])
def test_products_are_those_of_integers(dtype: type, depth: int) -> None:
    """At 258 terms float32 ends being exact; at 40,000 of the largest a sum does not fit into int32."""
    limits = np.iinfo(dtype)
    for left, zero in (
        (_extremes(dtype, (3, depth), 0), limits.min),
        (np.full((3, depth), limits.max, dtype), limits.min),
    ):
        right = np.full((depth, 2), -128, np.int8)
        right[:, 0] = _extremes(np.int8, (depth,), 1)
        got = _kernel("MatMulInteger", left, right, np.array(zero, dtype), np.array([0, 127], np.int8))
        wide = (left.astype(np.int64) - zero) @ (right.astype(np.int64) - np.array([0, 127]))
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, wide.astype(np.int32))


@pytest.mark.parametrize("channels", [28, 29, 4000])
def test_convolutions_are_those_of_integers(channels: int) -> None:
    """Windows of 9 places: 252 terms, 261, and so many that sums do not fit into int32."""
    x = np.full((1, channels, 3, 3), 255, np.uint8)
    weight = np.full((2, channels, 3, 3), -128, np.int8)
    weight[1] = _extremes(np.int8, weight[1].shape, 1)
    zeros = np.array(0, np.uint8), np.array([127, 0], np.int8)
    got = _kernel("ConvInteger", x, weight, *zeros)
    wide = (x.astype(np.int64) * (weight.astype(np.int64) - np.array([127, 0])[:, None, None, None])).sum(
        axis=(1, 2, 3)
    )
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got.reshape(-1), wide.astype(np.int32))
