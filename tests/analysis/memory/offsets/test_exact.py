"""smallest: proven where the bound is met or CP-SAT says so, and never worse than the heuristics."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.analysis.memory.offsets import exact
from irpar.analysis.memory.offsets.exact import smallest
from irpar.analysis.memory.offsets.heuristics import place
from irpar.analysis.memory.offsets.lifetimes import Lifetime

from .drawn import check_offsets, lifetimes

FEW = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(0, 4)), max_size=6)


def by_force(held: list[Lifetime[int]]) -> int:
    """The least end of all orders in which each goes as low as those before it allow; one of them is the best."""
    filled = [one for one in held if one.nbytes]
    least = sum(one.nbytes for one in filled)
    for order in itertools.permutations(filled):
        placed: list[tuple[Lifetime[int], int]] = []
        for one in order:
            near = [
                (begin, begin + other.nbytes)
                for other, begin in placed
                if one.first <= other.last and other.first <= one.last
            ]
            begin = 0
            for low, high in sorted(near):
                if low - begin >= one.nbytes:
                    break
                begin = max(begin, high)
            placed.append((one, begin))
        least = min(least, max(begin + one.nbytes for one, begin in placed) if placed else 0)
    return least


@settings(max_examples=20, deadline=None)
@given(FEW)
def test_as_small_as_all_orders_find(drawn):
    held = lifetimes(drawn)
    found = smallest(held, 5, 1)
    check_offsets(held, found.found, 1)
    assert found.is_optimal
    assert found.nbytes == found.bound == by_force(held)
    assert found.gap == 0


@settings(max_examples=20, deadline=None)
@given(FEW)
def test_cp_sat_alone(drawn):
    """Without the search before it, and from offsets that are bad."""
    held = [one for one in lifetimes(drawn) if one.nbytes]
    rectangles = exact.Rectangles.of(held, 64)
    begins = exact.np.cumsum(rectangles.size) - rectangles.size
    begins, bound = exact._solved(rectangles, begins, 0, 64, 5)
    found = exact.offsets_of(held, begins.tolist())
    assert list(found.offsets) == [one.key for one in held]
    assert rectangles.top(begins) == bound == by_force([Lifetime(o.key, 64, o.first, o.last) for o in held])


def test_little_time_still_gives_offsets(monkeypatch):
    held = lifetimes([(7 + key % 13, key % 29, key % 7) for key in range(80)])
    found = smallest(held, 0.01, 1)
    check_offsets(held, found.found, 1)
    assert found.bound <= found.nbytes <= place(held, 1).nbytes
    assert found.gap == pytest.approx(1 - found.bound / found.nbytes)
