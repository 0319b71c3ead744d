"""extract-communication on whole partitions: the same plan, the same numbers to the last bit, the same graph back."""

import difflib
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import irpar
from irpar import models
from irpar.cli import main
from irpar.ir import COMMUNICATION, Module, clone_module, same_module, verify
from irpar.ir.text.files import parse_module, print_module
from irpar.output.checkpoint import Checkpoint
from irpar.output.plan_reading import read_plan
from irpar.output.plan_record import Plan
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE

from .budget import budget
from .command_line import Capture, call
from .partition_runs import GROUPS, may_run_out, run_out, same
from .random_programs import Program, loaded, programs
from .runtime.groups.mpi_libraries import find

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
ANY_TIME = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
TAKE = st.sampled_from(["packing", "collectives"])


def extracting(take: str, match: str = "") -> str:
    """The pass with options."""
    return f"extract-communication{{take={take}{', match=[' + match + ']' if match else ''}}}"


def pipeline_with(pipeline: str, take: str) -> str:
    return pipeline.replace("group-segments", f"{extracting(take)},group-segments")


def planned(plan: Plan) -> dict[str, object]:
    """What must be equal with the pass and without."""
    found = json.loads(plan.to_json())
    parts = [{**part, "program": None} for part in found["parts"]]
    return {**found, "parts": parts, "id": None, "pipeline": None, "functions": None}


def pair(program: Program, folder: Path, take: str) -> tuple[irpar.Partition, irpar.Partition]:
    """A partition without the pass, and with it."""
    found = [
        irpar.partition(loaded(program, folder), program.mesh, pipeline=pipeline, network=program.network)
        for pipeline in (program.pipeline, pipeline_with(program.pipeline, take))
    ]
    return found[0], found[1]


@settings(
    max_examples=budget(150, least=3),
    deadline=None,
    suppress_health_check=ANY_TIME,
    phases=[Phase.generate],
    derandomize=True,
)
@given(programs(), TAKE)
def test_random_programs(program: Program, take: str) -> None:
    """In one process, with an engine of two; what is written is valid ONNX, and reads back as it was."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            plain, reused = pair(program, folder, take)
        except irpar.IrparError:
            return  # What cannot be partitioned is told elsewhere.
        verify(reused.module)
        check_back(plain.module, take)
        if take == "collectives":
            assert planned(plain.plan) == planned(reused.plan)
        else:  # Packing that stands in functions does not move to other segments.
            assert plain.plan.collectives == reused.plan.collectives
        engine = program.engines[len(program.drawn) % len(program.engines)]
        executor = reused.executor(engine)  # type: ignore[arg-type]
        expected = plain.executor(engine).run(program.inputs)  # type: ignore[arg-type]
        same(executor.run(program.inputs, check_replicas=True), expected)
        assert executor.log.differences(reused.plan.collectives) == []
        if not reused.plan.functions:
            return
        reused.save(folder / "out")
        for part in range(len(reused.plan.parts)):
            onnx.checker.check_model(str(folder / "out" / f"part{part}" / "model.onnx"))
        opened = irpar.Partition.open(folder / "out")
        same(opened.run(program.inputs, engine=engine), expected)  # type: ignore[arg-type]


def check_back(module: Module, take: str) -> None:
    """Collectives become functions, print, parse, and are opened again: to the letter."""
    module = clone_module(module)
    before = str(module)
    sent = any(node.domain == "irpar" for graph in module.graphs for node in graph.walk())
    PassManager.parse(extracting(take, "*" if sent else "")).run(module)
    printed = print_module(module)
    assert same_module(module, parse_module(printed.text, resources=printed.resources)) is None
    PassManager.parse("inline-functions").run(module)
    differ = list(difflib.unified_diff(before.splitlines(), str(module).splitlines(), lineterm="", n=0))
    assert not differ, "\n".join(differ)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS[1:])
def test_random_programs_in_processes(group: str, capfd: pytest.CaptureFixture[str]) -> None:
    if group == "mpi" and isinstance(find("MPICH"), str):
        pytest.skip(str(find("MPICH")))

    @settings(
        max_examples=budget(30, 3),
        deadline=None,
        suppress_health_check=ANY_TIME,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
    )
    @given(programs(), TAKE)
    def check(program: Program, take: str) -> None:
        if not may_run_out(program):
            return
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                plain, reused = pair(program, folder, take)
            except irpar.IrparError:
                return
            if reused.plan.functions:
                expected = plain.run(program.inputs, engine="ort")
                reused.save(folder / "out")
                same(run_out(folder, program.inputs, group, program.mesh.size), expected)

    check()
    capfd.readouterr()


def gpt(folder: Path, take: str | None, network: str = "h100-nvlink-ib") -> irpar.Partition:
    """A gpt of three layers over dp=2 x tp=2, with calls where `take` is given."""
    path = folder / "gpt.onnx"
    models.save(path, "gpt", layers=3)
    module = irpar.load(path)
    for name, spec in models.annotations("gpt", layers=3).items():
        module.shard(name, spec)
    pipeline = DEFAULT_PIPELINE if take is None else pipeline_with(DEFAULT_PIPELINE, take)
    return irpar.partition(module, {"dp": 2, "tp": 2}, pipeline=pipeline, network=network)


@pytest.mark.parametrize("take", ["packing", pytest.param("collectives", marks=pytest.mark.slow)])
def test_commands(take: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """verify, its bisection, explain and pack take a partition with functions as any other."""
    gpt(tmp_path, take).save(tmp_path / "out")
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert main(["verify", str(tmp_path / "out"), "--bisect"]) == 0
    assert main(["explain", str(tmp_path / "out"), "1"]) == 0
    assert main(["pack", str(tmp_path / "out"), "--rank", "1", "-o", str(tmp_path / "rank1.tar")]) == 0
    assert "equal" in capfd.readouterr().out


@pytest.mark.slow
def test_groups_agree(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain, reused = gpt(tmp_path, None), gpt(tmp_path, "packing")
    reused.save(tmp_path / "out")
    drawn = np.random.default_rng(0)
    inputs = {entry["name"]: drawn.integers(0, 32, entry["shape"]) for entry in plain.plan.inputs}
    expected = plain.run(inputs)
    for group in GROUPS:
        if group != "mpi" or not isinstance(find("MPICH"), str):
            same(run_out(tmp_path, inputs, group, 4), expected)
    capfd.readouterr()


def test_one_program_for_all_calls_of_a_function(tmp_path: Path) -> None:
    """A function is prepared once: its segments are compiled once, and what is inside has one set of places."""
    reused = gpt(tmp_path, "packing")
    (first, *_) = reused.executor("ort")._prepared.parts
    functions = {key[1] for key in reused.module.functions if key[0] == COMMUNICATION}
    assert functions
    calls = [node for node in first.part.graph if node.callee is not None]
    assert len(calls) > len(functions)
    own = {value for function in reused.module.functions.values() for value in function.graph.values()}
    inside = [value for value in first.tape.places if value in own]
    given = [node.result for function in reused.module.functions.values() for node in function.graph if node.results]
    assert len(inside) <= len(given)
    executed = [step.collective.id for step in first.tape.steps if hasattr(step, "collective")]
    assert executed == sorted(set(executed))


@pytest.mark.parametrize("group", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_training_with_state_and_evaluation(group: str, tmp_path: Path, capsys: Capture) -> None:
    """Losses, checkpoints and the evaluation beside the step are the same to the last bit."""
    models.save(tmp_path / "gpt.onnx", "gpt", layers=2)
    shardings = {"tensors": models.annotations("gpt", layers=2)}
    (tmp_path / "gpt.json").write_text(json.dumps(shardings), encoding="utf-8")
    told = {}
    for take in ("", "packing"):
        pipeline = pipeline_with(DEFAULT_PIPELINE, take) if take else DEFAULT_PIPELINE
        out, steps = tmp_path / f"out{take}", tmp_path / f"steps{take}"
        options = [
            "--mesh",
            "dp=2,tp=2",
            "--shardings",
            tmp_path / "gpt.json",
            "--optimizer",
            "momentum",
            "--lr",
            "0.1",
        ]
        options += ["--network", "h100-nvlink-ib", "--pipeline", pipeline]
        code, _, error = call(capsys, "train", tmp_path / "gpt.onnx", "-o", out, *options)
        assert code == 0, error
        plan = read_plan(out)
        assert bool(plan.functions) == bool(take)
        drawn, arrays = np.random.default_rng(0), {}
        for entry in plan.inputs:
            if entry["name"] in plan.training["inputs"]:  # type: ignore[index]
                arrays[entry["name"]] = drawn.integers(0, 32, (2 * entry["shape"][0], *entry["shape"][1:]))
        np.savez(tmp_path / "data.npz", **arrays)
        data = ["--data", tmp_path / "data.npz", "--eval-data", tmp_path / "data.npz"]
        run = ["run", out, *data, "--steps", "3", "--checkpoint", steps, "--group", group, "--json"]
        code, printed, error = call(capsys, *run)
        assert code == 0, error
        checkpoint = Checkpoint.open(steps)
        found = json.loads(printed)
        told[take] = checkpoint.read(list(checkpoint.tensors), {}), found["evaluations"]
    assert told[""][1] == told["packing"][1]
    same(told["packing"][0], told[""][0])


def test_explain_tells_what_is_saved(tmp_path: Path, capsys: Capture) -> None:
    gpt(tmp_path, "packing").save(tmp_path / "out")
    code, printed, _ = call(capsys, "explain", tmp_path / "out")
    assert code == 0
    assert re.search(r"\d+ collectives are calls of \d+ functions", " ".join(printed.split()))
    code, printed, _ = call(capsys, "explain", tmp_path / "out", "--json")
    listed = json.loads(printed)["functions"]
    assert all(len(entry["collectives"]) >= 2 for entry in listed)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    plan["functions"][0]["collectives"] = [10_000]
    (tmp_path / "out" / "plan.json").write_text(json.dumps(plan))
    assert "one that is not there" in call(capsys, "explain", tmp_path / "out")[2]
