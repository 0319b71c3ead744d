"""benchmarks/gpu/check.py without a GPU: its parts on numpy, what makes each fail, the report, the refusal."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import (
    check,
    family_checks,
    kernel_errors,
    machine,
    marked_tests,
    memory,
    rank_checks,
    rank_worker,
    report,
)
from benchmarks.gpu.findings import MOST_FAILURES, Context, Findings, merged
from benchmarks.gpu.held_blocks import HeldBlocks, rows
from benchmarks.gpu.trials import Call, Trial
from irpar import kernels
from irpar.ir import Node, parse_module
from irpar.kernels.cuda import cublas_lt
from irpar.runtime.groups import GROUPS, ThreadGroup
from irpar.runtime.groups import Call as RankCall
from irpar.sharding import Mesh
from tests.patience import patient
from tests.runtime.groups.spmd_threads import ThreadRank, Wires


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("numpy", "threads", time.monotonic() + patient(60), tmp_path)


def trial(name: str, *operands: np.ndarray, version: int = 21) -> Trial:
    kernel = kernels.lookup("", name, version)
    assert kernel is not None
    arrays = {f"x{place}": operand for place, operand in enumerate(operands)}
    return Trial(name, (Call(kernel, tuple(arrays), {}, ("y",)),), arrays, frozenset(), ("y",))


NUMBERS = np.linspace(-2, 3, 12, dtype=np.float32).reshape(3, 4)


# -- kernels ----------------------------------------------------------------------------------------------------------


def run_kernels(context: Context, monkeypatch: pytest.MonkeyPatch, *listed: Trial) -> Findings:
    monkeypatch.setattr(kernel_errors, "trials", lambda: iter(listed))
    monkeypatch.setattr(kernels, "supported", lambda: [("", one.calls[0].kernel.op_type) for one in listed])
    return kernel_errors.run(context)


def test_kernels_in_every_dtype(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_kernels(context, monkeypatch, trial("MatMul", NUMBERS, NUMBERS.T.copy()), trial("Not", NUMBERS > 0))
    assert found.is_good
    assert found.checks == 3 + 1 + 1
    errors = found.figures["operators"]["MatMul"]["errors"]
    assert errors.keys() == {"f32", "f16", "bf16"}
    assert 0 < errors["f32"]["error"] < errors["f16"]["error"] < errors["bf16"]["error"] < 2.0**-7
    assert "| MatMul |" in "\n".join(kernel_errors.lines(found.figures))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda array: array * 1.001, "error 0.0"),
        (lambda array: array.astype(np.float64), "y is float64[3, 4], on numpy float32[3, 4]"),
        (lambda array: np.where(array > 2, np.nan, array).astype(array.dtype), "error inf"),
    ],
)
def test_a_wrong_kernel_is_found(spoil: Any, told: str, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Trial.on_engine

    def wrong(self: Trial, engine: str, values: Any) -> Any:
        results, notes = right(self, engine, values)
        return {name: spoil(array) if array.dtype == np.float32 else array for name, array in results.items()}, notes

    monkeypatch.setattr(Trial, "on_engine", wrong)
    found = run_kernels(context, monkeypatch, trial("Exp", NUMBERS))
    assert [failure.split(":")[0] for failure in found.failures] == ["Exp in f32"]
    assert told in found.failures[0]


def test_small_integers_are_tried_on_the_device_too(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine computes them on the host; kernels by themselves do not."""
    right = Trial.on_module
    monkeypatch.setattr(Trial, "on_module", lambda self, module: {"y": right(self, module)["y"] + 1})
    found = run_kernels(context, monkeypatch, trial("Neg", np.arange(4, dtype=np.int32)))
    assert found.failures == ["Neg: alone on numpy: y: 4 of 4 elements are not those of numpy"]

    def fail(self: Trial, module: Any) -> Any:
        raise AttributeError("no such function")

    monkeypatch.setattr(Trial, "on_module", fail)
    found = run_kernels(context, monkeypatch, trial("Neg", np.arange(4, dtype=np.int32)))
    assert found.failures == ["Neg: alone on numpy: AttributeError: no such function"]


def test_what_the_device_cannot_compute_is_listed(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Trial, module: Any) -> Any:
        raise kernels.KernelError("Neg", "no such dtype")

    monkeypatch.setattr(Trial, "on_module", refuse)
    found = run_kernels(context, monkeypatch, trial("Neg", np.arange(4, dtype=np.int32)))
    assert found.is_good
    assert found.figures["fallbacks"] == {"Neg": {"KernelError: Neg: no such dtype": 1}}


def test_case_data_and_host_notes(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    note = "Exp runs on the host: no arrays of it (node n)"
    right = Trial.on_engine
    monkeypatch.setattr(Trial, "on_engine", lambda self, *given: (right(self, *given)[0], (note,)))
    wrong = replace(trial("Exp", NUMBERS), expected={"y": NUMBERS}, rtol=1e-3)
    found = run_kernels(context, monkeypatch, wrong)
    assert found.failures
    assert found.failures[0].startswith("Exp in f32: not ONNX's data: ")
    assert found.figures["fallbacks"] == {"Exp": {"no arrays of it": 3}}
    assert "| Exp | no arrays of it | 3 |" in kernel_errors.lines(found.figures)


def test_kernels_that_nothing_tries_and_those_out_of_time(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_errors, "trials", lambda: iter([trial("Exp", NUMBERS)]))
    found = kernel_errors.run(replace(context, deadline=0.0))
    assert found.failures[0] == "out of time: 1 nodes were not tried"
    assert found.failures[1].startswith("nothing tries the kernels of Abs, Acos")


@pytest.mark.slow
def test_all_kernels_on_numpy(context: Context) -> None:
    found = kernel_errors.run(context)
    assert found.is_good, found.failures
    assert found.checks > 4500
    assert len(found.figures["operators"]) > 170


# -- families ---------------------------------------------------------------------------------------------------------


def test_families(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [subject for subject in family_checks.subjects() if subject.name in ("mlp", "gru_dynamo_fixed")]
    assert len(some) == 4
    monkeypatch.setattr(family_checks, "subjects", lambda: iter(some))
    found = family_checks.run(context)
    assert found.is_good, found.failures
    assert found.checks == 4
    assert found.figures["models"]["mlp over dp=2,tp=2"]["collectives"] > 0


def test_every_family_and_export_is_run() -> None:
    names = {subject.name for subject in family_checks.subjects()}
    assert {"mlp", "gpt", "control-kind=scan", "hf-mixtral_dynamo_fixed", "bart_torchscript_fixed"} <= names
    assert len(names) > 70


def test_a_wrong_family_and_another_log(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(subject for subject in family_checks.subjects() if subject.name == "mlp")

    def with_other_plan(folder: Path) -> Any:
        partition, inputs = first.make(folder)
        partition.plan.collectives[0]["bytes"] += 4
        return partition, inputs

    subjects = [replace(first, tolerance=0.0), replace(first, make=with_other_plan)]
    monkeypatch.setattr(family_checks, "subjects", lambda: iter(subjects))
    found = family_checks.run(context)
    assert len(found.failures) == 2
    assert found.failures[0].startswith("mlp over tp=2: differs from ONNX Runtime: y: largest difference")
    assert found.failures[1].startswith("mlp over tp=2: the log is not the plan: collective id=0: the plan has")


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_of_a_step(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SIZES", {"mlp": {"batch": 512}})
    found = memory.run(context)
    assert found.is_good, found.failures
    assert found.checks == 2
    row = found.figures["programs"]["mlp, training step"]
    assert row["weights"] < row["peak"] <= row["plan"]
    assert row["allocated"] > row["plan"] / 2
    assert any(line.startswith("| mlp, training step |") for line in memory.lines(found.figures))


def test_memory_beyond_the_plan_is_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SIZES", {"mlp": {}})
    monkeypatch.setattr(memory, "MOST_BEYOND", -(1 << 30))
    found = memory.run(context)
    assert len(found.failures) == 2
    assert found.failures[0].startswith("mlp, inference: ")
    assert found.failures[0].endswith(" are planned")


def test_pools_are_watched(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CuPy's hooks, which tell of each block that a pool gives out or takes back."""
    hooks: list[Any] = []

    class Hook:
        def __enter__(self) -> Any:
            hooks.append(self)
            return self

        def __exit__(self, *_: Any) -> None:
            hooks.remove(self)

    used = [512]
    pool = SimpleNamespace(free_all_blocks=lambda: None, total_bytes=lambda: 8192, used_bytes=lambda: used[-1])
    cupy = SimpleNamespace(cuda=SimpleNamespace(MemoryHook=Hook), get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def runs(partition: Any, executor: Any) -> Iterator[None]:
        for sizes in ((4096, 1024), (1536, 2048, 1024)):
            for size in sizes:
                used.append(size)
                hooks[0].malloc_postprocess(device_id=0, size=size, mem_size=size, mem_ptr=1, pmem_id=1)
            monkeypatch.setattr(cublas_lt, "workspace_bytes", lambda: 256)
            yield

    mlp = next(one for one in memory.programs() if one.name == "mlp, inference")
    with mlp.make() as partition:
        assert memory._on_device(replace(mlp, runs=runs), partition, context) == (2048 - 512 - 256, 256, 8192, [])
    assert hooks == []


def test_what_is_held_at_the_most_is_listed() -> None:
    node = parse_module('graph @g(%x: f32[4]) -> (%y) opset 18 {\n  %y = Relu(%x) : f32[4] from "/act"\n}').graph.last
    used = 100
    held = HeldBlocks(lambda: used)

    def change(block: int, nbytes: int) -> None:
        """As CuPy's pools tell of their blocks; one that takes its memory from another tells of that too."""
        nonlocal used
        used += nbytes
        if nbytes < 0:
            held.taken_back(block)
        else:
            held.given(block)

    of_irpar: Any = FunctionType(_at_a_node.__code__, {"__name__": "irpar.some.module", "change": change})
    for block, nbytes in ((1, 1000), (2, 1000), (3, 0), (4, 500), (1, -1000), (5, 700)):
        of_irpar(node, block, nbytes)
    assert held.most == 100 + 2500
    (row,) = rows(held.at_most, 5)
    assert row == {
        "bytes": 2500,
        "blocks": 3,
        "functions": "some.module._at_a_node",
        "largest": 1000,
        "node": "Relu /act",
    }
    held.begin()
    assert (held.most, len(held.at_most)) == (100 + 2200, 3)
    lines = memory.lines({"programs": {}, "held": {"mlp, inference": [row]}})
    assert "| 2,500 | 3 | some.module._at_a_node | 1,000 | Relu /act |" in lines


def _at_a_node(node: Node, block: int, nbytes: int) -> None:
    change(block, nbytes)  # type: ignore[name-defined]  # noqa: F821  # It is what the caller says.


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["x=2", pytest.param("a=2,b=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("spoiled", [False, True])
def test_collectives_of_ranks(axes: str, spoiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, wires, made = Mesh.parse(axes), Wires(), {}
    own = threading.local()

    class Spoiled(ThreadRank):
        def exchange(self, waiting: Any) -> Any:
            results = super().exchange(waiting)
            return {rank: -array if array.dtype.kind == "f" else array for rank, array in results.items()}

    def join(name: str, mesh: Mesh, seconds: float) -> Any:
        assert name == "nccl"
        return (Spoiled if spoiled else ThreadRank)(mesh, own.rank, wires)

    def work(rank: int) -> None:
        own.rank = rank
        made[rank] = rank_worker._collectives(mesh, "nccl")

    monkeypatch.setattr(rank_worker, "make_group", join)
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count = len(list(rank_worker.collectives(mesh)))
    assert [made[rank]["done"] for rank in range(mesh.size)] == [count] * mesh.size
    assert made[0]["kinds"].keys() == set(rank_worker.KINDS)
    for rank in range(mesh.size):
        assert bool(made[rank]["problems"]) == spoiled
        assert not spoiled or any("AllReduce" in line and "sum of float16" in line for line in made[rank]["problems"])


def test_collectives_tell_ranks_apart() -> None:
    """A group that gives an operand back as it is would fail, whatever the collective."""
    mesh = Mesh({"x": 2})
    group = ThreadGroup(mesh)
    for collective, operands in rank_worker.collectives(mesh):
        if operands[0].size == 0:
            continue
        calls = {rank: RankCall(rank, mesh.coords(rank), collective, one) for rank, one in enumerate(operands)}
        results = group.exchange(calls)
        assert collective.kind == "Send" or any(
            rank_worker.difference(operands[rank], results[rank]) for rank in calls
        ), collective


@pytest.mark.slow
@pytest.mark.skipif("processes" not in GROUPS, reason="there is no group of processes yet")
def test_ranks_that_are_processes(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = next(entry for entry in family_checks.families() if entry[0] == "mlp")
    wrong = ("gpt", mlp[1], -1.0)
    monkeypatch.setattr(rank_checks, "families", lambda: iter([mlp, wrong]))
    monkeypatch.setattr(rank_checks, "MESHES", ("x=2",))
    found = rank_checks.run(replace(context, group="processes"))
    assert found.checks == 1 + 4 + 1
    assert found.figures["families"].keys() >= {"mlp over tp=2", "mlp over dp=2,tp=2"}
    assert [failure.split(": ")[:2] for failure in found.failures] == [
        ["gpt over tp=2", "different from ONNX Runtime on the original (inputs"],
        ["gpt over dp=2,tp=2", "different from ONNX Runtime on the original (inputs"],
    ]
    assert found.figures["collectives"]["x=2"]["kinds"].keys() == set(rank_worker.KINDS)


def test_a_group_that_is_not_there(context: Context) -> None:
    found = rank_checks.run(replace(context, group="pigeons"))
    assert found.failures == ['this irpar has no group "pigeons"']


# -- tests -----------------------------------------------------------------------------------------------------------

JUNIT = """<testsuites><testsuite><testcase classname="tests.a.test_a" name="test_one"/>
<testcase classname="tests.a.test_a" name="test_two"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="tests.test_b" name="test_three"><skipped message="no device"/></testcase>
<testcase classname="tests.test_b" name="test_four"><error message="fixture failed"/></testcase></testsuite></testsuites>"""


def test_outcomes_of_tests(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = Findings()
    marked_tests.enter(found, tmp_path / "junit.xml")
    assert found.checks == 3
    assert found.failures == ["a.test_a::test_two: assert 1 == 2 | more", "test_b::test_four: fixture failed"]
    assert marked_tests.lines(found.figures)[-3:] == ["| all | 1 | 2 | 1 |", "", "- skipped 1: no device"]


def test_a_share_of_the_tests(context: Context, tmp_path: Path) -> None:
    (tmp_path / "test_ten.py").write_text(
        "import pytest\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(10))\ndef test_one(n): pass\n"
    )
    found = Findings()
    for share in range(3):
        marked_tests.run_pytest(replace(context, shard=share, shards=3), found, [str(tmp_path)])
    assert (found.checks, found.failures) == (10, [])


def test_tests_that_had_no_time(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_two.py").write_text(
        "import pytest\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(2))\ndef test_one(n): pass\n"
    )
    found = Findings()
    monkeypatch.setattr(marked_tests, "_TO_END", 2 * context.seconds_left)
    marked_tests.run_pytest(context, found, [str(tmp_path)])
    assert found.failures == ["1 tests were not begun in time"]


# -- the whole --------------------------------------------------------------------------------------------------------


def test_the_report(tmp_path: Path) -> None:
    parts = {
        "kernels": Findings(checks=3, figures={"cases": 3}, seconds=1.5),
        "tests": Findings(checks=2, failures=["test_a: assert 1 == 2\nmore"], notes=["skipped"]),
        "ranks": Findings(),
    }
    facts = {"device": "one", "torch": None, "commit": "c1"}
    lines_of = {"kernels": ["a table"]}
    folder = tmp_path / "new"
    data, text = report.merge(folder, facts, parts, lambda name, found: lines_of.get(name, []))
    made = json.loads(data.read_text())
    assert made["format"] == report.FORMAT
    assert {name: part["is_good"] for name, part in made["parts"].items()} == {
        "kernels": True,
        "tests": False,
        "ranks": False,
    }
    assert Findings.of_json(made["parts"]["tests"]) == parts["tests"]
    lines = text.read_text().splitlines()
    assert any(line.startswith("| kernels | good | 3 | 0 | 2 s | 2") and line.endswith(" c1 |") for line in lines)
    assert any(line.startswith("| tests | FAILED | 2 | 1 | 0 s |") for line in lines)
    assert any(line.startswith("| ranks | NOTHING CHECKED | 0 | 0 | 0 s |") for line in lines)
    assert "- test_a: assert 1 == 2 more" in lines
    assert "a table" in lines
    assert "| torch | None |" not in lines
    assert sorted(path.name for path in folder.iterdir()) == ["gpu_check.json", "gpu_check.md"]


def test_parts_gather_in_the_report(tmp_path: Path) -> None:
    def merge(commit: str, parts: dict[str, Findings]) -> list[str]:
        _, text = report.merge(tmp_path, {"commit": commit}, parts, lambda name, found: [])
        return text.read_text().splitlines()

    merge("c1", {"kernels": Findings(checks=1), "tests": Findings(2, ["bad"] * (MOST_FAILURES + 3))})
    lines = merge("c2", {"kernels": Findings(checks=4)})
    assert any(line.startswith("| kernels | good | 4 | 0 |") and line.endswith(" c2 |") for line in lines)
    assert any(line.startswith("| tests | FAILED | 2 | 203 |") and line.endswith(" c1 |") for line in lines)
    assert {"| kernels | version |", "| tests | version |", "- and 3 more"} <= {*lines}


def test_shares_are_merged() -> None:
    left = Findings(2, ["a"], ["same"], {"cases": 1, "operators": {"Add": {"nodes": 2}}, "list": [1]}, 3.0)
    right = Findings(3, ["b"], ["same"], {"cases": 4, "operators": {"Mul": {"nodes": 1}}, "list": [2]}, 2.0)
    figures = {"cases": 5, "operators": {"Add": {"nodes": 2}, "Mul": {"nodes": 1}}, "list": [1, 2]}
    assert merged([left, right]) == Findings(5, ["a", "b"], ["same"], figures, 3.0)


@pytest.mark.parametrize(
    ("cupy", "told"),
    [
        (None, "CuPy is not installed"),
        (SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)), "CuPy finds no CUDA device"),
        (SimpleNamespace(), "CuPy cannot be used"),
    ],
)
def test_without_a_device(
    cupy: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(machine, "find_spec", lambda name: cupy)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert check.main(["--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: nothing to check on: {told}")
    assert "\n  do: " in printed
    assert not (tmp_path / "out").exists()


def test_a_part_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setitem(check.PARTS, "ranks", replace(check.PARTS["ranks"], seconds=0.0))
    monkeypatch.setattr(check, "_TO_END", 0.01)
    assert check.main(["--engine", "numpy", "--only", "ranks", "--out", str(tmp_path)]) == 1
    assert "ranks: FAILED" in capsys.readouterr().out
    made = json.loads((tmp_path / "gpu_check.json").read_text())
    assert "process 1 of 1 of ranks did not end in 0 s" in made["parts"]["ranks"]["failures"][0]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_process_of_a_part_writes(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(context: Context) -> Findings:
        if fails:
            raise ValueError("no luck")
        return Findings(checks=context.shards, figures={"shard": context.shard})

    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(check, "_module", lambda name: SimpleNamespace(run=run))
    result = tmp_path / "result.json"
    words = ["--part", "memory", "--shard", "1/2", "--seconds", "9", "--scratch", str(tmp_path)]
    assert check.main([*words, "--engine", "numpy", "--result", str(result)]) == 0
    found = Findings.of_json(json.loads(result.read_text()))
    assert found == (Findings(failures=["ValueError: no luck"]) if fails else Findings(2, figures={"shard": 1}))
