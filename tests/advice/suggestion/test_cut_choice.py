"""The choice among things that exclude each other, against trying all of them."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from irpar.advice.suggestion.cut_choice import heaviest


def graph(count: int, pairs: list[tuple[int, int]]) -> dict[int, set[int]]:
    conflicts: dict[int, set[int]] = {number: set() for number in range(count)}
    for a, b in pairs:
        if a % count != b % count:
            conflicts[a % count].add(b % count)
            conflicts[b % count].add(a % count)
    return conflicts


def best_weight(weights: dict[int, float], conflicts: dict[int, set[int]]) -> float:
    best = 0.0
    for size in range(len(weights) + 1):
        for chosen in itertools.combinations(weights, size):
            if not any(conflicts[number] & set(chosen) for number in chosen):
                best = max(best, sum(weights[number] for number in chosen))
    return best


@given(
    st.lists(st.integers(-3, 20), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20),
)
def test_the_choice_is_the_best_of_all(values: list[int], pairs: list[tuple[int, int]]) -> None:
    weights = {number: float(value) for number, value in enumerate(values)}
    conflicts = graph(len(values), pairs)
    chosen = heaviest(weights, conflicts)
    assert not any(conflicts[number] & chosen for number in chosen)
    assert all(weights[number] > 0 for number in chosen)
    assert sum(weights[number] for number in chosen) == best_weight(weights, conflicts)


def test_long_chains_and_hubs_take_no_time() -> None:
    """2,000 layers of three choices each, and one that excludes them all."""
    layers = 2000
    weights = {0: 50.0} | {number: 1.0 + number % 3 for number in range(1, 3 * layers + 1)}
    conflicts: dict[int, set[int]] = {number: {0} for number in weights} | {0: set(weights) - {0}}
    for layer in range(layers):
        first = 3 * layer + 1
        for a, b in ((first, first + 1), (first + 1, first + 2)):
            conflicts[a].add(b)
            conflicts[b].add(a)
    chosen = heaviest(weights, conflicts)
    assert 0 not in chosen
    # Of each three the first and the last (2 + 1) or the middle (3): worth 3 either way.
    assert sum(weights[number] for number in chosen) == 3 * layers


def test_a_long_path_is_exact() -> None:
    count = 3000
    weights = dict.fromkeys(range(count), 1.0)
    conflicts = {number: {number - 1, number + 1} & set(range(count)) for number in range(count)}
    assert len(heaviest(weights, conflicts)) == count // 2


def test_what_is_too_tangled_is_decided_greedily() -> None:
    count = 400
    weights = {number: 1.0 + number % 7 for number in range(count)}
    conflicts = graph(count, [(a, a * k + k) for a in range(count) for k in (2, 3, 5, 7, 11)])
    chosen = heaviest(weights, conflicts)
    assert chosen
    assert not any(conflicts[number] & chosen for number in chosen)
    assert chosen == heaviest(weights, conflicts)
