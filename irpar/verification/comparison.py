"""How two results differ: what a bound on it says, and what 8 units in the last place explain."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from irpar.ir import DType, dtype_of_numpy
from irpar.runtime.layout import kind_text, typical_bound
from irpar.units import count_text

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

TOLERANCES = {DType.F64: 1e-6, DType.F32: 1e-4, DType.F16: 3e-2, DType.BF16: 1e-1}
"""Largest |a - b| / (1 + |b|) by dtype, for `compare`; other float types 0.25, all else must be equal."""
UNITS = 8
"""Units in the last place of the largest element by which two right results may differ."""
_COMPLEX = (DType.C64, DType.C128)


@dataclass(frozen=True)
class Difference:
    """How two tensors differ.

    Attributes:
        name: of the tensor.
        largest: max |a - b|; inf where shapes, dtypes, NaNs or texts differ.
        relative: max |a - b| / (1 + |b|).
        error: what is bounded: `relative` for a tolerance; `largest`, or the largest distance from the numbers in
            float64; of numbers that are no floats how many are wrong.
        allowed: the bound.
        measure: what `error` is: "tolerance", "rounding", "float64", "float32" (where float64 could not be had) or
            "values".
        where: index of the largest difference.
        note: what else is wrong, e.g. another shape.
    """

    name: str
    largest: float
    relative: float
    error: float
    allowed: float
    measure: str = "tolerance"
    where: tuple[int, ...] = ()
    note: str = ""

    @property
    def is_equal(self) -> bool:
        """True within the bound."""
        return self.error <= self.allowed and not self.note

    @property
    def severity(self) -> tuple[bool, float]:
        """What orders differences, the worst last."""
        return not self.is_equal, self.error / self.allowed if self.allowed else self.error


CompareFloats = Callable[[str, Array, Array], Difference]
"""Compares two arrays of floats of one shape; takes a name and both."""


def compare(name: str, got: Any, expected: Any, tolerance: float | None = None) -> Difference:
    """Compare two arrays, lists of these, or None, by the largest |a - b| / (1 + |b|).

    Equal infinities and NaNs at equal places are equal. Of lists the entry counts that differs most.

    Args:
        name: of what is compared.
        got, expected: the two sides.
        tolerance: the bound; None: by dtype.
    """

    def bounded(entry: str, one: Array, other: Array) -> Difference:
        dtype = dtype_of_numpy(other.dtype)
        bound = tolerance if tolerance is not None else TOLERANCES.get(dtype, 0.25)
        largest, relative, where = _distances(one, other)
        return Difference(entry, largest, relative, relative, bound, where=where)

    return compare_by(name, got, expected, bounded)


def compare_rounding(name: str, got: Any, expected: Any) -> Difference:
    """Compare two arrays, lists of these, or None: floats may differ by `UNITS` of the largest element.

    Elements far larger than the others (masks) are compared on their own.
    """

    def bounded(entry: str, one: Array, other: Array) -> Difference:
        largest, relative, where = _distances(one, other)
        groups = [
            Difference(entry, largest, relative, float(np.max(away, initial=0.0)), units(expected), "rounding", where)
            for away, expected in ((distance(one, other)[group], other[group]) for group in magnitude_groups(other))
        ]
        return max(groups, key=lambda found: found.severity)

    return compare_by(name, got, expected, bounded)


def compare_by(name: str, got: Any, expected: Any, floats: CompareFloats) -> Difference:
    """Compare two results of any kind.

    Args:
        name: of what is compared.
        got, expected: arrays, lists of these, or None.
        floats: compares two arrays of floats of one shape; takes a name and both.
    """
    if isinstance(expected, list):
        return _compare_lists(name, got, expected, floats)
    if expected is None or got is None or isinstance(got, list):
        is_same = expected is None and got is None
        return exact(name) if is_same else misfit(name, f"is {kind_text(got)}, should be {kind_text(expected)}")
    got, expected = np.asarray(got), np.asarray(expected)
    dtype = dtype_of_numpy(expected.dtype)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return misfit(name, f"is {got.dtype}{list(got.shape)}, should be {expected.dtype}{list(expected.shape)}")
    if dtype.is_float or dtype in _COMPLEX:
        return floats(name, got, expected)
    wrong = np.argwhere(got != expected)
    if not len(wrong):
        return exact(name)
    largest = np.inf  # Texts are not so far from each other.
    if expected.dtype.kind in "iub":
        largest = float(np.abs(got.astype(np.float64) - expected.astype(np.float64)).max())
    where = tuple(map(int, wrong[0]))
    return Difference(name, largest, np.inf, float(len(wrong)), 0.0, "values", where, differ_text(len(wrong)))


def differ_text(count: int) -> str:
    """That so many elements differ."""
    return f"{count_text(count, 'element')} {'differs' if count == 1 else 'differ'}"


def exact(name: str) -> Difference:
    """Of two results that are the same."""
    return Difference(name, 0.0, 0.0, 0.0, 0.0, "values")


def misfit(name: str, note: str) -> Difference:
    """Of two results that cannot be compared element by element."""
    return Difference(name, np.inf, np.inf, np.inf, 0.0, "values", note=note)


def _compare_lists(name: str, got: Any, expected: Sequence[Any], floats: CompareFloats) -> Difference:
    if not isinstance(got, (list, tuple)) or len(got) != len(expected):
        return misfit(name, f"is {kind_text(got)}, should be {kind_text(expected)}")
    entries = zip(got, expected, strict=True)
    found = [compare_by(f"{name}[{place}]", one, other, floats) for place, (one, other) in enumerate(entries)]
    worst = max(found, key=lambda entry: entry.severity, default=None)
    if worst is None:
        return exact(name)
    return worst if not worst.is_equal else replace(worst, name=name, where=())


def widened(array: Array) -> Array:
    """Floats as float64, complex numbers as complex128."""
    return array.astype(np.complex128 if dtype_of_numpy(array.dtype) in _COMPLEX else np.float64)


def distance(one: Array, other: Array) -> Array:
    """|a - b| of floats in float64: 0 where both are the same NaN or infinity, inf where only one is."""
    one, other = widened(one), widened(other)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", over="ignore"):
        away = np.where(same, 0.0, np.abs(one - other))
    return np.where(np.isnan(away), np.inf, away)


def _distances(one: Array, other: Array) -> tuple[float, float, tuple[int, ...]]:
    """The largest |a - b|, the largest |a - b| / (1 + |b|), and where the latter is."""
    away = distance(one, other)
    if not away.any():
        return 0.0, 0.0, ()
    with np.errstate(invalid="ignore", over="ignore"):
        relative = away / (1.0 + np.abs(widened(other)))
    relative = np.where(np.isnan(relative), np.inf, relative)
    where = tuple(int(index) for index in np.unravel_index(int(relative.argmax()), relative.shape))
    return float(away.max()), float(relative.max()), where


def units(expected: Array) -> float:
    """`UNITS` units in the last place of the largest finite element; of floats of 8 bits and less one unit."""
    dtype = expected.dtype
    single = np.dtype(np.float32 if dtype == np.complex64 else np.float64 if dtype == np.complex128 else dtype)
    limits = ml_dtypes.finfo(single)
    largest = largest_finite(expected)
    exponent = np.floor(np.log2(largest)) if largest else -np.inf
    unit = max(float(limits.eps) * 2.0**exponent, float(limits.smallest_subnormal))
    return float(unit * (UNITS if single.itemsize > 1 else 1))


def largest_finite(array: Array) -> float:
    """The largest magnitude of the finite numbers."""
    sizes = np.abs(widened(array)).reshape(-1)
    return float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))


def magnitude_groups(expected: Array) -> Iterator[Array]:
    """Masks of elements that are judged together: all of them, or those that dwarf the median apart from the rest."""
    sizes = np.abs(widened(expected))
    outliers = np.isfinite(sizes) & (sizes > typical_bound(sizes))
    if outliers.any():
        yield outliers
    yield ~outliers
