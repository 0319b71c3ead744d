"""Arenas in which every number that nobody wrote, or that is not to be read any more, is not one."""

import numpy as np
import pytest

from irpar.runtime.engines.arena import Arena, ArenaLayout, Arenas
from irpar.runtime.engines.bodies import Instruction
from irpar.runtime.engines.operation import Environment
from irpar.runtime.rank_state import RankState
from irpar.runtime.tape import ComputeStep


def poisoned(nbytes: int) -> Arena:
    """Memory of which every number is not one."""
    return Arena(np, np.full(nbytes, 255, np.uint8))


class Poison:
    """Lets numbers in arenas go as soon as nothing is to read them; in CUDA graphs of a stand-in it is captured too.

    Attributes:
        gone: how many results went.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gone = 0
        self._layouts: dict[int, ArenaLayout] = {}
        self._arena: Arena | None = None
        self._before: dict[int, int] = {}
        take, compute, run_node = Arenas.take, RankState.compute, Instruction.run

        def watched_take(arenas: Arenas, rank: int, nbytes: int, layout: ArenaLayout | None = None) -> Arena | None:
            arena = take(arenas, rank, nbytes, layout)
            if arena is not None and layout is not None:
                arena.memory[:] = 255
                self._layouts[id(arena)], self._before[id(arena)] = layout, 0
            return arena

        def watched_compute(state: RankState, step: ComputeStep) -> None:
            self._arena = state.arena
            compute(state, step)

        def watched_node(instruction: Instruction, environment: Environment) -> None:
            self._poison(instruction)
            run_node(instruction, environment)

        monkeypatch.setattr(Arenas, "take", watched_take)
        monkeypatch.setattr(RankState, "compute", watched_compute)
        monkeypatch.setattr(Instruction, "run", watched_node)

    def _poison(self, instruction: Instruction) -> None:
        """Before a node runs, let go what was read last before it, where nothing else lies."""
        if self._arena is None or instruction.node not in self._layouts[id(self._arena)].steps:
            return
        layout = self._layouts[id(self._arena)]
        step, before = layout.steps[instruction.node], self._before[id(self._arena)]
        last = layout.held[3]
        if count := int(((before <= last) & (last < step)).sum()):
            self.gone += count
            for offset, end in layout.free_beside(instruction.node, self._arena.nbytes):
                self._arena.memory[offset:end] = 255
        self._before[id(self._arena)] = step
