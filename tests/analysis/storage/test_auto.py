"""What leaves the device for a limit: never too little, and at no longer a wait than the best choice has."""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import get_args

import numpy as np
import pytest

from irpar.analysis.cost.device import Device, node_seconds
from irpar.analysis.cost.model import FEMTOSECONDS
from irpar.analysis.cost.network import Disk, Network, Speed
from irpar.analysis.cost.timeline import copy_seconds
from irpar.analysis.storage.auto import _Search, solve
from irpar.analysis.storage.gaps import Gaps, Numbers, Room
from irpar.analysis.storage.items import Kind, MovableValue, items_of
from irpar.analysis.storage.rewriting import write_moves
from irpar.analysis.storage.steps import Steps, steps_of_reads
from irpar.analysis.storage.timeline import Rates, seconds_of_steps
from irpar.ir import Graph
from irpar.ir.text.files import parse_module
from tests.budget import budget

DEVICE = Device({"f32": 5000.0}, 1000.0, launch=0.1)
NETWORK = Network("", "", device=DEVICE, host_link=Speed(1.0, 100.0), disk=Disk(50.0, 25.0))
RATES = Rates(NETWORK)


def random_graph(random: np.random.Generator) -> Graph:
    """A chain of layers, which a backward pass goes through again: weights and activations of random sizes."""
    depth = int(random.integers(1, 3))
    sizes = [int(size) for size in random.integers(8, 200, depth + 1)]
    lines = [f'%w{n} = constant : f32[{a}, {b}] data("w{n}", 0, {4 * a * b})' for n, (a, b) in _layers(sizes)]
    lines += [f"%h{n + 1} = MatMul(%h{n}, %w{n}) {{| phase=forward}} : f32[4, {b}]" for n, (_, b) in _layers(sizes)]
    lines += [f"%g{depth} = Neg(%h{depth}) {{| phase=backward}} : f32[4, {sizes[-1]}]"]
    for n, (a, b) in reversed(list(_layers(sizes))):
        lines += [
            f"%t{n} = Transpose(%w{n}) {{perm=[1, 0] | phase=backward}} : f32[{b}, {a}]",
            f"%p{n} = MatMul(%g{n + 1}, %t{n}) {{| phase=backward}} : f32[4, {a}]",
            f"%g{n} = Mul(%p{n}, %h{n}) {{| phase=backward}} : f32[4, {a}]",
        ]
    head = f"graph local @g(%h0: f32[4, {sizes[0]}] of [4, {sizes[0]}]) -> (%g0) opset 21 ranks [0] {{"
    return parse_module("\n".join(['mesh @m = ["d"=1]', head, *lines, "}"])).graph


def _layers(sizes: list[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(pairwise(sizes))


def problem(seed: int) -> tuple[Graph, list[MovableValue], Steps, list[float], np.random.Generator]:
    random = np.random.default_rng(seed)
    graph = random_graph(random)
    items = items_of(graph, 1)
    steps = steps_of_reads(graph, items)
    return graph, items, steps, [float(each) for each in random.uniform(1, 40, steps.count)], random


def subsets(gaps: Gaps) -> Iterator[Numbers]:
    """All choices of gaps that can be: what leaves between uses lies elsewhere from the beginning."""
    for bits in product([False, True], repeat=len(gaps.all)):
        chosen = np.array(bits, np.bool_)
        around = {number for number, own in gaps.of_item.items() if gaps.is_around[own[0]] and not chosen[own[0]]}
        if not any(int(gaps.item[number]) in around for number in np.flatnonzero(chosen)):
            yield chosen


@pytest.mark.parametrize("seed", range(budget(200)))
def test_no_other_choice_waits_less(seed: int) -> None:
    graph, items, steps, seconds, random = problem(seed)
    memory = dict.fromkeys(get_args(Kind), ("host",))
    gaps = Gaps(graph, items, steps, RATES, Room(0, memory))
    least, whole = int(gaps.held(np.ones(len(gaps.all), np.bool_)).max()), int(gaps.whole.max())
    room = Room(int(random.integers(least, whole + 1)), memory)
    gaps = Gaps(graph, items, steps, RATES, room)
    search = _Search(gaps, seconds, RATES)
    best = min(search._worth(chosen) for chosen in subsets(gaps) if gaps.held(chosen).max() <= room.limit)
    found = solve(graph, items, steps, seconds, RATES, room)
    assert found.fits
    assert found.timeline.exposed <= best[0] + 1e-9
    tight = solve(graph, items, steps, seconds, RATES, Room(least - 1, memory))
    assert (tight.fits, tight.least) == (False, least)


@pytest.mark.parametrize("seed", range(budget(200)))
def test_the_plan_of_the_written_program_predicts_what_the_search_counted(seed: int) -> None:
    graph, items, steps, _, random = problem(seed)
    seconds = seconds_of_steps(graph, steps, lambda node: round(node_seconds(node, DEVICE) * FEMTOSECONDS))
    memory = {kind: (("host",), ("disk",))[int(random.integers(2))] for kind in get_args(Kind)}
    gaps = Gaps(graph, items, steps, RATES, Room(0, memory))
    limit = int(random.integers(int(gaps.least.max()), int(gaps.whole.max()) + 1))
    found = solve(graph, items, steps, seconds, RATES, Room(limit, memory), 0.1)
    write_moves(graph, steps, found.moves)
    taken = copy_seconds(NETWORK, graph, lambda node: pytest.fail(f"{node.title} communicates"))
    assert taken is not None
    assert (taken.total, taken.exposed) == pytest.approx((found.timeline.copying, found.timeline.exposed), abs=1e-9)
