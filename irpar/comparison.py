"""How two results differ, and how much of that rounding alone explains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from irpar.ir import DType, dtype_of_numpy

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

TOLERANCES = {DType.F64: 1e-6, DType.F32: 1e-4, DType.F16: 3e-2, DType.BF16: 1e-1}
"""Largest |a - b| / (1 + |b|) by dtype; other float types 0.25, all else must be equal."""
NOISE_FACTOR = 3.0
"""A difference of up to this many times ONNX Runtime's own, between optimizations or nudged inputs, is rounding."""
MOST_NOISE = 0.1
"""Where ONNX Runtime differs more than this from itself, the comparison tells nothing, and is not taken for equal."""


@dataclass(frozen=True)
class Difference:
    """How two tensors differ.

    Attributes:
        name: of the tensor.
        largest: max |a - b|; inf where shapes, dtypes or NaNs differ.
        relative: max |a - b| / (1 + |b|), which the tolerance bounds.
        tolerance: the bound.
        where: index of the largest difference.
        note: what else is wrong, e.g. another shape.
    """

    name: str
    largest: float
    relative: float
    tolerance: float
    where: tuple[int, ...] = ()
    note: str = ""

    @property
    def is_equal(self) -> bool:
        """True within the tolerance."""
        return self.relative <= self.tolerance and not self.note


def compare(name: str, got: Any, expected: Any, tolerance: float | None = None) -> Difference:
    """Compare two arrays, lists of these, or None; equal infinities and NaNs at equal places are equal.

    Of lists the entry counts that differs most.
    """
    if isinstance(expected, list):
        return _compare_lists(name, got, expected, tolerance)
    if expected is None or got is None or isinstance(got, list):
        is_same = expected is None and got is None
        note = "" if is_same else f"is {_kind(got)}, should be {_kind(expected)}"
        return Difference(name, 0.0 if is_same else np.inf, 0.0 if is_same else np.inf, 0.0, note=note)
    got, expected = np.asarray(got), np.asarray(expected)
    dtype = dtype_of_numpy(expected.dtype)
    bound = tolerance if tolerance is not None else TOLERANCES.get(dtype, 0.25)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        note = f"is {got.dtype}{list(got.shape)}, should be {expected.dtype}{list(expected.shape)}"
        return Difference(name, np.inf, np.inf, bound, note=note)
    if not dtype.is_float and dtype not in (DType.C64, DType.C128):
        wrong = np.argwhere(got != expected)
        if len(wrong):
            return Difference(name, np.inf, np.inf, 0.0, tuple(map(int, wrong[0])), f"{len(wrong)} elements differ")
        return Difference(name, 0.0, 0.0, 0.0)
    wide = np.complex128 if dtype in (DType.C64, DType.C128) else np.float64
    return _compare_floats(name, got.astype(wide), expected.astype(wide), bound)


def _compare_lists(name: str, got: Any, expected: Sequence[Any], tolerance: float | None) -> Difference:
    if not isinstance(got, (list, tuple)) or len(got) != len(expected):
        return Difference(name, np.inf, np.inf, 0.0, note=f"is {_kind(got)}, should be {_kind(expected)}")
    entries = zip(got, expected, strict=True)
    found = [compare(f"{name}[{place}]", one, other, tolerance) for place, (one, other) in enumerate(entries)]
    worst = max(found, key=lambda entry: (not entry.is_equal, entry.relative), default=None)
    if worst is None:
        return Difference(name, 0.0, 0.0, 0.0)
    return worst if not worst.is_equal else replace(worst, name=name, where=())


def _kind(given: Any) -> str:
    if given is None:
        return "an absent optional"
    return f"a sequence of {len(given)}" if isinstance(given, (list, tuple)) else "a tensor"


def _compare_floats(name: str, got: Array, expected: Array, bound: float) -> Difference:
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    if same.all():
        return Difference(name, 0.0, 0.0, bound)
    with np.errstate(invalid="ignore", over="ignore"):
        absolute = np.where(same, 0.0, np.abs(got - expected))
        relative = np.where(same, 0.0, absolute / (1.0 + np.abs(expected)))
    absolute, relative = (np.where(np.isnan(error), np.inf, error) for error in (absolute, relative))
    where = tuple(int(index) for index in np.unravel_index(int(relative.argmax()), relative.shape))
    return Difference(name, float(absolute.max()), float(relative.max()), bound, where)


def nudged(inputs: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """Inputs that are off by one rounding: every float is multiplied by 1 - eps, 1 or 1 + eps of its dtype."""
    random = np.random.default_rng(seed)

    def nudge(given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return [nudge(entry) for entry in given]
        array = np.asarray(given)
        if not dtype_of_numpy(array.dtype).is_float:
            return given
        eps = float(ml_dtypes.finfo(array.dtype).eps)
        return (array * (1 + eps * random.integers(-1, 2, array.shape))).astype(array.dtype)

    return {name: nudge(given) for name, given in inputs.items()}


@dataclass(frozen=True)
class References:
    """One tensor as ONNX Runtime computes it in several ways that are all right.

    Attributes:
        optimized: as it runs models.
        plain: without its optimizations.
        nudged: without them, of inputs that are off by one rounding; None where these were not run.
    """

    optimized: Any
    plain: Any
    nudged: Any = None

    def judge(self, found: Difference, got: Any) -> tuple[Difference, str]:
        """A difference beside those of ONNX Runtime from itself, and what is to be said of it.

        Large sums, steep softmaxes and small variances amplify rounding: there nobody's 1e-4 means anything, ONNX
        Runtime's neither.
        """
        name = found.name
        own = compare(name, self.plain, self.optimized)
        differs = (
            f"{name}: on these inputs ONNX Runtime differs by {own.relative:.2g} from itself without optimizations"
        )
        for side, said in ((self.plain, "the latter"), (self.optimized, "the former")):
            beside = compare(name, got, side)
            if beside.is_equal:
                return beside, f"{differs}; the partition is compared with {said}"
        if self.nudged is not None:
            moved = compare(name, self.nudged, self.plain)
            if moved.relative > own.relative:
                own = moved
                differs = (
                    f"{name}: on inputs that are off by one rounding ONNX Runtime itself differs by {own.relative:.2g}"
                )
        if found.note:
            return found, ""
        other = "other inputs (--inputs, --seed) may tell more"
        bound, scale = NOISE_FACTOR * own.largest, _scale(self.plain)
        if own.relative > found.tolerance and found.largest <= min(bound, found.tolerance * scale):
            note = f"{differs}; the largest difference is {found.largest / scale:.2g} of the largest number; {other}"
            return replace(found, tolerance=found.relative), note
        if own.relative > MOST_NOISE:
            return found, f"{differs}, which cannot be told from a wrong result; {other}"
        allowed = NOISE_FACTOR * own.relative
        if found.relative <= allowed:
            return replace(found, tolerance=allowed), f"{differs}, so {allowed:.2g} is allowed; {other}"
        return found, ""


def _scale(tensor: Any) -> float:
    """The largest magnitude of finite numbers of a tensor, or of the tensors of a sequence."""
    if isinstance(tensor, (list, tuple)):
        return max(map(_scale, tensor), default=0.0)
    sizes = np.abs(np.asarray(tensor).astype(np.complex128).reshape(-1))
    return float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))
