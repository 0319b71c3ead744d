"""The smallest block, proven where time allows: a search that grows, then CP-SAT from the best that is known."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Generic

import numpy as np

from irpar.analysis.cp_sat import run, solver_module

from .beam import beam_search
from .heuristics import place
from .lifetimes import ALIGNMENT, Ints, K, Lifetime, Offsets, Rectangles, aligned, most_held, offsets_of

SECONDS = 30.0
_SHARE_OF_SEARCH = 0.85
"""Of the time, where the search does not reach the bound."""
_TRIES = 400
"""What so many beams do not find in a small program, CP-SAT rather proves not to be there."""


@dataclass(frozen=True, slots=True)
class Smallest(Generic[K]):
    """The smallest block that was found.

    Attributes:
        found: it.
        nbytes: its size, aligned.
        bound: what no block is smaller than.
    """

    found: Offsets[K]
    nbytes: int
    bound: int

    @property
    def is_optimal(self) -> bool:
        """Whether it is proven that there is none smaller."""
        return self.nbytes <= self.bound

    @property
    def gap(self) -> float:
        """How much smaller another may be at most, as a part of it."""
        return 1 - self.bound / self.nbytes if self.nbytes else 0.0


def smallest(held: Sequence[Lifetime[K]], seconds: float = SECONDS, alignment: int = ALIGNMENT) -> Smallest[K]:
    """Offsets at which nothing overlaps with what is held at the same time, in the smallest block.

    Args:
        held: what is to be placed.
        seconds: after which the best that is known is taken.
        alignment: what offsets are multiples of.
    """
    began = monotonic()
    known = place(held, alignment)
    filled = [one for one in held if one.nbytes]
    bound = most_held(held, alignment)
    rectangles = Rectangles.of(filled, alignment)
    begins = np.array([known.offsets[one.key] for one in filled], np.int64)
    begins = _searched(rectangles, begins, bound, began + _SHARE_OF_SEARCH * seconds)
    if rectangles.top(begins) > bound:
        begins, bound = _solved(rectangles, begins, bound, alignment, began + seconds - monotonic())
    offsets = dict(zip((one.key for one in filled), begins.tolist(), strict=True))
    found = offsets_of(held, [offsets.get(one.key, 0) for one in held])
    return Smallest(found, aligned(found.nbytes, alignment), bound)


def _searched(rectangles: Rectangles, begins: Ints, bound: int, until: float) -> Ints:
    """The best that beams find, if any is better."""
    for better in beam_search(rectangles, bound, rectangles.top(begins) - 1, _TRIES, until):
        begins = better
    return begins


def _solved(rectangles: Rectangles, begins: Ints, bound: int, alignment: int, seconds: float) -> tuple[Ints, int]:
    """What CP-SAT makes of offsets, in units of the alignment: rectangles that do not overlap, with the lowest top.

    Returns:
        The offsets, and what no end is below.
    """
    top = rectangles.top(begins)
    model = solver_module().CpModel()
    end = model.new_int_var(bound // alignment, top // alignment, "")
    model.add_hint(end, top // alignment)
    variables, across, upward = [], [], []
    for begin, first, steps, nbytes in zip(begins, rectangles.first, rectangles.steps, rectangles.size, strict=True):
        size = int(nbytes) // alignment
        variable = model.new_int_var(0, top // alignment - size, "")
        model.add(variable + size <= end)
        model.add_hint(variable, int(begin) // alignment)
        variables.append(variable)
        across.append(model.new_fixed_size_interval_var(int(first), int(steps), ""))
        upward.append(model.new_fixed_size_interval_var(variable, size, ""))
    model.add_no_overlap_2d(across, upward)
    model.minimize(end)
    solver = run(model, max(seconds, 0.1), workers=0)
    if solver is None:  # Not even what it was told was taken up in time.
        return begins, bound
    proven = round(solver.best_objective_bound) * alignment
    return np.array([solver.value(variable) for variable in variables], np.int64) * alignment, max(bound, proven)
