import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from irpar.ir import DType, ExternalTensor, LazyTensor, RefAttribute, TensorType, symbol
from irpar.onnx_io import OnnxError, load, to_module, to_proto

from .models import mlp, model, peak_kilobytes

LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("light_*.onnx"))


def run(proto: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return list(onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds))


def test_types_names_and_sources() -> None:
    made = mlp()
    made.graph.node[0].name = "/fc1/MatMul"
    module = to_module(made)
    graph = module.graph
    assert [value.name for value in graph.inputs] == ["x"]
    assert graph.inputs[0].type == TensorType(DType.F32, (symbol("batch"), 32))
    assert [value.source for value in graph.constants] == ["w", "b"]
    first, second = graph
    assert (first.op_type, first.source, first.scope, first.version) == ("MatMul", "/fc1/MatMul", "fc1", 21)
    assert (second.source, second.scope) == (None, None)
    assert first.result.source == "h"
    assert graph.output_names == ["y"]


def test_tensors_are_not_decoded_at_load() -> None:
    module = to_module(mlp())
    assert all(isinstance(value.data, LazyTensor) for value in module.graph.constants)
    w = module.graph.value("w").data
    assert w is not None
    np.testing.assert_array_equal(w.numpy().ravel()[:8], [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 0])


@pytest.mark.parametrize(
    ("form", "dtype", "expected"),
    [
        ("value_int = 3", DType.I64, 3),
        ("value_ints = [1, 2]", DType.I64, [1, 2]),
        ("value_float = 0.5", DType.F32, 0.5),
        ("value_floats = [0.5, 2.0]", DType.F32, [0.5, 2.0]),
        ('value_string = "a"', DType.STR, "a"),
        ('value_strings = ["a", "b"]', DType.STR, ["a", "b"]),
        ("value = int32[2] {7, 8}", DType.I32, [7, 8]),
    ],
)
def test_constant_nodes_become_constants(form: str, dtype: DType, expected: object) -> None:
    module = to_module(model(f"g (float x) => (float y) {{ c = Constant<{form}>() y = Identity(x) }}"))
    (value,) = module.graph.constants
    assert value.name == value.source == "c"
    assert value.data is not None
    assert value.data.dtype is dtype
    assert value.data.numpy().tolist() == expected
    onnx.checker.check_model(to_proto(module))


def test_input_with_default_is_a_constant_and_says_so() -> None:
    made = mlp()
    made.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [32, 32]))
    module = to_module(made)
    assert [value.name for value in module.graph.inputs] == ["x"]
    assert module.graph.value("w").metadata == {"irpar.input_default": "true"}
    made.ir_version = 3
    assert to_module(made).graph.value("w").metadata is None


def test_unsorted_nodes_are_sorted() -> None:
    made = model("g (float[2] x) => (float[2] y) { a = Relu(x) b = Abs(a) y = Neg(b) }")
    nodes = list(made.graph.node)
    del made.graph.node[:]
    made.graph.node.extend(reversed(nodes))
    assert [node.op_type for node in to_module(made).graph] == ["Relu", "Abs", "Neg"]


def test_unsorted_nodes_in_a_body() -> None:
    made = model(
        """g (float[2] x, bool c) => (float[2] y) {
        y = If (c) <then_branch = t () => (float[2] a) { a = Neg(u) },
          else_branch = e () => (float[2] b) { b = Abs(u) }>
        u = Relu(x) }"""
    )
    module = to_module(made)
    assert [node.op_type for node in module.graph] == ["Relu", "If"]


def test_bodies_share_names_and_capture() -> None:
    made = model(
        """g (float[2] x, bool c) => (float[2] y) {
        u = Relu(x)
        y = If (c) <then_branch = t () => (float[2] r) { r = Neg(u) },
          else_branch = e () => (float[2] r) { r = Abs(u) }>
        }"""
    )
    module = to_module(made)
    _, branch = module.graph
    then, other = branch.nested_graphs()
    assert then.names is module.graph.names
    assert next(iter(then)).operands[0] is module.graph.value("u")
    assert {then.outputs[0].source, other.outputs[0].source} == {"r"}
    written = to_proto(module)
    onnx.checker.check_model(written, full_check=True)
    for truth in (True, False):
        feeds = {"x": np.array([-1, 2], np.float32), "c": np.array(truth)}
        np.testing.assert_array_equal(run(written, **feeds)[0], run(made, **feeds)[0])


def test_outer_names_win_over_names_in_bodies() -> None:
    made = model(
        """g (float[2] x, bool c) => (float[2] z) {
        y = If (c) <then_branch = t () => (float[2] k) { k = Neg(x) },
          else_branch = e () => (float[2] r) { r = Abs(x) }>
        r = Relu(y)  z = Abs(r) }"""
    )
    module = to_module(made)
    assert module.graph.value("r").node is not None
    assert module.graph.value("r").node.op_type == "Relu"
    onnx.checker.check_model(to_proto(module), full_check=True)


def test_loop_with_body_constants_round_trip() -> None:
    made = model(
        """g (float[2] x, int64 n) => (float[2] y) {
        t = Constant<value = bool {1}>()
        y = Loop (n, t, x) <body = b (int64 i, bool c, float[2] v) => (bool c2, float[2] w) {
          c2 = Identity(c)  k = Constant<value = float[2] {1.0, 2.0}>()  w = Add(v, k) }> }"""
    )
    written = to_proto(to_module(made))
    onnx.checker.check_model(written, full_check=True)
    feeds = {"x": np.zeros(2, np.float32), "n": np.array(3)}
    np.testing.assert_array_equal(run(written, **feeds)[0], [3, 6])


FUNCTION = """g (float[2] x) => (float[2] y) { y = local.scaled<by = 3.0>(x) }
<opset_import: ["" : 21], domain: "local"> scaled <by> (v) => (r) { k = Constant<value_float: float = @by>()
  two = Constant<value = float {2.0}>()  s = Mul(v, two)  r = Mul(s, k) }"""


def test_functions_are_kept() -> None:
    made = model(FUNCTION)
    module = to_module(made)
    ((key, function),) = module.functions.items()
    assert key == ("local", "scaled", "")
    (call,) = module.graph
    assert call.callee is function
    assert function.attributes == {"by": None}
    assert [node.op_type for node in function.graph] == ["Constant", "Mul", "Mul"]
    assert next(iter(function.graph)).attributes == {"value_float": RefAttribute("by", 1)}
    written = to_proto(module)
    onnx.checker.check_model(written)
    assert len(written.functions) == 1
    x = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(run(written, x=x)[0], [6, 12])


def test_left_out_operands_and_results() -> None:
    made = model("g (float[4] x, float m) => (float[4] y) { y, = Clip(x, , m) }".replace("y, =", "y ="))
    module = to_module(made)
    (clip,) = module.graph
    assert [operand and operand.name for operand in clip.operands] == ["x", None, "m"]
    assert list(to_proto(module).graph.node[0].input) == ["x", "", "m"]
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y", "", "d"], axis=0)
    made = model("g (float[4] x, float[4] s) => (float[4] y, float[1] d) { y = Add(x, s) }")
    made.graph.node[0].CopyFrom(node)
    assert list(to_proto(to_module(made)).graph.node[0].output) == ["y", "", "d"]


def test_metadata_and_docs_round_trip() -> None:
    made = mlp()
    made.doc_string, made.graph.doc_string, made.graph.node[0].doc_string = "model", "graph", "node"
    made.graph.input[0].doc_string = "input"
    made.graph.initializer[0].doc_string = "weight"
    made.producer_name, made.producer_version = "maker", "1.2"
    for place in (made, made.graph, made.graph.node[0], made.graph.input[0], made.graph.output[0]):
        place.metadata_props.add(key="k", value="v")
    made.graph.initializer[0].metadata_props.add(key="k", value="w")
    module = to_module(made)
    assert (module.doc, module.graph.doc, module.producer) == ("model", "graph", ("maker", "1.2"))
    assert module.metadata == {"k": "v"}
    assert module.graph.value("w").doc == "weight"
    again = to_proto(module)
    for before, after in (
        (made, again),
        (made.graph, again.graph),
        (made.graph.node[0], again.graph.node[0]),
        (made.graph.input[0], again.graph.input[0]),
        (made.graph.output[0], again.graph.output[0]),
        (made.graph.initializer[0], again.graph.initializer[0]),
    ):
        assert before.doc_string == after.doc_string
        assert list(before.metadata_props) == list(after.metadata_props)


def test_quantization_annotation_is_kept() -> None:
    made = mlp()
    entry = made.graph.quantization_annotation.add(tensor_name="h")
    entry.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="b")
    written = to_proto(to_module(made))
    assert written.graph.quantization_annotation == made.graph.quantization_annotation
    again = to_proto(to_module(written))
    assert again.graph.quantization_annotation == made.graph.quantization_annotation


def test_sparse_initializer_becomes_dense() -> None:
    made = model("g (float[2,3] x) => (float[2,3] y) { y = Add(x, s) }")
    values = helper.make_tensor("s", TensorProto.FLOAT, [2], [5.0, 7.0])
    indices = helper.make_tensor("i", TensorProto.INT64, [2, 2], [0, 1, 1, 2])
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 3]))
    data = to_module(made).graph.value("s").data
    assert data is not None
    assert data.numpy().tolist() == [[0, 5, 0], [0, 0, 7]]


def test_old_opset_is_converted() -> None:
    made = model(
        "g (float[1,3] x) => (float[3] y) { y = Squeeze<axes = [0]>(x) }", '<ir_version: 7, opset_import: ["" : 11]>\n'
    )
    made.graph.node[0].name = "squeeze"
    made.graph.node[0].metadata_props.add(key="k", value="v")
    made.metadata_props.add(key="a", value="1")
    made.metadata_props.add(key="b", value="2")
    module = to_module(made)
    assert module.opsets[""] == 13
    (node,) = module.graph
    assert (node.version, node.metadata) == (13, {"k": "v"})
    assert module.metadata == {"a": "1", "b": "2"}
    x = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(run(to_proto(module), x=x)[0], run(made, x=x)[0])


def test_old_opset_that_does_not_convert_names_the_operator() -> None:
    made = model(
        "g (float[1,1,2,2] x) => (float[1,1,4,4] y) { y = Upsample<mode = 'nearest'>(x) }".replace("'", '"'),
        '<ir_version: 7, opset_import: ["" : 6]>\n',
    )
    with pytest.raises(OnnxError, match=r"(?s)opset 6 is older.*operators: Upsample.*do: export"):
        to_module(made)


def test_large_weights_stay_out_of_the_converter(tmp_path: Path) -> None:
    made = mlp()
    made.opset_import[0].version = 11
    for tensor in made.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    x = np.ones((2, 32), np.float32)
    expected = run(made, x=x)[0]
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.bin")
    module = load(tmp_path / "m.onnx")
    assert isinstance(module.graph.value("w").data, ExternalTensor)
    np.testing.assert_array_equal(run(to_proto(module), x=x)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.stem)
def test_classic_networks(path: Path) -> None:
    original = onnx.load(path)
    written = to_proto(load(path))
    onnx.checker.check_model(written)
    weights = {tensor.name for tensor in original.graph.initializer}
    random = np.random.default_rng(0)
    feeds = {
        value.name: random.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim], np.float32)
        for value in original.graph.input
        if value.name not in weights
    }
    for a, b in zip(run(original, **feeds), run(written, **feeds), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_fixtures_round_trip_unchanged() -> None:
    for path in sorted((Path(__file__).parent.parent / "fixtures").glob("*.onnx")):
        module = load(path)
        assert module.source == path
        written = to_proto(module)
        onnx.checker.check_model(written, full_check=True)
        again = to_proto(to_module(written))
        assert written.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)


# -- broken models ------------------------------------------------------------------------------------------------


def nested_too_deep() -> onnx.ModelProto:
    made = helper.make_model(onnx.GraphProto(name="g"), opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    graph = made.graph
    for level in range(45):
        node = graph.node.add(op_type="If", output=[f"o{level}"])
        graph = node.attribute.add(name="then_branch", type=5).g
    return made


def nested_too_deep_in_bytes() -> bytes:
    data = b""
    for field in (6, 5, 1) * 60:  # AttributeProto.g in NodeProto.attribute in GraphProto.node
        data = bytes([field << 3 | 2]) + varint(len(data)) + data
    return b"\x08\x0a\x3a" + varint(len(data)) + data


def varint(number: int) -> bytes:
    data = b""
    while number >= 128:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


def broken(change: str) -> onnx.ModelProto:
    """mlp with a Python statement applied to it."""
    made = mlp()
    exec(change, {"m": made, "g": made.graph, "n": made.graph.node, "helper": helper, "TensorProto": TensorProto})
    return made


RECURSIVE = """g (float[2] x) => (float[2] y) { y = local.f(x) }
<opset_import: ["" : 21, "local" : 1], domain: "local"> f (v) => (r) { r = local.h(v) }
<opset_import: ["" : 21, "local" : 1], domain: "local"> h (v) => (r) { r = local.f(v) }"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("m.ClearField('graph')", "not an ONNX model: it has no graph"),
        ("m.ir_version = 0", "no IR version"),
        ("m.ir_version = 15", "IR version 15 is newer"),
        ("m.opset_import[0].version = 29", "opset 29 is newer than irpar reads"),
        ("m.opset_import.add(domain='irpar', version=2)", "version 2 of irpar's operators"),
        ("m.opset_import.add(domain='ai.onnx', version=20)", "opset versions 21 and 20"),
        ("m.training_info.add()", "training_info"),
        ("n[0].op_type = ''", "a node has no operator"),
        ("n[0].domain = 'com.example'", '(?s)MatMul is of domain "com.example".*imported: ai.onnx'),
        ("n[0].input[1] = 'ww'", '(?s)"ww" is read, but nothing defines it.*node|MatMul of h.*nearest names: w'),
        ("g.output[0].name = 'yy'", '(?s)graph output "yy" is not defined.*nearest'),
        ("g.output[0].name = ''", "graph output has no name"),
        ("g.input[0].name = ''", "graph input has no name"),
        ("g.initializer[0].name = ''", "constant has no name"),
        ("g.initializer[1].name = 'w'", 'constant "w" is defined twice'),
        ("n[1].output[0] = 'h'", '"h" is defined twice'),
        ("n[0].output[0] = 'x'", '"x" is defined twice'),
        ("n[0].input[0] = 'y'", "the nodes form a cycle: MatMul of h -> Add of y -> MatMul of h"),
        ("n[0].input[0] = 'h'", "the nodes form a cycle: MatMul of h -> MatMul of h"),
        ("g.initializer[0].data_type = 99", "(?s)unknown element type 99.*initializer w"),
        ("g.initializer[0].dims[0] = -4", "negative dim"),
        ("g.initializer[0].dims[0] = 2 ** 62", "1024 elements of data for a tensor"),
        ("g.initializer[0].float_data.pop()", "1023 elements of data"),
        ("g.initializer[0].ClearField('float_data')", "0 elements of data"),
        ("g.initializer[0].ClearField('float_data'); g.initializer[0].raw_data = b'1234'", "4 bytes of data"),
        ("g.initializer[1].ClearField('float_data'); g.initializer[1].raw_data = b'1234'", "needs 128"),
        ("g.initializer[0].segment.begin = 0", "segments"),
        ("g.input[0].type.tensor_type.elem_type = 99", "(?s)unknown element type 99.*value x"),
        ("g.input[0].type.tensor_type.shape.dim[1].dim_value = -7", "dim of -7"),
        ("g.input[0].type.map_type.key_type = 7", "map type are not supported"),
        ("g.value_info.append(helper.make_tensor_value_info('w', 1, [2, 2]))", "constant is f32"),
        ("a = n[0].attribute; a.add(name='a', type=1); a.add(name='a', type=1)", '"a" is given twice'),
        ("n[0].attribute.add(name='a')", "no known type"),
        ("n[0].attribute.add(name='a', type=1, ref_attr_name='b')", "no function around it has"),
        ("n[0].attribute.add(name='a', type=11)", "sparse tensor"),
        ("n.add(op_type='Constant', output=['k'])", "a Constant needs one value"),
        ("n.add(op_type='Constant', output=['k']).attribute.add(name='value_int', type=3, s=b'x')", "cannot take its"),
        ("n.add(op_type='Constant', output=['k']).attribute.add(name='other', type=2)", "cannot take its value"),
        ("g.quantization_annotation.add(tensor_name='zz')", 'quantization_annotation of "zz"'),
        ("n[0].metadata_props.add(key='irpar.phase', value='sideways')", "metadata irpar.phase"),
        ("m.metadata_props.add(key='irpar.mesh', value='dp=0')", "metadata irpar.mesh cannot be read"),
        ("m.metadata_props.add(key='irpar.ranks', value='[[')", "metadata irpar.ranks cannot be read"),
        ("g.input[0].metadata_props.add(key='irpar.sharding', value='{}')", "metadata irpar.sharding cannot be read"),
        ("g.initializer[0].data_location = 1", "the model has no folder"),
    ],
)
def test_broken_models_give_one_clear_error(change: str, message: str) -> None:
    with pytest.raises(OnnxError, match=message) as caught:
        to_module(broken(change))
    assert caught.value.do


def test_recursive_functions() -> None:
    with pytest.raises(OnnxError, match=r"circle: local.f -> local.h -> local.f"):
        to_module(model(RECURSIVE))


def test_function_called_with_too_many_operands() -> None:
    made = model(FUNCTION)
    made.graph.node[0].input.append("x")
    with pytest.raises(OnnxError, match="call of scaled with 2 operands"):
        to_module(made)


def test_function_of_an_old_opset() -> None:
    made = model(FUNCTION)
    made.functions[0].opset_import[0].version = 11
    with pytest.raises(OnnxError, match="the function follows opset 11"):
        to_module(made)


def test_deep_nesting_in_memory() -> None:
    with pytest.raises(OnnxError, match="nested"):
        to_module(nested_too_deep())


def test_deep_nesting_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "deep.onnx").write_bytes(nested_too_deep_in_bytes())
    with pytest.raises(OnnxError, match=r"(?s)nested.*deep\.onnx"):
        load(tmp_path / "deep.onnx")


@pytest.mark.parametrize("content", [b"", b"hello, this is no model", b"\x08", b"\xff" * 100])
def test_files_that_are_no_models(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(OnnxError, match=r"(?s)not an ONNX model.*bad\.onnx"):
        load(path)


def test_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.onnx"
    data = mlp().SerializeToString()
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(OnnxError):
            load(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(OnnxError, match=r"(?s)No such file.*none\.onnx"):
        load(tmp_path / "none.onnx")
    with pytest.raises(OnnxError, match="directory"):
        load(tmp_path)


def test_name_that_is_not_utf8(tmp_path: Path) -> None:
    made = mlp()
    made.graph.node[0].name = "QQQQ"
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString().replace(b"QQQQ", b"\xff\xfe\xfd\xfc"))
    with pytest.raises(OnnxError, match="is not UTF-8 text"):
        load(path)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.onnx"
    with open(path, "wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(OnnxError, match="at most 2 GB"):
        load(path)


def test_random_damage_never_gives_a_traceback(tmp_path: Path) -> None:
    data = bytearray(to_proto(to_module(model(FUNCTION))).SerializeToString())
    random = np.random.default_rng(1)
    path = tmp_path / "m.onnx"
    messages = []
    for _ in range(400):
        damaged = bytearray(data)
        for place in random.integers(0, len(data), 3):
            damaged[place] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            load(path)
        except OnnxError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert all("m.onnx" in message and "do: " in message for message in messages)


def test_loading_reads_no_weights_and_little_memory(tmp_path: Path) -> None:
    made = mlp()
    made.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=1, dims=[1 << 20, 1 << 15], data_location=1))
    made.graph.initializer[0].external_data.add(key="location", value="w.bin")
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    assert peak_kilobytes("import sys; from irpar.onnx_io import load; load(sys.argv[1])", str(path)) < 400_000
    assert not os.path.exists(tmp_path / "w.bin")
