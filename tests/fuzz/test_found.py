"""What fuzzing found, each with the clear error that it gives since."""

import json

import onnx
import pytest
from onnx import helper

from irpar.cli import main
from irpar.models import annotations, save
from tests.hostile.build import FLOAT, body, changed, model, node, numbers, relu, value

from ..older_plans import forget_programs


def refused(capsys, told, *words):
    """Check that a command ends with one clear error."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    err = capsys.readouterr().err
    assert code == 2, err
    assert told in err
    assert err.startswith("error: ")
    assert "\n  do: " in err


TERMS = "*".join(["(a+b+c+d+e+f+g+h)"] * 30)
IN_GRAPH = "graph @g(%x: f32[4]) -> (%y) opset 18 {{\n  {}\n}}\n"
TEXTS = {
    "which is too large": "graph @g(%x: f32[4]) -> (%y) opset 2147483648 {\n  %y = Relu(%x) : f32[4]\n}\n",
    "expected an opset version, found 2147483648": IN_GRAPH.format("%y = Relu:2147483648(%x) : f32[4]"),
    "expected an opset version, found -1": IN_GRAPH.format("%y = Relu:-1(%x) : f32[4]"),
    "a number in a dim does not fit 64 bits": IN_GRAPH.format("%y = Relu(%x) : f32[92233720368547758072]"),
    "a dim has more than 10000 terms": IN_GRAPH.format(f"%y = Relu(%x) : f32[{TERMS}]"),
    "does not fit 64 bits": IN_GRAPH.format("%y = Softmax(%x) {axis=9223372036854775808} : f32[4]"),
    "the IR is not valid: 1 problem": IN_GRAPH.format("%y = Relu(%x) : f32[4]") * 2,
    "but its sharding [] replicated is for 0 dims": 'mesh @m = ["dp"=2]\n'
    + IN_GRAPH.format("%y = Relu(%x) : f32[] replicated"),
    "docs/text.md": "graph",
}


@pytest.mark.parametrize("told", TEXTS)
def test_texts(capsys, tmp_path, told):
    (tmp_path / "m.irpar").write_text(TEXTS[told])
    refused(capsys, told, "opt", tmp_path / "m.irpar", "--pipeline", "infer-types,fold-constants,dce")


def attention(*shapes, **attributes):
    operands = [value(f"x{index}", FLOAT, shape) for index, shape in enumerate(shapes)]
    made = node("Attention", [one.name for one in operands], ["y"], **attributes)
    return model(made, inputs=operands, outputs=[value("y", FLOAT, None)], opset=23)


def scan_of_too_many():
    """A Scan of opset 8 with more results than its body has."""
    inner = body(node("Relu", ["a"], ["b"]), inputs=[value("a")], outputs=[value("b")])
    made = node("Scan", ["", "x"], ["y", "z"], body=inner, num_scan_inputs=1)
    return model(made, outputs=[value("y", FLOAT, None), value("z", FLOAT, None)], opset=8)


def scales_cut_short():
    """An Upsample of opset 9 whose scales have too few bytes."""
    scales = onnx.TensorProto(name="s", dims=[4], data_type=FLOAT, raw_data=b"abc")
    return model(node("Upsample", ["x", "s"], ["y"]), constants=[scales], outputs=[value("y", FLOAT, None)], opset=9)


MODELS = {
    "the operands of Gemm do not fit": lambda: model(
        node("Gemm", ["x", "x"], ["y"]), inputs=[value("x", FLOAT, (4,))], outputs=[value("y", FLOAT, None)]
    ),
    "the operands, attributes and results of Attention do not fit each other": lambda: attention(
        (2, 4, 8, 8), (2, 4, 8, 8), (2, 4, 8)
    ),
    "the type of input z is not known": lambda: model(
        node("Concat", ["x", "z"], ["y"], axis=0),
        inputs=[value("x"), onnx.ValueInfoProto(name="z")],
        outputs=[value("y", FLOAT, None)],
    ),
    "the type of input x is not known": lambda: model(
        node("Add", ["x", "k"], ["y"]),
        inputs=[value("x", FLOAT, None)],
        constants=[numbers(1.0, "k", "f4")],
        outputs=[value("y", FLOAT, None)],
    ),
    'opset 1000000000000 of domain "my" is none': lambda: relu("m.opset_import[1].version = 10**12"),
    "the operands, attributes and results of ScatterElements do not fit each other": lambda: model(
        node("ScatterElements", ["x", "i", "u"], ["y"], axis=1),
        inputs=[value("x"), value("u", FLOAT, [])],
        constants=[numbers([[1, 2]], "i")],
    ),
    "%y0 : ?": lambda: changed(model(node("CastLike", ["x", "x"], ["y", "y0"]), opset=13), "g.output[0].name = 'y'"),
    "Scan and its body do not fit each other": scan_of_too_many,
    "3 bytes of data for a tensor f32[4]": scales_cut_short,
}


@pytest.mark.parametrize("field", ["producer_name", "op_type", "doc_string"])
def test_names_of_old_models_that_are_no_text(capsys, tmp_path, field):
    made = model(node("Relu", ["x"], ["y"]), opset=8)
    setattr(made.graph.node[0] if field == "op_type" else made, field, "QQQQ")
    content = made.SerializeToString().replace(b"QQQQ", b"Q\xffQQ")
    (tmp_path / "m.onnx").write_bytes(content)
    refused(capsys, "is not UTF-8 text", "inspect", tmp_path / "m.onnx")


def test_a_bad_attribute_of_a_node_whose_result_is_no_text(capsys, tmp_path):
    made = model(node("Softmax", ["x"], ["QQQQ"], axis=1))
    made.graph.node[0].attribute[0].type = 0
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString().replace(b"QQQQ", b"Q\xffQQ"))
    refused(capsys, "no known type (0)", "inspect", tmp_path / "m.onnx")


@pytest.mark.parametrize("told", MODELS)
def test_models(capsys, tmp_path, told):
    (tmp_path / "m.onnx").write_bytes(MODELS[told]().SerializeToString())
    refused(capsys, told, "partition", tmp_path / "m.onnx", "--mesh", "tp=2", "-o", tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.onnx"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A partition that communicates."""
    folder = tmp_path_factory.mktemp("found")
    save(folder / "gpt.onnx", "gpt", layers=1)
    (folder / "gpt.json").write_text(json.dumps({"mesh": {"tp": 2}, "tensors": annotations("gpt", None, layers=1)}))
    words = ["partition", folder / "gpt.onnx", "-o", folder / "out", "--shardings", folder / "gpt.json", "--json"]
    assert main(list(map(str, words))) == 0
    return folder / "out"


def collective(made):
    return next(one for one in made.graph.node if one.domain == "irpar")


def axes_of_bytes(made):
    next(one for one in collective(made).attribute if one.name == "axes").strings[0] = b"\xff"


def kernel_with_a_graph(made):
    one = next(one for one in made.graph.node if one.op_type == "Add")
    one.attribute.append(helper.make_attribute("body", helper.make_graph([], "b", [], [])))


def two_results(made):
    next(one for one in made.graph.node if one.op_type == "Add").output.append("more")


def loop_without_body(made):
    next(one for one in made.graph.node if one.op_type == "Reshape").op_type = "Loop"


def no_permutation(made):
    del next(one for one in made.graph.node if one.op_type == "Transpose").attribute[0].ints[2:]


PARTS = {
    "attribute perm=[0, 2] is no permutation of the 4 dims": no_permutation,
    "Add is malformed: it has 2 results, Add has 1": two_results,
    "Loop is malformed": loop_without_body,
    "runs over axes that cannot be": axes_of_bytes,
    'Add is malformed: it has no attribute "body"': kernel_with_a_graph,
}


@pytest.mark.parametrize("told", PARTS)
def test_parts(capsys, out, told):
    path = out / "part0" / "model.onnx"
    before = path.read_bytes()
    made = onnx.ModelProto.FromString(before)
    PARTS[told](made)
    path.write_bytes(made.SerializeToString())
    plan = (out / "plan.json").read_bytes()
    forget_programs(out)
    try:
        refused(capsys, told, "verify", out, "--engine", "numpy")
    finally:
        path.write_bytes(before)
        (out / "plan.json").write_bytes(plan)
