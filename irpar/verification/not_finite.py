"""Elements that are infinite or NaN on one side alone, where float64 shows that either side may be right."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from irpar.ir import dtype_of_numpy
from irpar.units import count_text

from .comparison import Array, distance


def explained(
    got: Array, samples: Sequence[Array], truth: Array, sums: Array | None = None
) -> tuple[Array, list[Array], Array, list[str]]:
    """Take out what is not judged by numbers.

    - NaN in float64 and on one side: ONNX Runtime's ReduceMax and its like pass over a NaN that is not the first.
    - A number in float64, but not in the dtype: it is beyond its range, or sums on the way to it are, in one order.

    Args:
        got: the result, real floats.
        samples: the original's, computed in several ways; the first counts.
        truth: in float64.
        sums: what the terms that an element is a sum of make without their signs, where that is known: it tells whether
            the sum of some of them may be beyond the range.

    Returns:
        All three, alike where an element is explained and has no number to judge, and with the rounded number of
        float64 for the first sample where only the result has one; and a line for each reason that explains elements.
    """
    expected = samples[0]
    # Where both sides pass over a NaN they are judged by each other.
    truth = np.where(np.isnan(truth) & np.isfinite(got) & np.isfinite(expected), expected.astype(truth.dtype), truth)
    odd = ~np.isfinite(got) | ~np.isfinite(expected)
    odd &= distance(got, expected) > 0
    if not odd.any():
        return got, [*samples], truth, []
    skipped = odd & np.isnan(truth) & np.isnan(got)
    limit = float(ml_dtypes.finfo(expected.dtype).max)
    is_beyond = np.isfinite(truth) & (np.abs(truth) >= limit)
    overflows = np.isfinite(truth) & np.logical_or.reduce([~np.isfinite(sample) for sample in samples])
    if sums is not None:
        # No sum of some of the terms is larger than that of all those that have the one sign.
        overflows |= np.isfinite(truth) & ((sums + np.abs(truth)) / 2 >= limit)
    # The infinity that has the sign of what is beyond the range; NaN where both infinities were met on the way.
    fits = ~np.isfinite(got) & ~(is_beyond & np.isinf(got) & (np.sign(got) != np.sign(truth)))
    passed = odd & (is_beyond | overflows) & (fits | np.isfinite(got))
    taken = skipped | (passed & ~np.isfinite(got))
    told = []
    if count := int(skipped.sum()):
        have = "is NaN where ONNX Runtime has a number" if count == 1 else "are NaN where ONNX Runtime has numbers"
        told.append(
            f"{count_text(count, 'element')} of float64 {have}, since it may pass over a NaN by where that stands"
        )
    if count := int(passed.sum()):
        range_ = f"the range of {dtype_of_numpy(expected.dtype)} in some orders of summation"
        told.append(f"{count_text(count, 'element')} {'passes' if count == 1 else 'pass'} {range_}")
    with np.errstate(over="ignore"):
        rounded = truth.astype(expected.dtype)
    first = np.where(passed & np.isfinite(got), rounded, expected)
    got, truth = np.where(taken, first, got), np.where(taken, first.astype(truth.dtype), truth)
    return got, [first, *samples[1:]], truth, told
