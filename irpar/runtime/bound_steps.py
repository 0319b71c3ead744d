"""Steps on small tensors, bound to memory that stays from run to run: while they run nothing is decided or found.

A step of the tape looks up what it reads, compares it with what its session was bound to, copies it, and keeps what it
made; between tiny nodes that takes several times as long as the nodes. What these take and give has known sizes, so
where it lies is found once: a segment reads what a collective wrote, where that wrote it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import length_hint
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np

from irpar.ir import Value
from irpar.sharding import Mesh

from .engines.arena import taken
from .engines.base import BoundWork
from .errors import RunError
from .groups import Array, Call, Collective, Group
from .groups.base import RepeatingGroup
from .groups.results import EXECUTED
from .log import CollectiveLog, Entry
from .prepared import Prepared, PreparedPart
from .rank_state import RankState
from .small_tensors import are_small
from .tape import BoundStep, CommunicateStep, ComputeStep, Places, Step

UNBOUND_RUNS = 3
"""Runs before steps are bound: it is known then how long segments take, and which give other sizes than they say."""
_FEWEST = 3
"""Steps one after the other that are bound: what they read from before is copied, and what is read after them."""
_MOST_BYTES = 32 << 20
"""Of what the steps of a run make that are bound, on all ranks of a process; where it would be more, none are."""
_BINDING_BYTES = 4096
"""What a segment takes besides, whose binding takes 40 us."""

Column = tuple[Step, ...]
"""A step of each rank of the process, in order of ranks."""
Parts = Mapping[int, PreparedPart]
"""The program of each rank of the process, in order of ranks."""


class BoundSteps:
    """Steps that all ranks of the process take together, one after the other.

    Args:
        columns: the steps, in order.
        parts: the program of each rank.
        mesh: of all ranks.
        group: what they meet in.

    Attributes:
        failed: once `run` has raised an error: the rank that failed, or the first of those that met, and the step.
    """

    def __init__(self, columns: Sequence[Column], parts: Parts, mesh: Mesh, group: Group) -> None:
        self.failed: tuple[int, Step] | None = None
        self._mesh, self._group = mesh, group
        self._ranks = {rank: _Memory(part) for rank, part in parts.items()}
        self._works: list[Callable[[], object]] = []
        self._of: list[tuple[int, Step]] = []
        self._bound: list[BoundWork | None] = []
        self._entries: list[Entry] = []
        self._noted: list[int] = []
        for column in columns:
            self._bind(dict(zip(parts, column, strict=True)))
        for memory in self._ranks.values():
            memory.end()

    def run(self, states: Sequence[RankState], log: CollectiveLog) -> bool:
        """Take the steps; False where a rank holds something of another size than its program says: none is taken.

        Args:
            states: of all ranks of the process, which have come here.
            log: where the collectives are noted.

        Raises:
            NodeError: a node failed.
            RunError: see `Group.exchange`.
        """
        self.failed = None
        held = [(state, self._ranks[state.rank]) for state in states]
        if not all(state.copy_out(memory.taken) for state, memory in held):
            return False
        works = iter(self._works)
        try:
            for work in works:
                work()
        except BaseException as error:
            place = len(self._works) - length_hint(works) - 1
            self.failed = self._of[place]
            log.add_again(self._entries[: self._noted[place]])
            bound = self._bound[place]
            if bound is None or not isinstance(error, Exception):
                raise
            raise bound.failure(error) from error
        log.add_again(self._entries)
        for state, memory in held:
            state.copy_in(memory.left, memory.freed)
        return True

    def _bind(self, steps: Mapping[int, Step]) -> None:
        noted = len(self._entries)
        if isinstance(next(iter(steps.values())), CommunicateStep):
            self._bind_collective(steps)
        else:
            for rank, step in steps.items():
                bound = self._bind_segment(rank, step)
                self._add(bound.run, rank, step, bound)
        self._noted.extend([noted] * (len(self._works) - len(self._noted)))
        for rank, step in steps.items():
            self._ranks[rank].free(step.frees)

    def _add(self, work: Callable[[], object], rank: int, step: Step, bound: BoundWork | None = None) -> None:
        self._works.append(work)
        self._of.append((rank, step))
        self._bound.append(bound)

    def _bind_segment(self, rank: int, step: Step) -> BoundWork:
        assert isinstance(step, ComputeStep)
        memory, bind = self._ranks[rank], step.compiled.bind
        assert bind is not None
        inputs = list(map(memory.read, step.inputs, step.segment.inputs))
        return bind(inputs, [memory.write(*made) for made in zip(step.outputs, step.segment.outputs, strict=True)])

    def _bind_collective(self, steps: Mapping[int, Step]) -> None:
        """What all members get alike lies in one place for those of this process: nobody writes to what it reads."""
        calls: dict[int, Call] = {}
        results: dict[int, Array] = {}
        for rank, step in steps.items():
            assert isinstance(step, CommunicateStep)
            assert step.result is not None
            memory, first = self._ranks[rank], self._first(rank, step.collective)
            operand = memory.operand(step)
            into = memory.write(step.result, memory.values[step.result], results.get(first))
            calls[rank] = Call(rank, self._mesh.coords(rank), step.collective, operand, into)
            results.setdefault(first, into)
            self._entries.append((rank, step.collective, operand.dtype, operand.size))
        self._add(_meeting(self._group, calls, list(results.items())), *next(iter(steps.items())))

    def _first(self, rank: int, collective: Collective) -> int:
        """The first rank of the process that gets the very result that a rank gets."""
        if not EXECUTED[collective.kind].is_shared:
            return rank
        groups = self._mesh.groups(collective.axes)
        members = next(group for group in groups if rank in group)
        return min(rank for rank in members if rank in self._ranks)


class _Memory:
    """Where what one rank reads and makes lies.

    Attributes:
        values: what stands in each place.
        taken: what is made before the steps: in which place of the rank it stands, and where it is copied to.
        left: the same of what is read after them.
        freed: the places that nothing reads after them.
    """

    def __init__(self, part: PreparedPart) -> None:
        self.taken: list[tuple[int, Array]] = []
        self.freed: set[int] = set()
        self._constants = part.constants
        self.values = part.tape.values
        self.left: list[tuple[int, Array]] = []
        self._arrays: dict[int, Array] = {}
        self._made: set[int] = set()

    def end(self) -> None:
        """There are no more steps."""
        self.left = [(place, self._arrays[place]) for place in self._made]
        self._arrays.clear()

    def read(self, place: int, value: Value) -> Array:
        """Where what stands in a place lies."""
        if place not in self._arrays:
            self._arrays[place] = _empty(value)
            self.taken.append((place, self._arrays[place]))
        return self._arrays[place]

    def write(self, place: int, value: Value, array: Array | None = None) -> Array:
        """Where what a step makes lies: in an array, or in one of its own."""
        self._arrays[place] = _empty(value) if array is None else array
        self._made.add(place)
        self.freed.discard(place)
        return self._arrays[place]

    def operand(self, step: CommunicateStep) -> Array:
        """What a collective takes."""
        if step.operand is not None:
            return self.read(step.operand, self.values[step.operand])
        assert step.constant is not None
        return self._constants.array(step.constant)

    def free(self, places: Places) -> None:
        """Nothing reads any more what stands in some places."""
        for place in places:
            self._arrays.pop(place, None)
            self._made.discard(place)
            self.freed.add(place)


def _empty(value: Value) -> Array:
    return np.empty(value.shape, value.dtype.numpy)


def _meeting(group: Group, calls: Mapping[int, Call], results: Sequence[tuple[int, Array]]) -> Callable[[], object]:
    """What executes a collective of the ranks of this process.

    Args:
        group: what they meet in.
        calls: by rank.
        results: where the results lie, of each rank that has its own.
    """
    if len(calls) > 1 or not hasattr(group, "repeat"):
        return partial(_meet, group.exchange, calls, results)
    ((rank, into),) = results
    return partial(_repeat, cast(RepeatingGroup, group).repeat(calls[rank]), calls[rank], into)


def _meet(
    exchange: Callable[[Mapping[int, Call]], dict[int, Array]],
    calls: Mapping[int, Call],
    results: Sequence[tuple[int, Array]],
) -> None:
    """Execute a collective of several ranks of this process."""
    found = exchange(calls)
    while len(found) < len(calls):
        found |= exchange({rank: call for rank, call in calls.items() if rank not in found})
    for rank, into in results:
        if found[rank] is not into:
            _copy(found[rank], calls[rank], into)


def _repeat(run: Callable[[], Array], call: Call, into: Array) -> None:
    """Execute a collective of the one rank of this process."""
    result = run()
    if result is not into:
        _copy(result, call, into)


def _copy(result: Array, call: Call, into: Array) -> None:
    """Let a result lie where it is read."""
    if result.shape != into.shape:
        raise RunError(
            f"{call.collective} gives {list(result.shape)}, where the program says {list(into.shape)}",
            do="partition the model again",
        )
    into[...] = result


# -- which ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bound:
    """What the ranks of a process do, for one run at a time.

    Attributes:
        steps: of each rank.
        long: segments that would be bound if they took less time.
    """

    steps: Mapping[int, Sequence[Step]]
    long: Sequence[ComputeStep] = ()


class Bindings:
    """Binds the steps of programs that run again and again; runs beside each other have theirs each.

    Args:
        mesh: of all ranks.
        group: what they meet in.
        long_seconds: segments that take longer are not bound: several ranks may compute them at once.
    """

    def __init__(self, mesh: Mesh, group: Group, long_seconds: float) -> None:
        self._mesh, self._group, self._long_seconds = mesh, group, long_seconds
        self._runs: WeakKeyDictionary[Prepared, int] = WeakKeyDictionary()
        self._free: WeakKeyDictionary[Prepared, list[Bound]] = WeakKeyDictionary()

    def take(self, prepared: Prepared) -> Bound:
        """What a run does, which has it for itself until it is given back."""
        self._runs[prepared] = runs = self._runs.get(prepared, 0) + 1
        ranks = {rank: part for part in prepared.parts for rank in part.part.ranks if rank in self._group.ranks}
        parts = dict(sorted(ranks.items()))
        if runs <= UNBOUND_RUNS:
            return Bound(_unbound(parts))
        free = self._free.setdefault(prepared, [])
        while (found := taken(free)) is not None:
            if not any(self._is_quick(step) for step in found.long):
                return found
        return self._bind(parts)

    def give_back(self, prepared: Prepared, bound: Bound) -> None:
        """Let others have it."""
        if prepared in self._free:
            self._free[prepared].append(bound)

    def _is_quick(self, step: Step) -> bool:
        return not isinstance(step, ComputeStep) or step.seconds <= self._long_seconds

    def _bind(self, parts: Parts) -> Bound:
        unbound = _unbound(parts)
        if len(set(map(len, unbound.values()))) > 1:
            return Bound(unbound)  # Ranks do different things, as in stages of a pipeline.
        if any(part.tape.has_spaces for part in parts.values()):
            return Bound(unbound)  # What lies where is told step by step.
        columns = list(zip(*unbound.values(), strict=True))
        small = {column for column in columns if _is_small(column, parts)}
        if sum(sum(map(_bound_bytes, column, parts.values())) for column in small) > _MOST_BYTES:
            return Bound(unbound)
        long = [step for column in small for step in column if not self._is_quick(step)]
        steps: dict[int, list[Step]] = {rank: [] for rank in parts}
        for is_bound, some in groupby(columns, lambda column: column in small and all(map(self._is_quick, column))):
            stretch = list(some)
            if is_bound and len(stretch) >= _FEWEST and any(isinstance(column[0], ComputeStep) for column in stretch):
                together = BoundSteps(stretch, parts, self._mesh, self._group)
                stretch = [tuple(BoundStep(own, together) for own in zip(*stretch, strict=True))]
            for rank, own in zip(parts, zip(*stretch, strict=True), strict=True):
                steps[rank].extend(own)
        return Bound(steps, [step for step in long if isinstance(step, ComputeStep)])


def _unbound(parts: Parts) -> dict[int, Sequence[Step]]:
    return {rank: part.tape.steps for rank, part in parts.items()}


def _is_small(column: Column, parts: Parts) -> bool:
    """Whether ranks do the like, with what is small and of known size."""
    first = column[0]
    if isinstance(first, ComputeStep):
        return all(isinstance(step, ComputeStep) and step.compiled.bind is not None for step in column)
    return isinstance(first, CommunicateStep) and all(
        isinstance(step, CommunicateStep) and step.collective == first.collective and _moves_little(step, part)
        for step, part in zip(column, parts.values(), strict=True)
    )


def _moves_little(step: CommunicateStep, part: PreparedPart) -> bool:
    """Whether it is a collective of a small operand, with a small result."""
    values = part.tape.values
    operand = step.constant if step.operand is None else values[step.operand]
    if operand is None or step.result is None or step.collective.kind not in EXECUTED:
        return False
    return are_small([operand, values[step.result]])


def _bound_bytes(step: Step, part: PreparedPart) -> int:
    """Bytes of what a step makes that is small, and of what it is bound with."""
    if isinstance(step, ComputeStep):
        return _BINDING_BYTES + sum(value.tensor_type.nbytes for value in step.segment.outputs)
    assert isinstance(step, CommunicateStep)
    assert step.result is not None
    return part.tape.values[step.result].tensor_type.nbytes
