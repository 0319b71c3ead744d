"""What ranks may hold: passes that only make programs faster do not act where they would hold more."""

import time
from collections.abc import Callable
from typing import TypeVar

from irpar.analysis.memory.liveness import peak
from irpar.ir import Module, clone_module

from .pipeline import Pass, PassResult

Solution = TypeVar("Solution")

MOST_TRIES = 4
"""How often something is searched for lower and lower limits."""
TRY_SHARE = 0.6
"""Of the time that is left goes to each search but the last."""
LEAST_SECONDS = 0.2
"""That a search gets, even where time has run out."""


def run_within_limit(pass_: Pass, module: Module) -> PassResult:
    """Run a pass, but one that may do without where a rank would then hold more than the module's memory limit.

    What is held already may be above the limit: the pass then may not add to it. In global view nobody knows yet what a
    rank holds.
    """
    limit = module.memory_limit
    if limit is None or not pass_.may_hold_more or not module.is_local:
        return pass_.run(module)
    trial = clone_module(module)
    tried = pass_.run(trial)
    if not tried.changed:
        return tried
    most = peak_bytes(trial)
    if most > max(limit, peak_bytes(module)):
        return PassResult(False, notes=(above_limit(most, limit),))
    return pass_.run(module)


def above_limit(most: int, limit: int) -> str:
    """The note of what was not done, after which a rank would hold so many bytes."""
    return f"not done: a rank would hold {most:,} bytes, the memory limit is {limit:,}"


def peak_bytes(module: Module) -> int:
    """The most bytes that a rank of a local module holds at once, weights included."""
    return max(peak(graph).total_bytes for graph in module.graphs)


def search_within(
    limit: int,
    end: float,
    search: Callable[[int, float], tuple[Solution, bool] | None],
    held_by: Callable[[Solution], int],
) -> tuple[Solution | None, int]:
    """Search for what keeps a limit, where a program may hold more than the search for it thinks.

    Where it does, the search gets a limit that is lower by as much as was held too much.

    Args:
        limit: bytes.
        end: when to stop, by `time.monotonic`.
        search: finds something for a limit in so many seconds, and says whether it fits by its own account; None:
            it finds nothing.
        held_by: what the program holds with that.

    Returns:
        The first that fits, and what is held then; else None, and the least that is held by what was found, 0 where
        nothing was.
    """
    asked, least = limit, 0
    for number in range(MOST_TRIES):
        left = max(LEAST_SECONDS, end - time.monotonic())
        tried = search(asked, left if number + 1 == MOST_TRIES else left * TRY_SHARE)
        if tried is None:
            break
        found, fits = tried
        held = held_by(found)
        if held <= limit:
            return found, held
        least = min(least or held, held)
        if not fits:
            break  # Lower limits would not fit either.
        asked -= held - limit
    return None, least
