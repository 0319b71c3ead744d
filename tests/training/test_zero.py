"""ZeRO on whole runs: the same numbers on every stage, and checkpoints that go from one to another."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.ir import clone_module
from irpar.onnx_io import save
from irpar.output.checkpoint import Checkpoint
from irpar.pass_manager.default_pipeline import with_zero
from tests.budget import every
from tests.command_line import Capture, call, refused
from tests.partition_runs import GROUPS
from tests.training.group_runs import run_in_group
from tests.training.programs import CLASSIFIER, batch, classifier, data_file, same, state_in, with_weights

STAGES = (0, 1, 2, 3)
CUTS = {"x": ["dp", None], "w": [None, "tp"], "u": ["tp", None]}
MESHES = ("dp=2,tp=2", "dp=4,tp=1", "dp=3,tp=2")


@pytest.fixture(scope="module")
def step() -> irpar.Module:
    return classifier(optimizer="adamw")


def on(step: irpar.Module, mesh: str, stage: int, threshold: float = 0) -> irpar.Partition:
    module = clone_module(step)
    for name, cut in CUTS.items():
        module.shard(name, cut)
    zero = f"zero{{stage={stage}, threshold-kb={threshold}}}"
    return irpar.partition(module, mesh, pipeline=with_zero(zero) if stage else None)


def trained(partition: irpar.Partition, count: int = 3, **options: Any) -> tuple[list[float], dict[str, Any]]:
    with partition.trainer(**options) as trainer:
        return [trainer.step(batch(number)) for number in range(count)], trainer.read_all()


@pytest.mark.parametrize("mesh", every(2, MESHES))
def test_every_stage_learns_the_same(mesh: str, step: irpar.Module) -> None:
    """On dp=3 blocks are uneven, and of 5 over (tp, dp) some are empty."""
    losses, state = trained(irpar.partition(clone_module(step), "d=1"), engine="numpy")
    for stage in STAGES:
        others, found = trained(on(step, mesh, stage), engine="numpy")
        np.testing.assert_allclose(others, losses, rtol=1e-5)
        for name, array in state.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-5, err_msg=f"{name} in stage {stage}")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS[1:])
def test_every_group_computes_the_same_bits(
    group: str, step: irpar.Module, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    on(step, "dp=2,tp=2", 3).save(tmp_path / "out")
    words = [tmp_path / "out", "--data", data_file(tmp_path), "--steps", 4]
    for name in ("threads", group):
        run_in_group(capfd, name, *words, "--checkpoint", tmp_path / name)
    same(*(state_in(Checkpoint.open(tmp_path / name)) for name in (group, "threads")))


def test_checkpoints_go_between_stages_and_meshes(step: irpar.Module, tmp_path: Path) -> None:
    made = {(mesh, stage): on(step, mesh, stage) for mesh in every(2, MESHES) for stage in STAGES}
    for before in STAGES:
        with made["dp=2,tp=2", before].trainer(engine="numpy") as trainer:
            for number in range(3):
                trainer.step(batch(number))
            trainer.save_checkpoint(tmp_path / str(before))
            state = trainer.read_all()
        for partition in made.values():
            with partition.trainer(engine="numpy") as trainer:
                assert trainer.load_checkpoint(tmp_path / str(before)).step == 3
                same(trainer.read_all(), state)


def test_what_ranks_hold_is_what_the_plan_says(step: irpar.Module) -> None:
    for stage in STAGES:
        made = on(step, "dp=2,tp=2", stage)
        held = {entry["name"]: entry["sharding"] for entry in made.plan.state}
        assert (held["w.m"] == [["dp"], ["tp"]]) == (stage > 0)
        assert (held["w"] == [["dp"], ["tp"]]) == (stage == 3)
        assert made.verify()


# -- command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def network(tmp_path: Path) -> Path:
    save(with_weights(CLASSIFIER), tmp_path / "classifier.onnx")
    (tmp_path / "s.json").write_text(json.dumps({"tensors": {**CUTS, "target": ["dp"]}}))
    return tmp_path / "classifier.onnx"


def train(capsys: Capture, network: Path, *options: Any, out: str = "out") -> tuple[int, str, str]:
    folder = network.parent
    given = ("--mesh", "dp=2,tp=2", "--shardings", folder / "s.json", "--no-cache")
    return call(capsys, "train", network, "-o", folder / out, *given, *options)


def test_a_run_resumes_in_another_stage(network: Path, tmp_path: Path, capsys: Capture) -> None:
    data = data_file(tmp_path)
    run = ("--data", data, "--engine", "numpy", "--checkpoint", tmp_path / "steps")
    code, printed, _ = train(capsys, network, "--zero", 3, "--zero-threshold-kb", 0)
    assert code == 0
    assert "parameters, their state and gradients of 4 tensors sharded over dp" in printed
    assert call(capsys, "run", tmp_path / "out", *run, "--steps", 4)[0] == 0
    assert train(capsys, network, "--zero", 1, "--zero-threshold-kb", 0, out="other")[0] == 0
    code, printed, _ = call(capsys, "run", tmp_path / "other", *run, "--steps", 6, "--resume", "--eval-data", data)
    assert code == 0
    assert "2 steps after 4 on 4 ranks" in printed
    assert "evaluation after step 6: loss" in printed


def test_the_plan_and_explain_say_what_stays(network: Path, tmp_path: Path, capsys: Capture) -> None:
    code, printed, _ = train(capsys, network, "--zero", 2, "--zero-threshold-kb", 0.03)
    assert code == 0
    assert (
        "optimizer state and gradients of 2 tensors sharded over dp; 2 stay as they are (2 below --zero-threshold-kb 0.03)"
        in printed
    )
    zero = json.loads((tmp_path / "out" / "plan.json").read_text())["training"]["zero"]
    assert (zero["stage"], zero["axes"], zero["regather"]) == (2, ["dp"], False)
    whole = {entry["parameter"] for entry in zero["parameters"] if not entry["is_sharded"]}
    assert whole == {"b", "c"}
    code, printed, _ = call(capsys, "explain", tmp_path / "out", "--memory")
    assert code == 0
    assert "ZeRO, stage 2, over dp" in printed
    assert "a rank holds 12 B of it, less than the threshold of 0.03 kB" in printed
    code, printed, _ = call(capsys, "explain", tmp_path / "out", "--memory", "--json")
    found = json.loads(printed)
    assert found["zero"] == zero
    assert set(found["ranks"][0]["memory"]) == {"parameters", "gradients", "optimizer", "activations", "buffers"}


def test_mistakes(network: Path, tmp_path: Path, capsys: Capture) -> None:
    given = ("train", network, "-o", tmp_path / "no", "--mesh", "dp=2,tp=2")
    refused(capsys, "there is no stage 4", *given, "--zero", 4)
    refused(capsys, "zero cannot shard over ep", *given, "--zero", 1, "--zero-axes", "ep")
    refused(capsys, "--zero-threshold-kb without --zero 1, 2 or 3", *given, "--zero", 0, "--zero-threshold-kb", 1)
    refused(capsys, "--zero and --pipeline both say what runs", *given, "--zero", 1, "--pipeline", "dce")
    refused(capsys, "--zero-axes without --zero", *given, "--zero-axes", "ep")
    refused(capsys, "--no-zero-regather without --zero", *given, "--no-zero-regather")
    refused(capsys, "--no-zero-regather is about parameters that --zero 3", *given, "--zero", 2, "--no-zero-regather")
    refused(capsys, "write zero{stage=2} into", *given, "--zero", 2, "--pipeline", "dce")
    refused(capsys, "--zero-prefetch without --zero", *given, "--zero-prefetch", 2)
    refused(capsys, "a prefetch of -1 layers", *given, "--zero", 3, "--zero-prefetch", -1)
    refused(capsys, "zero has no axes", *given, "--zero", 1, "--zero-axes", ",")
    refused(capsys, "an .onnx file holds", "train", network, "-o", tmp_path / "no.onnx", "--zero", 1)
    refused(capsys, "--zero shards over ranks, and there is one", "train", network, "-o", tmp_path / "no", "--zero", 1)
    assert not (tmp_path / "no").exists()
    assert train(capsys, network)[0] == 0
    refused(capsys, "--memory is about ranks", "explain", tmp_path / "out", "w", "--memory")
    refused(capsys, "two reports", "explain", tmp_path / "out", "--conflicts", "--memory")
