"""What collectives send, counted message by message: devices that know only sends and receives do the same work.

The bytes must be those of the plan's formulas, and the results those of the process group.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from irpar.ir import Builder, DType, Graph, Node, TensorType
from irpar.ops.collectives import sent_bytes
from irpar.runtime.groups import Call, Collective, ThreadGroup
from irpar.sharding import Axis, Mesh, Sharding

Array = np.ndarray[Any, Any]


class Devices:
    """Devices in a row that send each other arrays; counts the bytes that each sends."""

    def __init__(self, held: list[Array]) -> None:
        self.held = held
        self.count = len(held)
        self.sent = [0] * self.count
        self.underway: dict[tuple[int, int], list[Array]] = {}

    def send(self, source: int, target: int, array: Array) -> None:
        if source != target:
            self.sent[source] += array.nbytes
        self.underway.setdefault((source, target), []).append(array.copy())

    def receive(self, source: int, target: int) -> Array:
        return self.underway[source, target].pop(0)

    def pass_on(self, parcels: list[Array]) -> list[Array]:
        """Each sends one array to the next of the ring."""
        for device, parcel in enumerate(parcels):
            self.send(device, (device + 1) % self.count, parcel)
        return [self.receive((device - 1) % self.count, device) for device in range(self.count)]


def ring_reduce_scatter(devices: Devices, dim: int) -> list[Array]:
    n = devices.count
    pieces = [np.split(array, n, dim) for array in devices.held]
    parcels = [pieces[device][(device - 1) % n] for device in range(n)]
    for step in range(n - 1):
        parcels = devices.pass_on(parcels)
        parcels = [parcel + pieces[device][(device - step - 2) % n] for device, parcel in enumerate(parcels)]
    return parcels


def ring_all_gather(devices: Devices, blocks: list[Array], dim: int) -> list[Array]:
    n = devices.count
    known = [{device: block} for device, block in enumerate(blocks)]
    parcels = blocks
    for step in range(n - 1):
        parcels = devices.pass_on(parcels)
        for device, parcel in enumerate(parcels):
            known[device][(device - step - 1) % n] = parcel
    return [np.concatenate([having[block] for block in range(n)], dim) for having in known]


def all_reduce(devices: Devices) -> list[Array]:
    return ring_all_gather(devices, ring_reduce_scatter(devices, 0), 0)


def all_gather(devices: Devices) -> list[Array]:
    return ring_all_gather(devices, devices.held, 1)


def reduce_scatter(devices: Devices) -> list[Array]:
    return ring_reduce_scatter(devices, 0)


def all_to_all(devices: Devices) -> list[Array]:
    n = devices.count
    for device, array in enumerate(devices.held):
        for target, piece in enumerate(np.split(array, n, 0)):
            devices.send(device, target, piece)
    return [np.concatenate([devices.receive(source, device) for source in range(n)], 1) for device in range(n)]


def permute(devices: Devices) -> list[Array]:
    n = devices.count
    for device, array in enumerate(devices.held):
        devices.send(device, (device + 1) % n, array)
    return [devices.receive((device - 1) % n, device) for device in range(n)]


CASES: dict[str, tuple[Callable[[Devices], list[Array]], dict[str, Any]]] = {
    "AllReduce": (all_reduce, {"reduce": "sum"}),
    "AllGather": (all_gather, {"dim": 1}),
    "ReduceScatter": (reduce_scatter, {"dim": 0, "reduce": "sum"}),
    "AllToAll": (all_to_all, {"split_dim": 0, "concat_dim": 1}),
    "CollectivePermute": (permute, {}),
}


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_bytes_and_results(op: str, n: int) -> None:
    run, attributes = CASES[op]
    if op == "CollectivePermute":
        attributes = {"pairs": tuple(place for device in range(n) for place in (device, (device + 1) % n))}
    mesh, axis = Mesh({"tp": n}), Axis("tp")
    random = np.random.default_rng(n)
    held = [random.integers(-8, 9, (2 * n, 3)).astype(np.float32) for _ in range(n)]
    devices = Devices(held)
    results = run(devices)

    collective = Collective(op, 0, (axis,), **attributes)
    calls = {rank: Call(rank, mesh.coords(rank), collective, array) for rank, array in enumerate(held)}
    expected = ThreadGroup(mesh).exchange(calls)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, expected[rank])
    assert not any(devices.underway.values())
    assert max(devices.sent) == sent_bytes(local_node(op, mesh, attributes), mesh)


def local_node(op: str, mesh: Mesh, attributes: dict[str, Any]) -> Node:
    """The collective in a local graph, on f32[2 n, 3]."""
    graph = Graph("g")
    graph.view = "local"
    n = mesh.size
    x = graph.add_input("x", TensorType(DType.F32, (2 * n, 3)))
    x.sharding = Sharding.replicated(mesh, 2)
    shapes = {"AllGather": (2 * n, 3 * n), "ReduceScatter": (2, 3), "AllToAll": (2, 3 * n)}
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in attributes.items()}
    made = Builder(graph, {"irpar": 1}).op(
        op,
        [x],
        {"axes": ["tp"], "id": 0, **settings},
        type=TensorType(DType.F32, shapes.get(op, (2 * n, 3))),
        domain="irpar",
    )
    assert made.node is not None
    return made.node
