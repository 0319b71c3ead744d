"""Whether a difference is more than rounding: both sides beside the original in float64.

A result is wrong unless its largest error against float64 is at most `FACTOR` times that of the original as ONNX
Runtime computes it, and `UNITS` units in the last place of the largest element. One run of the original shows one error
of the many that rounding can make; where it does not explain a difference it is run in more ways that are as right:
with and without optimizations, with one thread (by which DynamicQuantizeLSTM quantises the rows of a batch together or
apart), and with every result of a node off by one rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from irpar.analysis.memory.liveness import peak
from irpar.ir import dtype_of_numpy
from irpar.sharding import IrparError, listed

from .arithmetic import Nudges, OrtArrays, PlainArrays, run_float64, run_magnitudes, run_nudged
from .comparison import (
    Array,
    Arrays,
    Difference,
    compare_rounding,
    differ_text,
    distance,
    largest_finite,
    magnitude_groups,
    units,
)
from .not_finite import explained
from .original import Original, VerificationError, first_line

FACTOR = 4.0
"""How many times the error of the original a right result may have."""
MOST_NOISE = 0.1
"""Where the original itself is off by more than this share of its largest element, or a result may be (the bound is
`FACTOR` times as much), little can be told."""
LESS_EXACT = 8.0
"""How many times more is allowed at least where the yardstick is not all float64."""
NUDGES = 3
BADLY_CONDITIONED = 1000.0
"""Where so many times the 8 units is allowed, in float32 a thousandth of the largest element, that is reported."""

Tree = Any
"""An array, a list of these, or None."""


class Jumps(Enum):
    """How elements of a result jump where rounding moves an operand past a step.

    One element beside a step makes the largest error a whole step. So of such results is counted how many elements jump
    (rounding moves few), and what is rounded to a grid may not be further off than rounding puts it.
    """

    NONE = "none"
    STEPS = "steps"
    GRID = "grid"


@dataclass(frozen=True)
class Judgement:
    """What is found of some tensors.

    Attributes:
        differences: by name.
        notes: how they were judged, where that is not by float64 alone.
        doubted: names of those that agree, to what about them cannot be told from these inputs.
        badly_conditioned: names of those that rounding alone moves far on these inputs, and that agree.
        without_numbers: names of those that agree, and have infinities or NaNs that the other side has not.
    """

    differences: Mapping[str, Difference]
    notes: tuple[str, ...] = ()
    doubted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    badly_conditioned: tuple[str, ...] = ()
    without_numbers: tuple[str, ...] = ()

    @property
    def doubts(self) -> tuple[str, ...]:
        """What cannot be told."""
        return tuple(doubt for known in self.doubted.values() for doubt in known)


class Yardstick:
    """Judges tensors that were computed from one set of inputs.

    Args:
        original: the whole model.
        inputs: full arrays by name.
    """

    def __init__(self, original: Original, inputs: Arrays) -> None:
        self._original = original
        self._inputs = inputs
        self._jumps = Jumps.NONE
        self._no_nudges = ""
        """Why what nodes compute cannot be off by a rounding, once that is known."""

    def judge(self, got: Mapping[str, Tree], expected: Mapping[str, Tree]) -> Judgement:
        """Compare what both sides have under the names of `expected`."""
        found = {name: compare_rounding(name, got[name], wanted) for name, wanted in expected.items()}
        waiting = [name for name, difference in found.items() if not difference.is_equal]
        if not waiting:
            return Judgement(found)
        reference, notes, is_exact = self._reference(waiting)
        samples: dict[str, list[Tree]] = {name: [expected[name]] for name in waiting}
        doubts: dict[str, list[str]] = {}
        moved: dict[str, bool] = {}
        gaps: dict[str, bool] = {}
        sums = self._sums({name: got[name] for name in waiting}, expected)

        def measure(name: str) -> None:
            measured = _Measure(name, is_exact, sums.get(name), self._jumps)
            found[name] = measured.of(name, got[name], samples[name], reference.get(name))
            doubts[name] = measured.doubts
            gaps[name] = measured.has_gaps
            moved[name] = measured.is_badly_conditioned and not measured.doubts

        for more in (lambda names: {}, *self._others()):
            for name, sample in more(waiting).items():
                samples[name].append(sample)
            for name in waiting:
                measure(name)
            waiting = [name for name in waiting if not found[name].is_equal]
            if not waiting:
                break
        doubted = {name: tuple(known) for name, known in doubts.items() if known and found[name].is_equal}
        badly = tuple(name for name, is_moved in moved.items() if is_moved and found[name].is_equal)
        missing = tuple(name for name, has_gaps in gaps.items() if has_gaps and found[name].is_equal)
        return Judgement(found, (*notes, *filter(None, [self._no_nudges])), doubted, badly, missing)

    def _sums(self, got: Mapping[str, Tree], expected: Mapping[str, Tree]) -> Mapping[str, Array]:
        """What the terms of sums make without their signs, where that is to be known."""
        return {}

    def _reference(self, names: Sequence[str]) -> tuple[Mapping[str, Tree], tuple[str, ...], bool]:
        """The tensors in float64, what is to be said of that, and whether all was computed so."""
        try:
            self._check_memory()
            values, narrow = run_float64(self._original.nodes, self._inputs, names)
        except Exception as error:
            why = _told(error) if isinstance(error, IrparError) else f"{type(error).__name__}: {first_line(error)}"
            note = f"the original cannot be computed in float64: {why}"
            return {}, (f"{note}; differences are judged by how far ONNX Runtime is from itself",), False
        if not narrow:
            return values, (), True
        return (
            values,
            (f"irpar has no float64 kernel of {listed(narrow, 3)}: the yardstick has what ONNX Runtime gives",),
            False,
        )

    def _check_memory(self) -> None:
        from irpar.runtime.memory import check_memory

        check_memory(2 * peak(self._original.module.graph).total_bytes, "the original in float64")

    def _others(self) -> Iterator[Callable[[Sequence[str]], Mapping[str, Tree]]]:
        """More ways to compute the tensors that are as right as the first."""
        yield lambda names: self._run(names, self._inputs, optimized=False)
        yield lambda names: self._run(names, self._inputs, optimized=True, threads=1)
        for seed in range(NUDGES):
            yield partial(self._nudged, seed=seed)

    def _nudged(self, names: Sequence[str], seed: int) -> Mapping[str, Tree]:
        """With all that nodes compute off by a rounding; or the inputs alone, where only ONNX Runtime can do it."""
        if not self._no_nudges:
            try:
                self._check_memory()
                return run_nudged(self._original.nodes, self._inputs, names, seed)
            except IrparError as error:
                why = f"rounding cannot be tried inside the original: {_told(error)}"
                self._no_nudges = f"{why}; its inputs alone are off by it"
        nudges = Nudges(seed)
        return self._run(names, {name: nudges.of(given) for name, given in self._inputs.items()}, optimized=False)

    def _run(
        self, names: Sequence[str], inputs: Mapping[str, Any], *, optimized: bool, threads: int = 0
    ) -> Mapping[str, Tree]:
        try:
            made = self._original.run(inputs, optimized=optimized, threads=threads)
        except VerificationError:
            return {}  # Inputs that are off by a rounding may be outside of what the model takes.
        return {name: made[name] for name in names}


class StepYardstick(Yardstick):
    """Judges tensors by what the original's nodes make of tensors of the partition.

    Args:
        original: the whole model.
        given: full arrays by name, of inputs and of what nodes make.
        jumps: how the results may jump.
    """

    def __init__(self, original: Original, given: Mapping[str, Tree], jumps: Jumps = Jumps.NONE) -> None:
        super().__init__(original, given)
        self._jumps = jumps

    def judge_step(self, got: Mapping[str, Tree]) -> Judgement:
        """Compare what the partition has with what the original's nodes make.

        Raises:
            IrparError: a node can be computed neither by irpar's kernels nor alone in ONNX Runtime.
        """
        nodes = self._original.nodes
        return self.judge(got, nodes.run(PlainArrays(nodes.module.opsets), self._inputs, list(got)))

    def _sums(self, got: Mapping[str, Tree], expected: Mapping[str, Tree]) -> Mapping[str, Array]:
        try:
            return run_magnitudes(self._original.nodes, self._inputs, list(got))
        except IrparError:
            return {}

    def _check_memory(self) -> None:
        """Few nodes at a time need little."""

    def _others(self) -> Iterator[Callable[[Sequence[str]], Mapping[str, Tree]]]:
        yield partial(self._on_ort, threads=0)
        yield partial(self._on_ort, threads=1)
        for seed in range(NUDGES):
            yield partial(self._nudged, seed=seed)

    def _on_ort(self, names: Sequence[str], threads: int) -> Mapping[str, Tree]:
        """Each node alone in ONNX Runtime, whose kernels may round otherwise than irpar's."""
        nodes = self._original.nodes
        try:
            return nodes.run(OrtArrays(nodes.module.opsets, threads), self._inputs, names)
        except IrparError:
            return {}

    def _run(
        self, names: Sequence[str], inputs: Mapping[str, Any], *, optimized: bool, threads: int = 0
    ) -> Mapping[str, Tree]:
        return {}  # ONNX Runtime runs models, not some of their nodes.


class _Measure:
    """Measures one tensor, or the entries of one sequence.

    Attributes:
        doubts: what cannot be told of it, if anything.
        is_badly_conditioned: whether far more is allowed than a rounding of its largest element.
        has_gaps: whether it has infinities or NaNs that count as right, and that the original has not.
    """

    def __init__(self, name: str, is_exact: bool, sums: Array | None = None, jumps: Jumps = Jumps.NONE) -> None:
        self._name = name
        self._jumps = jumps
        self._sums = sums
        self._least = 1.0 if is_exact else LESS_EXACT
        self.doubts: list[str] = []
        self.is_badly_conditioned = False
        self.has_gaps = False

    def of(self, name: str, got: Tree, samples: Sequence[Tree], reference: Tree) -> Difference:
        """The difference of a tensor that the original gives in several ways, the first of which counts."""
        expected = samples[0]
        if isinstance(expected, list) and isinstance(got, (list, tuple)) and len(got) == len(expected):
            entries = [
                self.of(f"{name}[{place}]", got[place], _entries(samples, place), _entry(reference, place))
                for place in range(len(expected))
            ]
            worst = max(entries, key=lambda entry: entry.severity)
            return worst if not worst.is_equal else replace(worst, name=name, where=())
        found = compare_rounding(name, got, expected)
        if found.is_equal or any(tree is None or isinstance(tree, (list, tuple)) for tree in (got, expected)):
            return found
        got, expected = np.asarray(got), np.asarray(expected)
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return found
        alike = [sample for sample in map(np.asarray, samples) if sample.shape == expected.shape]
        truth = None if reference is None else np.asarray(reference)
        if truth is not None and truth.shape != expected.shape:
            truth = None
        is_float = dtype_of_numpy(expected.dtype).is_float or expected.dtype.kind == "c"
        return (self._floats if is_float else self._values)(found, got, alike, truth)

    def _floats(self, found: Difference, got: Array, samples: Sequence[Array], reference: Array | None) -> Difference:
        expected = samples[0]
        if reference is not None and expected.dtype.kind != "c":
            is_gap = _is_infinite(got) and not _is_infinite(expected)
            sums = self._sums if is_gap and self._sums is not None and self._sums.shape == got.shape else None
            judged_as, samples, reference, told = explained(got, samples, reference, sums)
            self.has_gaps = bool(np.any(~np.isfinite(got) & np.isfinite(judged_as)))
            got = judged_as
            expected = samples[0]
            self.doubts += [f"{self._name}: {why}" for why in told]
        judged = []
        for group in magnitude_groups(expected):
            least = units(expected[group])
            if float(np.max(distance(got[group], expected[group]), initial=0.0)) <= least:
                continue
            judged.append(self._group(found, got[group], [sample[group] for sample in samples], reference, group))
        if not judged:  # What differs has no number on one side.
            return _bounded(found, 0.0, units(expected), "float64")
        return max(judged, key=lambda difference: difference.severity)

    def _group(
        self, found: Difference, got: Array, samples: Sequence[Array], reference: Array | None, group: Array
    ) -> Difference:
        expected = samples[0]
        unit = units(expected)
        least = max(self._least * unit, self._least_of_sums(expected, group))
        if reference is not None:
            truth = reference[group]
            scale, own = largest_finite(truth), _own_error(samples, truth)
            if own <= MOST_NOISE * scale:
                self.is_badly_conditioned |= FACTOR * own > BADLY_CONDITIONED * unit
                made = self._within(found, _error(got, expected, truth), FACTOR * own + least, scale, "float64")
                return self._counted(made, got, samples, truth, own, least)
        # Without float64, or where float32 is far from it, ONNX Runtime beside itself tells what rounding does.
        scale, own = largest_finite(expected), _own_error(samples, expected)
        self.is_badly_conditioned |= FACTOR * own > BADLY_CONDITIONED * unit
        made = self._within(found, _error(got, expected, expected), FACTOR * own + least, scale, "float32")
        return self._counted(made, got, samples, expected, own, least)

    def _least_of_sums(self, expected: Array, group: Array) -> float:
        """What is allowed of sums at least: two roundings of what their terms make without signs.

        How far rounding moves sums whose terms cancel, few samples tell badly: they may come out alike in all.
        """
        if self._sums is None or self._sums.shape != group.shape:
            return 0.0
        return 2 * float(ml_dtypes.finfo(expected.dtype).eps) * largest_finite(self._sums[group])

    def _counted(
        self, made: Difference, got: Array, samples: Sequence[Array], truth: Array, own: float, least: float
    ) -> Difference:
        """As `made`, unless far more elements jump than rounding makes jump."""
        if self._jumps is Jumps.NONE or not made.is_equal or own <= least:
            return made
        past = max(least, own / FACTOR)
        explained_by_rounding = max(_further(sample, truth, past) for sample in samples)
        wrong, allowed = _further(got, truth, past), FACTOR * explained_by_rounding
        if wrong > allowed:
            made = replace(made, error=float(wrong), allowed=allowed, measure="values", note=differ_text(wrong))
        elif allowed > MOST_NOISE * truth.size:
            self._doubt(f"rounding alone changes {explained_by_rounding} of its {truth.size} elements")
        return made

    def _within(self, found: Difference, error: float, allowed: float, scale: float, measure: str) -> Difference:
        if allowed > MOST_NOISE * scale:
            self._doubt(
                f"rounding may explain differences of {allowed / scale:.0%} of its largest number"
                if scale
                else "it is noise"
            )
        return _bounded(found, error, allowed, measure)

    def _values(self, found: Difference, got: Array, samples: Sequence[Array], reference: Array | None) -> Difference:
        """Of integers and truth values those that are wrong are counted: rounding decides a few, at ties and steps."""
        expected = samples[0]
        for truth, measure in ((reference, "float64"), (expected, "float32")):
            if truth is None:
                continue
            own = max(int((sample != truth).sum()) for sample in samples)
            if measure == "float64" and own > MOST_NOISE * expected.size:
                continue
            allowed = FACTOR * own
            if allowed > MOST_NOISE * expected.size:
                self._doubt(f"rounding alone changes {own} of its {expected.size} elements")
            wrong = int((got != truth).sum())
            made = _bounded(found, float(wrong), allowed, measure)
            if self._jumps is Jumps.GRID and _furthest(got, truth) > FACTOR * max(_furthest(s, truth) for s in samples):
                return replace(made, allowed=0.0, note=differ_text(wrong))
            return replace(made, note="" if made.error <= made.allowed else differ_text(wrong))
        return found

    def _doubt(self, why: str) -> None:
        self.doubts += [f"{self._name}: on these inputs {why}, so that little can be told of it"]


def _is_infinite(tree: Tree) -> bool:
    """Whether a tensor has infinities or NaNs."""
    if tree is None or isinstance(tree, (list, tuple)):
        return False
    array = np.asarray(tree)
    return dtype_of_numpy(array.dtype).is_float and not bool(np.isfinite(array).all())


def _told(error: IrparError) -> str:
    return f"{first_line(error)} ({error.where})" if error.where else first_line(error)


def _bounded(found: Difference, error: float, allowed: float, measure: str) -> Difference:
    return replace(found, error=error, allowed=allowed, measure=measure, note="")


def _own_error(samples: Sequence[Array], truth: Array) -> float:
    """The largest error of the original in any way of computing it, where it has numbers."""
    errors = (np.where(np.isfinite(sample), distance(sample, truth), 0.0) for sample in samples)
    return max(float(np.max(error, initial=0.0, where=np.isfinite(error))) for error in errors)


def _further(array: Array, truth: Array, bound: float) -> int:
    """How many elements are further than so much from the truth; infinities and NaNs are judged elsewhere."""
    away = distance(array, truth)
    return int(((away > bound) & np.isfinite(away)).sum())


def _furthest(array: Array, truth: Array) -> float:
    """The largest distance of whole numbers from the truth."""
    return float(np.max(np.abs(array.astype(np.float64) - truth.astype(np.float64)), initial=0.0))


def _error(got: Array, expected: Array, truth: Array) -> float:
    """The largest error of a result; none where it has the same infinity or NaN as the original."""
    same = ~np.isfinite(expected) & (distance(got, expected) == 0)
    return float(np.max(np.where(same, 0.0, distance(got, truth)), initial=0.0))


def _entry(tree: Tree, place: int) -> Tree:
    return tree[place] if isinstance(tree, (list, tuple)) and place < len(tree) else None


def _entries(samples: Sequence[Tree], place: int) -> list[Tree]:
    found = [_entry(sample, place) for sample in samples]
    return [found[0], *(entry for entry in found[1:] if entry is not None)]
