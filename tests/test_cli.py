"""The command line: what each command prints and writes, and how it fails."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest

from irpar.cli import main
from irpar.models import annotations, save
from tests.command_line import call
from tests.patience import patient
from tests.written import model_of_text

MESH = "dp=2,tp=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """gpt.onnx, its shardings, and a partition of it in out/."""
    folder = tmp_path_factory.mktemp("cli")
    save(folder / "gpt.onnx", "gpt")
    (folder / "gpt.yaml").write_text(json.dumps({"mesh": {"dp": 2, "tp": 2}, "tensors": annotations("gpt")}))
    command = ["partition", folder / "gpt.onnx", "-o", folder / "out", "--shardings", folder / "gpt.yaml", "--json"]
    assert main(list(map(str, command))) == 0
    return folder


def call_json(capsys, *words):
    """Run a command with --json, which prints one object and nothing else."""
    code, out, err = call(capsys, *words, "--json")
    assert err == ""
    return code, json.loads(out)


@pytest.fixture
def columns(monkeypatch):
    """Tables are as narrow as for a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")


def fits_terminal(text):
    return max(map(len, text.splitlines())) <= 80


# -- inspect ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("columns")
def test_inspect_prints_tables_that_fit_a_terminal(capsys, folder):
    code, out, err = call(capsys, "inspect", folder / "gpt.onnx")
    assert (code, err) == (0, "")
    assert "h.*.attn.q.weight" in out
    assert "every operator has a sharding rule" in out
    assert fits_terminal(out)


def test_inspect_json(capsys, folder):
    code, found = call_json(capsys, "inspect", folder / "gpt.onnx")
    assert code == 0
    assert found["inputs"] == [{"name": "input_ids", "type": "i64[4, 32]"}]
    assert found["flops"] == sum(operator["flops"] for operator in found["operators"])


def test_inspect_lists_tensors_by_glob(capsys, folder):
    code, found = call_json(capsys, "inspect", folder / "gpt.onnx", "--tensors", "h.1.mlp.*.weight")
    names = [tensor["name"] for tensor in found["tensors"]]
    assert (code, names) == (0, ["h.1.mlp.c_fc.weight", "h.1.mlp.proj.weight"])


def test_inspect_asks_for_the_sizes_of_symbols(capsys, tmp_path):
    save(tmp_path / "mlp.onnx", "mlp", dynamic=True)
    code, out, _ = call(capsys, "inspect", tmp_path / "mlp.onnx")
    assert code == 0
    assert "--bind batch=..." in out
    code, out, _ = call(capsys, "inspect", tmp_path / "mlp.onnx", "--bind", "batch=6")
    assert code == 0
    assert "x f32[6, 64]" in out
    assert "--bind" not in out


# -- partition ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("columns")
def test_partition_writes_and_summarises(capsys, folder, tmp_path):
    code, out, err = call(
        capsys, "partition", folder / "gpt.onnx", "-o", tmp_path / "out", "--shardings", folder / "gpt.yaml"
    )
    assert (code, err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["part0", "part1", "plan.json"]
    assert "mesh dp=2,tp=2: 4 ranks, 2 parts" in out
    assert "all_reduce" in out
    assert "2 x all_reduce: MatMul /h.*/attn/proj/MatMul sums over tp" in out
    assert "irpar explain" in " ".join(out.split())
    assert fits_terminal("\n".join(line for line in out.splitlines() if str(tmp_path) not in line))


def test_partition_json_has_the_plan_and_the_passes(capsys, folder, tmp_path):
    words = ["partition", folder / "gpt.onnx", "-o", tmp_path / "out", "--mesh", MESH, "--weights", "none"]
    code, found = call_json(capsys, *words, "--shardings", folder / "gpt.yaml")
    assert code == 0
    assert [record["name"] for record in found["passes"]] == found["pipeline"].split(",")
    assert found["totals"]["collectives"] == 4
    assert not list((tmp_path / "out").glob("*/weights.bin"))


def test_without_annotations_the_user_is_told(capsys, folder, tmp_path):
    code, out, _ = call(capsys, "partition", folder / "gpt.onnx", "-o", tmp_path / "out", "--mesh", "tp=2")
    assert code == 0
    assert "no tensor was annotated" in out
    assert "nothing is sent" in out


def test_the_passes_can_be_watched(capsys, folder, tmp_path):
    code, out, err = call(
        *(capsys, "partition", folder / "gpt.onnx", "-o", tmp_path / "out", "--mesh", MESH),
        *("--dump-ir", tmp_path / "ir", "--print-ir-before", "dce", "--print-ir-after", "localize"),
        *("--verify-each", "--timing", "--statistics"),
    )
    assert code == 0
    assert "// ----- before dce -----" in err
    assert "// ----- after localize -----" in err
    assert "graph" not in out
    assert "seconds" in err
    assert "statistic" in err
    assert (tmp_path / "ir" / "00-start.irpar").is_file()


def test_force_replaces_a_partition_and_nothing_else(capsys, folder, tmp_path):
    out = tmp_path / "out"
    words = ["partition", folder / "gpt.onnx", "-o", out, "--mesh", MESH]
    assert call(capsys, *words)[0] == 0
    code, _, err = call(capsys, *words)
    assert code == 2
    assert "exists already" in err
    assert call(capsys, *words, "--force")[0] == 0
    (out / "plan.json").unlink()
    code, _, err = call(capsys, *words, "--force")
    assert code == 2
    assert "holds no partition" in err
    assert (out / "part0").is_dir()


def test_a_pass_that_crashes_leaves_a_reproducer_that_opt_replays(capsys, folder, tmp_path, monkeypatch):
    from irpar.passes.dce import Dce

    def crash(self, module):
        raise ZeroDivisionError("oh")

    with monkeypatch.context() as patch:
        patch.setattr(Dce, "run", crash)
        patch.setattr("tempfile.tempdir", str(tmp_path))
        code, _, err = call(capsys, "partition", folder / "gpt.onnx", "-o", tmp_path / "out", "--mesh", MESH)
    assert code == 70
    assert err.startswith("error: pass dce failed: ZeroDivisionError: oh\n  reproducer: ")
    path = err.splitlines()[1].split(": ", 1)[1]
    written = sorted(str(entry) for entry in tmp_path.iterdir())
    assert written in ([path], [path, f"{path}.data"])
    assert (f"its numbers: {path}.data" in err) == (len(written) == 2)
    code, found = call_json(capsys, "opt", path)
    assert code == 0
    assert found["passes"][0]["name"] == "dce"


# -- run ----------------------------------------------------------------------------------------------------------


def test_run_gives_what_onnx_runtime_gives(capsys, folder, tmp_path):
    ids = np.arange(128).reshape(4, 32) % 256
    np.savez(tmp_path / "in.npz", input_ids=ids)
    code, found = call_json(
        capsys, "run", folder / "out", "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz"
    )
    assert code == 0
    assert found["collectives"] == 4
    session = onnxruntime.InferenceSession(str(folder / "gpt.onnx"), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"input_ids": ids})
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["logits"], expected, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_run_prints_a_table(capsys, folder, tmp_path):
    np.savez(tmp_path / "in.npz", input_ids=np.zeros((4, 32), np.int64))
    code, out, _ = call(capsys, "run", folder / "out", "--inputs", tmp_path / "in.npz", "--engine", "numpy")
    assert code == 0
    assert "[4, 32, 256]" in out
    assert fits_terminal(out)


def test_run_keeps_the_old_outputs_when_it_fails(capsys, folder, tmp_path):
    (tmp_path / "out.npz").write_text("precious")
    np.savez(tmp_path / "in.npz", input_ids=np.full((4, 32), 10**6))
    words = ["run", folder / "out", "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz"]
    assert call(capsys, *words)[0] == 2
    assert (tmp_path / "out.npz").read_text() == "precious"


# -- verify -------------------------------------------------------------------------------------------------------


def test_verify_agrees(capsys, folder):
    code, found = call_json(capsys, "verify", folder / "out", "--bisect")
    assert code == 0
    assert found["is_equal"]
    assert found["largest"] < 1e-4
    assert found["bisection"]["first"] is None
    assert found["bisection"]["compared"] > 50


@pytest.fixture
def damaged(folder, tmp_path):
    """The partition with one weight of the last layer changed in part 1, as if it had been written so."""
    import shutil

    import onnx

    from irpar.output.fingerprint import fingerprint

    shutil.copytree(folder / "out", tmp_path / "damaged")
    part = tmp_path / "damaged" / "part1"
    model = onnx.load(part / "model.onnx", load_external_data=False)
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "h.1.mlp.c_fc.weight")
    place = {entry.key: entry.value for entry in weight.external_data}
    with open(part / place["location"], "r+b") as file:
        file.seek(int(place["offset"]))
        file.write(np.full(1, 100, np.float32).tobytes())
    plan = json.loads((tmp_path / "damaged" / "plan.json").read_text())
    plan["parts"][1]["weights"]["digest"] = fingerprint(part / "weights.bin")
    (tmp_path / "damaged" / "plan.json").write_text(json.dumps(plan))
    return tmp_path / "damaged"


def test_verify_finds_a_damaged_weight(capsys, damaged):
    code, out, _ = call(capsys, "verify", damaged)
    assert code == 1
    assert "the partition is different from ONNX Runtime on the original" in out
    assert out.splitlines()[-1] == f"find the first tensor that differs: irpar verify {damaged} --bisect"


def test_verify_says_what_the_bound_is_of(capsys, folder):
    _, found = call_json(capsys, "verify", folder / "out")
    (logits,) = found["outputs"]
    assert logits["relative"] <= logits["largest"]
    title, row, *_ = call(capsys, "verify", folder / "out")[1].splitlines()
    assert title.split() == ["output", "difference", "error", "allowed"]
    assert logits["measure"] in ("rounding", "float64")
    assert row.split() == ["logits", *(f"{logits[name]:.2g}" for name in ("largest", "error", "allowed")), "equal"]
    title, row, *_ = call(capsys, "verify", folder / "out", "--tolerance", "1e-3")[1].splitlines()
    assert title.split() == ["output", "difference", "relative", "allowed"]
    assert row.split() == ["logits", f"{logits['largest']:.2g}", f"{logits['relative']:.2g}", "0.001", "equal"]


def test_bisect_names_the_first_tensor_that_differs(capsys, damaged):
    code, out, _ = call(capsys, "verify", damaged, "--bisect")
    assert code == 1
    assert "made by /h.1/mlp/c_fc/MatMul" in out


@pytest.mark.slow
def test_bisect_in_json(capsys, damaged):
    code, found = call_json(capsys, "verify", damaged, "--bisect")
    assert code == 1
    assert found["bisection"]["node"] == "/h.1/mlp/c_fc/MatMul"


def test_the_tolerance_counts(capsys, folder):
    assert call(capsys, "verify", folder / "out", "--tolerance", "0")[0] == 1
    assert call(capsys, "verify", folder / "out", "--tolerance", "1e-3", "--seed", "3")[0] == 0


def test_verify_needs_the_original(capsys, folder, tmp_path):
    save(tmp_path / "gpt.onnx", "gpt")
    words = ["partition", tmp_path / "gpt.onnx", "-o", tmp_path / "out", "--shardings", folder / "gpt.yaml"]
    assert call(capsys, *words)[0] == 0
    (tmp_path / "gpt.onnx").rename(tmp_path / "moved.onnx")
    code, _, err = call(capsys, "verify", tmp_path / "out")
    assert code == 2
    assert "--model MODEL" in err
    assert call(capsys, "verify", tmp_path / "out", "--model", tmp_path / "moved.onnx")[0] == 0


def test_verify_works_from_another_folder(capsys, folder, tmp_path, monkeypatch):
    save(tmp_path / "mlp.onnx", "mlp")
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "partition", "mlp.onnx", "-o", "out", "--mesh", "dp=2")[0] == 0
    monkeypatch.chdir(folder)
    assert call(capsys, "verify", tmp_path / "out")[0] == 0


# -- explain ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("columns")
def test_explain_all(capsys, folder):
    code, out, _ = call(capsys, "explain", folder / "out")
    assert code == 0
    assert out.count("all_reduce sum over tp (2 ranks)") == 4
    assert "[4@dp, 32]" in out
    assert "wte.weight" in out
    assert fits_terminal(out)


def test_explain_follows_the_reasons_back_to_the_annotation(capsys, folder):
    code, found = call_json(capsys, "explain", folder / "out", "logits")
    assert code == 0
    (value,) = found["values"]
    last = [chain[-1]["why"] for chain in value["chains"]]
    assert last == ['annotated "input_ids" in gpt.yaml, line 1', 'annotated "lm_head.weight" in gpt.yaml, line 1']
    code, out, _ = call(capsys, "explain", folder / "out", "logits")
    assert code == 0
    assert "logits [4@dp, 32, 256@tp]" in out


def test_explain_a_collective(capsys, folder):
    code, found = call_json(capsys, "explain", folder / "out", "2")
    assert code == 0
    assert [entry["id"] for entry in found["collectives"]] == [2]


@pytest.fixture(scope="module")
def torn(tmp_path_factory):
    """gpt over tp=4 with its weights, and the sequence of input and output, over the same axis."""
    folder = tmp_path_factory.mktemp("torn")
    save(folder / "gpt.onnx", "gpt")
    tensors = {**annotations("gpt", None, "tp"), "input_ids": [None, ["tp"]], "logits": [None, ["tp"], None]}
    (folder / "gpt.yaml").write_text(json.dumps({"mesh": {"tp": 4}, "tensors": tensors}))
    command = ["partition", folder / "gpt.onnx", "-o", folder / "out", "--shardings", folder / "gpt.yaml", "--json"]
    assert main(list(map(str, command))) == 0
    return folder


@pytest.mark.usefixtures("columns")
def test_explain_conflicts_names_both_sides_and_the_cost(capsys, torn):
    code, found = call_json(capsys, "explain", torn / "out", "--conflicts")
    assert code == 0
    entry = found["conflicts"][0]
    assert entry["conflict"]["lies"] == "[_, @tp, _]"
    assert "annotated" in entry["conflict"]["needed_because"]
    code, out, _ = call(capsys, "explain", torn / "out", "--conflicts")
    assert code == 0
    assert fits_terminal(out)
    text = " ".join(out.split())
    for told in (
        'annotated "input_ids"',
        'annotated "h.*.attn.q.weight"',
        "resolved by all_gather",
        "what may avoid it",
    ):
        assert told in text
    plan = json.loads((torn / "out" / "plan.json").read_text())
    sent = sum(entry["sent_bytes"] for entry in plan["collectives"] if entry["conflict"])
    assert sum(entry["sent_bytes"] for entry in found["conflicts"]) == sent


def test_what_a_conflict_names_as_a_way_out_is_one(capsys, torn, tmp_path):
    """Annotated as told, the tensor is not moved for that reason any more."""
    _, found = call_json(capsys, "explain", torn / "out", "--conflicts")
    (conflict,) = {
        (entry["conflict"]["value"], entry["conflict"]["avoid"])
        for entry in found["conflicts"]
        if entry["conflict"]["value"] == "lm_head.weight"
    }
    assert conflict[1].startswith('annotate "lm_head.weight" as [null, null], or leave out the annotation "input_ids"')
    tensors = json.loads((torn / "gpt.yaml").read_text())["tensors"] | {"lm_head.weight": [None, None]}
    (tmp_path / "s.yaml").write_text(json.dumps({"mesh": {"tp": 4}, "tensors": tensors}))
    words = ["partition", torn / "gpt.onnx", "-o", tmp_path / "out", "--shardings", tmp_path / "s.yaml", "--json"]
    assert main(list(map(str, words))) == 0
    _, after = call_json(capsys, "explain", tmp_path / "out", "--conflicts")
    assert "lm_head.weight" not in {entry["conflict"]["value"] for entry in after["conflicts"]}


def test_without_conflicts_explain_says_so(capsys, folder):
    code, out, _ = call(capsys, "explain", folder / "out", "--conflicts")
    assert code == 0
    assert "no annotation is in the way of another" in out
    code, _, err = call(capsys, "explain", folder / "out", "logits", "--conflicts")
    assert code == 2
    assert "leave out logits" in err


def test_explain_a_value_names_the_collectives_of_it(capsys, folder):
    code, found = call_json(capsys, "explain", folder / "out", "/h.0/mlp/proj/MatMul_output_0")
    assert code == 0
    assert [entry["kind"] for entry in found["collectives"]] == ["all_reduce"]


@pytest.mark.parametrize(("target", "told"), [("99", "no collective 99"), ("h.0.attn.q.wight", "nearest names: h.0")])
def test_explain_what_there_is_not(capsys, folder, target, told):
    code, _, err = call(capsys, "explain", folder / "out", target)
    assert code == 2
    assert told in err


def test_explain_what_was_taken_apart(capsys, tmp_path):
    text = """g (float[4, 8] x, float[8, 12] w, float[12] b) => (float[4, 4] y) {
        m = MatMul(x, w) h = Add(m, b) p, q, r = Split<axis=1, num_outputs=3>(h) s = Mul(p, q) y = Sub(s, r) }"""
    onnx.save(model_of_text(text, ["w", "b"]), tmp_path / "m.onnx")
    (tmp_path / "s.yaml").write_text("mesh: {tp: 2}\ntensors:\n  w: [null, tp]\n")
    out = tmp_path / "out"
    code, _, _ = call(capsys, "partition", tmp_path / "m.onnx", "-o", out, "--shardings", tmp_path / "s.yaml")
    assert code == 0
    for target in ("h", "%m"):
        code, _, err = call(capsys, "explain", out, target)
        assert code == 2
        assert "split-weights" in err
        assert "w (0:4, 4:8, 8:12 of dim 1)" in err
        assert "there now: p, q, r" in err
    (tmp_path / "m.onnx").unlink()
    code, _, err = call(capsys, "explain", out, "h")
    assert code == 2
    assert "split-weights" not in err


# -- opt ----------------------------------------------------------------------------------------------------------

TEXT = """\
graph @g(%x: f32[4, 8]) -> (%y) opset 18 {
  %unused = Relu(%x) : f32[4, 8]
  %y = Neg(%x) : f32[4, 8]
}
"""


def test_opt_prints_text_that_it_reads_again(capsys, tmp_path):
    (tmp_path / "in.irpar").write_text(TEXT)
    code, out, err = call(capsys, "opt", tmp_path / "in.irpar", "--pipeline", "dce")
    assert (code, err) == (0, "")
    assert "Relu" not in out
    (tmp_path / "again.irpar").write_text(out)
    assert call(capsys, "opt", tmp_path / "again.irpar")[1] == out


def test_opt_annotates(capsys, tmp_path):
    (tmp_path / "in.irpar").write_text(TEXT)
    (tmp_path / "s.yaml").write_text("tensors: {x: [dp, null]}")
    words = ["opt", tmp_path / "in.irpar", "--mesh", "dp=2", "--shardings", tmp_path / "s.yaml"]
    code, out, _ = call(capsys, *words, "--pipeline", "complete-sharding")
    assert code == 0
    assert "%y = Neg(%x) : f32[4@dp, 8]" in out


def test_opt_reads_a_model_and_writes_a_file_with_its_weights(capsys, folder, tmp_path):
    code, _, _ = call(capsys, "opt", folder / "gpt.onnx", "-o", tmp_path / "gpt.irpar", "--pipeline", "infer-types")
    assert code == 0
    code, out, err = call(capsys, "opt", tmp_path / "gpt.irpar")
    assert (code, err) == (0, "")
    assert "h.0.attn.q.weight" in out
    _, _, err = call(capsys, "opt", folder / "gpt.onnx")
    assert "-o FILE" in err


def test_opt_shows_the_place_of_a_mistake(capsys, tmp_path):
    (tmp_path / "in.irpar").write_text(TEXT.replace("Neg(%x)", "Neg(%z)"))
    code, out, err = call(capsys, "opt", tmp_path / "in.irpar")
    assert (code, out) == (2, "")
    assert "in.irpar:3:12" in err


# -- demo ---------------------------------------------------------------------------------------------------------


def test_demo(capsys, tmp_path):
    code, out, err = call(capsys, "demo", "-o", tmp_path / "demo")
    assert (code, err) == (0, "")
    assert "equal to ONNX Runtime on the original" in out
    assert "the executed collectives are those of the plan" in out
    code, found = call_json(capsys, "demo", "-o", tmp_path / "demo", "--mesh", "tp=4")
    assert code == 0
    assert found["largest_difference"] < 1e-4
    assert found["totals"]["flops_per_rank"] < found["original"]["flops"] / 4 * 1.1


# -- mistakes -----------------------------------------------------------------------------------------------------

MISTAKES = [
    ([], 0, ""),
    (["nonsense"], 2, "no such command"),
    (["partition"], 2, "missing argument"),
    (["run", "OUT", "--nonsense"], 2, "no such option"),
    (["partition", "MODEL", "-o", "NEW"], 2, "there is no mesh"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=two"], 2, "is not a mesh"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=2", "--bind", "batch"], 2, "NAME=SIZE"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=2", "--bind", "b=1", "--bind", "b=2"], 2, "twice"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=2", "--bind", "b=1"], 2, "no symbol"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=2", "--pipeline", "nonsense"], 2, "no pass"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=2", "--pipeline", "dce"], 2, "global view"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=2", "--weights", "some"], 2, "--weights none"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=2", "--collectives", "nccl"], 2, "--collectives tensorrt"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=2", "--shardings", "NEW"], 2, "cannot read the shardings"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=2", "--shardings", "SHARDINGS"], 2, "does not agree"),
    (["partition", "MODEL", "-o", "NEW", "--mesh", "dp=2", "--print-ir-after", "x"], 2, "no pass"),
    (["partition", "MODEL", "-o", "FILE/out", "--mesh", "dp=2"], 2, "there is a file of that name"),
    (["partition", "FILE", "-o", "NEW", "--mesh", "dp=2"], 2, "not an ONNX model"),
    (["partition", "NEW", "-o", "NEW", "--mesh", "dp=2"], 2, "cannot read the model"),
    (["inspect", "MODEL", "--tensors", "nonsense"], 2, "no tensor matches"),
    (["run", "OUT"], 2, "--inputs in.npz"),
    (["run", "NEW"], 2, "cannot read the plan"),
    (["run", "OUT", "--inputs", "FILE"], 2, "not an .npz file"),
    (["run", "OUT", "--inputs", "NEW"], 2, "cannot read the arrays"),
    (["run", "OUT", "--inputs", "INPUTS", "--outputs", "NEW/out.npz"], 2, "cannot write the arrays"),
    (["run", "OUT", "--inputs", "WRONG"], 2, "the inputs do not fit"),
    (["run", "OUT", "--group", "mpi"], 2, "no launcher has made any"),
    (["run", "OUT", "--engine", "nonsense"], 2, "--engine numpy"),
    (["verify", "OUT", "--tolerance", "-1"], 2, "--tolerance"),
    (["verify", "OUT", "--model", "FILE"], 2, "not the model that was partitioned"),
    (["opt", "NEW"], 2, "cannot read"),
    (["demo", "--mesh", "pp=2", "-o", "NEW"], 2, "no mesh axis pp"),
]


@pytest.mark.parametrize(("words", "code", "told"), MISTAKES)
def test_mistakes_are_told_in_one_form(capsys, folder, tmp_path, words, code, told):
    (tmp_path / "file").write_bytes(b"\x0a\x00nothing useful")
    np.savez(tmp_path / "in.npz", input_ids=np.zeros((4, 32), np.int64))
    np.savez(tmp_path / "wrong.npz", input_ids=np.zeros((4, 31), np.int64))
    places = {
        "MODEL": folder / "gpt.onnx",
        "OUT": folder / "out",
        "SHARDINGS": folder / "gpt.yaml",
        "NEW": tmp_path / "new",
        "NEW/out.npz": tmp_path / "new" / "out.npz",
        "FILE": tmp_path / "file",
        "FILE/out": tmp_path / "file" / "out",
        "INPUTS": tmp_path / "in.npz",
        "WRONG": tmp_path / "wrong.npz",
    }
    got, out, err = call(capsys, *(places.get(word, word) for word in words))
    assert got == code
    assert told in err
    assert "Traceback" not in err
    assert not (tmp_path / "new").exists()
    if code == 2:
        first, *rest = err.splitlines()
        assert first.startswith("error: ")
        assert all(line.startswith("  ") for line in rest)
        assert out == ""


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "w.bin"),
            2,
            "error: No space left on device\n  w.bin\n  do: free",
        ),
        (MemoryError(), 2, "not enough memory"),
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("oh"), 70, "internal error: RuntimeError: oh, a bug in irpar; run with IRPAR_DEBUG=1"),
    ],
)
def test_failures_of_the_machine_and_of_irpar(capsys, folder, monkeypatch, error, code, told):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("irpar.api.load", fail)
    monkeypatch.delenv("IRPAR_DEBUG", raising=False)
    got, _, err = call(capsys, "inspect", folder / "gpt.onnx")
    assert got == code
    assert told in err
    assert "Traceback" not in err


def test_debugging_shows_the_traceback(capsys, folder, monkeypatch):
    monkeypatch.setattr("irpar.api.load", lambda *_, **__: 1 / 0)
    monkeypatch.setenv("IRPAR_DEBUG", "1")
    code, _, err = call(capsys, "inspect", folder / "gpt.onnx")
    assert code == 70
    assert "Traceback" in err
    assert "ZeroDivisionError" in err


# -- the process --------------------------------------------------------------------------------------------------


def test_the_version_is_printed(capsys):
    from irpar import __version__

    assert call(capsys, "--version") == (0, f"irpar {__version__}\n", "")


def test_a_reader_that_goes_away_is_no_error(folder):
    command = f'"{sys.executable}" -m irpar.cli inspect gpt.onnx --tensors "*" | head -n 1'
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=patient(60))
    assert done.stderr == ""
    assert done.stdout.startswith("tensor")


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path):
    (tmp_path / "in.irpar").write_text(TEXT.replace("%y", '%"größe"'), encoding="utf-8")
    command = [sys.executable, "-m", "irpar.cli", "opt", "in.irpar"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr\\xf6\\xdfe" in done.stdout
