"""The planner's costs against a search of its own: all pairs of shardings, by their axes alone, and Floyd-Warshall."""

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.redistribution import redistribution
from irpar.sharding import Axis, Mesh, Sharding

MESH = Mesh({"x": 2, "y": 2, "z": 2})
LAUNCH, BYTE, NEVER = 1, 1 << 20, 1 << 60
Layout = tuple[tuple[tuple[str, ...], ...], frozenset[str]]
"""The axes of each dim, and the partial ones."""


def layouts(names: list[str], rank: int) -> list[Layout]:
    found = []
    for places in itertools.product(range(-2, rank), repeat=len(names)):
        dims = [[name for name, place in zip(names, places, strict=True) if place == dim] for dim in range(rank)]
        partial = frozenset(name for name, place in zip(names, places, strict=True) if place == -2)
        found.extend((orders, partial) for orders in itertools.product(*map(itertools.permutations, dims)))
    return found


def count(axes: object, mesh: Mesh) -> int:
    return math.prod(mesh.axes[axis] for axis in axes)  # type: ignore[attr-defined]


def single_costs(mesh: Mesh, old: Layout, new: Layout, size: int) -> Iterator[int]:
    """What each collective costs that leads from one layout to another; blocks of `size` bytes before it."""
    (before, shares), (after, shares_after) = old, new
    used = {axis for dim in before for axis in dim} | shares
    changed = [dim for dim in range(len(before)) if before[dim] != after[dim]]
    if len(changed) == 1 and shares == shares_after:
        a, b = before[changed[0]], after[changed[0]]
        if a[: len(b)] == b:
            yield (count(a[len(b) :], mesh) - 1) * size * BYTE + LAUNCH
        if b[: len(a)] == a and used.isdisjoint(b[len(a) :]):
            yield 0
    if len(changed) == 2 and shares == shares_after:
        for one, other in (changed, changed[::-1]):
            moved = before[one][len(after[one]) :]
            if after[one] + moved == before[one] and before[other] + moved == after[other]:
                yield size * (count(moved, mesh) - 1) // count(moved, mesh) * BYTE + LAUNCH
    if [count(axes, mesh) for axes in (*before, shares)] == [count(axes, mesh) for axes in (*after, shares_after)]:
        yield size * BYTE + LAUNCH
    gone, n = shares - shares_after, count(shares - shares_after, mesh)
    if gone and shares_after < shares:
        if not changed:
            yield 2 * size * (n - 1) // n * BYTE + LAUNCH
        if len(changed) == 1:
            a, b = before[changed[0]], after[changed[0]]
            if b[: len(a)] == a and frozenset(b[len(a) :]) == gone:
                yield size * (n - 1) // n * BYTE + LAUNCH
    if shares < shares_after and not changed and used.isdisjoint(shares_after - shares):
        yield 0


def least_costs(mesh: Mesh, every: list[Layout], elements: int) -> np.ndarray:
    """The least cost between all pairs."""
    table = np.full((len(every), len(every)), NEVER, np.int64)
    for row, old in enumerate(every):
        size = 4 * elements // count([axis for dim in old[0] for axis in dim], mesh)
        for column, new in enumerate(every):
            table[row, column] = 0 if old == new else min(single_costs(mesh, old, new, size), default=NEVER)
    for middle in range(len(every)):
        np.minimum(table, table[:, middle : middle + 1] + table[middle : middle + 1], out=table)
    return table


def compare(mesh: Mesh, rank: int, *, planner: str = "optimal", factor: float = 1.0) -> None:
    every = layouts(list(mesh.axes), rank)
    shape = (16,) * rank
    known = least_costs(mesh, every, math.prod(shape))
    named = [
        Sharding.of_axes(mesh, [[Axis(axis) for axis in dim] for dim in dims], [Axis(axis) for axis in partial])
        for dims, partial in every
    ]
    for row, source in enumerate(named):
        for column, target in enumerate(named):
            found = redistribution(source, target, shape, 32, planner=planner, chunk_bytes=0)  # type: ignore[arg-type]
            sent, launches = found.key
            if factor == 1.0:
                assert sent * BYTE + launches * LAUNCH == known[row, column], f"{source} -> {target}: {found.steps}"
            assert sent <= known[row, column] // BYTE * factor, f"{source} -> {target}: {found.steps}"


@pytest.mark.parametrize("rank", [1, 2])
def test_costs_are_least(rank: int) -> None:
    compare(MESH, rank)


@pytest.mark.slow
def test_costs_are_least_in_three_dims() -> None:
    compare(MESH, 3)


@pytest.mark.slow
def test_unequal_axes_are_at_least_as_cheap() -> None:
    """The search here knows whole axes only; sub-axes can do better."""
    for sizes in ({"x": 2, "y": 4}, {"x": 2, "y": 3}, {"x": 4, "y": 2, "z": 2}):
        mesh = Mesh(sizes)
        every = layouts(list(mesh.axes), 2)
        known = least_costs(mesh, every, 48 * 48)
        named = [
            Sharding.of_axes(mesh, [[Axis(axis) for axis in dim] for dim in dims], [Axis(axis) for axis in partial])
            for dims, partial in every
        ]
        for (row, source), (column, target) in itertools.product(enumerate(named), enumerate(named)):
            sent, launches = redistribution(source, target, (48, 48), 32, chunk_bytes=0).key
            assert sent * BYTE + launches * LAUNCH <= known[row, column], f"{source} -> {target}"


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fast_is_within_a_tenth(rank: int) -> None:
    compare(MESH, rank, planner="fast", factor=1.1)


@pytest.mark.parametrize(
    ("sizes", "network"),
    [
        ({"x": 2, "y": 4}, "h100-nvlink-ib"),
        ({"x": 4, "y": 2, "z": 2}, "a100-pcie"),
        ({"dp": 4, "tp": 8}, "bytes"),
        ({"dp": 8, "tp": 8, "pp": 4}, "bytes"),
    ],
)
def test_fast_is_within_a_tenth_on_larger_meshes(sizes: dict[str, int], network: str) -> None:
    mesh, draw = Mesh(sizes), random.Random(5)

    def drawn(places: int) -> Sharding:
        dims: list[list[Axis]] = [[] for _ in range(5)]
        for name in draw.sample(list(sizes), len(sizes)):
            dims[draw.randrange(places)].append(Axis(name))
        return Sharding.of_axes(mesh, dims[:3], dims[4])

    for _ in range(25):
        source, target, shape = drawn(5), drawn(4), (1024, 1024, 256)
        best = redistribution(source, target, shape, 16, network_of(network)).key[0]
        fast = redistribution(source, target, shape, 16, network_of(network), planner="fast").key[0]
        assert best <= fast <= 1.1 * best, f"{source} -> {target}"
