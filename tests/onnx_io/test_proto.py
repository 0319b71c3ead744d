import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from irpar.ir import ArrayTensor, DType, Graph, Module, Node, TensorType, Value
from irpar.onnx_io import OnnxError, to_module, to_proto
from irpar.sharding import Mesh, Sharding

from .models import mlp, model

F32 = TensorType(DType.F32, (4,))


def relu_graph() -> tuple[Graph, Value, Value]:
    graph = Graph()
    x = graph.add_input("x", F32)
    node = graph.append(Node("Relu", [x], version=21))
    node.result.type = F32
    node.result.rename("r")
    return graph, x, node.result


def run(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": np.array([-1, 0, 1, 2], np.float32)}), strict=True))


def test_results_of_a_loop_keep_their_names() -> None:
    """ONNX Runtime crashes where the final state of a Loop is left out."""
    graph = Graph()
    x = graph.add_input("x", F32)
    trips = graph.add_constant(ArrayTensor(np.array(3, np.int64)), "trips")
    body = Graph("body", names=graph.names)
    number, go, state = (
        body.add_input(name, TensorType(dtype, shape))
        for name, dtype, shape in (("n", DType.I64, ()), ("go", DType.BOOL, ()), ("state", DType.F32, (4,)))
    )
    assert not number.has_uses
    kept, added = body.append(Node("Identity", [go], version=21)), body.append(Node("Add", [state, x], version=21))
    kept.result.type, added.result.type = TensorType(DType.BOOL, ()), F32
    body.set_outputs([kept.result, added.result, added.result])
    loop = graph.append(Node("Loop", [trips, None, x], {"body": body}, results=2, version=21))
    loop.results[1].type = TensorType(DType.F32, (3, 4))
    graph.set_outputs([loop.results[1]], ["y"])
    proto = to_proto(Module(graph, opsets={"": 21}))
    (node,) = (node for node in proto.graph.node if node.op_type == "Loop")
    assert all(node.output)
    assert run(proto)["y"].tolist() == [[-2, 0, 2, 4], [-3, 0, 3, 6], [-4, 0, 4, 8]]


def test_results_take_the_names_outside() -> None:
    graph, _, r = relu_graph()
    graph.set_outputs([r], ["y"])
    proto = to_proto(Module(graph, opsets={"": 21}))
    assert proto.graph.node[0].output == ["y"]
    assert run(proto)["y"].tolist() == [0, 0, 1, 2]
    assert r.name == "r"


def test_identity_where_a_name_needs_one() -> None:
    graph, x, r = relu_graph()
    c = graph.add_constant(ArrayTensor(np.arange(4, dtype=np.float32)), "c")
    graph.set_outputs([r, r, x, c], ["y", "again", "input", "constant"])
    found = run(to_proto(Module(graph, opsets={"": 21})))
    assert list(found) == ["y", "again", "input", "constant"]
    assert found["again"].tolist() == found["y"].tolist() == [0, 0, 1, 2]
    assert found["input"].tolist() == [-1, 0, 1, 2]
    assert found["constant"].tolist() == [0, 1, 2, 3]


def test_a_value_that_has_the_name_of_a_result_gives_way() -> None:
    graph, _, r = relu_graph()
    second = graph.append(Node("Neg", [r], version=21))
    second.result.type = F32
    graph.set_outputs([second.result, r], ["r", "other"])
    found = run(to_proto(Module(graph, opsets={"": 21})))
    assert found["r"].tolist() == [0, 0, -1, -2]
    assert found["other"].tolist() == [0, 0, 1, 2]


def test_a_hidden_value_that_has_the_name_of_a_result_gives_way() -> None:
    graph, _, r = relu_graph()
    second = graph.append(Node("Neg", [r], version=21))
    second.result.type = F32
    graph.set_outputs([second.result], ["r"])
    proto = to_proto(Module(graph, opsets={"": 21}))
    assert run(proto)["r"].tolist() == [0, 0, -1, -2]
    assert proto.graph.node[0].output[0] != "r"


def test_names_made_for_values_that_give_way_avoid_those_of_results() -> None:
    graph, _, r = relu_graph()
    graph.set_outputs([graph.append(Node(op, [r], version=21)).result for op in ("Neg", "Abs")], ["r", "r_1"])
    for value in graph.outputs:
        value.type = F32
    found = run(to_proto(Module(graph, opsets={"": 21})))
    assert (found["r"].tolist(), found["r_1"].tolist()) == ([0, 0, -1, -2], [0, 0, 1, 2])


@pytest.mark.parametrize("is_one_value", [False, True])
def test_two_results_may_not_share_a_name(is_one_value: bool) -> None:
    graph, x, r = relu_graph()
    graph.set_outputs([r, r if is_one_value else x], ["y", "y"])
    with pytest.raises(OnnxError, match='two results have the name "y"'):
        to_proto(Module(graph, opsets={"": 21}))


def test_a_result_may_not_have_the_name_of_an_input() -> None:
    graph, _, r = relu_graph()
    graph.set_outputs([r], ["x"])
    with pytest.raises(OnnxError, match='"x" is the name of both an input and a result'):
        to_proto(Module(graph, opsets={"": 21}))


def test_an_input_returned_under_its_own_name() -> None:
    made = model("g (float[4] x) => (float[4] x) { r = Relu(x) }")
    assert [node.op_type for node in to_proto(to_module(made)).graph.node] == ["Relu"]


def test_bodies_that_return_constants_and_captured_values() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
        y = If (c) <then_branch = t () => (float[4] k) { k = Constant<value = float[4] {1.0, 2.0, 3.0, 4.0}>() },
                    else_branch = e () => (float[4] b) { b = Identity(x) }> }"""
    )
    proto = to_proto(to_module(made))
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    feeds = {"x": np.zeros(4, np.float32), "c": np.array(True)}
    assert session.run(None, feeds)[0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("opset", "source_ir", "dtype", "expected"),
    [(21, 10, 1, 10), (13, 7, 1, 7), (26, 8, 1, 13), (17, 3, 1, 8), (21, 14, 1, 13), (21, 10, TensorProto.INT2, 13)],
)
def test_ir_version(opset: int, source_ir: int, dtype: int, expected: int) -> None:
    made = model("g (float[4] x) => (float[4] y) { y = Identity(x) }")
    made.opset_import[0].version, made.ir_version = opset, source_ir
    del made.opset_import[1:]
    for value in (made.graph.input[0], made.graph.output[0]):
        value.type.tensor_type.elem_type = dtype
    assert to_proto(to_module(made)).ir_version == expected


def test_metadata_needs_ir_version_10() -> None:
    made = mlp()
    made.ir_version, made.opset_import[0].version = 8, 17
    assert to_proto(to_module(made)).ir_version == 8
    made.graph.node[0].metadata_props.add(key="k", value="v")
    assert to_proto(to_module(made)).ir_version == 10


def test_the_hook_decides_where_constants_go() -> None:
    asked = []

    def elsewhere(value: Value) -> TensorProto:
        asked.append(value.name)
        return TensorProto(data_type=1, dims=value.shape, data_location=1)

    proto = to_proto(to_module(mlp()), constant=elsewhere)
    assert asked == ["w", "b"]
    assert [tensor.name for tensor in proto.graph.initializer] == ["w", "b"]
    assert all(tensor.data_location == 1 for tensor in proto.graph.initializer)


def local_module() -> Module:
    """A part of an MLP cut over tp, with an all-reduce."""
    mesh = Mesh({"dp": 2, "tp": 4})
    graph = Graph("mlp")
    graph.view, graph.ranks = "local", (0, 1, 2, 3)
    x = graph.add_input("x", TensorType(DType.F32, (4, 64)), "x")
    x.sharding, x.global_shape = Sharding.of_spec(mesh, ["dp", None]), (8, 64)
    coords = graph.add_input("irpar.coords", TensorType(DType.I64, (2,)))
    w = graph.add_constant(ArrayTensor(np.ones((64, 16), np.float32)), "w", "fc1.weight")
    w.sharding, w.global_shape, w.memory = Sharding.of_spec(mesh, [None, "tp"]), (64, 64), "host"
    product = graph.append(Node("MatMul", [x, w], version=21, name="/fc1/MatMul", source="/fc1/MatMul", scope="fc1"))
    product.result.type = TensorType(DType.F32, (4, 16))
    product.result.sharding = Sharding.of_spec(mesh, ["dp", None]).with_partial(mesh_axes("tp"), "max")
    reduce = graph.append(
        Node(
            "AllReduce",
            [product.result],
            {"axes": ["tp"], "reduce": "max", "id": 0},
            domain="irpar",
            version=1,
            source="/fc1/MatMul",
            scope="fc1",
        )
    )
    reduce.phase, reduce.stage, reduce.place, reduce.doc = "backward", 1, "host", "because"
    reduce.result.type = TensorType(DType.F32, (4, 16))
    reduce.result.source = "fc1"
    first = graph.append(Node("Cast", [coords], {"to": 1}, version=21))
    first.result.type = TensorType(DType.F32, (2,))
    graph.set_outputs([reduce.result, first.result], ["y", "where"])
    module = Module(graph, opsets={"": 21})
    module.meshes["m"] = mesh
    return module


def mesh_axes(*names: str) -> list:  # type: ignore[type-arg]
    from irpar.sharding import Axis

    return [Axis.parse(name) for name in names]


def test_parts_come_back_with_what_irpar_knows() -> None:
    proto = to_proto(local_module())
    onnx.checker.check_model(proto, full_check=True)
    entries = {entry.key: entry.value for entry in proto.metadata_props}
    assert entries == {"irpar.mesh": "dp=2,tp=4", "irpar.view": "local", "irpar.ranks": "[0, 1, 2, 3]"}
    facts = {entry.key: entry.value for entry in proto.graph.input[0].metadata_props}
    assert json.loads(facts["irpar.sharding"]) == {"spec": [["dp"], None]}
    assert json.loads(facts["irpar.global_shape"]) == [8, 64]

    module = to_module(proto)
    graph, mesh = module.graph, module.mesh
    assert mesh == Mesh({"dp": 2, "tp": 4})
    assert (graph.view, graph.ranks) == ("local", (0, 1, 2, 3))
    x, coords = graph.inputs
    assert x.sharding == Sharding.of_spec(mesh, ["dp", None])
    assert (x.global_shape, x.source, coords.source) == ((8, 64), "x", None)
    (w,) = graph.constants
    assert (w.source, w.memory, w.global_shape, w.shape) == ("fc1.weight", "host", (64, 64), (64, 16))
    product, reduce, _ = graph
    assert product.result.sharding == local_module().graph.first.result.sharding  # type: ignore[union-attr]
    assert product.metadata is None
    assert (reduce.source, reduce.scope, reduce.phase, reduce.stage, reduce.place, reduce.doc) == (
        "/fc1/MatMul",
        "fc1",
        "backward",
        1,
        "host",
        "because",
    )
    assert reduce.attributes == local_module().graph.first.next.attributes  # type: ignore[union-attr]
    assert reduce.result.source == "fc1"
    assert to_proto(module).SerializeToString(deterministic=True) == proto.SerializeToString(deterministic=True)


def test_several_meshes_and_device_lists() -> None:
    graph, x, r = relu_graph()
    graph.set_outputs([r], ["y"])
    module = Module(graph, opsets={"": 21})
    a, b = Mesh({"tp": 2}, (1, 0), "a"), Mesh({"pp": 2}, None, "b")
    module.meshes = {"a": a, "b": b}
    x.sharding, r.sharding = Sharding.of_spec(a, ["tp"]), Sharding.of_spec(b, [["pp", "?"]])
    again = to_module(to_proto(module))
    assert again.meshes == module.meshes
    assert again.graph.inputs[0].sharding == x.sharding
    assert again.graph.value("y").sharding == r.sharding


def test_uncut_constants_of_a_local_graph_are_refused() -> None:
    module = local_module()
    (w,) = module.graph.constants
    w.data = ArrayTensor(np.ones((64, 64), np.float32))
    with pytest.raises(OnnxError, match=r"(?s)holds the full tensor.*write the module as parts"):
        to_proto(module)


def test_more_than_two_gigabytes_are_refused_unread() -> None:
    class Huge(ArrayTensor):
        def numpy(self) -> np.ndarray:
            raise AssertionError("read")

        @property
        def nbytes(self) -> int:
            return 3 << 30

    graph, _, r = relu_graph()
    graph.add_constant(Huge(np.zeros(1)), "c")
    graph.set_outputs([r], ["y"])
    with pytest.raises(OnnxError, match="at most 2 GB"):
        to_proto(Module(graph, opsets={"": 21}))
