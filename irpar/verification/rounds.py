"""Which inputs a partition is verified on: such as reach both branches of an If, and loops of 0, 1 and more trips."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from irpar.ir import Graph
from irpar.runtime.layout import TensorSpec
from irpar.sharding import IrparError

from .comparison import Arrays
from .inputs import random_inputs
from .original import Original, VerificationError
from .reached import Body, Control, Counts, ProfileError

CANDIDATES = 48
"""How many draws are tried for what the first does not reach."""
MOST_RUNS = 8

Goal = tuple[int, int]
"""A body, and how often it is to run: 0, 1 or 2 for more; any number of times is 1 for a branch."""


@dataclass(frozen=True)
class Rounds:
    """Inputs, one set for each run of both sides.

    Attributes:
        inputs: the sets.
        told: where they came from.
        expected: the results of the original on the first, where it was run to see whether it takes them.
        bodies: the branches and loop bodies that the partition has.
        missed: those of them that none of the inputs reach.
        doubt: why it cannot be told which of them ran, where that is so.
        drawn: names of the inputs that are not given.
    """

    inputs: tuple[Arrays, ...]
    told: str
    expected: Arrays | None = None
    bodies: tuple[Body, ...] = ()
    missed: tuple[Body, ...] = ()
    doubt: str = ""
    drawn: tuple[str, ...] = ()


def rounds_for(
    specs: Sequence[TensorSpec],
    graphs: Sequence[Graph],
    original: Original,
    given: Mapping[str, Any],
    seed: int,
    begun: Mapping[str, Any] | None = None,
) -> Rounds:
    """The inputs to verify on.

    Args:
        specs: what the partition takes.
        graphs: its programs.
        original: the model that it was made of.
        given: inputs that stay as they are; the others are drawn.
        seed: of these.
        begun: state that is not given, and has numbers to begin with. What begins as zeros is drawn: zeros tell little.

    Raises:
        IrparError: an input cannot be drawn, or the original does not run on any.
    """
    control = Control(original, graphs)
    known = {**(begun or {}), **given}
    drawn = [spec for spec in specs if spec.name not in known]

    def draw(variant: int = 0, narrow: bool = False) -> dict[str, Any]:
        return {**random_inputs(drawn, original.module.graph, seed, variant=variant, narrow=narrow), **known}

    if not drawn:
        chosen, told = Rounds((known,), "given"), "given" if given else "none"
    else:
        chosen = replace(_first(draw, original), drawn=tuple(spec.name for spec in drawn))
        told = f"random, seed {seed}" + (f"; {', '.join(sorted(given))} given" if given else "")
    if not control.bodies:
        return replace(chosen, told=told)
    try:
        counts = control.counts(chosen.inputs)
        if None in counts:
            raise ProfileError("the model's control does not run by itself")
        more = _reaching(control, counts, draw) if drawn else []
    except ProfileError as error:
        doubt = f"which branches and loop bodies ran cannot be told: {error.what}"
        return replace(chosen, told=told, bodies=control.bodies, doubt=doubt)
    if drawn:
        chosen = replace(chosen, inputs=(*chosen.inputs, *(inputs for inputs, _ in more)))
        counts += [count for _, count in more]
        told += f"; {len(chosen.inputs)} runs" if more else ""
    ran = [any(count is not None and count[place] for count in counts) for place in range(len(control.bodies))]
    missed = tuple(body for body, is_run in zip(control.bodies, ran, strict=True) if not is_run)
    return replace(chosen, told=told, bodies=control.bodies, missed=missed)


def _first(draw: Callable[..., Arrays], original: Original) -> Rounds:
    """A draw that the original takes: where it refuses wide integers, perhaps narrow ones do."""
    try:
        inputs = draw()
        return Rounds((inputs,), "", original.run(inputs))
    except VerificationError:
        inputs = draw(narrow=True)
        return Rounds((inputs,), "", original.run(inputs))


def _reaching(
    control: Control, counts: Sequence[Counts | None], draw: Callable[..., Arrays]
) -> list[tuple[Arrays, Counts]]:
    """Further draws that reach more, few of them."""
    wanted = _wanted(control) - _reached(control, counts)
    if not wanted:
        return []
    tried = list(_drawn(draw))
    found = [(inputs, count) for inputs, count in zip(tried, control.counts(tried), strict=True) if count is not None]
    chosen: list[tuple[Arrays, Counts]] = []
    while wanted and found and len(chosen) < MOST_RUNS - 1:
        best = max(found, key=lambda entry: len(wanted & _reached(control, [entry[1]])))
        reached = wanted & _reached(control, [best[1]])
        if not reached:
            break
        chosen.append(best)
        wanted -= reached
    return chosen


def _drawn(draw: Callable[..., Arrays]) -> Iterator[Arrays]:
    for variant in range(1, CANDIDATES + 1):
        try:
            yield draw(variant)
        except IrparError:
            return


def _wanted(control: Control) -> set[Goal]:
    """What inputs may decide: whether a branch runs, whether a loop makes 0, 1 or more trips."""
    goals = set()
    for place, body in enumerate(control.bodies):
        if body.follows_inputs:
            goals |= {(place, times) for times in ((0, 1, 2) if body.operator == "Loop" else (1,))}
    return goals


def _reached(control: Control, counts: Sequence[Counts | None]) -> set[Goal]:
    goals = set()
    for count in counts:
        for place, (body, times) in enumerate(zip(control.bodies, count or (), strict=False)):
            goals.add((place, min(times, 2 if body.operator == "Loop" else 1)))
    return goals
