"""The formulas against the algorithms themselves: each is run step by step on sets that stand for data."""

import math
from collections.abc import Iterator

import pytest

from irpar.analysis.cost.network_algorithms import ALGORITHMS, operand_of_ring_bytes, ring_bytes, rounds

SIZES = [*range(2, 18), 24, 32, 33]
Message = tuple[int, int, list[int]]
"""Who sends to whom which chunks."""
Schedule = list[list[Message]]


def ring_gather(n: int) -> Schedule:
    return [[(i, (i + 1) % n, [(i - step) % n]) for i in range(n)] for step in range(n - 1)]


def bruck_gather(n: int) -> Schedule:
    """Device i holds the blocks i, i + 1, ...; it gets as many more as it has, from the device that is so far on."""
    steps, held = [], 1
    while held < n:
        count = min(held, n - held)
        steps.append([(i, (i - held) % n, [(i + k) % n for k in range(count)]) for i in range(n)])
        held += count
    return steps


def backwards(schedule: Schedule) -> Schedule:
    return [[(target, source, chunks) for source, target, chunks in step] for step in reversed(schedule)]


def volume(schedule: Schedule, chunk: float) -> tuple[int, float]:
    """Messages in a row and bytes in a row; nobody sends or receives twice in a step."""
    sent = 0.0
    for step in schedule:
        assert len({source for source, _, _ in step}) == len({target for _, target, _ in step}) == len(step)
        sent += max(len(chunks) for _, _, chunks in step) * chunk
    return len(schedule), sent


def run_gather(n: int, schedule: Schedule) -> None:
    held = [{i} for i in range(n)]
    for step in schedule:
        assert all(set(chunks) <= held[source] for source, _, chunks in step)
        received = [(target, chunks) for _, target, chunks in step]
        for target, chunks in received:
            assert not set(chunks) & held[target], "sent what was there"
            held[target] |= set(chunks)
    assert all(blocks == set(range(n)) for blocks in held)


def run_reduce_scatter(n: int, schedule: Schedule) -> None:
    parts = [[{i} for _ in range(n)] for i in range(n)]
    for step in schedule:
        moved = [(target, chunk, parts[source][chunk]) for source, target, chunks in step for chunk in chunks]
        for source, _, chunks in step:
            for chunk in chunks:
                parts[source][chunk] = set()
        for target, chunk, contributors in moved:
            assert not parts[target][chunk] & contributors, "added twice"
            parts[target][chunk] = parts[target][chunk] | contributors
    assert all(parts[i][i] == set(range(n)) for i in range(n))


SCHEDULES = {"ring": ring_gather, "tree": bruck_gather}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("n", SIZES)
def test_gathers_reductions_and_both(n: int, name: str) -> None:
    gather = SCHEDULES[name](n)
    scatter = backwards(gather)
    run_gather(n, gather)
    run_reduce_scatter(n, scatter)
    assert ALGORITHMS["all_gather"][name](n, 7.0) == pytest.approx(volume(gather, 7.0))
    assert ALGORITHMS["reduce_scatter"][name](n, 7.0 * n) == pytest.approx(volume(scatter, 7.0))
    assert ALGORITHMS["all_reduce"][name](n, 7.0 * n) == pytest.approx(volume([*scatter, *gather], 7.0))


@pytest.mark.parametrize("n", SIZES)
def test_recursive_doubling(n: int) -> None:
    power = 1 << (n.bit_length() - 1)
    steps: list[list[tuple[int, int]]] = []
    if power < n:
        steps.append([(power + i, i) for i in range(n - power)])
    steps += [[(i, i ^ bit) for i in range(power)] for bit in (1 << k for k in range(power.bit_length() - 1))]
    if power < n:
        steps.append([(i, power + i) for i in range(n - power)])
    held = [{i} for i in range(n)]
    for step in steps:
        moved = [(target, set(held[source])) for source, target in step]
        for target, parts in moved:
            held[target] |= parts
    assert all(parts == set(range(n)) for parts in held)
    assert ALGORITHMS["all_reduce"]["doubling"](n, 5.0) == (len(steps), 5.0 * len(steps))


@pytest.mark.parametrize("n", SIZES)
def test_all_to_all(n: int) -> None:
    pairwise = [[(i, (i + distance) % n, [distance]) for i in range(n)] for distance in range(1, n)]
    assert ALGORITHMS["all_to_all"]["direct"](n, 3.0 * n) == pytest.approx(volume(pairwise, 3.0))
    # Bruck: block d of device i is for i + d; it moves on by each bit of d.
    places = {(i, d): i for i in range(n) for d in range(1, n)}
    steps, sent = 0, 0
    for bit in (1 << k for k in range(rounds(n))):
        travelling = [key for key in places if key[1] & bit]
        sent += max(sum(places[key] == device for key in travelling) for device in range(n))
        for key in travelling:
            places[key] = (places[key] + bit) % n
        steps += 1
    assert all(place == (i + d) % n for (i, d), place in places.items())
    assert ALGORITHMS["all_to_all"]["tree"](n, 3.0 * n) == pytest.approx((steps, 3.0 * sent))


def binomial(n: int) -> Iterator[list[tuple[int, int]]]:
    """Who tells whom: in each round all who know."""
    known = 1
    while known < n:
        yield [(i, known + i) for i in range(min(known, n - known))]
        known *= 2


@pytest.mark.parametrize("n", SIZES)
def test_broadcast(n: int) -> None:
    steps = list(binomial(n))
    assert {target for step in steps for _, target in step} == set(range(1, n))
    assert ALGORITHMS["broadcast"]["tree"](n, 4.0) == (len(steps), 4.0 * len(steps))
    assert ALGORITHMS["broadcast"]["direct"](n, 4.0) == (n - 1, 4.0 * (n - 1))
    # Scatter: whoever holds a range gives away its upper part.
    ranges, rounds_made, sent = {0: n}, 0, 0
    for span in (1 << k for k in reversed(range(rounds(n)))):
        given = {start: size - span for start, size in ranges.items() if size > span}
        sent += max(given.values())
        rounds_made += 1
        for start, size in given.items():
            ranges[start], ranges[start + span] = span, size
    assert ranges == dict.fromkeys(range(n), 1)
    messages, passed = volume(ring_gather(n), 4.0 / n)
    expected = rounds_made + messages, sent * 4.0 / n + passed
    assert ALGORITHMS["broadcast"]["ring"](n, 4.0) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("n", SIZES)
def test_nothing_is_below_what_must_pass(kind: str, n: int) -> None:
    """The lower bounds of Chan et al.: log2 n messages, and the bytes that a device lacks."""
    size = 1000.0
    least = {
        "all_reduce": 2 * (n - 1) / n * size,
        "all_gather": (n - 1) * size,
        "reduce_scatter": (n - 1) / n * size,
        "all_to_all": (n - 1) / n * size,
    }.get(kind, size)
    for algorithm in ALGORITHMS[kind].values():
        found = algorithm(n, size)
        assert found.messages >= (1 if kind == "permute" else math.log2(n))
        assert found.sent >= least * (1 - 1e-12)


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_ring_bytes_and_back(kind: str, n: int) -> None:
    assert ring_bytes(kind, 1, 1000) == 0
    size = 840 * n
    sent = ring_bytes(kind, n, size)
    if n > 1:
        assert operand_of_ring_bytes(kind, n, sent) == pytest.approx(size)
        name = {"all_to_all": "direct", "permute": "direct", "broadcast": ""}.get(kind, "ring")
        if name:
            assert sent == pytest.approx(ALGORITHMS[kind][name](n, size).sent)
