"""The planner's steps are executed here by a few lines of numpy of their own, and their bytes counted."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.analysis.cost.model import CostModel, add_keys
from irpar.analysis.cost.network import BYTES, Network
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.redistribution import Planner, Step, price, redistribution
from irpar.analysis.redistribution.search import Effort
from irpar.analysis.redistribution.solution import EFFORTS, forget
from irpar.ops.collectives import FREE, KINDS
from irpar.sharding import Axis, IrparError, Mesh, Sharding, block_range, ceil_shape
from tests.budget import budget

from .ranks import block, execute

MESHES = [{"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 4}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2}]


def check(
    mesh: Mesh, source: Sharding, target: Sharding, shape: tuple[int, ...], network: Network = BYTES
) -> tuple[Step, ...]:
    array = np.random.default_rng(0).standard_normal(shape)
    steps = redistribution(source, target, shape, 32, network).steps
    held = [block(array, source, rank) for rank in range(mesh.size)]
    before = source
    for step in steps:
        held = execute(step, held, before, shape)
        before = step.after
    assert (steps[-1].after if steps else source) == target
    for group in mesh.groups(target.partial):
        expected = block(array, target.with_partial(()), group[0])
        got = sum(held[rank] for rank in group) if target.partial else held[group[0]]
        np.testing.assert_allclose(got, expected, atol=1e-12, err_msg=f"rank {group[0]}: {source} -> {target}")
    return steps


@st.composite
def problems(draw: st.DrawFn) -> tuple[Mesh, Sharding, Sharding, tuple[int, ...]]:
    mesh = Mesh(draw(st.sampled_from(MESHES)))
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))

    def sharding(may_be_partial: bool) -> Sharding:
        dims: list[list[Axis]] = [[] for _ in shape]
        partial: list[Axis] = []
        for axis in draw(st.permutations(mesh.axis_names)):
            place = draw(st.integers(-2 if may_be_partial else -1, rank - 1))
            if place >= 0:
                dims[place].append(Axis(axis))
            elif place == -2:
                partial.append(Axis(axis))
        return Sharding.of_axes(mesh, dims, partial)

    return mesh, sharding(True), sharding(draw(st.booleans())), shape


@given(problems())
@settings(max_examples=budget(150), deadline=None)
def test_steps_lead_to_the_target(problem: tuple[Mesh, Sharding, Sharding, tuple[int, ...]]) -> None:
    check(*problem)


@given(problems())
@settings(max_examples=budget(60), deadline=None)
def test_haste_leads_there_too(problem: tuple[Mesh, Sharding, Sharding, tuple[int, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EFFORTS, "optimal", Effort(1.0, 0))
        forget()
        check(*problem)
    forget()


def specs(mesh: Mesh, *dims: list[str] | None, partial: str = "") -> Sharding:
    return Sharding.of_spec(mesh, dims).with_partial([Axis(name) for name in partial])


M24 = Mesh({"x": 2, "y": 4})


@pytest.mark.parametrize(
    ("source", "target", "ops", "sent"),
    [
        (specs(M24, ["x"], None), specs(M24, None, None), ["AllGather"], 64 * 32 * 4 // 2),
        (specs(M24, None, None), specs(M24, ["x"], ["y"]), ["AllSlice", "AllSlice"], 0),
        (specs(M24, ["x"], None), specs(M24, None, ["x"]), ["AllToAll"], 64 * 32 * 4 // 2 // 2),
        # Slicing before gathering halves what is gathered.
        (specs(M24, ["x"], None), specs(M24, None, ["y"]), ["AllSlice", "AllGather"], 64 * 32 * 4 // 4 // 2),
        (specs(M24, ["x"], None, partial="y"), specs(M24, ["x"], None), ["AllReduce"], 64 * 32 * 4 // 2 * 2 * 3 // 4),
        (specs(M24, ["x"], None, partial="y"), specs(M24, ["x", "y"], None), ["ReduceScatter"], 64 * 32 * 4 * 3 // 8),
        # Both devices of x hold all partial values: each reduces one half of them.
        (
            specs(M24, None, None, partial="y"),
            specs(M24, None, None),
            ["AllSlice", "AllReduce", "AllGather"],
            64 * 32 * 4 // 2 * 2 * 3 // 4 + 64 * 32 * 4 // 2,
        ),
        (specs(M24, None, None), specs(M24, None, None, partial="y"), ["MakePartial"], 0),
        (specs(M24, ["x"], None), specs(M24, ["y", "x"], None), ["AllSlice", "CollectivePermute"], 64 * 32 * 4 // 8),
        (
            specs(M24, ["x"], ["y"]),
            specs(M24, ["y"], ["x"]),
            ["AllToAll", "CollectivePermute"],
            64 * 32 * 4 // 8 // 2 * 3,
        ),
        (specs(M24, None, None, partial="xy"), specs(M24, ["x", "y"], None), ["ReduceScatter"], 64 * 32 * 4 * 7 // 8),
        (specs(M24, ["y"], None), specs(M24, ["y:(1)2"], ["y:(2)2"]), ["AllToAll"], 64 * 32 * 4 // 4 // 2),
    ],
)
def test_known_moves(source: Sharding, target: Sharding, ops: list[str], sent: int) -> None:
    steps = check(M24, source, target, (64, 32))
    assert [step.op for step in steps] == ops
    assert sum(step.sent_bytes for step in steps) == sent


def test_every_pair_on_two_axes() -> None:
    mesh = Mesh({"x": 2, "y": 2})
    choices = [(), ("x",), ("y",), ("x", "y"), ("y", "x")]
    shardings = [
        Sharding.of_axes(mesh, [[Axis(a) for a in first], [Axis(a) for a in second]])
        for first, second in itertools.product(choices, choices)
        if not set(first) & set(second)
    ]
    for source, target in itertools.product(shardings, shardings):
        check(mesh, source, target, (8, 4))


def test_uneven_blocks_are_gathered_whole_where_they_do_not_nest() -> None:
    mesh = Mesh({"x": 2, "y": 2})
    # 10 over 4 is 3, 3, 3, 1, but 10 over 2 is 5, 5: blocks over (x, y) do not join to blocks over x.
    assert block_range(10, 4, 1) == (3, 6)
    steps = check(mesh, specs(mesh, ["x", "y"]), specs(mesh, ["x"]), (10,))
    assert [step.op for step in steps] == ["AllGather", "AllSlice"]


def test_sub_axes_that_do_not_divide_each_other_go_through_the_whole_tensor() -> None:
    mesh = Mesh({"x": 6})
    steps = check(mesh, specs(mesh, ["x:(1)2"]), specs(mesh, ["x:(1)3"]), (12,))
    assert [step.op for step in steps] == ["AllGather", "AllSlice"]


def test_another_mesh_is_refused() -> None:
    with pytest.raises(IrparError, match="two meshes"):
        redistribution(specs(M24, None), specs(Mesh({"x": 4}), None), (8,), 32)


def test_other_reductions_go_through_the_reduced_value() -> None:
    source = Sharding.of_axes(M24, [()], [Axis("x")], "max")
    steps = redistribution(source, specs(M24, ["y"], partial="x"), (8,), 32).steps
    assert [step.op for step in steps] == ["AllSlice", "AllReduce", "MakePartial"]
    assert [step.after.reduce for step in steps if step.after.partial] == ["max", "sum"]


def test_half_reduced_values_keep_the_other_axis() -> None:
    (step,) = redistribution(specs(M24, None, partial="xy"), specs(M24, None, partial="y"), (8,), 32).steps
    assert step.op == "AllReduce"
    assert step.axes == (Axis("x"),)
    assert step.sent_bytes == math.prod([8, 4, 2, 1]) // 2


# -- other networks ------------------------------------------------------------------------------------------------

SLOW_ACROSS = network_of(
    json.dumps(
        {
            "links": [
                {"name": "fast", "devices": 4, "latency": 1e-6, "bandwidth": 100e9},
                {"name": "slow", "latency": 1e-5, "bandwidth": 1e9},
            ]
        }
    )
)


def price_of(steps: tuple[Step, ...], source: Sharding, shape: tuple[int, ...], network: Network) -> tuple[int, ...]:
    """What steps cost, from their shardings alone."""
    total, before = CostModel(network).nothing, source
    for step in steps:
        if step.op not in FREE:
            held = math.prod(ceil_shape(before, shape)) * 4
            if step.op in ("ReduceScatter", "AllToAll"):
                dim, n = step.dims[0], source.mesh.group_size(step.axes)
                padded = list(ceil_shape(before, shape))
                padded[dim] = n * ceil_shape(step.after, shape)[dim]
                held = math.prod(padded) * 4
            total = add_keys(total, CostModel(network).collective(KINDS[step.op], step.axes, held, source.mesh))
        before = step.after
    return total


@given(problems(), st.sampled_from([SLOW_ACROSS, network_of("h100-nvlink-ib"), BYTES]))
@settings(max_examples=budget(100), deadline=None)
def test_paths_by_a_network(problem: tuple[Mesh, Sharding, Sharding, tuple[int, ...]], network: Network) -> None:
    mesh, source, target, shape = problem
    steps = check(mesh, source, target, shape, network)
    assert price(source, target, shape, 32, network) == price_of(steps, source, shape, network)
    by_bytes = redistribution(source, target, shape, 32).steps
    assert price_of(steps, source, shape, network) <= price_of(by_bytes, source, shape, network)


def test_what_is_far_is_sent_little() -> None:
    """x is across nodes, y inside: rather more bytes inside than fewer across."""
    mesh = Mesh({"x": 2, "y": 4})
    source, target, shape = specs(mesh, None, None, partial="xy"), specs(mesh, None, None), (64, 65536)
    assert [step.op for step in redistribution(source, target, shape, 32).steps] == ["AllReduce"]
    seconds = price(source, target, shape, 32, SLOW_ACROSS)[0] / 1e15
    size = 64 * 65536 * 4
    inside, across = 2 * 3 / 4 * size / 100e9, 2 / 2 * size / 4 / 1e9
    assert seconds == pytest.approx(inside + across, rel=0.05)
    assert price(source, target, shape, 32)[0] == 2 * 7 * size // 8


@pytest.mark.parametrize("planner", ["optimal", "fast"])
def test_tensors_of_many_dims_on_many_devices_are_planned_in_no_time(planner: Planner) -> None:
    """There are a million ways to cut ten dims by ten factors of two, up to their order and the order of dims few."""
    mesh = Mesh({"x": 1024})
    first, last = Axis.parse("x:(1)32"), Axis.parse("x:(32)32")
    source = Sharding.replicated(mesh, 10).with_partial([first])
    target = Sharding.of_axes(mesh, [(), (), (), (first,), (), (last,), (), (), (), ()])
    found = redistribution(source, target, (64,) * 10, 32, planner=planner)
    assert [step.op for step in found.steps[:2]] == ["AllSlice", "ReduceScatter"]
