"""Offsets for everything: the best that several heuristics find."""

from collections.abc import Iterator, Sequence

import numpy as np

from .beam import beam_search
from .best_fit import best_fit
from .greedy import greedy_offsets
from .lifetimes import ALIGNMENT, Ints, K, Lifetime, Offsets, Rectangles, most_held, offsets_of

MOST_FOR_GREEDY = 2**13
"""Above that many, time that grows with the square of their number is more than a better plan is worth."""
MOST_FOR_SEARCH = 2**8
_CLOSE = 1.002
"""What is that close to the most that is held at once is not improved any more."""
_WORTH_SEARCH = 1.01
_TRIES = 4


def place(held: Sequence[Lifetime[K]], alignment: int = ALIGNMENT) -> Offsets[K]:
    """Offsets at which nothing overlaps with what is held at the same time, in a block about as small as can be.

    The best of best fit, greedy orders and a short search, each of which is tried only where those before it leave
    something to gain. The same each time.
    """
    found = best_fit(held, alignment)
    bound = most_held(held, alignment)
    filled = [one for one in held if one.nbytes]
    if found.nbytes <= bound * _CLOSE or len(filled) > MOST_FOR_GREEDY:
        return found
    rectangles = Rectangles.of(filled, alignment)
    for begins in _tried(rectangles, bound):
        if (top := rectangles.top(begins)) < found.nbytes:
            known = dict(zip((one.key for one in filled), begins.tolist(), strict=True))
            found = offsets_of(held, [known.get(one.key, 0) for one in held])
        if top <= bound * _CLOSE:
            break
    return found


def _tried(rectangles: Rectangles, bound: int) -> Iterator[Ints]:
    """What each heuristic finds."""
    least = np.iinfo(np.int64).max
    for begins in greedy_offsets(rectangles):
        least = min(least, rectangles.top(begins))
        yield begins
    if len(rectangles) <= MOST_FOR_SEARCH and least > bound * _WORTH_SEARCH:
        yield from beam_search(rectangles, bound, least - 1, _TRIES)
