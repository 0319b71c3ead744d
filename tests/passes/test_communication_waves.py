"""How many collectives are left: beside every way to send them, and in programs that are run."""

import random
from collections.abc import Collection, Mapping
from functools import cache
from itertools import combinations

import numpy as np
import pytest

import irpar
from irpar.ir import Module
from irpar.passes.fuse_communication.waves import waves_of
from irpar.runtime.executor import Executor

from .golden import read, run_pipeline

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
    """The fewest launches of all ways: any of one kind that are ready may go together, all of them or some."""

    @cache
    def left(sent: frozenset[int]) -> int:
        if len(sent) == len(kinds):
            return 0
        ready = [number for number in kinds if number not in sent and sent.issuperset(before[number])]
        ways = (
            chosen
            for kind in {kinds[number] for number in ready}
            for alike in [[number for number in ready if kinds[number] == kind]]
            for size in range(1, len(alike) + 1)
            for chosen in combinations(alike, size)
        )
        return 1 + min(left(sent.union(chosen)) for chosen in ways)

    return left(frozenset())


def check_waves(kinds: Mapping[int, str], before: Mapping[int, Collection[int]], found: Mapping[int, int]) -> int:
    """Each wave is of one kind, and stands behind what it depends on; returns how many there are."""
    assert found.keys() == kinds.keys()
    assert all(found[other] < found[number] for number in kinds for other in before[number])
    assert all(len({kinds[n] for n in kinds if found[n] == wave}) == 1 for wave in found.values())
    return len(set(found.values()))


@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_as_few_waves_as_there_can_be(first: int) -> None:
    for seed in range(first, first + 250):
        kinds, before = draw(seed, 12 if seed % 10 == 0 else 8)
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


@pytest.mark.parametrize("seed", range(40))
def test_programs_are_left_with_as_few(seed: int) -> None:
    kinds, before = draw(seed, 8)
    text = program(kinds, before)
    module, plain = read(text), read(text)
    run_pipeline("fuse-communication", module)
    assert launches(module) == fewest(kinds, before)
    if seed % 4 == 0:
        expected = results(plain)
        for name, found in results(module).items():
            np.testing.assert_array_equal(found, expected[name])
