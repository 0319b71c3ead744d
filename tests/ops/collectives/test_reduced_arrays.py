"""Reductions over arrays of several ranks."""

import numpy as np
import pytest

from irpar.ops.collectives.reduced_arrays import reduce_arrays


def test_arrays_larger_than_a_chunk() -> None:
    random = np.random.default_rng(0)
    arrays = [random.integers(-9, 9, (3, 70_001)).astype(np.float32) for _ in range(3)]
    np.testing.assert_array_equal(reduce_arrays(arrays, "sum"), arrays[0] + arrays[1] + arrays[2])


def test_strided_and_empty_arrays() -> None:
    array = np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(reduce_arrays([array[:, ::2], array[:, 1::2]], "max"), array[:, 1::2])
    assert reduce_arrays([np.zeros((0, 3), np.int8)] * 2, "sum").shape == (0, 3)
    assert reduce_arrays([np.asarray(2.0), np.asarray(3.0)], "prod") == 6.0


def test_integers_wrap_around_and_keep_their_dtype() -> None:
    result = reduce_arrays([np.asarray([100], np.int8), np.asarray([100], np.int8)], "sum")
    assert result.dtype == np.int8
    assert result.tolist() == [-56]


def test_nan_reaches_the_result() -> None:
    arrays = [np.asarray([np.nan, 1.0], np.float32), np.asarray([0.0, 2.0], np.float32)]
    assert np.isnan(reduce_arrays(arrays, "max")[0])


def test_order_is_fixed() -> None:
    # In float32 1e8 + 1 - 1e8 is 0 from the left, and 1 in other orders.
    arrays = [np.asarray([value], np.float32) for value in (1e8, 1.0, -1e8)]
    assert reduce_arrays(arrays, "sum").tolist() == [0.0]


def test_single_array_is_not_copied() -> None:
    array = np.ones(3)
    assert reduce_arrays([array], "sum") is array


@pytest.mark.parametrize(("dtype", "reduction"), [(np.bool_, "max"), (np.float32, "and"), (np.object_, "sum")])
def test_what_there_is_not(dtype: type, reduction: str) -> None:
    with pytest.raises(ValueError, match=f"have no reduction '{reduction}'"):
        reduce_arrays([np.zeros(1, dtype)] * 2, reduction)  # type: ignore[arg-type]
