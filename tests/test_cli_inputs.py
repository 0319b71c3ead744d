"""--input of `irpar run` and `irpar verify`, and what verify answers where branches did not run."""

import json

import numpy as np
import onnx
import pytest

from irpar.cli import main
from irpar.inputs.values import settings
from irpar.runtime import local_ranks
from irpar.runtime.engines.base import make_engine
from irpar.runtime.executor import Executor
from irpar.sharding import IrparError
from tests.command_line import call
from tests.written import model_of_text

TEXT = """g (float[4,8] x, float[8,8] w, int64 sr, bool[1] on, float16[3] h) => (float[4,8] y, float16[3] z)
  <int64 k = {16000}> {
    q = Equal(sr, k)
    y = If(q) <then_branch = a () => (float[4,8] u) { u = MatMul(x, w) },
               else_branch = b () => (float[4,8] v) { v = Neg(x) }>
    z = Where(on, h, h) }"""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A partition of a model that branches on a sample rate."""
    folder = tmp_path_factory.mktemp("inputs")
    onnx.save(model_of_text(TEXT, ("w",), {}, 21), folder / "m.onnx")
    (folder / "m.json").write_text(json.dumps({"mesh": {"tp": 2}, "tensors": {"w": [["tp"], None]}}))
    words = ["partition", folder / "m.onnx", "-o", folder / "out", "--shardings", folder / "m.json", "--json"]
    assert main(list(map(str, words))) == 0
    return folder / "out"


def test_what_did_not_run_is_told(capsys, out):
    code, text, _ = call(capsys, "verify", out)
    assert (code, "but" in text) == (0, False)
    words = ["verify", out, "--input", "sr=16000"]
    code, text, _ = call(capsys, *words)
    assert code == 0
    assert "equal to ONNX Runtime on the original (inputs: random, seed 0; sr given), but\n" in text
    assert "1 of 2 branches did not run: else_branch of If y (1 node)" in text
    assert call(capsys, *words, "--strict")[0] == 1
    code, text, _ = call(capsys, *words, "--json")
    found = json.loads(text)
    assert (code, found["result"], found["is_equal"]) == (0, "equal, but", True)
    assert found["not_run"] == [{"node": "y", "operator": "If", "branch": "else_branch", "nodes": 1}]
    found = json.loads(call(capsys, "verify", out, "--json", "--strict")[1])
    assert (found["result"], found["not_run"]) == ("equal", [])


def test_inputs_of_a_run(capsys, out, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((4, 8), np.float32))
    np.savez(tmp_path / "rest.npz", on=np.array([True]), sr=np.array(16000), h=np.zeros(3, np.float16))
    words = ["run", out, "--outputs", tmp_path / "y.npz", "--input", f"x={tmp_path / 'x.npy'}"]
    assert call(capsys, *words, "--input", "sr=5", "--input", "on=[true]", "--input", "h=[1, 0.5, 2]")[0] == 0
    results = np.load(tmp_path / "y.npz")
    np.testing.assert_array_equal(results["y"], -np.ones((4, 8), np.float32))
    np.testing.assert_array_equal(results["z"], np.array([1, 0.5, 2], np.float16))
    # What --input says goes before the file; one number is for all of a tensor.
    assert call(capsys, *words, "--inputs", tmp_path / "rest.npz", "--input", "sr=-1", "--input", "h=2")[0] == 0
    results = np.load(tmp_path / "y.npz")
    assert results["y"][0, 0] == -1
    assert results["z"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("16000", 'cannot read --input "16000"'),
        ("rs=1", 'there is no input "rs"'),
        ("sr=1.5", "the value of input sr is 1.5, which is no i64"),
        ("sr=abc", 'the value of input sr is "abc", which is neither a number nor a list'),
        ("sr=[1, 2]", "the value of input sr has shape [2], expected []"),
        ("on=2", "the value of input on is 2, which is no bool"),
        ("x=[[1, 2], [3]]", "the value of input x is ragged"),
        ("x=none.npy", "cannot read the value of input x: No such file or directory"),
        ("sr=99999999999999999999", "which is no i64"),
        ("h=1e6", "the value of input h has 1000000.0, which is too large for f16"),
        ("h=[1, 2, 65520]", "the value of input h has 65520, which is too large for f16"),
        ("x=1e39", "which is too large for f32"),
        ("x=1e400", "the value of input x has 1e400, which is too large"),
        pytest.param("x=" + "[" * 20_000, "the value of input x is nested too deep", id="deep"),
        ("x=" + "[" * 200 + "1" + "]" * 200, "the value of input x is nested too deep"),
    ],
)
def test_values_that_do_not_fit(capsys, out, given, told):
    for command in ("run", "verify"):
        code, _, err = call(capsys, command, out, "--input", given)
        assert code == 2
        assert told in err


def test_an_input_that_is_given_twice(capsys, out):
    code, _, err = call(capsys, "verify", out, "--input", "sr=1", "--input", "sr=2")
    assert (code, "--input gives sr twice" in err) == (2, True)


def test_the_command_to_bisect_has_the_inputs(capsys, out, monkeypatch):
    plain = Executor.run
    monkeypatch.setattr(Executor, "run", lambda *words, **more: {**plain(*words, **more), "z": np.zeros(3, np.float16)})
    code, text, _ = call(capsys, "verify", out, "--input", "sr=16000", "--tolerance", "0", "--input", "h=1")
    assert code == 1
    assert "--tolerance 0.0 --input sr=16000 --input h=1 --bisect" in text


def test_all_ranks_in_processes_of_their_own(capfd, out):
    code, text, _ = call(capfd, "verify", out, "--group", "processes", "--json")
    found = json.loads(text)
    assert (code, found["result"], found["inputs"]) == (0, "equal", "random, seed 0; 2 runs")


def test_a_file_of_inputs_given_to_the_option_for_one() -> None:
    with pytest.raises(IrparError, match=r"or --inputs in\.npz"):
        settings("--input", ["in.npz"], ["x"])
    with pytest.raises(IrparError, match=r"such as --set sr=16000$"):
        settings("--set", ["in.npz"], ["x"])


@pytest.mark.parametrize("asked", [[], ["--tf32"]])
@pytest.mark.parametrize("command", ["run", "verify"])
def test_tf32_is_told_to_the_engine(capsys, out, monkeypatch, command, asked):
    told = []

    def make(name, settings):
        told.append(settings.tf32)
        return make_engine(name, settings)

    monkeypatch.setattr(local_ranks, "make_engine", make)
    given = ["--input", "sr=16000", "--input", "x=1", "--input", "on=[true]", "--input", "h=[1, 2, 3]"]
    assert call(capsys, command, out, *given, *asked)[0] == 0
    assert told == [bool(asked)]
