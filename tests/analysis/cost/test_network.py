"""Networks: which links an axis runs over, what collectives over several links take, presets."""

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.analysis.cost.model import CostModel, add_keys
from irpar.analysis.cost.network import BYTES, FieldError, Network
from irpar.analysis.cost.network_algorithms import ALGORITHMS, ring_bytes
from irpar.analysis.cost.network_fields import network_of_fields
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.network_presets import PRESETS
from irpar.sharding import Axis, IrparError, Mesh
from tests.budget import budget

KINDS = sorted(ALGORITHMS)
RINGS = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "broadcast"), "ring")
FAST, SLOW = (1e-6, 100e9), (10e-6, 1e9)


def two_links(inside: int, algorithms: dict | None = None, **more: object) -> Network:
    """Nodes of `inside` devices with a fast link, and a slow one between them."""
    links = [
        {"name": "fast", "devices": inside, "latency": FAST[0], "bandwidth": FAST[1], "algorithms": algorithms or {}},
        {"name": "slow", "latency": SLOW[0], "bandwidth": SLOW[1], "algorithms": algorithms or {}},
    ]
    return network_of_fields({"links": links, **more})


def axes(*texts: str) -> tuple[Axis, ...]:
    return tuple(map(Axis.parse, texts))


# -- which links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "over", "inside", "levels"),
    [
        ({"dp": 2, "tp": 8}, ["tp"], 8, {0: 8}),
        ({"dp": 2, "tp": 8}, ["dp"], 8, {1: 2}),
        ({"dp": 2, "tp": 8}, ["dp", "tp"], 8, {0: 8, 1: 2}),
        ({"dp": 4, "tp": 2}, ["dp"], 4, {0: 2, 1: 2}),  # Two tp pairs fill a node.
        ({"dp": 4, "tp": 2}, ["dp:(1)2"], 4, {1: 2}),
        ({"dp": 4, "tp": 2}, ["dp:(2)2"], 4, {0: 2}),
        ({"tp": 16}, ["tp"], 8, {0: 8, 1: 2}),
        ({"tp": 16}, ["tp:(4)4"], 8, {0: 4}),
        ({"tp": 16}, ["tp:(1)4"], 8, {0: 2, 1: 2}),
        ({"dp": 2, "tp": 3}, ["tp"], 8, {0: 3}),  # All on one node.
        ({"dp": 4, "tp": 3}, ["tp"], 8, {1: 3}),  # Ranks 6, 7, 8 are on two nodes.
        ({"dp": 4, "tp": 3}, ["dp", "tp"], 8, {1: 12}),
        ({"x": 1, "tp": 4}, ["x"], 2, {}),
        ({"x": 1, "tp": 4}, ["x", "tp"], 2, {0: 2, 1: 2}),
    ],
)
def test_minor_axes_fill_a_node_first(mesh: dict, over: list[str], inside: int, levels: dict) -> None:
    assert dict(two_links(inside).levels(axes(*over), Mesh(mesh))) == levels


def test_device_ids_count() -> None:
    major_inside = Mesh({"dp": 2, "tp": 4}, (0, 2, 4, 6, 1, 3, 5, 7))
    assert dict(two_links(2).levels(axes("dp"), major_inside)) == {0: 2}
    assert dict(two_links(2).levels(axes("tp"), major_inside)) == {1: 4}


def test_an_axis_may_be_given_its_link() -> None:
    network = two_links(8, axes={"tp": "slow"})
    mesh = Mesh({"dp": 2, "tp": 4})
    assert dict(network.levels(axes("tp"), mesh)) == {1: 4}
    assert dict(network.levels(axes("tp:(1)2"), mesh)) == {1: 2}
    assert dict(network.levels(axes("dp"), mesh)) == {0: 2}


def test_groups_that_cross_the_bounds_of_nodes() -> None:
    # Pairs of 6 devices on nodes of 3: ranks 2 and 3 are on two.
    assert dict(two_links(3).levels(axes("x:(3)2"), Mesh({"x": 6}))) == {1: 2}
    assert dict(two_links(3).levels(axes("x:(2)3"), Mesh({"x": 6}))) == {0: 3}


@st.composite
def groups(draw: st.DrawFn) -> tuple[Mesh, tuple[Axis, ...], int]:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3))
    mesh = Mesh({f"a{i}": size for i, size in enumerate(sizes)})
    if draw(st.booleans()):
        mesh = Mesh(mesh.axes, tuple(draw(st.permutations(range(mesh.size)))))
    chosen = [Axis(name) for name in draw(st.permutations(mesh.axis_names))[: draw(st.integers(1, len(sizes)))]]
    made = []
    for axis in chosen:
        size = mesh.axes[axis.name]
        cuts = [(pre, part) for pre in range(1, size + 1) for part in range(2, size + 1) if size % (pre * part) == 0]
        made.append(Axis(axis.name, *draw(st.sampled_from(cuts))) if cuts and draw(st.booleans()) else axis)
    return mesh, tuple(made), draw(st.sampled_from([2, 3, 4, 8]))


@given(groups())
@settings(max_examples=budget(200), deadline=None)
def test_levels_never_count_a_device_as_nearer_than_it_is(group: tuple[Mesh, tuple[Axis, ...], int]) -> None:
    mesh, over, inside = group
    levels = dict(two_links(inside).levels(over, mesh))
    n = mesh.group_size(over)
    assert levels.get(0, 1) * levels.get(1, 1) == n
    for members in mesh.groups(over):
        nodes: dict[int, int] = {}
        for rank in members:
            node = mesh.device(rank) // inside
            nodes[node] = nodes.get(node, 0) + 1
        assert levels.get(0, 1) <= min(nodes.values())
        if len(nodes) > 1:
            assert 1 in levels


# -- how long ------------------------------------------------------------------------------------------------------


def ring(members: list[list[int]]) -> list[list[tuple[int, int]]]:
    """The steps of rings inside each of these groups at once."""
    n = len(members[0])
    return [[(group[i], group[(i + 1) % n]) for group in members for i in range(n)] for _ in range(n - 1)]


def seconds_of(steps: list[list[tuple[int, int]]], size: float, inside: int) -> float:
    """A step takes as long as its slowest message."""
    total = 0.0
    for step in steps:
        total += max(
            latency + size / bandwidth
            for source, target in step
            for latency, bandwidth in [FAST if source // inside == target // inside else SLOW]
        )
    return total


@pytest.mark.parametrize(("nodes", "inside"), [(2, 2), (2, 4), (3, 4), (4, 8)])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_two_links_against_their_messages(nodes: int, inside: int, size: float) -> None:
    """Link after link: rings inside the nodes, rings of the devices with equal places across them."""
    n = nodes * inside
    inner = [[node * inside + i for i in range(inside)] for node in range(nodes)]
    outer = [[node * inside + i for node in range(nodes)] for i in range(inside)]
    scatter = seconds_of(ring(inner), size / inside, inside)
    across = seconds_of(ring(outer), size / n, inside)
    expected = {
        "reduce_scatter": scatter + across,
        "all_reduce": 2 * scatter + 2 * across,
        "all_gather": seconds_of(ring(outer), size, inside) + seconds_of(ring(inner), size * nodes, inside),
        "permute": SLOW[0] + size / SLOW[1],
    }
    network, mesh = two_links(inside, RINGS), Mesh({"dp": nodes, "tp": inside})
    levels = network.levels(axes("dp", "tp"), mesh)
    for kind, seconds in expected.items():
        assert network._apart(kind, levels, size) == pytest.approx(seconds), kind
        assert network.seconds(kind, axes("dp", "tp"), size, mesh) <= seconds * (1 + 1e-9)


def test_one_ring_leaves_a_node_over_all_of_its_adapters() -> None:
    network, mesh = two_links(4, RINGS), Mesh({"dp": 2, "tp": 4})
    size = 1e9
    flat = 14 * SLOW[0] + 2 * 7 / 8 * size / (4 * SLOW[1])
    assert network.seconds("all_reduce", axes("dp", "tp"), size, mesh) == pytest.approx(
        min(flat, network._apart("all_reduce", network.levels(axes("dp", "tp"), mesh), size))
    )


@given(
    groups(), st.sampled_from(KINDS), st.integers(0, 1 << 30), st.integers(0, 1 << 20), st.sampled_from(sorted(PRESETS))
)
@settings(max_examples=budget(150), deadline=None)
def test_more_bytes_never_cost_less(
    group: tuple[Mesh, tuple[Axis, ...], int], kind: str, size: int, more: int, preset: str
) -> None:
    mesh, over, _ = group
    network = network_of(preset)
    cost = CostModel(network)
    less, longer = cost.collective(kind, over, size, mesh), cost.collective(kind, over, size + more, mesh)
    assert cost.nothing <= less <= longer
    assert cost.collective(kind, tuple(reversed(over)), size, mesh)[0] == less[0]
    if network.knows_seconds and mesh.group_size(over) == 1:
        assert network.seconds(kind, over, size, mesh) == 0


@given(
    st.sampled_from(KINDS),
    st.integers(0, 1 << 30),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(sorted(PRESETS)),
)
@settings(max_examples=budget(100), deadline=None)
def test_more_devices_never_cost_less(kind: str, size: int, small: int, more: int, preset: str) -> None:
    network = network_of(preset)
    if not network.knows_seconds:
        return
    few, many = (network.seconds(kind, axes("x"), size, Mesh({"x": 1 << n})) for n in (small, small + more))
    # What each device holds of all_to_all stays: the blocks get smaller, and only more messages cost more.
    assert few <= many * (1 + 1e-9)


def test_the_cheapest_algorithm_is_taken_unless_one_is_pinned() -> None:
    link = {"name": "l", "latency": 1e-3, "bandwidth": 1e9}
    mesh = Mesh({"x": 8})
    free = network_of_fields({"links": [link]})
    assert free.seconds("all_reduce", axes("x"), 8, mesh) == pytest.approx(3e-3, rel=1e-3)  # doubling
    pinned = network_of_fields({"links": [{**link, "algorithms": {"all_reduce": "ring"}}], "launch": 0.5})
    assert pinned.seconds("all_reduce", axes("x"), 8, mesh) == pytest.approx(0.5 + 14e-3, rel=1e-3)
    own = network_of_fields({"links": [{**link, "kinds": {"permute": {"latency": 2, "bandwidth": 1}}}]})
    assert own.seconds("permute", axes("x"), 3, mesh) == 5
    assert own.seconds("all_reduce", axes("x"), 8, mesh) == free.seconds("all_reduce", axes("x"), 8, mesh)


def test_bytes_counts_what_is_sent_and_launches() -> None:
    mesh = Mesh({"x": 2, "y": 4})
    for kind, over in itertools.product(KINDS, (axes("x"), axes("y"), axes("x", "y"))):
        assert CostModel(BYTES).collective(kind, over, 1003, mesh) == (ring_bytes(kind, mesh.group_size(over), 1003), 1)
    assert add_keys((3, 1), (4, 1)) == (7, 2)
    with pytest.raises(IrparError, match="knows no seconds"):
        BYTES.seconds("all_reduce", axes("x"), 8, mesh)


# -- presets and fields --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    network = network_of(name)
    assert network is network_of(name)
    assert pickle.loads(pickle.dumps(network)) == network
    assert network.knows_seconds == (name != "bytes")
    if network.knows_seconds:
        assert network.device is not None
        assert network.device.rate("f32") > 1e12
        tp, dp = (network.seconds("all_reduce", axes(axis), 1e8, Mesh({"dp": 8, "tp": 2})) for axis in ("tp", "dp"))
        assert tp < dp


def test_no_such_preset() -> None:
    with pytest.raises(IrparError, match="nearest names: h100-nvlink-ib"):
        network_of("h100-nvlink")
    with pytest.raises(IrparError, match="not JSON"):
        network_of("{")


LINK = {"name": "l", "latency": 1e-6, "bandwidth": 1e9}
DEVICE = {"flops": {"f32": 1e12}, "memory_bandwidth": 1e11}


@pytest.mark.parametrize(
    ("fields", "path", "what"),
    [
        ([], (), "no table"),
        ({}, (), "links is missing"),
        ({"links": []}, ("links",), "links is"),
        ({"links": [LINK], "lunch": 1}, ("lunch",), 'no field "lunch"'),
        ({"links": [{"name": "l"}]}, ("links", 0), "latency is missing"),
        ({"links": [{**LINK, "latency": -1}]}, ("links", 0, "latency"), "latency is -1"),
        ({"links": [{**LINK, "latency": True}]}, ("links", 0, "latency"), "latency is true"),
        ({"links": [{**LINK, "bandwidth": 0}]}, ("links", 0, "bandwidth"), "bandwidth is 0"),
        ({"links": [{**LINK, "bandwidth": float("nan")}]}, ("links", 0, "bandwidth"), "bandwidth is"),
        ({"links": [{**LINK, "devices": 8}]}, ("links", 0, "devices"), "nothing joins more than 8"),
        ({"links": [LINK, {**LINK, "name": "m"}]}, ("links", 0), "but others follow"),
        ({"links": [{**LINK, "devices": 2}, LINK]}, ("links", 1, "name"), "two links"),
        (
            {"links": [{**LINK, "devices": 4}, {**LINK, "name": "m", "devices": 6}, {**LINK, "name": "n"}]},
            ("links", 1, "devices"),
            "not several whole groups",
        ),
        ({"links": [{**LINK, "devices": 1}, {**LINK, "name": "m"}]}, ("links", 0, "devices"), "devices is 1"),
        ({"links": [{**LINK, "algorithms": {"reduce": "ring"}}]}, ("links", 0, "algorithms", "reduce"), "no kind"),
        ({"links": [{**LINK, "algorithms": {"permute": "ring"}}]}, ("links", 0, "algorithms", "permute"), "permute is"),
        ({"links": [{**LINK, "algorithms": {"permute": []}}]}, ("links", 0, "algorithms", "permute"), "permute is"),
        ({"links": [{**LINK, "kinds": {"permute": {}}}]}, ("links", 0, "kinds", "permute"), "latency is missing"),
        ({"links": [LINK], "axes": {"tp": "x"}}, ("axes", "tp"), "tp is"),
        ({"links": [LINK], "device": {}}, ("device",), "flops is missing"),
        ({"links": [LINK], "device": {**DEVICE, "flops": {"f16": 1}}}, ("device", "flops"), "no rate for f32"),
        ({"links": [LINK], "device": {**DEVICE, "flops": {"f33": 1}}}, ("device", "flops", "f33"), "no type"),
        ({"links": [LINK], "device": {**DEVICE, "efficiency": 2}}, ("device", "efficiency"), "efficiency is 2"),
        ({"links": [LINK], "device": {**DEVICE, "uses_tf32": 1}}, ("device", "uses_tf32"), "uses_tf32 is 1"),
        ({"links": [LINK], "name": ""}, ("name",), "name is"),
    ],
)
def test_fields_that_cannot_be(fields: object, path: tuple, what: str) -> None:
    with pytest.raises(FieldError) as caught:
        network_of_fields(fields)
    assert caught.value.path == path
    assert what in caught.value.what
    assert caught.value.do
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_network_of_fields_is_made_again_from_its_text() -> None:
    network = two_links(4, RINGS, launch=1e-6, device=DEVICE)
    again = network_of(network.text)
    assert again == network
    mesh = Mesh({"x": 8})
    assert again.seconds("all_reduce", axes("x"), 1e6, mesh) == network.seconds("all_reduce", axes("x"), 1e6, mesh)
