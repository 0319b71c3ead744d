"""Searches for what keeps a limit on memory, of which the program itself has the last word."""

import time
from collections.abc import Callable
from typing import TypeVar

Solution = TypeVar("Solution")

MOST_TRIES = 4
"""How often something is searched for lower and lower limits."""
TRY_SHARE = 0.6
"""Of the time that is left goes to each search but the last."""
LEAST_SECONDS = 0.2
"""That a search gets, even where time has run out."""


def next_end(end: float, parts: int, least: float = 0.0) -> float:
    """When the first of so many searches stops that share the time until an end, by `time.monotonic`.

    Args:
        end: of all of them.
        parts: how many there are.
        least: seconds that it has in any case.
    """
    now = time.monotonic()
    return now + max(least, (end - now) / parts)


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
