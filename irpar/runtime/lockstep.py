"""The ranks of this process, one step after the other: compute, meet, go on."""

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from irpar.sharding import IrparError, Mesh, option, spelled

from .bound_steps import BoundSteps
from .errors import MismatchError, PeerError, RunError
from .groups import Call, Group, rank_text
from .log import CollectiveLog
from .rank_state import At, RankState
from .side_threads import SideThreads
from .tape import BoundStep, ComputeStep

PARALLEL_SECONDS = 2e-4
"""Segments that take longer are shared out to threads; handing work to one takes about a quarter of that."""


_Come = tuple[RankState, At | None]
"""A rank, and what it has come to."""


class Lockstep:
    """What drives the ranks of this process.

    Args:
        group: what the ranks meet in.
        mesh: of all ranks.
        threads: how many ranks may compute at once.

    Attributes:
        long_seconds: a segment that takes longer is one for a thread; a rank computes the others in passing.
    """

    def __init__(self, group: Group, mesh: Mesh, threads: int) -> None:
        self._group = group
        self._mesh = mesh
        self._beside = SideThreads(threads - 1, "irpar-rank") if threads > 1 else None
        self.long_seconds = math.inf if self._beside is None else PARALLEL_SECONDS

    def close(self) -> None:
        """Stop the threads."""
        if self._beside is not None:
            self._beside.close()

    def run(self, states: Sequence[RankState], log: CollectiveLog) -> None:
        """Bring all ranks to the end of their programs.

        Args:
            states: of the ranks, where their programs begin.
            log: where the collectives are noted.

        Raises:
            RunError: a rank failed.
            MismatchError: ranks came to different collectives.
        """
        self._group.begin_run()
        if len(states) == 1:
            self._run_alone(states[0], log)
            return
        of_rank = {state.rank: state for state in states}
        waiting: dict[int, Call] = {}
        come = [(state, self._go_on(state)) for state in states]
        while True:
            computing, bound = [], []
            for state, at in come:
                if type(at) is Call:
                    waiting[state.rank] = at
                elif type(at) is ComputeStep:
                    computing.append((state, at))
                elif type(at) is BoundStep:
                    bound.append((state, at))
            if computing:
                come = [*bound, *self._compute(computing)]
                continue
            if bound:
                come = self._take_bound(bound, states, log)
                continue
            if not waiting:
                return
            come = []
            for rank, result in self._group.exchange(waiting).items():
                log.add(waiting.pop(rank))
                state = of_rank[rank]
                come.append((state, self._go_on(state, result)))

    def _run_alone(self, state: RankState, log: CollectiveLog) -> None:
        """As `run`, of the one rank that this process has: it computes all segments in passing."""
        exchange, go_on, add, rank = self._group.exchange, self._go_on, log.add, state.rank
        at = go_on(state)
        while at is not None:
            if type(at) is Call:
                result = exchange({rank: at})[rank]
                add(at)
                at = go_on(state, result)
            elif type(at) is ComputeStep:
                at = self._run_segment(state, at)
            elif type(at) is BoundStep:
                ((_, at),) = self._take_bound([(state, at)], [state], log)

    def _take_bound(
        self, come: Sequence[tuple[RankState, BoundStep]], states: Sequence[RankState], log: CollectiveLog
    ) -> list[_Come]:
        """Let ranks that have come to bound steps take them, each by itself where not all ranks have come."""
        together = come[0][1].together
        are_all = len(come) == len(states) and all(at.together is together for _, at in come)
        try:
            are_taken = are_all and together.run(states, log)
        except (MismatchError, PeerError):
            raise
        except Exception as error:
            raise self._rank_error(self._failed(together, states), error) from error
        return [(state, self._go_on(state, are_taken)) for state, _ in come]

    @staticmethod
    def _failed(together: BoundSteps, states: Sequence[RankState]) -> RankState:
        """The rank that failed in bound steps, at the step where it did."""
        if together.failed is None:
            return states[0]  # What is taken over and left is alike for all.
        rank, step = together.failed
        (state,) = (state for state in states if state.rank == rank)
        state.step = step if isinstance(step, ComputeStep) else None
        return state

    def _go_on(self, state: RankState, result: Any = None) -> At | None:
        """What a rank comes to next that it cannot do in passing."""
        try:
            return state.go_on(result)
        except StopIteration:
            state.step = None
            return None
        except (MismatchError, PeerError):
            raise  # Of a collective that the rank started, or that a segment has.
        except Exception as error:
            raise self._rank_error(state, error) from error

    def _compute(self, states: Sequence[tuple[RankState, ComputeStep]]) -> list[_Come]:
        """Run the long segment that each rank has come to, on threads where there are several."""
        if self._beside is None or len(states) == 1:
            return [(state, self._run_segment(state, step)) for state, step in states]
        found = self._beside.run([partial(self._run_segment, *each) for each in states])
        return [(state, at) for (state, _), at in zip(states, found, strict=True)]

    def _run_segment(self, state: RankState, step: ComputeStep) -> At | None:
        """Run the segment that a rank has come to, note how long it took, and go on."""
        start = time.perf_counter()
        try:
            state.compute(step)
        except (MismatchError, PeerError):
            raise  # Of a collective in it.
        except Exception as error:
            raise self._rank_error(state, error) from error
        # The shortest time seen: a thread that waited for a core says little about the segment.
        step.seconds = min(time.perf_counter() - start, step.seconds)
        return self._go_on(state)

    def _rank_error(self, state: RankState, error: Exception) -> RunError:
        who = rank_text(self._mesh, state.rank)
        if state.copying is not None:
            label = f"copy {state.copying.label}, from the {state.copying.source} to the {state.copying.target}"
        else:
            label = "" if state.step is None else state.step.segment.label
        if isinstance(error, IrparError):
            do = error.do or _check_original()
            notes = (*error.notes, label) if label else error.notes
            return RunError(f"{who}: {error.what}", where=error.where, notes=notes, do=do)
        return RunError(
            f"{who}: {type(error).__name__}: {error}",
            where=label,
            do=f"this is a bug of the engine: report it, and try {option('engine', 'numpy')} (or ort)",
        )


def _check_original() -> str:
    """What to do where the numbers may be at fault."""
    verify = spelled("`irpar verify OUT --inputs FILE`", "`partition.verify(inputs)`")
    return (
        f"check the numbers in the inputs, and whether the original runs on them in ONNX Runtime: {verify} tells; "
        "if only the partition fails, report it"
    )
