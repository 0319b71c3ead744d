"""Programs of the pass store: the numbers of the original, copies as the plan has them, and files that nobody sees."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.cli import main
from irpar.pass_manager.default_pipeline import composed
from irpar.passes.recompute import Recompute
from irpar.passes.zero import Zero
from irpar.runtime.errors import RunError
from irpar.sharding import IrparError
from tests.training.programs import MESHES, batch, classifier, same

WAYS = {
    "host": "store{weights=host, state=host, activations=host, prefetch=0, threshold-kb=0}",
    "disk": "store{weights=disk, state=disk, activations=disk, prefetch=1, threshold-kb=0}",
    "auto": "store{auto=true, limit-gb=1e-6, seconds=0, threshold-kb=0}",
}


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "gpt.onnx"
    models.save(path, "gpt", weights="external", layers=2, hidden=32, vocab=64, batch=2, seq=16)
    return path


@pytest.mark.parametrize("mesh", [pytest.param("d=1", marks=pytest.mark.slow), "tp=2"])
def test_streamed_weights_give_what_the_original_gives(mesh: str, gpt: Path, tmp_path: Path) -> None:
    module = irpar.load(gpt)
    if mesh == "tp=2":
        module.shard("h.*.mlp.c_fc.weight", [None, "tp"])
    made = irpar.partition(module, mesh, pipeline=composed(None, ["store{weights=disk, prefetch=1}"]))
    made.save(tmp_path / "out")
    opened = irpar.Partition.open(tmp_path / "out")
    assert opened.verify()
    with opened.executor(engine="numpy") as executor:
        ids = {"input_ids": np.zeros((2, 16), np.int64)}
        for _ in range(2):
            executor.run(ids)
        assert executor.log.copies.differences(made.plan.copies) == []
        assert executor.log.copies.copied_bytes == made.plan.totals["copied_bytes"]
        # From the parts' own files: nothing is copied to others first.
        assert {path.name for path in executor._disk._read} == {"weights.bin"}
        assert not executor._disk._spilled


@pytest.fixture
def streamed(gpt: Path, tmp_path: Path) -> Iterator[tuple[irpar.Partition, Path]]:
    """A partition that reads from the model's own file while it runs, and that file."""
    for path in gpt.parent.iterdir():
        shutil.copy(path, tmp_path)
    made = irpar.partition(irpar.load(tmp_path / gpt.name), "d=1", pipeline=composed(None, ["store{weights=disk}"]))
    yield made, tmp_path / f"{gpt.name}.data"
    made.close()


IDS = {"input_ids": np.zeros((2, 16), np.int64)}


def test_the_model_s_own_file_is_read_and_no_other(streamed: tuple[irpar.Partition, Path]) -> None:
    made, data = streamed
    expected = list(irpar.partition(irpar.load(data.with_suffix("")), "d=1").run(IDS, engine="numpy").values())
    with made.executor(engine="numpy") as executor:
        assert list(executor._disk._read) == [data]
        # What is put in its place is another file, which nobody has asked for.
        turned = data.read_bytes()[::-1]
        data.unlink()
        data.write_bytes(turned)
        for one, other in zip(executor.run(IDS).values(), expected, strict=True):
            np.testing.assert_array_equal(one, other)
        assert not executor._disk._spilled


def cut(data: Path) -> None:
    os.truncate(data, data.stat().st_size // 2)


def turn(data: Path) -> None:
    time.sleep(0.02)  # A clock of the file system ticks in a few milliseconds.
    data.write_bytes(data.read_bytes()[::-1])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (cut, "the file was written to after its model was partitioned"),
        (turn, "the file was written to after its model was partitioned"),
        (Path.unlink, "cannot read external data: No such file or directory"),
    ],
)
def test_weights_that_are_others_before_a_run_are_told(
    change: Callable[[Path], None], told: str, streamed: tuple[irpar.Partition, Path]
) -> None:
    made, data = streamed
    change(data)
    with pytest.raises(IrparError, match=told) as caught:
        made.run(IDS, engine="numpy")
    assert caught.value.where == str(data)


@pytest.mark.parametrize("change", [cut, turn])
def test_weights_that_change_during_a_run_are_told(
    change: Callable[[Path], None], streamed: tuple[irpar.Partition, Path]
) -> None:
    made, data = streamed
    executor = made.executor(engine="numpy")
    executor.run(IDS)
    change(data)
    with pytest.raises(RunError, match="the file was written to while the program ran") as caught:
        executor.run(IDS)
    assert caught.value.where == str(data)
    assert "from the disk to the device" in caught.value.notes[-1]


@pytest.mark.parametrize("weights", ["host", "disk", "device"])
@pytest.mark.parametrize("change", [cut, turn])
def test_weights_that_were_written_to_are_told_before_a_run(
    change: Callable[[Path], None], weights: str, gpt: Path, tmp_path: Path
) -> None:
    for path in gpt.parent.iterdir():
        shutil.copy(path, tmp_path)
    data = tmp_path / f"{gpt.name}.data"
    pipeline = composed(None, [] if weights == "device" else [f"store{{weights={weights}}}"])
    known, late = (irpar.partition(irpar.load(tmp_path / gpt.name), "d=1", pipeline=pipeline) for _ in range(2))
    known.run(IDS, engine="numpy")
    change(data)
    for made in (known, late):
        with pytest.raises(IrparError, match="the file was written to after its model was partitioned") as caught:
            made.run(IDS, engine="numpy")
        assert caught.value.where == str(data)


@pytest.mark.parametrize("engine", ["numpy", "ort"])
def test_another_file_of_that_name_is_not_read(engine: Any, gpt: Path, tmp_path: Path) -> None:
    for path in gpt.parent.iterdir():
        shutil.copy(path, tmp_path)
    data = tmp_path / f"{gpt.name}.data"
    made = irpar.partition(irpar.load(tmp_path / gpt.name), "d=1")
    expected = made.run(IDS, engine=engine)
    turned = data.read_bytes()[::-1]
    data.unlink()
    data.write_bytes(turned)
    for one, other in zip(made.run(IDS, engine=engine).values(), expected.values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_was_opened_last_counts(gpt: Path, tmp_path: Path) -> None:
    for path in gpt.parent.iterdir():
        shutil.copy2(path, tmp_path)
    data, copied = tmp_path / f"{gpt.name}.data", tmp_path / "copied"
    made = irpar.partition(irpar.load(tmp_path / gpt.name), "d=1")
    made.run(IDS, engine="numpy")
    made.close()
    shutil.copy2(data, copied)
    copied.replace(data)
    made.run(IDS, engine="numpy")
    turn(data)
    with pytest.raises(IrparError, match="the file was written to after its model was partitioned"):
        made.run(IDS, engine="numpy")


@pytest.mark.parametrize("change", [cut, turn])
@pytest.mark.parametrize("ask", ["verify", "bisect"])
def test_weights_that_were_written_to_are_told_where_the_original_is_another_file(
    ask: str, change: Callable[[Path], None], gpt: Path, tmp_path: Path
) -> None:
    for path in gpt.parent.iterdir():
        shutil.copy(path, tmp_path)
    made = irpar.partition(irpar.load(tmp_path / gpt.name), "d=1")
    made.run(IDS, engine="numpy")
    change(tmp_path / f"{gpt.name}.data")
    with pytest.raises(IrparError, match="the file was written to after its model was partitioned"):
        getattr(made, ask)(IDS, engine="numpy", model=gpt)


def trained(mesh: str, *passes: Any, zero: Zero | None = None) -> tuple[list[Any], dict[str, Any]]:
    """The losses of some steps and the state after them; copies are those of the plan, in each step."""
    step = classifier(optimizer="adam")
    for name, cut in MESHES[mesh].items():
        if name in {value.source_name for value in step.graph.inputs}:
            step.shard(name, cut)
    made = irpar.partition(step, mesh, pipeline=composed(zero, list(passes)))
    assert bool(passes) == (made.plan.totals["copied_bytes"] > 0)
    executor = made.executor(engine="numpy")
    with made.session(engine="numpy") as session:
        found = []
        for number in range(3):
            found.append(session.run({**batch(number), "learning_rate": np.float32(0.1)})["loss"])
            assert executor.log.copies.differences(made.plan.copies) == []
        state = session.read_all()
    executor.close()
    return found, state


@pytest.mark.parametrize(
    ("mesh", "way"),
    [
        ("dp=2,tp=2", "disk"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product(("d=1", "z=2"), WAYS)),
    ],
)
def test_steps_are_the_same_to_the_bit(mesh: str, way: str) -> None:
    plain, state = trained(mesh)
    found, stored = trained(mesh, WAYS[way])
    assert found == plain
    same(stored, state)


@pytest.mark.slow
def test_with_recompute_and_sharded_state_too() -> None:
    zero = Zero(3, threshold_kb=0)
    plain, state = trained("dp=2", zero=zero)
    found, stored = trained("dp=2", Recompute(match=("a",)), WAYS["disk"], zero=zero)
    assert found == plain
    same(stored, state)


def test_what_comes_early_is_counted_for_what_it_is() -> None:
    """Moments that come during the backward pass are no gradients: the kinds of memory add up to what is held."""
    step = irpar.train_step(models.build("mlp"), optimizer="adam", micro_batches=2)
    store = "store{weights=host, state=disk, activations=host, threshold-kb=0, prefetch=1}"
    (rank,) = irpar.partition(step, "d=1", pipeline=composed(None, [store])).plan.ranks
    assert min(rank["memory"].values()) >= 0
    moments = [value for value, state in step.graph.states.items() if state.kind == "moment"]
    assert rank["memory"]["gradients"] <= sum(value.tensor_type.nbytes for value in moments) / 2


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step that keeps everything on disk, with its evaluation."""
    tmp_path = tmp_path_factory.mktemp("step")
    models.save(tmp_path / "mlp.onnx", "mlp")
    store = f"weights=disk, state=disk, activations=disk, prefetch=1, path={tmp_path / 'ssd'}"
    options = ["--optimizer", "adam", "--store", store]
    assert main(["train", str(tmp_path / "mlp.onnx"), "-o", str(tmp_path / "out"), *options]) == 0
    random = np.random.default_rng(0)
    x = random.standard_normal((24, 64), np.float32)
    np.savez(tmp_path / "data.npz", x=x, target=random.integers(0, 64, 24))
    return tmp_path


def run_step(folder: Path) -> int:
    data = str(folder / "data.npz")
    return main(["run", str(folder / "out"), "--data", data, "--steps", "3", "--eval-data", data, "--lr", "0.01"])


def test_a_step_reads_and_writes_where_it_is_told(
    step: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_step(step) == 2
    assert f"what goes to disk has no place: {step / 'ssd'} is no folder" in capsys.readouterr().err
    (step / "ssd").mkdir()
    assert run_step(step) == 0
    *_, evaluated = capsys.readouterr().out.splitlines()
    assert evaluated.startswith("evaluation after step 3: loss")
    assert not list((step / "ssd").iterdir())
    (step / "ssd").rmdir()
    monkeypatch.setenv("IRPAR_OFFLOAD_PATH", str(step))
    assert run_step(step) == 0
    assert capsys.readouterr().out.splitlines()[-1] == evaluated


def test_a_disk_that_is_full_is_told_by_the_rank_that_wrote(
    step: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, of: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (step / "ssd").mkdir(exist_ok=True)
    monkeypatch.setattr(os, "pwritev", full)
    assert run_step(step) != 0
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert f"what rank 0 keeps on disk in {step / 'ssd'}" in told
    assert "free some room, or write to another disk: IRPAR_OFFLOAD_PATH=FOLDER" in told
    assert "store{path=FOLDER}" in told
