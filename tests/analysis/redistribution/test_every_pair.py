"""Every pair of shardings on small meshes: right values, right bytes, and blocks no larger than those of the ends."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from irpar.analysis.redistribution import Redistribution, redistribution
from irpar.sharding import Axis, Mesh, Sharding
from tests.budget import every

from .machine import Machine, shardings


def axes(text: str) -> list[Axis]:
    return [Axis.parse(part) for part in text.split()]


CASES = [
    (Mesh({"x": 4}), axes("x:(1)2 x:(2)2"), (1, 2, 3)),
    (Mesh({"x": 2, "y": 2}), axes("x y"), (1, 2, 3)),
    (Mesh({"x": 2, "y": 4}), axes("x y:(1)2 y:(2)2"), (1, 2)),
    (Mesh({"x": 2, "y": 4}), axes("x y"), (3,)),
    (Mesh({"x": 2, "y": 2, "z": 2}), axes("x y z"), (1, 2, 3)),
    (Mesh({"x": 4, "y": 2, "z": 2}), axes("x y z"), (1, 2, 3)),
    (Mesh({"x": 4, "y": 2, "z": 2}), axes("x:(1)2 x:(2)2 y z"), (1, 2)),
]
PROBLEMS = [(mesh, atoms, rank) for mesh, atoms, ranks in CASES for rank in ranks]


def check(machine: Machine, source: Sharding, target: Sharding, whole: np.ndarray) -> Redistribution:
    """Plan and execute."""
    found = redistribution(source, target, whole.shape, 32, chunk_bytes=0)
    held = machine.distribute(whole, source)
    peak, total = machine.block_bytes(held), 0
    for step in found.steps:
        held, sent = machine.run(step, held)
        assert sent == step.sent_bytes
        peak, total = max(peak, machine.block_bytes(held)), total + sent
    expected = machine.distribute(whole, target.with_partial(()))
    got = machine.reduced(held, target.partial)
    np.testing.assert_allclose(got, expected, rtol=1e-12, err_msg=f"{source} -> {target}")
    assert peak == found.peak_bytes <= found.ends_bytes, f"{source} -> {target}"
    assert total == found.sent_bytes == found.key[0]
    assert not found.steps or found.steps[-1].after == target
    return found


def wholes(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal((16,) * rank)


def check_all(machine: Machine, pairs: Sequence[tuple[Sharding, Sharding]], rank: int) -> None:
    whole = wholes(rank)
    for source, target in pairs:
        check(machine, source, target, whole)


@pytest.mark.parametrize(("mesh", "atoms", "rank"), every(2, PROBLEMS))
def test_a_sample_of_pairs(mesh: Mesh, atoms: list[Axis], rank: int) -> None:
    draw = random.Random(rank)
    sources = shardings(mesh, atoms, rank, with_partial=True)
    targets = shardings(mesh, atoms, rank)
    pairs = [(draw.choice(sources), draw.choice(targets)) for _ in range(60)]
    pairs += [(draw.choice(sources), draw.choice(sources)) for _ in range(20)]
    check_all(Machine(mesh), pairs, rank)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "atoms", "rank"), PROBLEMS)
def test_every_pair(mesh: Mesh, atoms: list[Axis], rank: int) -> None:
    every = shardings(mesh, atoms, rank)
    check_all(Machine(mesh), list(itertools.product(every, every)), rank)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rank"), [(Mesh({"x": 2, "y": 4}), 2), (Mesh({"x": 2, "y": 2, "z": 2}), 2)])
def test_every_pair_with_partial_values(mesh: Mesh, rank: int) -> None:
    every = shardings(mesh, [Axis(name) for name in mesh.axis_names], rank, with_partial=True)
    check_all(Machine(mesh), list(itertools.product(every, every)), rank)


@pytest.mark.parametrize("shape", [(12, 12), (24, 12)])
def test_rink_et_al_stays_at_six_elements(shape: tuple[int, int]) -> None:
    """The naive plan gathers all 144 elements of a 12 x 12 array on 4 x 6 devices; each holds 6 before and after."""
    mesh = Mesh({"x": 4, "y": 6})
    source, target = Sharding.of_spec(mesh, [["x"], ["y"]]), Sharding.of_spec(mesh, [["y"], ["x"]])
    whole = np.random.default_rng(0).standard_normal(shape)
    found = check(Machine(mesh), source, target, whole)
    assert found.peak_bytes == whole.size // 24 * 4


def test_what_xla_rematerialises() -> None:
    """openxla/xla issue 15207: f32[16,16,16] from {y, _, x} to {_, (x, y), _} on x=4, y=2."""
    mesh = Mesh({"x": 4, "y": 2})
    source, target = Sharding.of_spec(mesh, [["y"], None, ["x"]]), Sharding.of_spec(mesh, [None, ["x", "y"], None])
    found = check(Machine(mesh), source, target, wholes(3))
    assert [step.op for step in found.steps] == ["AllToAll", "AllToAll"]
    block = 16**3 // 8 * 4
    assert found.peak_bytes == block
    assert found.sent_bytes == block * 3 // 4 + block // 2
