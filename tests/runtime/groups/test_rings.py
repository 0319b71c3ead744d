"""What collectives send, counted message by message: the bytes of the plan's formulas, the results of the process group."""

from typing import Any

import numpy as np
import pytest

from irpar.ir import Builder, DType, Graph, Node, TensorType
from irpar.ops.collectives import KINDS, POINT_TO_POINT, sent_bytes
from irpar.runtime.groups import Call, Collective, ThreadGroup
from irpar.sharding import Axis, Mesh, Sharding

from .ring import RINGS, RingGroup

CASES: dict[str, dict[str, Any]] = {
    "AllReduce": {"reduce": "sum"},
    "AllGather": {"dim": 1},
    "ReduceScatter": {"dim": 0, "reduce": "sum"},
    "AllToAll": {"split_dim": 0, "concat_dim": 1},
    "CollectivePermute": {},
    "Broadcast": {"root": 1},
}


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_bytes_and_results(op: str, n: int) -> None:
    attributes = CASES[op]
    if op == "CollectivePermute":
        attributes = {"pairs": tuple(place for device in range(n) for place in (device, (device + 1) % n))}
    mesh, axis = Mesh({"tp": n}), Axis("tp")
    random = np.random.default_rng(n)
    held = [random.integers(-8, 9, (2 * n, 3)).astype(np.float32) for _ in range(n)]
    collective = Collective(op, 0, (axis,), **attributes)
    calls = {rank: Call(rank, mesh.coords(rank), collective, array) for rank, array in enumerate(held)}
    rings = RingGroup(mesh)
    results, expected = rings.exchange(calls), ThreadGroup(mesh).exchange(calls)
    for rank, result in results.items():
        np.testing.assert_array_equal(result, expected[rank])
    assert rings.sent == {0: [sent_bytes(local_node(op, mesh, attributes), mesh)]}


def test_every_kind_has_a_ring() -> None:
    assert set(CASES) == set(RINGS) == KINDS.keys() - POINT_TO_POINT


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
