"""How many collectives are left: beside every way to send them, and in programs that are run."""

import random
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import cache

import numpy as np
import pytest

import irpar
from irpar.ir import Module
from irpar.ir.verifier import verify
from irpar.ops.collectives import sent_bytes
from irpar.pass_manager import PassManager
from irpar.passes.fuse_communication.waves import _Front, _Search, _State, waves_of
from irpar.runtime.executor import Executor
from tests.budget import budget

from .golden import read

Kinds = dict[int, str]
Before = dict[int, set[int]]


def draw(seed: int, most: int) -> tuple[Kinds, Before]:
    """Collectives of some kinds, each with what it depends on."""
    drawn = random.Random(seed)
    count = drawn.randint(1, most)
    letters = "pqrs"[: drawn.randint(1, 4)]
    share = drawn.choice([0.1, 0.25, 0.5])
    kinds = {number: drawn.choice(letters) for number in range(count)}
    return kinds, {number: {other for other in range(number) if drawn.random() < share} for number in range(count)}


def fewest(kinds: Mapping[int, str], before: Mapping[int, Collection[int]]) -> int:
    """The fewest launches of all ways: any of one kind that are ready may go together, all of them or some.

    Sets of collectives are numbers, with a bit for each.
    """
    behind = {1 << number: sum(1 << other for other in others) for number, others in before.items()}
    alike: dict[str, int] = {}
    for number, kind in kinds.items():
        alike[kind] = alike.get(kind, 0) | 1 << number
    everything = sum(behind)

    @cache
    def left(sent: int) -> int:
        if sent == everything:
            return 0
        ready = sum(bit for bit, others in behind.items() if not sent & bit and not others & ~sent)
        ways = (sent | chosen for members in alike.values() for chosen in subsets(members & ready))
        return 1 + min(left(way) for way in ways)

    return left(0)


def subsets(members: int) -> Iterator[int]:
    """All subsets but the empty one."""
    chosen = members
    while chosen:
        yield chosen
        chosen = chosen - 1 & members


def check_waves(kinds: Mapping[int, Hashable], before: Mapping[int, Collection[int]], found: Mapping[int, int]) -> int:
    """Each wave is of one kind, and stands behind what it depends on; returns how many there are."""
    assert found.keys() == kinds.keys()
    assert all(found[other] < found[number] for number in kinds for other in before[number])
    assert len({(wave, kinds[number]) for number, wave in found.items()}) == len(set(found.values()))
    return len(set(found.values()))


@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_as_few_waves_as_there_can_be(first: int) -> None:
    for seed in range(first, first + 250):
        kinds, before = draw(seed, 12)
        assert check_waves(kinds, before, waves_of(kinds, before)) == fewest(kinds, before), f"seed {seed}"


def test_depth_alone_is_not_enough() -> None:
    kinds = {0: "q", 1: "p", 2: "p", 3: "p"}
    assert waves_of(kinds, {0: (), 1: (), 2: (0,), 3: ()}) == {0: 0, 1: 1, 2: 1, 3: 1}


def test_what_goes_alone_goes_once() -> None:
    kinds = {0: 0, 1: "p", 2: 2, 3: "p"}
    assert len(set(waves_of(kinds, {0: (), 1: (0,), 2: (1,), 3: ()}).values())) == 3


def test_no_collectives() -> None:
    assert waves_of({}, {}) == {}


def test_where_too_many_states_would_have_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irpar.passes.fuse_communication.waves.MOST_STATES", 3)
    for seed in range(200):
        kinds, before = draw(seed, 12)
        levels: dict[int, int] = {}
        for number in kinds:
            levels[number] = 1 + max((levels[other] for other in before[number]), default=0)
        by_depth = len({(kinds[number], level) for number, level in levels.items()})
        assert check_waves(kinds, before, waves_of(kinds, before)) <= by_depth


def test_a_long_chain_beside_many_takes_little_time() -> None:
    """A step of training: a chain over one axis, and beside each of it some that nothing waits for."""
    kinds: dict[int, str] = {}
    before: dict[int, set[int]] = {}
    last: set[int] = set()
    for layer in range(200):
        number = layer * 6
        kinds[number], before[number] = "tp", last
        last = {number}
        for other in range(number + 1, number + 6):
            kinds[other], before[other] = "dp", {number}
    assert len(set(waves_of(kinds, before).values())) == 201


UNMERGEABLE = 2000
SHUFFLED = random.Random(0).sample(range(UNMERGEABLE), UNMERGEABLE)


@pytest.mark.parametrize("size", [1, 2], ids=["alone", "pairs"])
@pytest.mark.parametrize("shape", ["unrelated", "chain"])
def test_what_merges_with_nothing_takes_no_search(shape: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what merges with all of its kind: each step is one that is taken in any case."""
    monkeypatch.setattr("irpar.passes.fuse_communication.waves.MOST_STATES", 0)
    kinds = {number: number // size for number in range(UNMERGEABLE)}
    before = {number: {number - 1} & set(kinds) if shape == "chain" else set() for number in kinds}
    fewest_of_them = UNMERGEABLE // size if shape == "unrelated" else UNMERGEABLE
    assert len(set(waves_of(kinds, before).values())) == fewest_of_them


@pytest.mark.parametrize(
    ("kinds", "before", "most"),
    [
        (
            {**{n: n for n in range(1000)}, **{1000 + n: (n + 1) % 1000 for n in range(1000)}},
            {**{n: set() for n in range(1000)}, **{1000 + n: {n} for n in range(1000)}},
            1001,
        ),
        (
            {number: SHUFFLED[number] // 2 for number in range(UNMERGEABLE)},
            {number: {number - 1, number // 2} & set(range(number)) for number in range(UNMERGEABLE)},
            UNMERGEABLE,
        ),
        (
            {number: SHUFFLED[number] // 2 for number in range(UNMERGEABLE)},
            {number: {number // 2} & set(range(number)) for number in range(UNMERGEABLE)},
            1500,
        ),
    ],
    ids=["a ring of pairs", "a chain of pairs", "a tree of pairs"],
)
def test_many_kinds_are_searched_for_a_while(
    kinds: Mapping[int, int], before: Before, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of thousands of states of a thousand kinds would take minutes: what is made of them is counted."""
    made: list[_State] = []
    state_of = _Search._state

    def counted(search: _Search, front: _Front) -> _State:
        made.append(state_of(search, front))
        return made[-1]

    monkeypatch.setattr(_Search, "_state", counted)
    assert check_waves(kinds, before, waves_of(kinds, before)) <= most
    assert len(made) < 20_000


# -- programs ---------------------------------------------------------------------------------------------------------


def program(kinds: Kinds, before: Before) -> str:
    """A program with these collectives: each adds up what it depends on; all are results."""
    lines = []
    for number, others in before.items():
        operand = "%x"
        for other in sorted(others):
            lines.append(f"  %a{number}_{other} = Add({operand}, %y{other}) : f32[4]")
            operand = f"%a{number}_{other}"
        axis, reduce = {"p": ("p", "sum"), "q": ("q", "sum"), "r": ("p", "max"), "s": ("q", "max")}[kinds[number]]
        facts = f'axes=["{axis}"], reduce="{reduce}", id={number}'
        lines.append(f"  %n{number} = Mul({operand}, %k{number}) : f32[4]")
        lines.append(f"  %y{number} = irpar.AllReduce(%n{number}) {{{facts}}} : f32[4]")
    constants = [f"  %k{number} = constant : f32[] {0.5 + 0.1 * number}" for number in kinds]
    results = ", ".join(f"%y{number}" for number in kinds)
    head = 'module {network="h100-nvlink-ib"}\nmesh @m = ["p"=2, "q"=2]\n'
    body = "\n".join([*constants, *lines])
    return f"{head}graph local @g(%x: f32[4] of [16@(p,q)]) -> ({results}) opset 21 ranks [0, 1, 2, 3] {{\n{body}\n}}\n"


def launches(module: Module) -> int:
    return sum(node.domain == "irpar" for node in module.graph)


def results(module: Module) -> dict[str, np.ndarray]:
    """What each rank has: results of different ranks differ along the axes that they were not reduced over."""
    for value in (*module.graph.inputs, *module.graph.outputs):
        value.sharding = irpar.Sharding.of_spec(module.mesh, [["p", "q"]])
        value.global_shape = (16,)
    given = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    with Executor(module, module.mesh, engine="numpy") as executor:
        return executor.run({"x": given})


def bytes_sent(module: Module) -> int:
    return sum(sent_bytes(node, module.mesh) for node in module.graph if node.domain == "irpar")


FIXED: list[tuple[str, Before, int]] = [
    ("qppp", {0: set(), 1: set(), 2: {0}, 3: set()}, 2),  # By depth: {c0}, {c1, c3}, {c2}.
    ("pppp", {0: set(), 1: set(), 2: set(), 3: set()}, 1),
    ("pppp", {0: set(), 1: {0}, 2: {1}, 3: {2}}, 4),
    ("pqqp", {0: set(), 1: {0}, 2: set(), 3: {2}}, 3),  # Two that cross: one pair may go together, not both.
    ("pqpqpq", {0: set(), 1: {0}, 2: {1}, 3: set(), 4: {3}, 5: {4}}, 4),
    ("pqrspqrs", {0: set(), 1: {0}, 2: {1}, 3: {2}, 4: set(), 5: {4}, 6: {5}, 7: {6}}, 4),
    ("pqpqpqpqpqpq", {number: {number - 2} & set(range(12)) for number in range(12)}, 12),
]
"""Kinds, what each depends on, and how many launches are left."""


@pytest.mark.parametrize(("letters", "before", "count"), FIXED)
def test_fixed_programs(letters: str, before: Before, count: int) -> None:
    assert fewest(dict(enumerate(letters)), before) == count
    check_program(dict(enumerate(letters)), before, runs=True)


@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_programs_are_left_with_as_few(first: int) -> None:
    """What brute force finds, on 2,000 programs of up to 12 collectives."""
    for seed in range(first, first + budget(250)):
        check_program(*draw(seed, 12), runs=seed % 5 == 0)


def check_program(kinds: Kinds, before: Before, *, runs: bool) -> None:
    """As few launches as there can be, of the same bytes; where it runs, each rank has the same to the last bit."""
    text = program(kinds, before)
    module, plain = read(text), read(text)
    PassManager.parse("fuse-communication").run(module)
    verify(module)
    assert launches(module) == fewest(kinds, before), text
    assert bytes_sent(module) == bytes_sent(plain)
    if runs:
        expected = results(plain)
        for name, found in results(module).items():
            assert found.tobytes() == expected[name].tobytes(), name
