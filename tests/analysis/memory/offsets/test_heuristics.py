"""place: the best of several heuristics, each of which is right alone."""

import numpy as np
import pytest
from hypothesis import example, given

import irpar
from irpar import models
from irpar.analysis.memory.arena import lifetimes as lifetimes_of
from irpar.analysis.memory.offsets import heuristics
from irpar.analysis.memory.offsets.beam import beam_search
from irpar.analysis.memory.offsets.best_fit import best_fit
from irpar.analysis.memory.offsets.greedy import greedy_offsets, lowest_in_order
from irpar.analysis.memory.offsets.heuristics import place
from irpar.analysis.memory.offsets.lifetimes import Lifetime, Rectangles, most_held, offsets_of
from tests.budget import every

from .drawn import ALIGNMENTS, LIFETIMES, check_offsets, lifetimes


@example([(0, 0, 1), (1, 0, 0), (65, 1, 0)], 64)
@given(LIFETIMES, ALIGNMENTS)
def test_nothing_overlaps_with_what_is_held_at_the_same_time(drawn, alignment):
    held = lifetimes(drawn)
    found = place(held, alignment)
    check_offsets(held, found, alignment)
    assert found.nbytes <= best_fit(held, alignment).nbytes


@given(LIFETIMES, ALIGNMENTS)
def test_each_heuristic_alone(drawn, alignment):
    held = lifetimes([one for one in drawn if one[0]])
    check_offsets(held, best_fit(held, alignment), alignment)
    rectangles = Rectangles.of(held, alignment)
    for begins in greedy_offsets(rectangles):
        check_offsets(held, offsets_of(held, begins.tolist()), alignment)
    bound = most_held(held, alignment)
    ends = []
    for begins in beam_search(rectangles, bound, 2 * bound, 4):
        check_offsets(held, offsets_of(held, begins.tolist()), alignment)
        ends.append(rectangles.top(begins))
    assert ends == sorted(set(ends), reverse=True)
    assert bool(ends) or not held


@given(LIFETIMES, ALIGNMENTS)
def test_each_lies_as_low_as_those_before_it_allow(drawn, alignment):
    held = [one for one in lifetimes(drawn) if one.nbytes]
    rectangles = Rectangles.of(held, alignment)
    first, last, size = rectangles.first, rectangles.last, rectangles.size
    order = size.argsort(kind="stable")[::-1]
    placed: list[tuple[int, int]] = []  # which, and where it begins
    for one in order:
        near = [
            (begin, begin + size[other])
            for other, begin in placed
            if first[other] <= last[one] and last[other] >= first[one]
        ]
        free = (
            at for at in sorted([0, *(end for _, end in near)]) if all(at + size[one] <= a or at >= b for a, b in near)
        )
        placed.append((one, next(free)))
    assert lowest_in_order(rectangles, order).tolist() == [begin for _, begin in sorted(placed)]


def test_a_beam_finds_what_greedy_orders_do_not(monkeypatch):
    held = lifetimes([(6, 2, 4), (8, 5, 3), (8, 7, 1), (1, 4, 2), (1, 6, 2), (8, 0, 2), (3, 4, 4), (2, 1, 4)])
    assert place(held, 1).nbytes == most_held(held, 1) == 20
    monkeypatch.setattr(heuristics, "MOST_FOR_SEARCH", 0)
    assert place(held, 1).nbytes == 21


def test_the_same_each_time():
    random = np.random.default_rng(0)
    held = lifetimes([tuple(row) for row in random.integers(1, 40, (150, 3)).tolist()])
    assert place(held, 1) == place(held, 1)


def test_none_and_one():
    assert place([]).nbytes == 0
    assert place([Lifetime("a", 65, 3, 3)]).offsets == {"a": 0}


@pytest.mark.parametrize("family", every(4, models.FAMILIES))
def test_arenas_of_training_steps_are_as_large_as_what_is_held(family):
    held = list(lifetimes_of(irpar.train_step(models.build(family), optimizer="adamw").graph))
    assert place(held).nbytes <= 1.02 * most_held(held)
