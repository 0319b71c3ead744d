"""What a schedule holds and costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .training_graph import RecomputeError, TrainingGraph

Schedule = Sequence[int]
"""Nodes in the order in which they run; one that is there again is recomputed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comes of a schedule.

    Attributes:
        peak: the most bytes that are held at once, the fixed ones included.
        cost: of all that runs.
    """

    peak: int
    cost: int


def simulate(graph: TrainingGraph, schedule: Schedule) -> Outcome:
    """Run a schedule: while a node runs, its operands and its result are held; a result goes after its last use.

    A node reads the result that was computed last. f0 f1 f2 f0 b: what f0 gave first goes after f1 has read it.
    """
    peak = max(held_bytes(graph, schedule), default=graph.fixed_mem)
    return Outcome(peak, sum(graph.nodes[place].cost for place in schedule))


def held_bytes(graph: TrainingGraph, schedule: Schedule) -> Iterator[int]:
    """The bytes that are held while each entry of a schedule runs."""
    nodes = graph.nodes
    ends: list[list[int]] = [[] for _ in range(len(schedule) + 1)]
    for entry, end in enumerate(last_uses(graph, schedule)):
        ends[end].append(nodes[schedule[entry]].mem)
    held = graph.fixed_mem
    for entry, place in enumerate(schedule):
        held += nodes[place].mem
        yield held + nodes[place].work
        held -= sum(ends[entry])


def lower_bound(graph: TrainingGraph) -> int:
    """Bytes that any schedule holds: of some node its operands, its result and what it works in."""
    return graph.fixed_mem + max(
        (
            node.mem + node.work + sum(graph.nodes[operand].mem for operand in graph.operands[place])
            for place, node in enumerate(graph.nodes)
        ),
        default=0,
    )


def last_uses(graph: TrainingGraph, schedule: Schedule) -> list[int]:
    """For each entry of a schedule the last one that reads its result: itself where none does.

    Raises:
        RecomputeError: an entry reads what has not been computed, a node that may run once runs again, or one runs
            without what it is joined to.
    """
    last = list(range(len(schedule)))
    newest: dict[int, int] = {}
    for entry, place in enumerate(schedule):
        for operand in graph.operands[place]:
            if operand not in newest:
                raise RecomputeError(
                    f"{graph.nodes[place].name} runs before {graph.nodes[operand].name}, which it reads"
                )
            last[newest[operand]] = entry
        if place in newest and not graph.may_repeat(place):
            raise RecomputeError(f"{graph.nodes[place].name} may run only once")
        if graph.nodes[place].joined and (not entry or schedule[entry - 1] != place - 1):
            raise RecomputeError(f"{graph.nodes[place].name} runs without the node before it, whose result it is")
        newest[place] = entry
    for place, entry in newest.items():
        if graph.nodes[place].keep:
            last[entry] = len(schedule)
    return last


def canonical(graph: TrainingGraph, schedule: Schedule) -> list[int]:
    """The same repetitions before each new node, each once there and in the order of the graph.

    Without those whose results nobody reads, and those of nodes that may run only once.
    """
    stages: list[set[int]] = [set()]
    seen: set[int] = set()
    for place in schedule:
        if place in seen:
            stages[-1].update(graph.together[place] if graph.may_repeat(place) else ())
        else:
            seen.add(place)
            stages.append(set())
            if graph.nodes[place].joined:  # Nothing runs between the results of a node.
                stages[-2:] = reversed(stages[-2:])
    order = iter(dict.fromkeys(schedule))
    listed: list[int] = []
    for stage in stages[:-1]:
        listed += sorted(stage)
        listed.append(next(order))
    return without_idle(graph, listed)


def without_idle(graph: TrainingGraph, schedule: Schedule) -> list[int]:
    """A schedule without the repetitions whose results nobody reads."""
    kept = list(schedule)
    while True:
        last = last_uses(graph, kept)
        first = set[int]()
        found: list[int] = []
        for entry, place in enumerate(kept):
            results = graph.together[place]
            begin = entry - results.index(place)
            end = begin + len(results)
            if place not in first or any(use >= end for use in last[begin:end]):
                found.append(place)
            first.add(place)
        if len(found) == len(kept):
            return kept
        kept = found
