"""Folders whose pieces do not belong together are refused; nothing is computed from them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import irpar
from irpar import models
from irpar.runtime.executor import Executor
from irpar.sharding import IrparError

from ..older_plans import forget_programs


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two partitions of one model: out/ over dp=2,tp=2, and other/ with other weights."""
    folder = tmp_path_factory.mktemp("pieces")
    for name, seed in (("out", 0), ("other", 1)):
        models.save(folder / "gpt.onnx", "gpt", seed=seed)
        module = irpar.load(folder / "gpt.onnx")
        irpar.annotate(module, models.annotations("gpt"))
        irpar.partition(module, "dp=2,tp=2").save(folder / name)
    return folder


def swap(out: Path, name: str) -> None:
    """Exchange part0/NAME and part1/NAME; without a name the folders."""
    first, second = out / "part0" / name, out / "part1" / name
    first.rename(out / "aside")
    second.rename(first)
    (out / "aside").rename(second)


def edit(out: Path, change: Callable[[Any], object]) -> None:
    plan = json.loads((out / "plan.json").read_text())
    change(plan)
    (out / "plan.json").write_text(json.dumps(plan))


def reorder(plan: Any) -> None:
    """The axes of the mesh in another order; coordinates that fit it."""
    plan["mesh"]["axes"] = {"tp": 2, "dp": 2}


def zeroed(out: Path) -> None:
    path = out / "part0" / "weights.bin"
    path.write_bytes(bytes(path.stat().st_size))


def flip_bits(out: Path) -> None:
    path = out / "part1" / "model.onnx"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def from_other(name: str) -> Callable[[Path], object]:
    return lambda out: shutil.copy(out.parent / "other" / name, out / name)


MIXED: dict[str, tuple[Callable[[Path], object], str]] = {
    "folders swapped": (lambda out: swap(out, ""), r"part0/model.onnx is part 1, plan.json has it as part 0"),
    "models swapped": (lambda out: swap(out, "model.onnx"), r"part0/model.onnx is part 1"),
    "weights swapped": (lambda out: swap(out, "weights.bin"), r"part0/weights.bin is not the file"),
    "weights zeroed": (zeroed, r"part0/weights.bin is not the file"),
    "weights of another": (from_other("part1/weights.bin"), r"part1/weights.bin is not the file"),
    "a bit of a model flipped": (flip_bits, r"part1/model.onnx is not the file that was written here"),
    "model of another": (from_other("part1/model.onnx"), r"part1/model.onnx is of another partition"),
    "plan of another": (from_other("plan.json"), r"part0/model.onnx is of another partition"),
    "rank to another part": (
        lambda out: edit(out, lambda plan: plan["ranks"][0].update(part=1)),
        r"part0/model.onnx was made for ranks \[0, 2\], plan.json runs it on ranks \[2\]",
    ),
    "model of part 1": (
        lambda out: edit(out, lambda plan: plan["parts"][0].update(model="part1/model.onnx")),
        r"part1/model.onnx is part 1, plan.json has it as part 0",
    ),
    "mesh reordered": (lambda out: edit(out, reorder), r"part0/model.onnx was made for another mesh"),
    "devices reordered": (
        lambda out: edit(out, lambda plan: plan["mesh"].update(devices=[3, 2, 1, 0])),
        r"part0/model.onnx was made for another mesh",
    ),
    "input cut otherwise": (
        lambda out: edit(out, lambda plan: plan["inputs"][0].update(sharding=[None, ["dp"]])),
        r"different inputs or outputs",
    ),
    "no digest": (
        lambda out: edit(out, lambda plan: plan["parts"][0].update(weights={})),
        r"parts\[0\].weights.size is missing",
    ),
    "no weights said": (
        lambda out: edit(out, lambda plan: plan["parts"][0].update(weights=None)),
        r'part0/weights.bin is not there: the partition was written with weights="none"',
    ),
    "no id": (lambda out: edit(out, lambda plan: plan.pop("id")), r"id is missing"),
    "weights are a pipe": (
        lambda out: ((out / "part0" / "weights.bin").unlink(), os.mkfifo(out / "part0" / "weights.bin")),
        r"part0/weights.bin is not a file",
    ),
}


@pytest.mark.parametrize("mixed", MIXED)
def test_pieces_that_do_not_belong_together(written: Path, tmp_path: Path, mixed: str) -> None:
    shutil.copytree(written / "out", tmp_path / "out")
    shutil.copytree(written / "other", tmp_path / "other")
    change, told = MIXED[mixed]
    change(tmp_path / "out")
    with pytest.raises(IrparError, match=told) as caught:
        Executor.open(tmp_path / "out")
    assert caught.value.do


def test_a_moved_folder_is_whole(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "other", tmp_path / "moved")
    irpar.Partition.open(tmp_path / "moved").verify(model=written / "gpt.onnx").check()


def test_any_flipped_bit_of_a_model_is_told(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "out", tmp_path / "out")
    path = tmp_path / "out" / "part0" / "model.onnx"
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(IrparError, match=r"part0/model.onnx is ") as caught:
            Executor.open(tmp_path / "out")
        assert caught.value.do


def test_a_model_that_was_changed_by_hand_runs_where_the_plan_says_nothing_of_it(written: Path, tmp_path: Path) -> None:
    """As plans do that were written before they said it."""
    shutil.copytree(written / "out", tmp_path / "out")
    path = tmp_path / "out" / "part0" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    model.doc_string = "changed by hand"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(IrparError, match="is not the file that was written here") as caught:
        Executor.open(tmp_path / "out")
    assert '"program": null' in str(caught.value.do)
    edit(tmp_path / "out", lambda plan: plan["parts"][0].update(program=None))
    Executor.open(tmp_path / "out").close()
    forget_programs(tmp_path / "out")
    Executor.open(tmp_path / "out").close()


def test_the_id_is_that_of_the_contents(written: Path, tmp_path: Path) -> None:
    module = irpar.load(written / "gpt.onnx")
    irpar.annotate(module, models.annotations("gpt"))
    made = irpar.partition(module, "dp=2,tp=2")
    known = json.loads((written / "other" / "plan.json").read_text())["id"]
    for weights in ("copy", "none", "copy"):
        made.save(tmp_path / "out", weights=weights, force=True)
        assert made.plan.id == known
        for part in ("part0", "part1"):
            model = onnx.load(tmp_path / "out" / part / "model.onnx", load_external_data=False)
            assert [prop.value for prop in model.metadata_props if prop.key == "irpar.partition"] == [known]
    assert known != json.loads((written / "out" / "plan.json").read_text())["id"]
