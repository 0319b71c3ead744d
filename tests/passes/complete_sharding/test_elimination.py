"""Elimination against trying all states."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.passes.complete_sharding.elimination import Elimination
from tests.budget import budget

Tables = list[tuple[tuple[int, ...], np.ndarray]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], Tables]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    tables = []
    for _ in range(draw(st.integers(0, 8))):
        scope = tuple(draw(st.permutations(range(len(sizes))))[: draw(st.integers(1, min(3, len(sizes))))])
        tables.append((scope, random.integers(0, 20, [sizes[variable] for variable in scope])))
    return sizes, tables


def total(tables: Tables, states: list[int]) -> float:
    return sum(float(table[tuple(states[variable] for variable in scope)]) for scope, table in tables)


def solved(sizes: list[int], tables: Tables, most: int) -> list[int]:
    problem = Elimination(sizes, most)
    for scope, table in tables:
        problem.add(scope, table)
    return problem.solve([0] * len(sizes))


@given(problems())
@settings(max_examples=budget(200), deadline=None)
def test_it_is_the_least(problem: tuple[list[int], Tables]) -> None:
    sizes, tables = problem
    states = solved(sizes, tables, 1 << 18)
    best = min(total(tables, list(tried)) for tried in itertools.product(*map(range, sizes)))
    assert total(tables, states) == best


@given(problems(), st.integers(1, 9))
@settings(max_examples=budget(200), deadline=None)
def test_with_small_tables_it_is_never_worse_than_the_start(problem: tuple[list[int], Tables], most: int) -> None:
    sizes, tables = problem
    assert total(tables, solved(sizes, tables, most)) <= total(tables, [0] * len(sizes))


def test_long_cycles() -> None:
    """The least of all ways around is found: per first state a path, by a product of matrices of minima and sums."""
    random = np.random.default_rng(0)
    count = 2000
    tables = [((n, (n + 1) % count), random.uniform(0, 1, (4, 4))) for n in range(count)]
    around = tables[0][1]
    for _, table in tables[1:]:
        around = (around[:, :, None] + table[None]).min(1)
    states = solved([4] * count, tables, 1 << 18)
    assert np.isclose(total(tables, states), around.diagonal().min())
