"""Bad input to every command: one clear error, exit code 2, nothing half-written, nothing lost, no hang."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from irpar.cli import main
from irpar.models import annotations, save

FLOAT = TensorProto.FLOAT
SHAPE = (4, 8)
OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]


def value(name, dtype=FLOAT, shape=SHAPE):
    return helper.make_tensor_value_info(name, dtype, shape)


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs, outputs, **attributes)


def function(name, *nodes):
    return helper.make_function("my", name, ["a"], ["b"], nodes, OPSETS)


def model(*nodes, inputs=None, outputs=None, constants=(), functions=(), opset=18):
    graph = helper.make_graph(nodes, "g", inputs or [value("x")], outputs or [value("y")], constants)
    opsets = [helper.make_opsetid("", opset), OPSETS[1]]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def external(location="w.bin", offset=0, length=256, shape=(8, 8)):
    weight = TensorProto(name="w", dims=shape, data_type=FLOAT, data_location=TensorProto.EXTERNAL)
    for key, fact in (("location", location), ("offset", offset), ("length", length)):
        weight.external_data.add(key=key, value=str(fact))
    return model(node("MatMul", ["x", "w"], ["y"]), constants=[weight])


def raw(dims, content=b"abc", dtype=FLOAT):
    weight = TensorProto(name="w", dims=dims, data_type=dtype, raw_data=content)
    return model(node("Add", ["x", "w"], ["y"]), constants=[weight])


def call(capsys, *words):
    """Run a command; returns (exit code, standard output, standard error)."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def refused(capsys, told, *words):
    """Check that a command fails with one error that says what is wrong and what to do."""
    code, _, err = call(capsys, *words)
    assert code == 2, err
    assert told in err
    assert err.startswith("error: ")
    assert "\n  do: " in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """gpt.onnx, its shardings and inputs, and a partition of it in out/."""
    folder = tmp_path_factory.mktemp("hostile")
    save(folder / "gpt.onnx", "gpt")
    (folder / "gpt.json").write_text(json.dumps({"mesh": {"dp": 2, "tp": 2}, "tensors": annotations("gpt")}))
    np.savez(folder / "in.npz", input_ids=np.zeros((4, 32), np.int64))
    words = ["partition", folder / "gpt.onnx", "-o", folder / "out", "--shardings", folder / "gpt.json", "--json"]
    assert main(list(map(str, words))) == 0
    return folder


# -- models -------------------------------------------------------------------------------------------------------

RELU = node("Relu", ["x"], ["y"])
CALL = node("f", ["x"], ["y"], domain="my")
MODELS = {
    "the nodes form a cycle": lambda: model(node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), RELU),
    '"y" is defined twice': lambda: model(RELU, RELU),
    '"x" is defined twice': lambda: model(node("Relu", ["x"], ["x"]), RELU),
    '"zzz" is read, but nothing defines it': lambda: model(node("Add", ["x", "zzz"], ["y"])),
    'graph output "y" is not defined': lambda: model(node("Relu", ["x"], ["q"])),
    'graph input "x" is defined twice': lambda: model(RELU, inputs=[value("x"), value("x")]),
    'domain "com.x", which the model does not import': lambda: model(node("Odd", ["x"], ["y"], domain="com.x")),
    "Relu is malformed: it has 3 operands, Relu has 1": lambda: model(node("Relu", ["x", "x", "x"], ["y"])),
    "'axis' must be in": lambda: model(node("Softmax", ["x"], ["y"], axis=77)),
    "Expected: 'INT', actual: 'STRING'": lambda: model(node("Softmax", ["x"], ["y"], axis="one")),
    "perm for Transpose has repeated value": lambda: model(node("Transpose", ["x"], ["y"], perm=[0, 0])),
    "%y is declared i64[4, 8], but Relu gives f32": lambda: model(RELU, outputs=[value("y", TensorProto.INT64)]),
    "Incompatible dimensions for matrix": lambda: model(node("MatMul", ["x", "x"], ["y"])),
    'graph output "y" is defined twice': lambda: model(RELU, outputs=[value("y"), value("y")]),
    "has 0 results, Relu has 1": lambda: model(node("Relu", ["x"], [""]), RELU),
    "the model has no outputs": lambda: onnx.ModelProto(
        ir_version=10, graph=helper.make_graph([], "g", [], []), opset_import=OPSETS
    ),
    "f32[4611686018427387904, 4611686018427387904] has more than 2^63 bytes": lambda: model(
        RELU, inputs=[value("x", FLOAT, (2**62, 2**62))], outputs=[value("y", FLOAT, (2**62, 2**62))]
    ),
    "%y would be f32[1099511627776, 1099511627776], which has more than 2^63 bytes": lambda: model(
        node("MatMul", ["x", "z"], ["y"]),
        inputs=[value("x", FLOAT, (2**40, 1)), value("z", FLOAT, (1, 2**40))],
        outputs=[value("y", FLOAT, (None, None))],
    ),
    "sparse_tensor": lambda: model(RELU, inputs=[helper.make_sparse_tensor_value_info("x", FLOAT, SHAPE)]),
    "a node has no operator": lambda: model(node("", ["x"], ["y"])),
    "3 bytes of data for a tensor f32[4, 8]": lambda: raw([4, 8]),
    "which needs 4398046511104": lambda: raw([2**40]),
    "tensor with a negative dim: [-4, -8]": lambda: raw([-4, -8], bytes(128)),
    "unknown element type 99": lambda: raw([4, 8], bytes(128), 99),
    "functions call each other in a circle: my.f -> my.f": lambda: model(
        CALL, functions=[function("f", node("f", ["a"], ["b"], domain="my"))]
    ),
    "functions call each other in a circle: my.f -> my.g -> my.f": lambda: model(
        CALL,
        functions=[
            function("f", node("g", ["a"], ["b"], domain="my")),
            function("g", node("f", ["a"], ["b"], domain="my")),
        ],
    ),
    "the function is defined twice": lambda: model(CALL, functions=[function("f", node("Relu", ["a"], ["b"]))] * 2),
    'function result "b" is not defined': lambda: model(CALL, functions=[function("f")]),
    "opset 99 is newer than irpar reads": lambda: model(RELU, opset=99),
    "opset 0 is older than irpar reads": lambda: model(RELU, opset=0),
    'location "../w.bin" leaves the model\'s folder': lambda: external("../w.bin"),
    'location "/dev/zero" is absolute': lambda: external("/dev/zero"),
    'location "link.bin" is a symbolic link that leaves': lambda: external("link.bin"),
    "cannot read external data: No such file": lambda: external("no.bin"),
    "external data ends at byte 256, but a tensor f32[8, 8] needs bytes 128 to 384": lambda: external(offset=128),
    'offset "-4"': lambda: external(offset=-4),
    'length "-256"': lambda: external(length=-256),
    'offset "abc"': lambda: external(offset="abc"),
    'offset "1000000000000000000000000000000"': lambda: external(offset=10**30),
    "external data of 128 bytes for a tensor": lambda: external(length=128),
}


@pytest.mark.parametrize("told", MODELS)
def test_broken_models_are_refused_and_nothing_is_written(capsys, tmp_path, told):
    inside, outside = tmp_path / "model", tmp_path / "elsewhere.bin"
    inside.mkdir()
    (inside / "w.bin").write_bytes(bytes(256))
    outside.write_bytes(bytes(256))
    (inside / "link.bin").symlink_to(outside)
    (inside / "m.onnx").write_bytes(MODELS[told]().SerializeToString())
    refused(capsys, told, "partition", inside / "m.onnx", "--mesh", "tp=2", "-o", tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere.bin", "model"]


def test_files_that_are_no_models(capsys, tmp_path, base):
    content = (base / "gpt.onnx").read_bytes()
    for damaged in (content[: len(content) // 2], b"hello\n", b"\x08\x08\x3a\xff\xff\xff\xff\x07abc", b"", b"\x08\x08"):
        (tmp_path / "m.onnx").write_bytes(damaged)
        refused(capsys, "not an ONNX model", "inspect", tmp_path / "m.onnx")
    refused(capsys, "No such file", "inspect", tmp_path / "none.onnx")
    refused(capsys, "Is a directory", "inspect", tmp_path)


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
    assert time.perf_counter() - start < 30  # 2**24 steps take minutes


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
    assert time.perf_counter() - start < 30  # 2**40 steps take days


# -- shardings, meshes, pipelines ---------------------------------------------------------------------------------

SHARDINGS = {
    "the shardings file is empty": "",
    "not UTF-8": "\xff\xfe",
    'no axis "xx"': "tensors: {input_ids: [xx, null]}",
    "nearest names: input_ids": "tensors: {input_id: [dp, null]}",
    "the annotation has 1 dims": "tensors: {input_ids: [dp]}",
    "comes twice, first in line 1": "tensors: {input_ids: [dp, null],\n  input_ids: [null, dp]}",
    "used twice in one sharding": "tensors: {input_ids: [dp, dp]}",
    "has no list of dims": "tensors: {input_ids: dp}",
    "2 is no mesh axis": "tensors: {input_ids: [2, 1]}",
    "1.5 is no mesh axis": "tensors: {input_ids: [1.5, null]}",
    '"?" must come last': 'tensors: {input_ids: [["?", dp], null]}',
    "there is no section": "a: &a [dp, null]\ntensors: {input_ids: *a}",
    "input_ids": "tensors: &t\n  input_ids: *t",
    "have the tag !foo": "tensors: !foo {input_ids: [dp, null]}",
    "have the tag !bar": "tensors: {input_ids: [!bar dp, null]}",
    "have the tag !!set": "tensors: !!set {input_ids}",
    "tensors must be a table": "tensors: [a]",
    "have the tag !!python/object/apply:os.system": 'tensors: !!python/object/apply:os.system ["false"]',
    "not YAML": "tensors: {a: [b",
    "nested too deep": "tensors: {a: " + "[" * 3000 + "]" * 3000 + "}",
    "does not fit axis tp": 'tensors: {input_ids: ["tp:(1)3", null]}',
    'no op is called "foo"': "ops: {foo: {in: [[1]]}}",
    "is no list of cuts": "ops: {/h.0/attn/q/MatMul: {in: [[-1, 1, 1], [1, 1]]}}",
    "the cuts do not agree": "ops: {/h.0/attn/q/MatMul: {in: [[1, 1, 2], [1, 2]]}}",
    "annotated twice": "tensors:\n  h.*.attn.q.weight: [null, tp]\n  h.0.attn.*.weight: [tp, null]",
    "does not agree with the mesh": "mesh: {dp: 4}",
}


@pytest.mark.parametrize("told", SHARDINGS)
def test_shardings_files_that_are_wrong(capsys, tmp_path, base, told):
    (tmp_path / "s.yaml").write_bytes(SHARDINGS[told].encode("latin-1"))
    words = ["partition", base / "gpt.onnx", "--mesh", "dp=2,tp=2", "--shardings", tmp_path / "s.yaml"]
    refused(capsys, told, *words, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


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
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("made/.out.*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
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


# -- what is read back --------------------------------------------------------------------------------------------


def weights_link(out):
    (out / "part0" / "weights.bin").rename(out.parent / "w")
    (out / "part0" / "weights.bin").symlink_to(out.parent / "w")


PARTS = {
    "part0/weights.bin has 1,000 bytes, it was written with": lambda out: os.truncate(
        out / "part0" / "weights.bin", 1000
    ),
    "part0/weights.bin is not there": lambda out: (out / "part0" / "weights.bin").unlink(),
    "is a symbolic link that leaves": weights_link,
    "cannot read the model: No such file": lambda out: shutil.rmtree(out / "part1"),
    "not an ONNX model": lambda out: (out / "part0" / "model.onnx").write_bytes(b"hello"),
    "part0/model.onnx is no part of a partition": lambda out: shutil.copy(
        out.parent / "gpt.onnx", out / "part0" / "model.onnx"
    ),
    "plan.json is not JSON": lambda out: (out / "plan.json").write_bytes(b"\xff\xfe"),
    "cannot read the plan": lambda out: (out / "plan.json").unlink(),
}


@pytest.mark.parametrize("told", PARTS)
def test_damaged_partitions_are_refused(capsys, tmp_path, base, told):
    shutil.copy(base / "gpt.onnx", tmp_path)
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    PARTS[told](out)
    refused(capsys, told, "run", out, "--inputs", base / "in.npz")
    refused(capsys, told, "verify", out)


def edit(path, change):
    plan = json.loads(path.read_text())
    change(plan)
    path.write_text(json.dumps(plan))


def swap_coords(plan):
    first, second = plan["ranks"][:2]
    first["coords"], second["coords"] = second["coords"], first["coords"]


EDITS = {
    "another format": lambda plan: plan.update(format="irpar-plan/2"),
    "no ranks": lambda plan: plan.update(ranks=[]),
    "negative rank": lambda plan: plan["ranks"][0].update(rank=-1),
    "swapped coords": swap_coords,
    "part outside": lambda plan: plan["ranks"][0].update(part=99),
    "other mesh": lambda plan: plan["mesh"].update(axes={"tp": 2}),
    "mesh of text": lambda plan: plan.update(mesh="tp=2"),
    "no parts": lambda plan: plan.pop("parts"),
    "model elsewhere": lambda plan: plan["parts"][0].update(model="/etc/passwd"),
    "inputs of nothing": lambda plan: plan.update(inputs=None),
}


@pytest.mark.parametrize("edited", EDITS)
def test_edited_plans_are_refused(capsys, tmp_path, base, edited):
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    edit(out / "plan.json", EDITS[edited])
    for command in ("run", "verify"):
        refused(capsys, "", command, out, "--inputs", base / "in.npz")


# -- numbers that no engine takes ---------------------------------------------------------------------------------


def numbers(entry, name):
    return numpy_helper.from_array(np.array(entry), name)


FAILING = {
    "Gather failed": lambda: model(
        node("Gather", ["x", "i"], ["y"]), constants=[numbers([100, 1], "i")], outputs=[value("y", FLOAT, (2, 8))]
    ),
    "Range failed": lambda: model(
        *(node("Range", ["a", "b", "c"], ["r"]), node("ReduceSum", ["r"], ["d"], keepdims=0)),
        *(node("Cast", ["d"], ["e"], to=FLOAT), node("Add", ["x", "e"], ["y"])),
        constants=[numbers(0, "a"), numbers(10, "b"), numbers(0, "c")],
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
