"""Positions computed from `irpar.coords` against the mesh's own."""

import numpy as np
import pytest

from irpar.ir import Builder, DType, Graph, Node, TensorType
from irpar.ops.coords import COORDS, block_index, block_start, coords_input
from irpar.sharding import Axis, Mesh

from .rule_proof import run

MESH = Mesh({"dp": 2, "tp": 12, "pp": 3})
OPSETS = {"": 21}


@pytest.mark.parametrize(
    "text", ["tp", "dp tp", "tp dp", "tp:(1)3", "tp:(2)3", "tp:(3)4 dp", "dp tp:(2)2 pp", "tp:(6)2 tp:(1)6", ""]
)
def test_positions_are_those_of_the_mesh(text: str) -> None:
    axes = [Axis.parse(part) for part in text.split()]
    graph = Graph()
    graph.set_outputs(
        [block_index(Builder(graph, OPSETS), MESH, axes), block_start(Builder(graph, OPSETS), MESH, axes, 5)]
    )
    for coords in MESH.all_coords():
        index, start = run(graph, {COORDS: np.asarray(coords, np.int64)}, 21)
        assert index == MESH.position(coords, axes)
        assert start == 5 * MESH.position(coords, axes)


def test_values_are_made_once_and_before_all_readers() -> None:
    graph = Graph()
    data = graph.add_input("x", TensorType(DType.F32, (4,)))
    last = graph.append(Node("Relu", [data], version=21))
    builder = Builder(graph, OPSETS, before=last)
    start = block_start(builder, MESH, [Axis("tp")], 3)
    index = block_index(builder, MESH, [Axis("tp")])
    count = len(graph)
    assert block_start(builder, MESH, [Axis("tp")], 3) is start
    assert block_start(builder, MESH, [Axis("tp")], 4) is not start
    assert block_index(builder, MESH, [Axis("tp")]) is index
    assert len(graph) == count + 1
    assert start.node is not None
    assert index.node is not None
    assert graph.is_before(index.node, start.node)
    assert graph.is_before(start.node, last)


def test_a_nested_graph_reads_the_outermost_ones() -> None:
    graph = Graph()
    body = Graph("body", names=graph.names)
    condition = graph.add_input("c", TensorType(DType.BOOL, ()))
    graph.append(Node("If", [condition], {"then_branch": body}, version=21))
    start = block_start(Builder(body, OPSETS), MESH, [Axis("dp")], 2)
    assert start.owner is graph
    assert len(body) == 0
    assert [value.name for value in graph.inputs] == ["c", COORDS]


def test_another_value_of_that_name_is_refused() -> None:
    graph = Graph()
    graph.add_input(COORDS, TensorType(DType.I64, (2,)))
    with pytest.raises(ValueError, match="not the coordinates"):
        coords_input(graph, MESH)
