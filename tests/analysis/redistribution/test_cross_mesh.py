"""From mesh to mesh: every element arrives once, from who holds it, and no device sends more than it must."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.analysis.cost.network import BYTES, Network
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.redistribution.cross_mesh import CrossMesh, cross_mesh
from irpar.sharding import Axis, IrparError, Mesh, Sharding, local_region
from tests.budget import budget

from .ranks import block, execute

NODES = network_of(
    json.dumps(
        {
            "links": [
                {"name": "fast", "devices": 4, "latency": 1e-6, "bandwidth": 100e9},
                {"name": "slow", "latency": 1e-5, "bandwidth": 1e9},
            ]
        }
    )
)
SOURCES = [Mesh({"x": 4}), Mesh({"x": 2, "y": 2}), Mesh({"x": 2, "y": 3}), Mesh({"x": 1})]
TARGETS = [
    Mesh({"a": 4}, (4, 5, 6, 7)),
    Mesh({"a": 2, "b": 2}, (3, 2, 5, 4)),
    Mesh({"a": 2}, (0, 1)),
    Mesh({"a": 2, "b": 4}, tuple(range(8, 16))),
    Mesh({"a": 3}, (9, 0, 7)),
]


def run(found: CrossMesh, source: Sharding, target: Sharding, array: np.ndarray) -> None:
    """Execute, and compare with what the target's devices should hold."""
    shape = array.shape
    held = [block(array, source, rank) for rank in range(source.mesh.size)]
    departure = source
    for step in found.before.steps:
        held = execute(step, held, departure, shape)
        departure = step.after
    landed, counts = land(found, departure, held, shape)
    for rank, count in enumerate(counts):
        assert (count == 1).all(), f"rank {rank} of the target gets some elements {count.min()} to {count.max()} times"
    lies = found.landing
    for step in found.after.steps:
        landed = execute(step, landed, lies, shape)
        lies = step.after
    assert lies.axes == target.axes
    for rank in range(target.mesh.size):
        np.testing.assert_allclose(landed[rank], block(array, target, rank), atol=1e-12)


def land(
    found: CrossMesh, departure: Sharding, held: list[np.ndarray], shape: tuple[int, ...]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the target's ranks hold after the transfers, and how often each element came."""
    mesh = found.landing.mesh
    regions = [local_region(found.landing, shape, coords) for coords in mesh.all_coords()]
    sizes = [tuple(stop - start for start, stop in region) for region in regions]
    landed, counts = [np.full(size, np.nan) for size in sizes], [np.zeros(size, int) for size in sizes]
    senders = {departure.mesh.device(rank): rank for rank in range(departure.mesh.size)}
    receivers = {mesh.device(rank): rank for rank in range(mesh.size)}
    for one in (*found.transfers, *found.kept):
        sender, receiver = senders[one.source], receivers[one.target]
        first = local_region(departure, shape, departure.mesh.coords(sender))
        part = held[sender][inside(one.box, first)]
        assert part.shape == tuple(stop - start for start, stop in one.box)
        assert one.bytes == part.size * 4
        landed[receiver][inside(one.box, regions[receiver])] = part
        counts[receiver][inside(one.box, regions[receiver])] += 1
    assert all(one.source != one.target for one in found.transfers)
    assert all(one.source == one.target for one in found.kept)
    return landed, counts


def inside(box: tuple[tuple[int, int], ...], region: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, region, strict=True))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Sharding, Sharding, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))

    def sharding(mesh: Mesh, may_be_partial: bool) -> Sharding:
        dims: list[list[Axis]] = [[] for _ in range(len(shape) + 2)]
        for axis in draw(st.permutations(mesh.axis_names)):
            places = [len(shape), *range(len(shape)), *([len(shape) + 1] if may_be_partial else [])]
            dims[draw(st.sampled_from(places))].append(Axis(axis))
        return Sharding.of_axes(mesh, dims[: len(shape)], dims[-1])

    return sharding(draw(st.sampled_from(SOURCES)), True), sharding(draw(st.sampled_from(TARGETS)), False), shape


@given(problems(), st.sampled_from([BYTES, NODES]))
@settings(max_examples=budget(200), deadline=None)
def test_every_element_arrives_once(problem: tuple[Sharding, Sharding, tuple[int, ...]], network: Network) -> None:
    source, target, shape = problem
    found = cross_mesh(source, target, shape, 32, network)
    run(found, source, target, np.random.default_rng(0).standard_normal(shape))


A4, B2 = Mesh({"x": 4}), Mesh({"y": 2}, (4, 5))


def spec(mesh: Mesh, *dims: list[str] | None) -> Sharding:
    return Sharding.of_spec(mesh, dims)


def test_blocks_go_where_they_are_needed() -> None:
    found = cross_mesh(spec(A4, ["x"], None), spec(B2, ["y"], None), (8, 4), 32)
    assert [(one.source, one.target, one.box) for one in found.transfers] == [
        (0, 4, ((0, 2), (0, 4))),
        (1, 4, ((2, 4), (0, 4))),
        (2, 5, ((4, 6), (0, 4))),
        (3, 5, ((6, 8), (0, 4))),
    ]
    assert found.key == (8 * 4, 1)
    assert found.landing == spec(B2, ["y"], None)


def test_devices_that_hold_the_same_share_the_work() -> None:
    found = cross_mesh(spec(A4, None), spec(Mesh({"y": 1}, (7,)), None), (8,), 32)
    assert [(one.source, one.bytes) for one in found.transfers] == [(0, 8), (1, 8), (2, 8), (3, 8)]


def test_who_needs_the_same_gets_it_once_and_gathers() -> None:
    found = cross_mesh(
        spec(Mesh({"x": 1}, (0,)), None), spec(Mesh({"y": 4}, (4, 5, 6, 7)), None), (1 << 20,), 32, NODES
    )
    assert [step.op for step in found.after.steps] == ["AllGather"]
    assert [one.bytes for one in found.transfers] == [1 << 20] * 4
    # 4 MB once over the slow link, at 1 GB/s, instead of four times.
    assert found.key[0] / 1e15 == pytest.approx((1 << 22) / 1e9, rel=0.02)


def test_near_holders_send() -> None:
    source = spec(Mesh({"x": 2}, (0, 4)), None)
    found = cross_mesh(source, spec(Mesh({"y": 2}, (5, 1)), None), (64,), 32, NODES)
    assert {(one.source, one.target) for one in found.transfers} == {(0, 1), (4, 5)}


def test_what_is_there_stays() -> None:
    mesh = Mesh({"a": 2, "b": 2})
    found = cross_mesh(spec(A4, ["x"]), spec(mesh, ["a", "b"]), (8,), 32)
    assert not found.transfers
    assert len(found.kept) == 4
    assert found.key == (0, 0)


def test_partial_values_are_reduced_where_they_are() -> None:
    source = Sharding.of_axes(A4, [()], [Axis("x")])
    found = cross_mesh(source, spec(B2, ["y"]), (8,), 32)
    assert [step.op for step in found.before.steps] == ["ReduceScatter"]
    with pytest.raises(IrparError, match="the target is partial"):
        cross_mesh(spec(A4, None), Sharding.of_axes(B2, [()], [Axis("y")]), (8,), 32)


@given(problems())
@settings(max_examples=budget(100), deadline=None)
def test_no_device_sends_more_than_alone_it_would(problem: tuple[Sharding, Sharding, tuple[int, ...]]) -> None:
    """At most what the first holder of each block sends where nobody shares the work."""
    source, target, shape = problem
    if source.partial:
        return
    found = cross_mesh(source, target, shape, 32)
    loads: dict[int, int] = {}
    for rank in range(target.mesh.size):
        needed = local_region(target, shape, target.mesh.coords(rank))
        seen = set()
        for holder in range(source.mesh.size):
            region = local_region(source, shape, source.mesh.coords(holder))
            if region in seen:
                continue
            seen.add(region)
            overlap = [max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(region, needed, strict=True)]
            if source.mesh.device(holder) != target.mesh.device(rank):
                loads[holder] = loads.get(holder, 0) + int(np.prod(overlap)) * 4
    assert found.sent_bytes <= max(loads.values(), default=0)
