"""The searches together: never worse than one of them, and how far from the optimum at most."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import product
from typing import Literal

import numpy as np

from irpar.asked import spelled
from irpar.errors import IrparError
from irpar.units import bytes_text, gigabytes_option

from .cut import cheapest
from .filling import filled, parts
from .graph import Assignment, PlacementGraph
from .packing import pack
from .rounding import Rounded, round_relaxations
from .simulation import Outcome, Simulator

Method = Literal["auto", "linear"]
"""All together; and without CP-SAT."""
FEW = 80
"""Units of a graph of which each is decided for itself; of larger ones those go together that are placed alike."""
MOST_GROUPS = 400
"""That CP-SAT decides on, where units go together."""
_FEW_ASSIGNMENTS = 12
"""That fit, the cheapest ones, are filled up."""
_MOST_COMPARED = 32
"""Assignments, those that hold nearest to the limit, say which units go together."""
_LINEAR_SHARE, _FILL_SHARE = 0.75, 0.4
"""Of the time goes to linear programs, and of what is left to filling up."""
_LATE_SHARE = 1.0
"""So much of the time more is spent on linear programs where these have led to nothing that fits."""


class NoRoomError(IrparError):
    """Nothing fits.

    Attributes:
        least: the bytes that fit at the least.
    """

    def __init__(self, limit: int, least: int, where: str = "") -> None:
        self.least = least
        room, same = gigabytes_option(least), gigabytes_option(limit)
        more = spelled(f"--device-memory-gb {room}", f"limit-gb={room}")
        store = spelled(f'--store "auto, limit-gb={same}"', f"store{{auto=true, limit-gb={same}}}")
        super().__init__(
            f"wherever nodes run, the device holds more than {limit:,} bytes ({bytes_text(limit)})",
            where=where,
            notes=(f"with all on the host that can be there it holds {least:,} bytes ({bytes_text(least)})",),
            do=f"give {more} or more, pin less to the device, or let things come when they are read: {store}",
        )


@dataclass(frozen=True)
class Placement:
    """An assignment.

    Attributes:
        on_device: of each unit whether it is on the device.
        outcome: what that comes to.
        bound: nothing that fits costs less.
        plain: the cheapest where there is no limit.
        method: what found it: cut, linear programs, cp-sat, or least memory where only that was tried.
    """

    on_device: Assignment
    outcome: Outcome
    bound: int
    plain: Assignment
    method: str

    @property
    def proven(self) -> bool:
        """Whether nothing that fits costs less."""
        return self.bound >= self.outcome.cost

    @property
    def gap(self) -> float:
        """The share of the cost that something better could save at most."""
        return max(0.0, 1 - self.bound / self.outcome.cost) if self.outcome.cost else 0.0


def solve(graph: PlacementGraph, limit: int | None = None, method: Method = "auto", seconds: float = 5) -> Placement:
    """The cheapest assignment as far as time allows; the optimum where it keeps the limit by itself, or there is none.

    Args:
        graph: it.
        limit: bytes that the device may hold; None: as many as there are.
        method: which searches.
        seconds: of search.

    Raises:
        NoRoomError: nothing fits.
    """
    end = time.monotonic() + seconds
    simulator = Simulator(graph)
    plain = simulator.tidied(cheapest(graph))
    outcome = simulator.outcome(plain)
    if limit is None or outcome.peak <= limit:
        return Placement(plain, outcome, outcome.cost, plain, "cut")
    smallest = simulator.smallest
    least = simulator.outcome(smallest).peak
    if least > limit:
        raise NoRoomError(limit, least)
    wanted, too_large = plain, simulator.least_held > limit
    if too_large.any():
        graph = graph.pinned([False if never else None for never in too_large.tolist()])
        wanted = simulator.tidied(cheapest(graph))
        outcome = simulator.outcome(wanted)
        if outcome.peak <= limit:
            return Placement(wanted, outcome, outcome.cost, plain, "cut")
    now = time.monotonic()
    rounded = round_relaxations(
        graph, limit, simulator, wanted, now + (end - now) * _LINEAR_SHARE, end + seconds * _LATE_SHARE
    )
    found = replace(_filled(limit, simulator, rounded, wanted, end), plain=plain)
    if method == "auto" and found.gap:
        return _packed(graph, limit, simulator, found, rounded, end)
    return found


def _filled(limit: int, simulator: Simulator, rounded: Rounded, plain: Assignment, end: float) -> Placement:
    """The best of what linear programs led to, filled up."""
    outcomes = rounded.outcomes | {each: simulator.outcome(each) for each in (simulator.smallest, plain)}
    fitting = sorted(
        (each for each, then in outcomes.items() if then.peak <= limit), key=lambda one: outcomes[one].cost
    )
    above = [each for each, then in outcomes.items() if then.peak > limit]
    best, outcome = fitting[0], outcomes[fitting[0]]
    now = time.monotonic()
    until = now + (end - now) * _FILL_SHARE
    pairs = product(fitting[:_FEW_ASSIGNMENTS], above)
    for base, other in sorted(pairs, key=lambda pair: _between(outcomes[pair[0]], outcomes[pair[1]], limit)):
        both = tuple(one and two for one, two in zip(base, other, strict=True))
        for start in dict.fromkeys((both, base)):
            trial, then = filled(simulator, start, other, limit, until)
            if then.cost < outcome.cost:
                best, outcome = trial, then
        if time.monotonic() > until:
            break
    best = simulator.tidied(best)
    outcome = simulator.outcome(best)
    return Placement(best, outcome, min(outcome.cost, rounded.bound), plain, "linear programs")


def _between(fits: Outcome, above: Outcome, limit: int) -> float:
    """What a mixture of one that fits and one that does not would cost that just fits."""
    share = (limit - fits.peak) / max(1, above.peak - fits.peak)
    return fits.cost + share * (above.cost - fits.cost)


def _packed(
    graph: PlacementGraph, limit: int, simulator: Simulator, known: Placement, rounded: Rounded, end: float
) -> Placement:
    """What CP-SAT makes of it; what is known where that is no better."""
    is_whole = len(graph.units) <= FEW
    outcomes = rounded.outcomes
    others = nsmallest(_MOST_COMPARED, outcomes, key=lambda each: abs(outcomes[each].peak - limit))
    numbers = list(range(len(graph.units))) if is_whole else _groups(simulator, (known.on_device, *others))
    count = max(numbers) + 1
    small = graph if is_whole else graph.merged(numbers, count)
    begin = dict(zip(numbers, known.on_device, strict=True))
    packed = pack(
        small,
        limit,
        end - time.monotonic(),
        tuple(begin[number] for number in range(count)),
        None if is_whole else (*rounded.times, known.outcome.at),
    )
    bound = max(known.bound, packed.bound) if is_whole else known.bound
    best = known
    if packed.assignment is not None:
        chosen = simulator.tidied(tuple(packed.assignment[number] for number in numbers))
        outcome = simulator.outcome(chosen)
        if outcome.cost < known.outcome.cost:
            best = Placement(chosen, outcome, bound, known.plain, "cp-sat")
        if is_whole and packed.proven:
            bound = best.outcome.cost
    return replace(best, bound=min(bound, best.outcome.cost))


def _groups(simulator: Simulator, assignments: Sequence[Assignment]) -> list[int]:
    """Of each unit the number of those that it goes with: units that assignments place alike, and that values connect.

    What is the same in all goes together, connected or not. The first assignment counts, and as many of those behind it
    as leave few groups.
    """
    best = [0] * len(assignments[0])
    for count in range(1, len(assignments) + 1):
        there = np.array(assignments[:count], bool)
        _, labels = np.unique(there, axis=1, return_inverse=True)
        always, never = there.all(axis=0), ~there.any(axis=0)
        groups = parts(simulator, np.where(always | never, 0, labels.reshape(-1) + 1))
        if count > 2 and len(groups) > MOST_GROUPS:
            break
        best = always.astype(int).tolist()
        for number, group in enumerate(groups):
            for unit in group:
                best[unit] = number + 2
    # Numbers are dense even where nothing is always on one side.
    dense = {number: place for place, number in enumerate(dict.fromkeys(best))}
    return [dense[number] for number in best]
