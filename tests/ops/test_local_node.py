"""What stands for a node on a device without elements of what is sharded."""

from irpar.ir import Builder, DType, Graph, Node, TensorType, Value
from irpar.ops.local_node import without_elements
from irpar.sharding import Mesh, Sharding, local_shape


def local(op_type: str, shapes: list[tuple[int, ...]], result: Sharding, given: tuple[int, ...]) -> Graph:
    """One node, of which the last device of a mesh has the blocks: operands are cut where the result or the sum is."""
    graph = Graph("local")
    graph.view = "local"
    operands = [graph.add_input("x", TensorType(DType.F32, shape)) for shape in shapes]
    node = graph.append(Node(op_type, operands, version=21))
    coords = tuple(size - 1 for size in result.mesh.axes.values())
    node.result.type = TensorType(DType.F32, local_shape(result, given, coords))
    node.result.sharding, node.result.global_shape = result, given
    return graph


def whole(op_type: str, shapes: list[tuple[int, ...]], given: tuple[int, ...]) -> Node:
    """The same node in global view."""
    graph = Graph("whole")
    operands: list[Value | None] = [graph.add_input("x", TensorType(DType.F32, shape)) for shape in shapes]
    node = graph.append(Node(op_type, operands, version=21))
    node.result.type = TensorType(DType.F32, given)
    return node


def replaced(
    op_type: str, shapes: list[tuple[int, ...]], blocks: list[tuple[int, ...]], lies: Sharding
) -> Value | None:
    """What takes the place of the result on the last device."""
    given = (*shapes[0][:-1], *shapes[1][-1:]) if op_type == "MatMul" else shapes[0]
    graph = local(op_type, blocks, lies, given)
    assert graph.first is not None
    found = without_elements(whole(op_type, shapes, given), graph.first, Builder(graph, {"": 21}, before=graph.first))
    return None if found is None else found[0]


MESH = Mesh({"x": 4})


def test_a_result_without_elements_is_a_constant() -> None:
    found = replaced("Relu", [(5, 64)], [(0, 64)], Sharding.of_spec(MESH, ["x", None]))
    assert found is not None
    assert found.data is not None
    assert (found.shape, found.global_shape, found.dtype) == ((0, 64), (5, 64), DType.F32)


def test_a_large_sum_of_nothing_is_no_constant() -> None:
    partial = Sharding.of_spec(MESH, [None, None]).with_partial(Sharding.of_spec(MESH, ["x"]).all_axes)
    found = replaced("MatMul", [(64, 5), (5, 64)], [(64, 0), (0, 64)], partial)
    assert found is not None
    assert found.node is not None
    assert found.node.op_type == "Expand"
    assert found.node.operands[0].data.numpy() == 0  # type: ignore[union-attr]


def test_a_node_with_elements_stays() -> None:
    assert replaced("Relu", [(8, 64)], [(2, 64)], Sharding.of_spec(MESH, ["x", None])) is None
