"""Repeats in sequences, against a search of all pairs."""

import random

import pytest

from irpar.analysis.layers.repeats import Run, choose_runs


def chosen(numbers, least):
    found = []
    for run, taken in choose_runs(numbers, least):
        covered = [run.start + each for each in range(run.length)]
        places = {*covered, *(place + run.distance for place in covered)}
        assert not any(taken[place] for place in places)
        assert all(numbers[place] == numbers[place + run.distance] for place in covered)
        taken[list(places)] = True
        found.append(run)
    return found


def test_the_longest_row_of_repetitions_comes_first():
    assert chosen([9, *[0, 1, 2] * 5, 8, 0, 1], 3) == [Run(1, 12, 3)]
    assert (Run(1, 12, 3).times, Run(1, 12, 3).size) == (5, 3)


def test_repeats_within_layers_do_not_break_layers():
    layer = [*[0, 1] * 3, 2, 3]
    assert chosen(layer * 4, 2)[0] == Run(0, 24, 8)


def test_two_that_stand_apart_are_found():
    assert chosen([0, 1, 2, 3, 9, 8, 0, 1, 2, 3], 4) == [Run(0, 4, 6)]


@pytest.mark.parametrize("numbers", [[], [1], [1, 2, 3, 4, 5]])
def test_where_nothing_repeats_nothing_is_found(numbers):
    assert chosen(numbers, 2) == []


def test_what_a_random_sequence_repeats_is_found():
    draw = random.Random(0)
    for _ in range(200):
        layer = [draw.randrange(6) for _ in range(draw.randrange(4, 9))]
        count = draw.randrange(2, 6)
        front, back = ([draw.randrange(100, 120) for _ in range(draw.randrange(4))] for _ in range(2))
        best = max((run.times * run.size for run in chosen([*front, *layer * count, *back], 2)), default=0)
        assert best >= len(layer) * count - min(len(layer), 8)
