"""Comparing a partition with ONNX Runtime on the original model, and finding the first tensor that differs."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from irpar.ir import dtype_of_numpy, tensor_type
from irpar.runtime.layout import find_first
from irpar.sharding import IrparError, listed, spelled
from irpar.tables.html import report_html
from irpar.units import count_text, difference_text

from .comparison import Array, Arrays, Difference, compare, misfit
from .original import Original, VerificationError
from .reached import Body
from .rounds import Rounds, rounds_for
from .steps import TENSORS_AT_ONCE, StepByStep, Steps
from .yardstick import Judgement, Yardstick

if TYPE_CHECKING:
    from irpar.runtime.executor import Executor

EQUAL, EQUAL_BUT, DIFFERENT = "equal", "equal, but", "different"
_MISSING = "the partition does not give it"
_MOST_NAMED = 5
"""Bodies that did not run are named so many."""


@dataclass(frozen=True)
class Verification:
    """The outputs of both sides, compared.

    Attributes:
        differences: one for each output, the worst of all runs up to the first that differs.
        inputs: where the inputs came from.
        notes: what else a reader of the result must know.
        bodies: the branches and loop bodies of the partition.
        not_run: those of them that no inputs reached, so that nothing is known of them.
        doubts: what the inputs do not tell for another reason.
    """

    differences: tuple[Difference, ...]
    inputs: str
    notes: tuple[str, ...] = ()
    bodies: tuple[Body, ...] = ()
    not_run: tuple[Body, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """True where all outputs agree."""
        return all(difference.is_equal for difference in self.differences)

    @property
    def result(self) -> str:
        """ "equal", "different", or "equal, but" where outputs agree and `but` says what that does not tell."""
        if not self.is_equal:
            return DIFFERENT
        return EQUAL_BUT if self.but else EQUAL

    @property
    def but(self) -> tuple[str, ...]:
        """What equal outputs do not tell, a line each."""
        if not self.not_run:
            return self.doubts
        named = "; ".join(map(str, self.not_run[:_MOST_NAMED]))
        more = f"; and {len(self.not_run) - _MOST_NAMED} more" if len(self.not_run) > _MOST_NAMED else ""
        kinds = "branches" if all(body.operator == "If" for body in self.bodies) else "branches and loop bodies"
        return (f"{len(self.not_run)} of {len(self.bodies)} {kinds} did not run: {named}{more}", *self.doubts)

    @property
    def largest(self) -> float:
        """The largest |a - b| over all outputs."""
        return max((difference.largest for difference in self.differences), default=0.0)

    def __bool__(self) -> bool:
        return self.is_equal

    def __repr__(self) -> str:
        outputs = count_text(len(self.differences), "output")
        return f"<verification: {self.result}, {outputs}, largest difference {difference_text(self.largest)}>"

    def _repr_html_(self) -> str:
        return report_html(lambda page: page.print(str(self)))

    @property
    def verdict(self) -> str:
        """The answer in a line."""
        verdict = "equal to" if self.is_equal else "different from"
        but = ", but" if self.result == EQUAL_BUT else ""
        return f"{verdict} ONNX Runtime on the original (inputs: {self.inputs}){but}"

    def __str__(self) -> str:
        return "\n".join([self.verdict, *self.but, *map(describe, self.differences), *self.notes])

    def check(self, *, strict: bool = False) -> "Verification":
        """Itself, where all outputs agree.

        Args:
            strict: refuse "equal, but" as well.

        Raises:
            VerificationError: naming the outputs that differ, or what did not run.
        """
        wrong = [difference for difference in self.differences if not difference.is_equal]
        if wrong:
            raise VerificationError(
                f"{len(wrong)} of {len(self.differences)} outputs differ from the original",
                notes=tuple(describe(difference) for difference in wrong[:5]),
                do=find_first("differs"),
            )
        if strict and self.but:
            raise VerificationError(
                "the outputs are equal to those of the original, but not all was compared",
                notes=self.but,
                do="give inputs that reach it: "
                + spelled("--input NAME=VALUE, or --inputs FILE", 'inputs={"NAME": array}'),
            )
        return self


@dataclass(frozen=True)
class Bisection:
    """The first tensor that differs, and how many before it agree."""

    first: Difference | None
    compared: int
    node: str

    def __repr__(self) -> str:
        agree = count_text(self.compared, "tensor")
        if self.first is None:
            return f"<bisection: no tensor differs, {agree} compared>"
        return f"<bisection: {self.first.name} differs, after {agree} that agree>"

    def __str__(self) -> str:
        agree = f"{count_text(self.compared, 'tensor')} inside the model"
        if self.first is None:
            return f"no tensor differs: {agree} compared"
        found = f"  {describe(self.first)}\n  made by {self.node}"
        return f"the first tensor that differs, after {agree} that agree:\n{found}"

    def _repr_html_(self) -> str:
        return report_html(lambda page: page.print(str(self)))


def describe(difference: Difference) -> str:
    """One line about a difference."""
    if difference.note:
        return f"{difference.name}: {difference.note}"
    where = f" at {list(difference.where)}" if difference.where else ""
    return f"{difference.name}: largest difference {difference.largest:.3g}{where}, {describe_bound(difference)}"


def describe_bound(difference: Difference) -> str:
    """What is bounded, and by how much."""
    error, allowed = f"{difference.error:.3g}", f"{difference.allowed:.3g} allowed"
    match difference.measure:
        case "tolerance":
            return f"relative {error}, {allowed}"
        case "float64":
            return f"{error} from float64, {allowed}"
        case _:
            return allowed


def verify(
    executor: "Executor", original: Original, inputs: Arrays | None, *, tolerance: float | None, seed: int
) -> Verification:
    """Run both sides on the same inputs and compare all outputs.

    Args:
        executor: runs the partition.
        original: the whole model.
        inputs: what is given of the inputs; those that are left out are drawn, several times where the first draw does
            not reach all branches.
        tolerance: the largest |a - b| / (1 + |b|) that counts as equal; None: see `Yardstick`.
        seed: of the draws.

    Raises:
        IrparError: a side does not run.
    """
    rounds = _rounds(executor, original, inputs, seed)
    worst: dict[str, Difference] = {}
    notes: dict[str, None] = dict.fromkeys(original.notes)
    doubts: dict[str, None] = {rounds.doubt: None} if rounds.doubt else {}
    moved: dict[str, None] = {}
    for place in range(len(rounds.inputs)):
        judged = _verify_once(executor, original, rounds, place, tolerance)
        for name, found in judged.differences.items():
            worst[name] = max(worst.get(name, found), found, key=lambda difference: difference.severity)
        notes |= dict.fromkeys(judged.notes)
        doubts |= dict.fromkeys(judged.doubts)
        moved |= dict.fromkeys(judged.badly_conditioned)
        if not all(found.is_equal for found in judged.differences.values()):
            break  # Nothing more is to be told; and ranks in other processes may have ended.
    else:
        notes |= dict.fromkeys(_conditioning(worst, tuple(moved), rounds.drawn))
    return Verification(
        tuple(worst.values()),
        rounds.told,
        (*notes, *executor.notes),
        rounds.bodies,
        rounds.missed,
        tuple(doubts),
    )


def _conditioning(found: Mapping[str, Difference], moved: Sequence[str], drawn: Sequence[str]) -> Iterator[str]:
    """What is told of outputs of which much may be wrong unseen, and what inputs would tell more."""
    if not moved:
        return
    named = listed([f"{name} ({found[name].allowed:.2g} allowed)" for name in moved], _MOST_NAMED)
    what = f"these inputs are badly conditioned: rounding alone moves {named} far"
    if not drawn:
        yield what
        return
    given = spelled("--inputs FILE.npz", f'inputs={{"{drawn[0]}": array}}')
    yield f"{what}; real inputs may tell more, give them: {given}"


def _rounds(executor: "Executor", original: Original, inputs: Arrays | None, seed: int) -> Rounds:
    from irpar.runtime.specs import check_inputs, with_fixed

    given = with_fixed(executor.fixed, inputs or {})
    specs = executor.inputs
    # What is left out is drawn; what is given has to fit.
    known = {spec.name for spec in specs if spec.name in given}
    check_inputs([spec for spec in specs if spec.name in known or known != given.keys()], given)
    graphs = [part.graph for part in executor.parts]
    begun = {
        value.source_name: state.data.numpy()
        for value, state in graphs[0].states.items()
        if state.data is not None and value.source_name not in given
    }
    return rounds_for(specs, graphs, original, given, seed, begun)


def _verify_once(
    executor: "Executor", original: Original, rounds: Rounds, place: int, tolerance: float | None
) -> Judgement:
    inputs = rounds.inputs[place]
    from irpar.runtime.errors import ReplicaError

    # The original first: where it fails by itself, that is no fault of the partition.
    expected = rounds.expected if place == 0 and rounds.expected is not None else original.run(inputs)
    try:
        # Copies that other ranks hold count too.
        got = executor.run(inputs, check_replicas=True)
    except ReplicaError as error:
        return Judgement({error.value: misfit(error.value, error.what)})
    except IrparError as error:
        if place:
            error.notes += (f"run {place + 1} of {len(rounds.inputs)}, on {_told(inputs)}",)
        raise
    missing = {name: misfit(name, _MISSING) for name in expected if name not in got}
    present = {name: wanted for name, wanted in expected.items() if name not in missing}
    if tolerance is not None:
        judged = Judgement({name: compare(name, got[name], wanted, tolerance) for name, wanted in present.items()})
    else:
        judged = Yardstick(original, inputs).judge(got, present)
        if judged.doubts or not all(found.is_equal for found in judged.differences.values()):
            judged = _step_by_step(judged, executor, original, inputs)
        elif judged.badly_conditioned or _tells_little(present.values()):
            judged = _first_inside(judged, StepByStep(executor, original, inputs).walk())
    empty = {name: (f"{name}: {why}",) for name, wanted in expected.items() if (why := _emptiness(wanted))}
    found = {**dict.fromkeys(expected, misfit("", "")), **judged.differences, **missing}
    return replace(judged, differences=found, doubted={**judged.doubted, **empty})


def _step_by_step(judged: Judgement, executor: "Executor", original: Original, inputs: Arrays) -> Judgement:
    """Outputs that differ or are noise, judged by the tensors before them.

    The first tensor that is wrong counts as an output. Where none is, outputs may differ by what quantisers and their
    like decide otherwise.
    """
    wrong = {name: found for name, found in judged.differences.items() if not found.is_equal}
    steps = StepByStep(executor, original, inputs)
    walked = steps.walk()
    if walked.first is not None:
        if wrong:
            return judged
        return _first_inside(judged, walked)
    agree = f"{count_text(walked.compared, 'tensor')} inside the model {'agrees' if walked.compared == 1 else 'agree'}"
    doubted = {name: tuple(f"{doubt}; {agree}" for doubt in known) for name, known in judged.doubted.items()}
    decided, why = steps.decided([*wrong, *doubted]) if walked.is_whole else (Judgement({}), "")
    found = dict(judged.differences)
    for name, now in decided.differences.items():
        if now.is_equal and (name not in decided.doubted or name in decided.without_numbers):
            away = found[name].largest
            found[name] = replace(now, largest=away, relative=found[name].relative)
            by = f" by {difference_text(away)}" if isfinite(away) else ""
            doubted[name] = (
                f"{name}: differs{by}, since {why}; with what these give, the original gives the same, and {agree}",
            )
    return replace(judged, differences=found, doubted={**walked.doubted, **doubted})


def _first_inside(judged: Judgement, walked: Steps) -> Judgement:
    """With the first tensor inside the model that is wrong, if any, beside outputs that agree."""
    if walked.first is None:
        return judged
    note = walked.first.note or f"differs, made by {walked.node} inside the model"
    return replace(judged, differences={**judged.differences, walked.first.name: replace(walked.first, note=note)})


def _told(inputs: Mapping[str, Any]) -> str:
    """Inputs that decide what runs, in words: the small ones."""
    small = {name: np.asarray(given) for name, given in inputs.items() if not isinstance(given, (list, tuple))}
    told = [f"{name}={given.tolist()}" for name, given in small.items() if given.size <= 4 and given.dtype.kind != "O"]
    return ", ".join(told) or "random inputs"


def _tells_little(expected: Collection[Any]) -> bool:
    """Whether a fault inside may leave these outputs as they are: one of them is flat, or none has floats.

    What is clipped, saturated or compared with a far number is the same whatever is before it, and which of some
    numbers is the largest is for most small faults.
    """
    arrays = [entry for tree in expected for entry in (tree if isinstance(tree, (list, tuple)) else [tree])]
    arrays = [np.asarray(entry) for entry in arrays if entry is not None]
    is_real = any(dtype_of_numpy(array.dtype).is_float or array.dtype.kind == "c" for array in arrays)
    return not is_real or any(map(_is_flat, arrays))


def _is_flat(array: Array) -> bool:
    """Whether all elements are the same, or there are none; of a single one: whether it is 0."""
    if array.size < 2:
        return not array.any()
    return bool((array == array.reshape(-1)[0]).all())


def _emptiness(expected: Any) -> str:
    """Why an output tells nothing, whatever it is compared with."""
    if not isinstance(expected, np.ndarray) or expected.dtype.kind not in "fc":
        return ""
    if expected.size and np.isnan(expected).all():
        return "it is all NaN on these inputs, which tells nothing of it"
    if expected.size and np.isinf(expected).all():
        return "it is all infinite on these inputs, which tells nothing of it"
    return ""


def bisect(
    executor: "Executor", original: Original, inputs: Arrays | None, *, tolerance: float | None, seed: int
) -> Bisection:
    """Compare the intermediate values of both sides in the order of the original; stop at the first that differs."""
    rounds = _rounds(executor, original, inputs, seed)
    compared = 0
    for taken in rounds.inputs:
        found = _bisect_once(executor, original, taken, tolerance)
        if found.first is not None:
            return found
        compared = max(compared, found.compared)
    return Bisection(None, compared, "")


def _bisect_once(executor: "Executor", original: Original, inputs: Arrays, tolerance: float | None) -> Bisection:
    steps = StepByStep(executor, original, inputs)
    if tolerance is None:
        walked = steps.walk()
        found = Bisection(walked.first, walked.compared, walked.node)
    else:
        found = _first_beyond(tolerance, executor, original, inputs)
    # What other ranks hold of a tensor may differ where all that is gathered of it is right.
    first, node = (found.first, found.node) if found.first is not None else steps.first_copy()
    return Bisection(first, found.compared, node)


def _first_beyond(tolerance: float, executor: "Executor", original: Original, inputs: Arrays) -> Bisection:
    held = {value.source_name for value in executor.parts[0].graph.values() if tensor_type(value.type)}
    producers = {value.source_name: node.label for node in original.module.graph for value in node.results}
    computed = original.computed()
    names = [name for name in producers if name in held and name in computed]
    compared = 0
    for start in range(0, len(names), TENSORS_AT_ONCE):
        batch = names[start : start + TENSORS_AT_ONCE]
        # With fusions off every intermediate value exists.
        plain = original.run(inputs, fetch=batch, optimized=False)
        got = executor.run(inputs, fetch=batch)
        for name in batch:
            found = compare(name, got[name], plain[name], tolerance)
            if not found.is_equal:
                return Bisection(found, compared, producers[name])
            compared += 1
    return Bisection(None, compared, "")
