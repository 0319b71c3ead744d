"""A training graph as a chain of blocks, and the dynamic program for it.

rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly & Shilova, Optimal checkpointing for heterogeneous chains, arXiv
1911.13214) chooses for each block of a chain to keep only its input or all that its backward needs. Here a block may be
kept in several ways, from a sweep of its saved sets, and so may a few blocks that follow each other as one; compare
Rockmate (Zhao, Le Hellard, Eyraud-Dubois, Gusak & Beaumont, arXiv 2307.01236). Optimal among persistent schedules of
these choices, to the memory slots: what is kept stays until its block has run backward.

    forward to k without keeping, keep the input of k, [k..j] whole, then [i..k-1] whole       cost of i..k-1 twice
    forward of a block keeping as an option says, [i+1..j] whole, backward of the block        cost of the option
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from .saved_sets import on_demand, sweep
from .simulation import canonical, held_bytes, simulate
from .training_graph import TrainingGraph, TrainingNode

SLOTS = 500
"""Of memory, in which the dynamic program counts."""
SPAN = 3
"""Blocks that may be kept as one."""
OPTIONS = 12
"""Sizes of the saved sets that are tried for a span."""
MOST_SCHEDULES = 40
"""Of the dynamic program that are simulated."""
_SHARED_SPAN, _SHARED_BYTES = 1 / 3, 0.05
"""Of the nodes of the forward pass, and of the bytes of all their results: what is read so far on, and is so small."""
_HEADROOM = 1.3
"""What the dynamic program may plan with beyond the budget: it does not know of all that goes earlier than planned."""


@dataclass(frozen=True)
class Block:
    """A piece of the forward pass of which only its last result goes on, and its part of the backward pass.

    Attributes:
        forward, backward: the nodes, in order.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def chain_of(graph: TrainingGraph) -> list[Block]:
    """The blocks of a graph, as many as there are; one where no single result crosses."""
    if not 0 < graph.backward < len(graph.nodes):
        return []
    held = _held_anyway(graph)
    ends = list(_ends(graph, held))
    starts = [0, *(end + 1 for end in ends[:-1])]
    bounds = list(zip(starts, ends, strict=True))
    block_of = [block for block, (start, end) in enumerate(bounds) for _ in range(start, end + 1)]
    backward: list[list[int]] = [[] for _ in ends]
    now = len(ends) - 1
    for place in range(graph.backward, len(graph.nodes)):
        read = [operand for operand in graph.operands[place] if operand < graph.backward and operand not in held]
        if read:
            # The end of a block is also what the next one reads, so that it may be that one's.
            now = min(now, max(block_of[operand] + (operand == ends[block_of[operand]]) for operand in read))
        backward[now].append(place)
    return [
        Block(tuple(range(start, end + 1)), tuple(behind))
        for (start, end), behind in zip(bounds, backward, strict=True)
    ]


def _held_anyway(graph: TrainingGraph) -> set[int]:
    """What of the forward pass may run only once, or is small and read almost everywhere, such as a mask."""
    first = graph.backward
    total = sum(graph.nodes[place].mem for place in range(first))
    found = set[int]()
    for place in range(first):
        last = max((reader for reader in graph.readers[place] if reader < first), default=-1)
        is_shared = last - place > first * _SHARED_SPAN and graph.nodes[place].mem < total * _SHARED_BYTES
        if is_shared or not graph.may_repeat(place):
            found.add(place)
    return found


def _ends(graph: TrainingGraph, held: Collection[int]) -> Iterator[int]:
    """The nodes after which the forward pass reads of all before only their results, and its last one."""
    first = graph.backward
    reach = -1
    for place in range(first):
        if place in held:
            continue
        if reach <= place < first - 1:
            yield place
        reach = max([reach, *(reader for reader in graph.readers[place] if reader < first)])
    yield first - 1


@dataclass(frozen=True)
class _Option:
    """A way to run some blocks backward.

    Attributes:
        saved: bytes that are kept for it, with what the next block reads.
        peak: bytes that running forward and backward holds.
        cost: of what is recomputed.
        backward: the backward pass, with what is recomputed, as numbers in the span.
    """

    saved: int
    peak: int
    cost: int
    backward: tuple[int, ...]


@dataclass(frozen=True)
class _Span:
    """Blocks that follow each other.

    Attributes:
        cost: of running them forward.
        peak: bytes that this holds when nothing is kept.
        end: bytes of what the next block reads.
        options: ways to keep them.
    """

    cost: int
    peak: int
    end: int
    options: tuple[_Option, ...]


@dataclass(frozen=True)
class _Table:
    """Of some blocks, for each number of slots of memory.

    Attributes:
        costs: the least; infinite where nothing fits.
        chosen: which of the moves that takes.
        moves: after how many blocks the rest begins, and which option of these is taken; -1: only the last result is
            kept, and they run again.
    """

    costs: np.ndarray
    chosen: np.ndarray
    moves: list[tuple[int, int]]


class Chain:
    """The dynamic program over the blocks of a graph; where time is short, of single ones and of few ways to keep them.

    Args:
        graph: it.
        end: when to stop, by `time.monotonic`.
    """

    def __init__(self, graph: TrainingGraph, end: float = inf) -> None:
        self.graph = graph
        self.end = end
        self.blocks = chain_of(graph)
        self.unit = 1
        self._spans: dict[object, _Span] = {}
        count = len(self.blocks)
        self.longest = 1
        self.span = {(start, start + 1): self._span(start, start + 1) for start in range(count)}
        while self.longest < SPAN and time.monotonic() < end:
            length = self.longest + 1
            longer = {(start, start + length): self._span(start, start + length) for start in range(count - length + 1)}
            self.span |= longer
            self.longest = length
        kinds: dict[tuple[int, ...], int] = {}
        # Blocks are alike where all that begins with them is: then so are the choices for what they begin.
        alike = [tuple(id(self.span[block, stop]) for stop in self._stops(block, count)) for block in range(count)]
        self.kinds = [kinds.setdefault(each, len(kinds)) for each in alike]
        self.tables: dict[tuple[int, int], _Table] = {}

    def _stops(self, start: int, stop: int) -> range:
        """Behind which blocks a span may end that begins with one."""
        return range(start + 1, min(start + self.longest, stop) + 1)

    # -- what blocks are -------------------------------------------------------------------------------------------

    def _places(self, start: int, stop: int) -> tuple[list[int], list[int], list[int]]:
        """Of a span: its forward nodes, the results of the backward pass that it reads, its backward nodes."""
        forward = [place for block in self.blocks[start:stop] for place in block.forward]
        backward = [place for block in reversed(self.blocks[start:stop]) for place in block.backward]
        own = set(backward)
        outside = sorted(
            {
                operand
                for place in backward
                for operand in self.graph.operands[place]
                if operand >= self.graph.backward and operand not in own
            }
        )
        return forward, outside, backward

    def _signature(self, start: int, stop: int) -> tuple[object, ...]:
        """What equal spans have in common: nodes, and what they read, counted from the span."""
        forward, outside, backward = self._places(start, stop)
        number = {place: index for index, place in enumerate((*forward, *outside, *backward))}
        nodes = self.graph.nodes
        facts = [
            (
                _facts_of(nodes[place]),
                tuple(number.get(operand, -1) for operand in self.graph.operands[place]),
                bool(self.graph.readers[place]) and self.graph.readers[place][-1] not in number,
            )
            for place in number
        ]
        return (*facts, len(forward), len(outside), stop == len(self.blocks))

    def _span(self, start: int, stop: int) -> _Span:
        key = self._signature(start, stop)
        if key not in self._spans:
            self._spans[key] = self._made_span(start, stop)
        return self._spans[key]

    def _made_span(self, start: int, stop: int) -> _Span:
        forward, outside, backward = self._places(start, stop)
        part = self._alone(forward, outside, backward)
        is_last = stop == len(self.blocks)
        cost = sum(self.graph.nodes[place].cost for place in forward)
        plain = self.graph.part(forward)
        end = 0 if is_last else plain.nodes[-1].mem
        peak = max(held_bytes(plain, range(len(forward))))
        given = () if is_last else (len(forward) - 1,)
        options = [self._option(part, saved, len(forward)) for saved in sweep(part, given, OPTIONS, self.end)]
        return _Span(cost, peak, end, tuple(_undominated(options)))

    def _alone(self, forward: list[int], outside: list[int], backward: list[int]) -> TrainingGraph:
        """A span as a graph: what it reads of the backward pass is there when its own begins."""
        part = self.graph.part([*forward, *outside, *backward])
        inside = set(backward)
        nodes = list(part.nodes)
        for index in range(len(forward), len(forward) + len(outside)):
            nodes[index] = replace(nodes[index], cost=0, work=0, bwd=True, norec=True)
        for index, place in enumerate(backward, len(forward) + len(outside)):
            is_read = any(reader not in inside for reader in self.graph.readers[place])
            nodes[index] = replace(nodes[index], bwd=True, keep=is_read)
        for index in range(len(forward)):
            nodes[index] = replace(nodes[index], bwd=False)
        return TrainingGraph(tuple(nodes), part.edges)

    def _option(self, part: TrainingGraph, saved: frozenset[int], first: int) -> _Option:
        schedule = on_demand(part, saved)
        backward = schedule[first:]
        kept = {place for place in range(first) if place in saved or not part.may_repeat(place)}
        return _Option(
            saved=sum(part.nodes[place].mem for place in kept),
            peak=max(held_bytes(part, schedule)),
            cost=sum(part.nodes[place].cost for place in backward if place < first),
            backward=tuple(backward),
        )

    # -- the dynamic program ---------------------------------------------------------------------------------------

    def best(self, budget: int) -> np.ndarray:
        """The least cost of all blocks for each number of slots of memory, up to a budget and a little more.

        Infinite where there was no time to find it.
        """
        self.unit = max(1, int((budget - self.graph.fixed_mem) * _HEADROOM / SLOTS))
        self.tables = {}
        count = len(self.blocks)
        known: dict[tuple[int, ...], _Table] = {}
        for length in range(1, count + 1):
            if time.monotonic() > self.end:
                return np.full(SLOTS + 1, np.inf)
            for start in range(count - length + 1):
                key = tuple(self.kinds[start : start + length])
                if key not in known:
                    known[key] = self._table(start, start + length)
                self.tables[start, start + length] = known[key]
        return self.tables[0, count].costs

    def _table(self, start: int, stop: int) -> _Table:
        """Costs and choices of the blocks from `start` before `stop`, for each number of slots."""
        ends = [(end, self.span[start, end]) for end in self._stops(start, stop)]
        rows = np.full((sum(len(span.options) for _, span in ends) + stop - start - 1, SLOTS + 1), np.inf)
        moves: list[tuple[int, int]] = []
        for end, span in ends:
            for number, option in enumerate(span.options):
                self._fill(rows[len(moves)], span.cost + option.cost, option.peak, (end, stop), option.saved)
                moves.append((end - start, number))
        cost, peak = 0, 0
        for end in range(start + 1, stop):
            span = self.span[end - 1, end]
            before = self.span[end - 2, end - 1].end if end - 1 > start else 0
            cost, peak = cost + span.cost, max(peak, before + span.peak)
            again = self.tables[start, end].costs
            self._fill(rows[len(moves)], cost, peak, (end, stop), span.end, again)
            moves.append((end - start, -1))
        chosen = rows.argmin(axis=0)
        return _Table(np.take_along_axis(rows, chosen[None], axis=0)[0], chosen, moves)

    def _fill(
        self, row: np.ndarray, cost: int, peak: int, rest: tuple[int, int], kept: int, again: np.ndarray | None = None
    ) -> None:
        """Write the cost of a choice for each number of slots: infinite where the memory is less than its peak.

        Args:
            row: where to; infinite before.
            cost: of the choice itself.
            peak: that it holds.
            rest: the blocks that follow.
            kept: bytes that are held while they run.
            again: the cost of what runs once more.
        """
        least, shift = self._slots(peak), 0
        if rest[0] < rest[1]:
            shift = self._slots(kept)
            least = max(least, shift)
        if least > SLOTS:
            return
        row[least:] = cost if again is None else again[least:] + cost
        if rest[0] < rest[1]:
            row[least:] += self.tables[rest].costs[least - shift : SLOTS + 1 - shift]

    def _slots(self, nbytes: int) -> int:
        return -(-nbytes // self.unit)

    # -- schedules -------------------------------------------------------------------------------------------------

    def schedule(self, slots: int) -> list[int]:
        """What was chosen for so many slots."""
        listed: list[int] = []
        pending: list[tuple[int, int, int] | list[int]] = [(0, len(self.blocks), slots)]
        while pending:
            item = pending.pop()
            if isinstance(item, list):
                listed += item
                continue
            start, stop, slots = item
            table = self.tables[start, stop]
            length, number = table.moves[table.chosen[slots]]
            end = start + length
            listed += [place for block in self.blocks[start:end] for place in block.forward]
            if number < 0:
                pending.append((start, end, slots))
                kept = self.span[end - 1, end].end
            else:
                pending.append(self._backward(start, end, number))
                kept = self.span[start, end].options[number].saved
            if end < stop:
                pending.append((end, stop, slots - self._slots(kept)))
        return canonical(self.graph, listed)

    def _backward(self, start: int, stop: int, number: int) -> list[int]:
        """The backward pass of a span by one of its options."""
        forward, outside, backward = self._places(start, stop)
        places = [*forward, *outside, *backward]
        skipped = range(len(forward), len(forward) + len(outside))
        return [places[index] for index in self.span[start, stop].options[number].backward if index not in skipped]


def _facts_of(node: TrainingNode) -> tuple[object, ...]:
    """What equal nodes have in common."""
    return (node.cost, node.mem, node.bwd, node.keep, node.norec, node.work, node.joined)


def _undominated(options: Sequence[_Option]) -> Iterator[_Option]:
    """Those beside which no other is better in all."""
    for option in options:
        mine = (option.saved, option.peak, option.cost)
        others = ((other.saved, other.peak, other.cost) for other in options)
        if not any(its != mine and all(a <= b for a, b in zip(its, mine, strict=True)) for its in others):
            yield option


def chain_schedules(chain: Chain, budget: int) -> list[list[int]]:
    """Schedules that may fit a budget, or nearly do.

    It plans with memory that no schedule holds exactly so: schedules for several numbers of slots are simulated.
    """
    costs = chain.best(budget) if chain.blocks else np.full(1, np.inf)
    # The fewest slots for each cost.
    slots = [place for place in np.flatnonzero(np.isfinite(costs)) if not place or costs[place] < costs[place - 1]]
    made: dict[int, list[int]] = {}

    def fits(index: int) -> bool:
        made[index] = chain.schedule(int(slots[index]))
        return simulate(chain.graph, made[index]).peak <= budget

    low, high = 0, len(slots) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    for index in sorted(range(len(slots)), key=lambda index: abs(index - low))[:MOST_SCHEDULES]:
        if index not in made and time.monotonic() <= chain.end:
            made[index] = chain.schedule(int(slots[index]))
    return list(made.values())
