"""Names that hold control characters: nothing of them reaches a terminal."""

import json
import unicodedata

import onnx
import pytest
from onnx import TensorProto, helper

from irpar.sharding import IrparError
from irpar.visible import visible
from tests.command_line import call

ESCAPE, OVERRIDE, BELL = "\x1b]0;mine\x07\x1b[2J", "\u202etxt.\u2066", "\x07\x08\x9b31m"
NAME = f"w{ESCAPE}{OVERRIDE}{BELL}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größe 名前 🙂", "größe 名前 🙂"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\u202eb", "a\\u202eb"),
        ("a\x9bb\x7f", "a\\x9bb\\x7f"),
        ("a\rb", "a\\rb"),
        ("two\n\tlines", "two\n\tlines"),
        ("\ud800\U000e0001", "\\ud800\\U000e0001"),
    ],
)
def test_what_is_seen(text, shown):
    assert visible(text) == shown


def is_clean(text):
    return all(character in "\n\t" or unicodedata.category(character)[0] != "C" for character in text)


def test_errors_hold_no_control_characters():
    error = IrparError(f"no tensor {NAME}", where=NAME, notes=(NAME,), do=NAME)
    assert is_clean(str(error))
    assert error.what == f"no tensor {NAME}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of which every name holds control characters, in a folder with such a name, and its partition."""
    made = tmp_path_factory.mktemp("names") / f"f{NAME.replace('/', '')}"
    made.mkdir()
    nodes = [helper.make_node("MatMul", [f"x{NAME}", NAME], [f"y{NAME}"], name=f"n{NAME}")]
    x = helper.make_tensor_value_info(f"x{NAME}", TensorProto.FLOAT, [8, 16])
    y = helper.make_tensor_value_info(f"y{NAME}", TensorProto.FLOAT, [8, 16])
    weight = helper.make_tensor(NAME, TensorProto.FLOAT, [16, 16], [1.0] * 256)
    graph = helper.make_graph(nodes, f"g{NAME}", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, made / "m.onnx")
    (made / "s.json").write_text(json.dumps({"mesh": {"tp": 2}, "tensors": {NAME: ["tp", None]}}))
    return made


def test_no_command_prints_them(capsys, folder):
    model, out = folder / "m.onnx", folder / "out"
    commands = (
        ["inspect", model],
        ["inspect", model, "--suggest", "tp=2"],
        ["partition", model, "-o", out, "--shardings", folder / "s.json"],
        ["explain", out],
        ["explain", out, NAME],
        ["explain", out, "0"],
        ["explain", out, f"none{NAME}"],
        ["verify", out],
        ["opt", model, "--pipeline", "dce"],
        ["partition", model, "-o", out, "--mesh", "tp=2"],
        ["inspect", folder / "gone.onnx"],
        ["inspect", model, f"--{NAME}"],
    )
    for command in commands:
        code, told, err = call(capsys, *command)
        assert code in (0, 2), err
        assert is_clean(told), (command[0], told)
        assert is_clean(err), (command[0], err)
        assert told or err


def test_json_holds_them_as_escapes(capsys, folder):
    code, told, _ = call(capsys, "inspect", folder / "m.onnx", "--json")
    assert code == 0
    assert is_clean(told)
    assert NAME in str(json.loads(told)) or repr(NAME)[1:-1] in str(json.loads(told))
