"""Checkpoints: bit by bit what was there, on any mesh; what is damaged is one clear error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import irpar
from irpar.errors import IrparError
from irpar.output.checkpoint import INDEX, Checkpoint, CheckpointError, checkpoints
from tests.budget import every
from tests.training.programs import MESHES, batch, classifier, on_mesh, same


@pytest.fixture(scope="module")
def step() -> irpar.Module:
    return classifier(optimizer="adamw", dropout={"a": 0.1})


@pytest.fixture(scope="module")
def meshes(step: irpar.Module) -> dict[str, irpar.Partition]:
    return {mesh: on_mesh(step, mesh) for mesh in MESHES}


def trained(step: irpar.Module, mesh: str, folder: Path, count: int = 3) -> dict[str, Any]:
    """The state after some steps, which is saved."""
    with on_mesh(step, mesh).trainer(engine="numpy") as trainer:
        for number in range(count):
            trainer.step(batch(number))
        trainer.save_checkpoint(folder)
        return trainer.read_all()


@pytest.mark.parametrize("mesh", every(2, list(MESHES)))
def test_state_is_on_any_mesh_what_it_was(
    mesh: str, step: irpar.Module, meshes: dict[str, irpar.Partition], tmp_path: Path
) -> None:
    state = trained(step, mesh, tmp_path)
    for other in meshes.values():
        with other.trainer(engine="numpy") as trainer:
            assert trainer.load_checkpoint(tmp_path).step == trainer.steps == 3
            same(trainer.read_all(), state)


def test_going_on_is_bit_by_bit_the_run_that_was_not_stopped(step: irpar.Module, tmp_path: Path) -> None:
    partition = on_mesh(step, "dp=2,tp=2")
    with partition.trainer(engine="numpy") as trainer:
        losses = [trainer.step(batch(number)) for number in range(6)]
        state = trainer.read_all()
    trained(step, "dp=2,tp=2", tmp_path)
    with partition.trainer(engine="numpy") as trainer:
        trainer.load_checkpoint(tmp_path)
        assert [trainer.step(batch(number)) for number in range(3, 6)] == losses[3:]
        same(trainer.read_all(), state)


def test_tensors_that_a_rank_holds_whole_are_those_of_any_tool(step: irpar.Module, tmp_path: Path) -> None:
    state = trained(step, "dp=2", tmp_path)
    (folder,) = checkpoints(tmp_path)
    assert folder.name == "step-00000003"
    index = json.loads((folder / INDEX).read_text())
    assert set(index["weight_map"]) == set(state)
    files = {name: safetensors.numpy.load_file(folder / name) for name in set(index["weight_map"].values())}
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(files[file][name], state[name])
    assert sum(map(len, files.values())) == len(state)  # Each once, though both ranks hold it.


def test_only_so_many_are_kept(step: irpar.Module, tmp_path: Path) -> None:
    with on_mesh(step, "d=1").trainer(engine="numpy") as trainer:
        for number in range(5):
            trainer.step(batch(number))
            trainer.save_checkpoint(tmp_path, keep=2)
        assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004", "step-00000005"]
        trainer.save_checkpoint(tmp_path, keep=2)  # Once more: it replaces itself.
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
        trainer.step(batch())
        trainer.save_checkpoint(tmp_path)
        assert len(checkpoints(tmp_path)) == 3


def test_what_is_left_of_one_whose_removal_was_not_finished_is_removed(step: irpar.Module, tmp_path: Path) -> None:
    with on_mesh(step, "d=1").trainer(engine="numpy") as trainer:
        for number in range(3):
            trainer.step(batch(number))
            trainer.save_checkpoint(tmp_path)
        (tmp_path / "step-00000001" / INDEX).unlink()
        (tmp_path / "notes").mkdir()
        trainer.save_checkpoint(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000003"]


def test_what_has_no_index_is_no_checkpoint(step: irpar.Module, tmp_path: Path) -> None:
    trained(step, "d=1", tmp_path)
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000009")
    (tmp_path / "step-00000009" / INDEX).unlink()
    (tmp_path / "step-9").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert Checkpoint.open(tmp_path).step == 3
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Checkpoint.open(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Checkpoint.open(tmp_path / "none")


def changed_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def rank_file(folder: Path) -> Path:
    return folder / "rank0.safetensors"


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "index cut short": lambda folder: cut(folder / INDEX, 200),
    "index empty": lambda folder: cut(folder / INDEX, 0),
    "index is a list": lambda folder: (folder / INDEX).write_text("[]"),
    "index is bytes": lambda folder: (folder / INDEX).write_bytes(b"\xff\xfe\x00"),
    "another format": lambda folder: changed_index(folder, lambda index: index["metadata"].update(format="x/2")),
    "no metadata": lambda folder: changed_index(folder, lambda index: index.pop("metadata")),
    "no step": lambda folder: changed_index(folder, lambda index: index["metadata"].pop("step")),
    "a step that is no number": lambda folder: changed_index(folder, lambda index: index["metadata"].update(step="x")),
    "no tensors": lambda folder: changed_index(folder, lambda index: index.pop("tensors")),
    "tensors is a list": lambda folder: changed_index(folder, lambda index: index.update(tensors=[])),
    "a tensor without shape": lambda folder: changed_index(folder, lambda index: index["tensors"]["w"].pop("shape")),
    "a shape that is none": lambda folder: changed_index(
        folder, lambda index: index["tensors"]["w"].update(shape=["x", None])
    ),
    "a dtype that is none": lambda folder: changed_index(
        folder, lambda index: index["tensors"]["w"].update(dtype="z9")
    ),
    "a tensor is missing": lambda folder: changed_index(folder, lambda index: index["tensors"].pop("w")),
    "a tensor of another shape": lambda folder: changed_index(
        folder, lambda index: index["tensors"]["w"].update(shape=[6, 7])
    ),
    "a block is missing": lambda folder: changed_index(folder, lambda index: drop_block(index["weight_map"])),
    "a block of other dims": lambda folder: changed_index(
        folder, lambda index: index["weight_map"].update({"w[0:2]": "rank0.safetensors"})
    ),
    "a block that is beyond": lambda folder: changed_index(folder, lambda index: move_block(index["weight_map"])),
    "a block twice": lambda folder: changed_index(
        folder, lambda index: index["weight_map"].update({"w[0:6,0:1]": "rank0.safetensors"})
    ),
    "a file of another folder": lambda folder: changed_index(
        folder, lambda index: index["weight_map"].update(dict.fromkeys(index["weight_map"], "../rank0.safetensors"))
    ),
    "a file name that is none": lambda folder: changed_index(
        folder, lambda index: index["weight_map"].update(dict.fromkeys(index["weight_map"], 7))
    ),
    "file missing": lambda folder: rank_file(folder).unlink(),
    "file empty": lambda folder: cut(rank_file(folder), 0),
    "file cut short": lambda folder: cut(rank_file(folder), rank_file(folder).stat().st_size - 8),
    "file cut in its header": lambda folder: cut(rank_file(folder), 100),
    "file is text": lambda folder: rank_file(folder).write_text("hello, world, this is no safetensors file"),
    "file lacks a block": lambda folder: safetensors.numpy.save_file({"z": np.zeros(1)}, rank_file(folder)),
    "file has another dtype": lambda folder: safetensors.numpy.save_file(
        {
            name: array.astype(np.float16) if array.dtype == np.float32 else array
            for name, array in safetensors.numpy.load_file(rank_file(folder)).items()
        },
        rank_file(folder),
    ),
    "file has another shape": lambda folder: safetensors.numpy.save_file(
        {
            name: np.ascontiguousarray(array[:1]) if array.ndim else array
            for name, array in safetensors.numpy.load_file(rank_file(folder)).items()
        },
        rank_file(folder),
    ),
}


def drop_block(blocks: dict[str, str]) -> None:
    del blocks[next(name for name in blocks if name.startswith("w["))]


def move_block(blocks: dict[str, str]) -> None:
    name = next(name for name in blocks if name.startswith("w["))
    blocks["w[0:6,3:9]"] = blocks.pop(name)


@pytest.fixture(scope="module")
def four(step: irpar.Module) -> irpar.Partition:
    return on_mesh(step, "dp=2,tp=2")


@pytest.fixture(scope="module")
def whole(step: irpar.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    trained(step, "tp=2", folder)
    return folder / "step-00000003"


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_what_is_damaged_is_one_clear_error_and_changes_nothing(
    damage: str, whole: Path, four: irpar.Partition, tmp_path: Path
) -> None:
    folder = tmp_path / "step-00000003"
    shutil.copytree(whole, folder)
    DAMAGE[damage](folder)
    with four.trainer(engine="numpy") as trainer:
        before = trainer.read_all()
        with pytest.raises(IrparError) as caught:
            trainer.load_checkpoint(folder)
        assert caught.value.do
        assert str(folder) in str(caught.value)
        assert "bug" not in str(caught.value)
        assert trainer.steps == 0
        same(trainer.read_all(), before)


def test_what_is_damaged_says_which_one_is_before(whole: Path, tmp_path: Path) -> None:
    for number in (2, 3):
        shutil.copytree(whole, tmp_path / f"step-0000000{number}")
    changed_index(tmp_path / "step-00000003", lambda index: index.pop("metadata"))
    with pytest.raises(CheckpointError, match="it has no metadata") as caught:
        Checkpoint.open(tmp_path)
    assert caught.value.do == "remove it: step-00000002 is the newest then"
    shutil.rmtree(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert caught.value.do == "begin anew: no other checkpoint is before it"


def test_where_one_rank_cannot_read_its_block_all_stay_as_they_were(
    whole: Path, meshes: dict[str, irpar.Partition], tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "steps")
    (tmp_path / "steps" / "rank1.safetensors").unlink()
    with meshes["tp=2"].trainer(engine="numpy") as trainer:
        before = trainer.read_all()
        with pytest.raises(IrparError, match=r"rank1\.safetensors"):
            trainer.load_checkpoint(tmp_path / "steps")
        same(trainer.read_all(), before)
        trainer.step(batch())


def test_a_checkpoint_of_another_program(whole: Path) -> None:
    with on_mesh(classifier(optimizer="adamw", loss_scale="dynamic"), "d=1").trainer(engine="numpy") as trainer:
        with pytest.raises(CheckpointError, match="is not of this program") as caught:
            trainer.load_checkpoint(whole)
        assert any("loss_scale: nothing of that name" in note for note in caught.value.notes)


def test_a_folder_that_cannot_be_written(step: irpar.Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with on_mesh(step, "d=1").trainer(engine="numpy") as trainer:
        with pytest.raises(CheckpointError, match="cannot write the checkpoint") as caught:
            trainer.save_checkpoint(tmp_path / "file")
        assert caught.value.do
        trainer.step(batch())
    assert (tmp_path / "file").read_text() == "mine"


def test_names_with_brackets_are_names(tmp_path: Path) -> None:
    from tests.training.programs import CLASSIFIER, with_weights

    module = with_weights(CLASSIFIER.replace('from "w"', 'from "w[0:2,1:3]"').replace('from "u"', 'from "a/b.[1]"'))
    step = irpar.train_step(module, optimizer="momentum")
    for cut in ([None, "tp"], None):
        folder = tmp_path / str(cut)
        partition = irpar.partition(step, "tp=2") if cut is None else cut_partition(step, cut)
        with partition.trainer(engine="numpy") as trainer:
            trainer.step(batch())
            trainer.save_checkpoint(folder)
            state = trainer.read_all()
            trainer.step(batch())
            trainer.load_checkpoint(folder)
            same(trainer.read_all(), state)


def cut_partition(step: irpar.Module, cut: list[Any]) -> irpar.Partition:
    from irpar.ir import clone_module

    module = clone_module(step)
    module.shard("w[0:2,1:3]", cut)
    return irpar.partition(module, "tp=2")
