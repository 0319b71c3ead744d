"""Linear programs against what is known of them."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from random import Random

import pytest

from irpar.analysis.linear_program import LinearProgram
from tests.budget import budget

NODES = 4
SECONDS = 60


@pytest.mark.parametrize("seed", range(5))
def test_the_program_of_a_cut_costs_what_the_cheapest_cut_does(seed: int) -> None:
    random = Random(seed)
    ends = [(random.randint(0, 9), random.randint(0, 9)) for _ in range(NODES)]
    arcs = {(one, other): random.randint(0, 9) for one, other in product(range(NODES), repeat=2) if one != other}
    program = LinearProgram()
    # Each node costs one of its ends, and an arc what it does where it leads from there to elsewhere.
    there = [program.variable(here - elsewhere) for here, elsewhere in ends]
    for (one, other), cost in arcs.items():
        program.row({program.variable(cost): 1, there[one]: -1}, {there[other]: 1}, least=0)
    cuts = [
        sum(end[not side] for end, side in zip(ends, sides, strict=True))
        + sum(cost for (one, other), cost in arcs.items() if sides[one] and not sides[other])
        for sides in product((False, True), repeat=NODES)
    ]
    solved = program.solve(SECONDS)
    assert solved is not None
    assert solved.least + sum(end[1] for end in ends) == pytest.approx(min(cuts), rel=1e-5, abs=1e-4)
    assert all(value == pytest.approx(round(value)) for value in solved.values)


def test_what_costs_most_for_its_room_is_there_in_part() -> None:
    program = LinearProgram()
    one, other = program.variable(-10), program.variable(-6)
    program.row({one: 3, other: 2}, {other: 1}, most=4.5)
    solved = program.solve(SECONDS)
    assert solved is not None
    assert list(solved.values) == pytest.approx([1, 0.5])
    assert solved.least == pytest.approx(-13, rel=1e-5)
    assert solved.least <= -13


def test_no_values_or_no_time() -> None:
    program = LinearProgram()
    program.row({program.variable(1): 1}, least=0.5)
    assert program.solve(0) is None
    program.row({program.variable(1): 1}, least=2)
    solved = program.solve(SECONDS)
    assert solved is not None
    assert solved.least == math.inf


def test_bounds_that_change() -> None:
    """The next solution begins at the last one, also where that does not fit any more."""
    program = LinearProgram()
    one, other = program.variable(-10), program.variable(-6)
    row, alone = program.row({one: 3, other: 3}, most=3), program.row({one: 1})
    found = []
    for bounds, most in (((0, 1), 3), ((0, 0.5), 3), ((0, 0), 6), ((1, 1), 2), ((1, 1), 6)):
        program.set_bounds(alone, *bounds)
        program.set_bounds(row, -math.inf, most)
        solved = program.solve(SECONDS)
        assert solved is not None
        found.append(solved.least)
    assert found == pytest.approx([-10, -8, -6, math.inf, -16], rel=1e-5)


@pytest.mark.parametrize("seed", range(budget(32, least=4)))
def test_a_program_that_grows_is_solved_as_one_that_is_new(seed: int) -> None:
    random = Random(f"grows {seed}")
    grown = LinearProgram()
    steps: list[Callable[[LinearProgram], object]] = []
    variables = rows = 0
    for _ in range(6):
        new: list[Callable[[LinearProgram], object]] = []
        for _ in range(random.randint(0, 3)):
            new.append(partial(LinearProgram.variable, cost=random.randint(-9, 9), upper=random.randint(1, 3)))
            variables += 1
        for _ in range(random.randint(0, 2) if variables else 0):
            terms = {random.randrange(variables): random.randint(-4, 4) for _ in range(3)}
            new.append(partial(_add_row, terms=terms, most=random.randint(0, 6)))
            rows += 1
        for _ in range(random.randint(0, 2) if rows else 0):
            row, least = random.randrange(rows), random.randint(-8, 0)
            new.append(partial(LinearProgram.set_bounds, row=row, least=least, most=least + random.randint(0, 9)))
        steps += new
        for step in new:
            step(grown)
        if random.random() < 0.3:
            assert grown.solve(1e-9) is None  # There was no time.
        fresh = LinearProgram()
        for step in steps:
            step(fresh)
        one, other = grown.solve(SECONDS), fresh.solve(SECONDS)
        assert one is not None
        assert other is not None
        assert one.least == pytest.approx(other.least, rel=1e-4, abs=1e-4)


def _add_row(program: LinearProgram, terms: dict[int, float], most: float) -> None:
    program.row(terms, most=most)
