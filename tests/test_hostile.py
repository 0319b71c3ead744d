"""Bad input to every command: one clear error, exit code 2, nothing half-written, nothing lost, no hang."""

import os
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from irpar.models import save
from tests.budget import of_each
from tests.command_line import call, refused
from tests.hostile.__main__ import main as hostile
from tests.hostile.build import FLOAT, INT64, RELU, SHAPE, function, model, node, numbers, value
from tests.hostile.cases import all_cases, entries, make_good, objection
from tests.patience import patient

FEWEST_CASES = 200


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """gpt.onnx, its shardings and inputs, and a partition of it in out/."""
    return make_good(tmp_path_factory.mktemp("hostile"))


def what_is_bad(case):
    """Of a damaged partition that is run, verified and packed the damage; else the case."""
    return case.told if case.kind == "partition" else case


@pytest.mark.parametrize("case", of_each(what_is_bad, list(all_cases())), ids=str)
def test_bad_input_is_refused_and_nothing_is_written(capsys, tmp_path, base, case):
    case.put(tmp_path, base)
    before = entries(tmp_path)
    problem = objection(case, *call(capsys, *case.command(tmp_path)))
    assert problem is None
    assert entries(tmp_path) == before


def test_there_are_enough_cases():
    names = [(case.kind, case.told) for case in all_cases()]
    assert len(set(names)) >= FEWEST_CASES


@pytest.mark.slow
def test_bad_input_is_refused_by_processes(capsys):
    code = hostile(["cycle", "pipe", "YAML", "weights.bin", "nested", "2^63"])
    assert code == 0, capsys.readouterr().out


# -- models -------------------------------------------------------------------------------------------------------


def test_damaged_bytes_give_an_error_or_a_model(capsys, tmp_path, base):
    content, random = (base / "gpt.onnx").read_bytes(), np.random.default_rng(0)
    for _ in range(12):
        damaged = bytearray(content)
        for place in random.integers(0, 20000, 8):
            damaged[place] = random.integers(256)
        (tmp_path / "m.onnx").write_bytes(damaged)
        code, _, err = call(capsys, "inspect", tmp_path / "m.onnx")
        assert code in (0, 2), err


def nested_ifs(depth):
    """An If within an If and so on; each else branch negates."""
    inner = helper.make_graph([node("Relu", ["x"], ["last"])], "b", [], [value("last")])
    for level in range(depth):
        other = helper.make_graph([node("Neg", ["x"], [f"e{level}"])], "e", [], [value(f"e{level}")])
        made = node("If", ["c"], [f"o{level}"], then_branch=inner, else_branch=other)
        inner = helper.make_graph([made], "b", [], [value(f"o{level}")])
    return model(*inner.node, inputs=[value("x"), value("c", TensorProto.BOOL, [])], outputs=list(inner.output))


def test_deep_nesting_takes_no_exponential_time(capsys, tmp_path):
    onnx.save(nested_ifs(24), tmp_path / "m.onnx")
    (tmp_path / "s.json").write_text('{"tensors": {"x": [["tp"], null]}}')
    words = ["partition", tmp_path / "m.onnx", "--mesh", "tp=2", "--shardings", tmp_path / "s.json"]
    assert call(capsys, *words, "-o", tmp_path / "out")[0] == 0
    start = time.perf_counter()
    assert call(capsys, "verify", tmp_path / "out")[0] == 0
    assert time.perf_counter() - start < patient(30)  # 2**24 steps take minutes


def doubling(depth):
    """Functions that each call the one before twice: 2**depth nodes when all are opened."""
    leaf = function("f0", node("Relu", ["a"], ["b"]))
    levels = [
        function(
            f"f{level}", node(f"f{level - 1}", "a", "c", domain="my"), node(f"f{level - 1}", "c", "b", domain="my")
        )
        for level in range(1, depth + 1)
    ]
    return model(node(f"f{depth}", ["x"], ["y"], domain="my"), functions=[leaf, *levels])


def test_functions_that_double_are_counted_before_they_are_opened(capsys, tmp_path):
    onnx.save(doubling(40), tmp_path / "m.onnx")
    words = ["partition", tmp_path / "m.onnx", "--mesh", "tp=2", "-o", tmp_path / "out"]
    start = time.perf_counter()
    refused(capsys, "opening my.f22 makes 4,194,304 nodes", *words)
    code, out, _ = call(capsys, "inspect", tmp_path / "m.onnx")
    assert code == 0
    assert "opening my.f22" in " ".join(out.split())
    assert call(capsys, "inspect", tmp_path / "m.onnx", "--tensors", "*")[0] == 0
    pipeline = "infer-types,cse,fold-constants,simplify-layout,dce,complete-sharding,insert-redistribution,localize"
    assert call(capsys, *words, "--pipeline", pipeline)[0] == 0
    assert time.perf_counter() - start < patient(30)  # 2**40 steps take days


# -- meshes, pipelines ---------------------------------------------------------------------------------

MESHES = ["dp=0", "dp=2,dp=2", "=", "", "tp", "tp=", "=2", "tp=-1", "tp=1.5", "tp=2,", "tp=0x2", "a b=2", "?=2", "π=2"]
HUGE_MESHES = ["tp=65537", "tp=999999999", ",".join(f"a{number}=2" for number in range(40))]


@pytest.mark.parametrize("mesh", [*MESHES, *HUGE_MESHES, "x:(1)2=2", "tp=99999999999999999999999", "tp=²"])
def test_meshes_that_are_none(capsys, tmp_path, base, mesh):
    refused(capsys, "mesh", "partition", base / "gpt.onnx", "-o", tmp_path / "out", "--mesh", mesh)


@pytest.mark.parametrize("bind", ["batch", "batch=", "=8", "batch=x", "batch=-1", "batch=0", "nope=3", ""])
def test_binds_that_are_none(capsys, tmp_path, base, bind):
    words = ["partition", base / "gpt.onnx", "-o", tmp_path / "out", "--mesh", "tp=2", "--bind", bind]
    refused(capsys, "", *words)


WHOLE = "complete-sharding,insert-redistribution,localize"
PIPELINES = {
    "": "leaves the module in global view",
    "nonsense": 'no pass "nonsense"',
    "cse,": "expected the name of a pass",
    "cse{": "expected the name of an option",
    "cse{a=1}": "cse has no option",
    "../cse": "no pass",
    "localize": "run complete-sharding before localize",
    "insert-redistribution": "run complete-sharding before",
    "complete-sharding": "leaves the module in global view",
    f"{WHOLE},localize": "in local view already",
    f"{WHOLE},complete-sharding": "needs the global view",
}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipelines_that_cannot_work(capsys, tmp_path, base, pipeline):
    words = ["partition", base / "gpt.onnx", "-o", tmp_path / "out", "--shardings", base / "gpt.json"]
    refused(capsys, PIPELINES[pipeline], *words, "--pipeline", pipeline)
    assert not (tmp_path / "out").exists()


# -- what is written ----------------------------------------------------------------------------------------------


def test_force_replaces_nothing_but_partitions(capsys, tmp_path, base):
    words = ["partition", base / "gpt.onnx", "--mesh", "tp=2", "--force", "-o"]
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "plan.json").write_text('{"format": "another"}')
    (tmp_path / "link").symlink_to(base / "out")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "folder", "link", "dangling"):
        refused(capsys, "holds no partition of irpar", *words, tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "kept"


def test_an_interrupted_partition_leaves_nothing(tmp_path):
    save(tmp_path / "m.onnx", "mlp", layers=2, width=8192, hidden=8192, weights="none")
    out = tmp_path / "made" / "out"
    words = [sys.executable, "-m", "irpar.cli", "partition", tmp_path / "m.onnx", "--mesh", "tp=8", "-o", out]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + patient(30)
    while not list(tmp_path.glob("made/.out.*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=patient(30))
    assert "Traceback" not in err
    left = [entry.name for entry in (tmp_path / "made").iterdir()] if out.parent.exists() else []
    assert process.returncode in (0, 130)
    assert left in ([], ["out"])  # it may have been complete already


NPZ = {
    "input_ids is missing": {"foo": np.zeros((4, 32), np.int64)},
    "there is no input extra": {"input_ids": np.zeros((4, 32), np.int64), "extra": np.zeros(1)},
    "is f32[4, 32], expected i64": {"input_ids": np.zeros((4, 32), np.float32)},
    "has shape [2, 32], expected [4, 32]": {"input_ids": np.zeros((2, 32), np.int64)},
    "Python objects": {"input_ids": np.array([{}], object)},
}


@pytest.mark.parametrize("told", NPZ)
@pytest.mark.parametrize("command", ["run", "verify"])
def test_inputs_that_do_not_fit(capsys, tmp_path, base, command, told):
    np.savez(tmp_path / "in.npz", **NPZ[told])
    refused(capsys, told, command, base / "out", "--inputs", tmp_path / "in.npz")


def test_an_npz_member_that_is_no_array(capsys, tmp_path, base):
    with zipfile.ZipFile(tmp_path / "in.npz", "w") as file:
        file.writestr("input_ids.npy", bytes(100))
    refused(capsys, "a file that is no array", "run", base / "out", "--inputs", tmp_path / "in.npz")


def test_outputs_never_take_the_place_of_a_device(capsys, tmp_path, base):
    os.mkfifo(tmp_path / "pipe")
    words = ["run", base / "out", "--inputs", base / "in.npz", "--outputs"]
    for place in (tmp_path / "pipe", tmp_path, ""):
        refused(capsys, "cannot write the arrays", *words, place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]
    assert (tmp_path / "pipe").is_fifo()


# -- numbers that no engine takes ---------------------------------------------------------------------------------


FAILING = {
    "Gather failed": lambda: model(
        node("Gather", ["x", "i"], ["y"]), constants=[numbers([100, 1], "i")], outputs=[value("y", FLOAT, (2, 8))]
    ),
    "Range failed": lambda: model(
        *(node("Sub", ["x", "x"], ["z"]), node("ReduceMax", ["z"], ["m"], keepdims=0)),
        *(node("Cast", ["m"], ["c"], to=INT64), node("Range", ["a", "b", "c"], ["r"])),
        *(node("ReduceSum", ["r"], ["d"], keepdims=0), node("Cast", ["d"], ["e"], to=FLOAT)),
        node("Add", ["x", "e"], ["y"]),
        constants=[numbers(0, "a"), numbers(10, "b")],
    ),
}


@pytest.mark.parametrize("told", FAILING)
def test_a_model_that_fails_by_itself_is_told_so(capsys, tmp_path, told):
    onnx.save(FAILING[told](), tmp_path / "m.onnx")
    np.savez(tmp_path / "in.npz", x=np.ones(SHAPE, np.float32))
    assert call(capsys, "partition", tmp_path / "m.onnx", "--mesh", "tp=2", "-o", tmp_path / "out")[0] == 0
    for engine in ("ort", "numpy"):
        words = ["run", tmp_path / "out", "--inputs", tmp_path / "in.npz", "--engine", engine]
        refused(capsys, told, *words)
        refused(capsys, "whether the original runs on them in ONNX Runtime", *words)
    refused(capsys, "ONNX Runtime does not run the original", "verify", tmp_path / "out")


# -- numbers: graphs that are odd but right -----------------------------------------------------------------------

WEIGHT = numpy_helper.from_array(np.arange(32, dtype=np.float32).reshape(4, 8) / 7, "w")
ODD = {
    "an input is an output": lambda: model(RELU, outputs=[value("y"), value("x")]),
    "a constant is an output": lambda: model(RELU, outputs=[value("y"), value("w")], constants=[WEIGHT]),
    "no nodes": lambda: model(outputs=[value("x")]),
    "an empty dim": lambda: model(RELU, inputs=[value("x", FLOAT, (0, 8))], outputs=[value("y", FLOAT, (0, 8))]),
    "names of control characters": lambda: model(node("Relu", ["x"], ['a\n"%\x00']), node("Neg", ['a\n"%\x00'], ["y"])),
    "2,000 operands": lambda: model(node("Sum", ["x"] * 2000, ["y"])),
    "texts": lambda: model(
        node("Identity", ["x"], ["y"]), inputs=[value("x", TensorProto.STRING)], outputs=[value("y", 8)]
    ),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_models_compute_the_same(capsys, tmp_path, odd):
    onnx.save(ODD[odd](), tmp_path / "m.onnx")
    (tmp_path / "s.json").write_text('{"tensors": {"x": [["dp"], ["tp"]]}}')
    words = ["partition", tmp_path / "m.onnx", "--mesh", "dp=3,tp=2", "--shardings", tmp_path / "s.json"]
    assert call(capsys, *words, "-o", tmp_path / "out")[0] == 0
    code, out, err = call(capsys, "verify", tmp_path / "out")
    assert code == 0, out + err
