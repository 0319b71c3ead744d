"""--set, and `irpar.load(set=...)`: inputs that are fixed when a model is partitioned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irpar
from irpar.inputs.fixed import fix_inputs
from irpar.ir import Module, read_text, verify, write_text
from irpar.pass_manager import Instrumentation, PassFailure, PassManager
from irpar.pass_manager.reproducer import read_reproducer
from tests.command_line import Capture, call, refused
from tests.pass_manager.test_reproducer import Crash
from tests.written import model_of_text

RATES = """g (float[4,8] x, float[8,8] w, int64 sr, float[2] gain, bool on) => (float[4,8] y, int64 z)
  <int64 k = {16000}> {
    q = Equal(sr, k)
    h = If(q) <then_branch = a () => (float[4,8] u) { u = MatMul(x, w) },
               else_branch = b () => (float[4,8] v) { v = Neg(x) }>
    g = ReduceMax<keepdims=0>(gain)  m = Mul(h, g)  y = Where(on, m, h)  z = Identity(sr) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that branches on a sample rate."""
    onnx.save(model_of_text(RATES, ("w",), {}, 21), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def operators(partition: irpar.Partition) -> set[str]:
    assert partition.module is not None
    return {node.op_type for node in partition.module.graph.walk()}


def partitioned(model: Path, **values: Any) -> irpar.Partition:
    module = irpar.load(model, set=values)
    module.shard("w", ["tp", None])
    return irpar.partition(module, "tp=2")


@pytest.mark.parametrize(("rate", "operator"), [(16000, "MatMul"), (8000, "Neg")])
def test_what_depends_on_it_is_folded(model: Path, rate: int, operator: str) -> None:
    assert {"If", "Equal", "MatMul", "Neg"} <= operators(partitioned(model))
    made = partitioned(model, sr=rate, gain=[1.5, 0.5], on=True)
    left = operators(made) & {"If", "Equal", "ReduceMax", "MatMul", "Neg"}
    assert left == {operator}
    assert {spec["name"]: spec["value"] for spec in made.plan.inputs} == {
        "x": None,
        "sr": rate,
        "gain": [1.5, 0.5],
        "on": True,
    }
    verified = made.verify()
    assert (verified.result, verified.bodies) == ("equal", ())


def test_it_stays_an_input_of_one_value(model: Path, tmp_path: Path) -> None:
    made = partitioned(model, sr=16000)
    made.save(tmp_path / "out")
    rest = {"x": np.ones((4, 8), np.float32), "gain": np.ones(2, np.float32), "on": np.array(True)}
    for partition in (made, irpar.Partition.open(tmp_path / "out")):
        without = partition.run(rest)
        assert without["z"] == 16000
        np.testing.assert_array_equal(partition.run({**rest, "sr": np.array(16000)})["y"], without["y"])
        for run in (partition.run, partition.verify, partition.bisect):
            for other in (np.array(8000), np.array(16000, np.int32), np.array([16000])):
                with pytest.raises(irpar.IrparError, match="was fixed to be 16000 when the model was") as caught:
                    run({**rest, "sr": other})
                assert 'partition the model again with another set={"sr": VALUE}' in str(caught.value)
        assert partition.verify(rest).result == "equal"


def test_the_command_line(model: Path, tmp_path: Path, capsys: Capture) -> None:
    np.save(tmp_path / "gain.npy", np.array([2, 1], np.float32))
    out = tmp_path / "out"
    words = ["--mesh", "tp=2", "--set", "sr=16000", "--set", f"gain={tmp_path / 'gain.npy'}", "--set", "on=true"]
    assert call(capsys, "partition", model, "-o", out, *words)[0] == 0
    plan = json.loads((out / "plan.json").read_text())
    assert [spec["value"] for spec in plan["inputs"]] == [None, 16000, [2.0, 1.0], True]
    np.savez(tmp_path / "in.npz", x=np.ones((4, 8), np.float32))
    run = ["run", out, "--inputs", tmp_path / "in.npz"]
    assert call(capsys, *run)[0] == 0
    assert call(capsys, *run, "--input", "sr=16000")[0] == 0
    told = refused(capsys, "input sr is 8000, and was fixed to be 16000", *run, "--input", "sr=8000")
    assert "partition the model again with another --set" in told
    refused(capsys, "input sr is 8000, and was fixed to be 16000", "verify", out, "--input", "sr=8000")
    found = json.loads(call(capsys, "verify", out, "--strict", "--json")[1])
    assert (found["result"], found["not_run"]) == ("equal", [])


TABLE = "g (float[4,8] x, int64 sr, float[5,5] t) => (float[4,8] y) { m = ReduceMax<keepdims=0>(t)  y = Mul(x, m) }"


def table(folder: Path) -> Module:
    """A module with a fixed input that is too big for the text, and one that nothing reads."""
    onnx.save(model_of_text(TABLE, (), {}, 21), folder / "t.onnx")
    module = irpar.load(folder / "t.onnx", set={"sr": 16000, "t": np.arange(25.0, dtype=np.float32).reshape(5, 5)})
    module.set_mesh("dp=2")
    module.shard("x", ["dp", None])
    return module


def check_table(module: Module) -> None:
    """The plan of a module that was read back has the values, and it runs as one that was not."""
    verify(module)
    made = irpar.partition(module)
    values = {spec["name"]: spec["value"] for spec in made.plan.inputs}
    assert values == {"x": None, "sr": 16000, "t": np.arange(25.0).reshape(5, 5).tolist()}
    x = np.ones((4, 8), np.float32)
    np.testing.assert_array_equal(made.run({"x": x})["y"], 24 * x)
    with pytest.raises(irpar.IrparError, match="was fixed to be 16000"):
        made.run({"x": x, "sr": np.array(8000)})


def test_texts_dumps_and_reproducers_keep_it(tmp_path: Path) -> None:
    module = table(tmp_path)
    write_text(module, tmp_path / "t.irpar")
    check_table(read_text(tmp_path / "t.irpar"))
    with pytest.raises(PassFailure):
        PassManager([Crash()], Instrumentation(reproducer=tmp_path / "crash")).run(module)
    check_table(read_reproducer(tmp_path / "crash" / "crash-test.irpar")[0])
    dump = tmp_path / "dump"
    PassManager.parse("fold-constants,dce", Instrumentation(dump_ir=dump)).run(table(tmp_path))
    check_table(read_text(dump / "02-dce.irpar"))
    folded = read_text(dump / "02-dce.irpar")
    with pytest.raises(irpar.IrparError, match="would replace the file that the module reads"):
        PassManager.parse("dce", Instrumentation(dump_ir=dump)).run(folded)


def test_opt_keeps_it(model: Path, tmp_path: Path, capsys: Capture) -> None:
    dump = tmp_path / "dump"
    words = ["--mesh", "tp=2", "--set", "sr=16000", "--dump-ir", dump]
    assert call(capsys, "partition", model, "-o", tmp_path / "out", *words)[0] == 0
    for file in (sorted(dump.glob("*.irpar"))[0], sorted(dump.glob("*.irpar"))[-1]):
        assert call(capsys, "opt", file, "--pipeline", "dce", "-o", tmp_path / "again.irpar")[0] == 0
        assert read_text(tmp_path / "again.irpar").fixed["sr"].numpy() == 16000
        (tmp_path / "again.irpar").unlink()


def test_a_suggestion_is_made_for_the_value(model: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "s.yaml"
    words = ["inspect", model, "--suggest", "dp=2", "-o", file]
    _, told, _ = call(capsys, *words, "--set", "sr=16000")
    assert told.rstrip().endswith(f"--shardings {file} --set sr=16000")
    assert call(capsys, "partition", model, "-o", tmp_path / "out", "--shardings", file, "--set", "sr=16000")[0] == 0
    listed = json.loads(call(capsys, "inspect", model, "--set", "sr=16000", "--json")[1])
    assert {entry["name"] for entry in listed["inputs"]} == {"x", "w", "sr", "gain", "on"} - {"w"}
    refused(capsys, 'there is no input "rate"', *words, "--force", "--set", "rate=1")


SIZES = """g (float[2,n] x, int64 sr) => (float[a,b] y) <int64 k = {16000}> {
    q = Equal(sr, k)
    y = If(q) <then_branch = a () => (float[c,d] u) { u = Neg(x) },
               else_branch = b () => (float[e,f] v) { i = Constant<value_ints = [2, 256]>()  v = Reshape(x, i) }>}"""


def test_a_branch_that_the_sizes_do_not_fit_may_be_one_that_is_never_taken(tmp_path: Path, capsys: Capture) -> None:
    onnx.save(model_of_text(SIZES, (), {}, 21), tmp_path / "m.onnx")
    words = ["partition", tmp_path / "m.onnx", "-o", tmp_path / "out", "--mesh", "dp=2", "--bind", "n=512"]
    told = refused(capsys, "Reshape of f32[2, 512]", *words)
    assert "it stands in a branch of If" in told
    assert "fix the input that decides it: --set NAME=VALUE" in told
    with pytest.raises(irpar.IrparError, match="Reshape of f32") as caught:
        irpar.partition(irpar.load(tmp_path / "m.onnx", bind={"n": 512}), "dp=2")
    assert 'fix the input that decides it: set={"NAME": VALUE}' in str(caught.value)
    assert call(capsys, *words, "--set", "sr=16000")[0] == 0
    assert call(capsys, "verify", tmp_path / "out", "--strict")[0] == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("sr", 'cannot read --set "sr"'),
        ("rate=1", 'there is no input "rate"'),
        ("sr=0.5", "the value of input sr is 0.5, which is no i64"),
        ("gain=[1, 2, 3]", "the value of input gain has shape [3], expected [2]"),
        ("gain=[1, NaN]", "the value of input gain is not finite"),
        pytest.param("gain=" + "[" * 20_000, "the value of input gain is nested too deep", id="deep"),
        ("on=maybe", 'the value of input on is "maybe", which is neither a number nor a list'),
    ],
)
def test_values_that_do_not_fit(model: Path, tmp_path: Path, capsys: Capture, given: str, told: str) -> None:
    refused(capsys, told, "partition", model, "-o", tmp_path / "out", "--mesh", "tp=2", "--set", given)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_fixed(tmp_path: Path) -> None:
    text = "g (float[n,8] x, float[100,100] t) => (float[n,8] y) { y = Neg(x) }"
    onnx.save(model_of_text(text, (), {}, 21), tmp_path / "m.onnx")
    module = irpar.load(tmp_path / "m.onnx")
    with pytest.raises(irpar.IrparError, match="the shape of input x is not known") as caught:
        fix_inputs(module, {"x": np.ones((2, 8), np.float32)})
    assert 'give sizes: bind={"NAME": SIZE}' in str(caught.value)
    with pytest.raises(irpar.IrparError, match="up to 4,096 can be fixed"):
        fix_inputs(module, {"t": 1.0})
    assert module.fixed == {}
    assert irpar.load(tmp_path / "m.onnx", bind={"n": 2}, set={"x": 0.5}).fixed["x"].shape == (2, 8)


def test_a_plan_whose_value_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    made = partitioned(model, sr=16000)
    made.save(tmp_path / "out")
    path = tmp_path / "out" / "plan.json"
    path.write_text(path.read_text().replace('"value": 16000', '"value": [1, 2]'))
    with pytest.raises(irpar.IrparError, match="the value of input sr has shape"):
        irpar.Partition.open(tmp_path / "out").run({})


def test_a_suggestion_of_what_is_left(model: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["inspect", model, "--suggest", "tp=2", "-o", tmp_path / "s.yaml", "--set", "sr=16000"]
    code, text, _ = call(capsys, *words)
    assert code == 0
    assert "--set sr=16000" in text.splitlines()[-1]
    assert json.loads(call(capsys, "inspect", model, "--set", "sr=8000", "--json")[1])
    refused(capsys, 'there is no input "rate"', "inspect", model, "--set", "rate=8000")


def test_texts_with_half_a_character_are_refused(tmp_path: Path, capsys: Capture) -> None:
    text = "g (float[4,8] x, string[1] s) => (float[4,8] y, string[1] t) { y = Neg(x)  t = Identity(s) }"
    onnx.save(model_of_text(text, (), {}, 21), tmp_path / "m.onnx")
    words = ["partition", tmp_path / "m.onnx", "-o", tmp_path / "out", "--mesh", "tp=2"]
    half = 's=["\\ud800"]'
    refused(capsys, "which is no text of Unicode", *words, "--set", half)
    assert call(capsys, *words)[0] == 0
    for command in ("run", "verify"):
        refused(capsys, "which is no text of Unicode", command, tmp_path / "out", "--input", half)
    assert call(capsys, "verify", tmp_path / "out", "--input", 's=["\\ud83d\\ude00"]')[0] == 0


def test_numbers_too_large_for_the_type(model: Path) -> None:
    with pytest.raises(irpar.IrparError, match=r"the value of input gain has 1e\+39, which is too large for f32"):
        irpar.load(model, set={"gain": [1.0, 1e39]})
