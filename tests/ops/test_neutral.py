"""What changes nothing in a reduction."""

from typing import get_args

import numpy as np
import pytest

from irpar.ir import DType
from irpar.ir.value_rules import is_reducible
from irpar.ops.collectives.reduced_arrays import reduce_arrays
from irpar.ops.neutral import neutral
from irpar.sharding import Reduction

NUMBERS = [
    dtype for dtype in DType if dtype.bits >= 8 and dtype not in (DType.STR, DType.C64, DType.C128, DType.F8E8M0)
]
"""What reductions are tried with. f8e8m0 holds powers of two, which nobody adds up."""


@pytest.mark.parametrize("reduce", get_args(Reduction))
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_neutral_numbers_change_nothing(dtype: DType, reduce: Reduction) -> None:
    if not is_reducible(dtype, reduce):
        pytest.skip("no such reduction")
    numbers = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32).astype(dtype.numpy)
    numbers = numbers[np.isfinite(numbers.astype(np.float64))]
    if dtype.is_float:
        limits = [np.nextafter(np.asarray(0, dtype.numpy), np.asarray(1, dtype.numpy)), -np.max(numbers)]
        numbers = np.concatenate([numbers, np.asarray([*limits, -0.0], dtype.numpy)])
    nothing = np.full(numbers.shape, neutral(reduce, dtype), dtype.numpy)
    for arrays in ([numbers, nothing], [nothing, numbers], [nothing, nothing, numbers]):
        reduced = reduce_arrays(arrays, reduce)
        np.testing.assert_array_equal(reduced, numbers)
        if dtype.is_float and reduce == "sum":
            np.testing.assert_array_equal(np.signbit(reduced), np.signbit(numbers))
