"""Opening the parts of some ranks out of folders that hold only those, and what the checksum files beside them tell."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.cli import main
from irpar.output.checksums import sums_file, sums_text
from irpar.runtime.executor import Executor
from irpar.runtime.pieces import open_parts
from irpar.sharding import IrparError, Mesh

from .groups.spmd_threads import run_ranks


def sealed(out: Path, part: int) -> None:
    """Write the checksum file of a part."""
    names = ("plan.json", f"part{part}/model.onnx", f"part{part}/weights.bin")
    sums = {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names}
    (out / sums_file(part)).write_text(sums_text(sums))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Partitions of two GPTs over dp=2,tp=2 with checksum files: out/ and other/; ranks 0 and 2 have part 0."""
    folder = tmp_path_factory.mktemp("parts")
    for name, seed in (("out", 0), ("other", 1)):
        models.save(folder / "gpt.onnx", "gpt", layers=1, seed=seed)
        module = irpar.load(folder / "gpt.onnx")
        irpar.annotate(module, models.annotations("gpt", layers=1))
        irpar.partition(module, "dp=2,tp=2").save(folder / name)
        for part in (0, 1):
            sealed(folder / name, part)
    return folder


@pytest.fixture
def copies(base: Path, tmp_path: Path) -> Path:
    """Copies of both partitions."""
    for name in ("out", "other"):
        shutil.copytree(base / name, tmp_path / name)
    return tmp_path


def test_each_rank_from_a_folder_of_its_own(copies: Path) -> None:
    shutil.rmtree(copies / "out" / "part1")
    shutil.copytree(copies / "other", copies / "host1")
    ids = {"input_ids": np.random.default_rng(0).integers(0, 32, (4, 32))}
    with Executor.open(copies / "other") as whole:
        expected = whole.run(ids)["logits"]
    opened = []
    for rank in range(4):
        folder = copies / f"host{rank}"
        shutil.copytree(copies / "other", folder, dirs_exist_ok=True)
        absent = 1 - rank % 2
        shutil.rmtree(folder / f"part{absent}")
        (folder / sums_file(absent)).unlink()
        opened.append(open_parts(folder, [rank]))
        assert [part.ranks for part in opened[-1].parts] == [(rank,)]
        assert [part.index for part in opened[-1].parts] == [rank % 2]
        assert opened[-1].parts[0].coords == opened[-1].mesh.coords(rank)
    parts = [part for one in opened for part in one.parts]
    with Executor(opened[0].modules[0], opened[0].mesh, parts=parts) as executor:
        np.testing.assert_array_equal(executor.run(ids)["logits"], expected)


def on_hosts(folder: Path, ids: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray] | None, dict[int, BaseException]]:
    """Run each rank from folder/hostN, as processes would; what rank 0 gives, and what ranks raised."""
    return run_ranks(
        Mesh({"dp": 2, "tp": 2}),
        lambda group: Executor.open(folder / f"host{group.rank}", group=group, engine="numpy"),
        lambda executor: executor.run(ids),
    )


def test_ranks_with_folders_of_their_own(copies: Path) -> None:
    ids = {"input_ids": np.random.default_rng(0).integers(0, 32, (4, 32))}
    for rank in range(4):
        shutil.copytree(copies / "out", copies / f"host{rank}")
        shutil.rmtree(copies / f"host{rank}" / f"part{1 - rank % 2}")
    given, raised = on_hosts(copies, ids)
    assert raised == {}
    assert given is not None
    with Executor.open(copies / "out", engine="numpy") as executor:
        np.testing.assert_array_equal(given["logits"], executor.run(ids)["logits"])
    shutil.rmtree(copies / "host2" / "part0")
    _, raised = on_hosts(copies, ids)
    assert "not here: part0 (rank 2)" in str(raised[2])
    assert "rank 2 (dp=1, tp=0) failed: not here: part0 (rank 2)" in str(raised[0])
    # All of this host is of the other partition: by itself it is whole.
    shutil.rmtree(copies / "host2")
    shutil.copytree(copies / "other", copies / "host2")
    _, raised = on_hosts(copies, ids)
    assert "rank 2 has another partition than rank 0" in str(raised[2])
    for name in ("out", "other"):
        assert json.loads((copies / name / "plan.json").read_text())["id"] in str(raised[0])


def test_ranks_that_share_a_part(base: Path) -> None:
    assert [part.ranks for part in open_parts(base / "out", [2, 0]).parts] == [(0, 2)]
    assert [part.ranks for part in open_parts(base / "out", {3, 2}).parts] == [(2,), (3,)]
    assert [part.ranks for part in open_parts(base / "out").parts] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("rank", [4, -1, 10**30])
def test_no_such_rank(base: Path, rank: int) -> None:
    with pytest.raises(IrparError, match=rf"there is no rank {rank}: mesh dp=2,tp=2 has ranks 0 to 3"):
        open_parts(base / "out", [0, rank])


def test_an_absent_part(capsys: pytest.CaptureFixture[str], copies: Path) -> None:
    shutil.rmtree(copies / "out" / "part1")
    assert open_parts(copies / "out", [0, 2]).parts[0].ranks == (0, 2)
    with pytest.raises(IrparError, match=r"not here: part1 \(rank 3\)") as caught:
        open_parts(copies / "out", [2, 3])
    assert caught.value.do is not None
    assert "irpar pack OUT --rank 3" in caught.value.do
    np.savez(copies / "in.npz", input_ids=np.zeros((4, 32), np.int64))
    assert main(["run", str(copies / "out"), "--inputs", str(copies / "in.npz")]) == 2
    err = capsys.readouterr().err
    assert "all ranks are to run here, and 1 of 2 parts are not: part1 (ranks 1, 3)" in err
    assert "irpar pack OUT --rank 1" in err
    assert "irpar launch" in err


def flipped(path: Path) -> None:
    """One bit of the middle byte is another; a byte that the digest of samples does not see in a large file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def edited_plan(out: Path) -> None:
    plan = json.loads((out / "plan.json").read_text())
    plan["pipeline"] += " "
    (out / "plan.json").write_text(json.dumps(plan))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def from_other(*names: str) -> Callable[[Path], object]:
    def take(out: Path) -> None:
        for name in names:
            shutil.copy(out.parent / "other" / name, out / name)

    return take


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a model": (
        lambda out: flipped(out / "part1/model.onnx"),
        r"part1/model.onnx is not the file that was pa",
    ),
    "a bit of weights": (lambda out: flipped(out / "part1/weights.bin"), r"part1/weights.bin is not the file that was"),
    "a bit of the plan": (lambda out: flipped(out / "plan.json"), r"plan.json is not the file that was packed"),
    "an edited plan": (edited_plan, r"plan.json is not the file that was packed"),
    "a plan cut short": (lambda out: cut(out / "plan.json"), r"plan.json is not the file that was packed"),
    "an empty plan": (lambda out: os.truncate(out / "plan.json", 0), r"plan.json is not the file that was packed"),
    "a model cut short": (lambda out: cut(out / "part1/model.onnx"), r"part1/model.onnx is not the file that was pack"),
    "an empty model": (lambda out: os.truncate(out / "part1/model.onnx", 0), r"part1/model.onnx is not the file that"),
    "weights cut short": (lambda out: cut(out / "part1/weights.bin"), r"part1/weights.bin has .* bytes, it was writ"),
    "no model": (lambda out: (out / "part1/model.onnx").unlink(), r"not here: part1 \(rank 1\)"),
    "no weights": (
        lambda out: (out / "part1/weights.bin").unlink(),
        r"part1/weights.bin is not there: the file was lo",
    ),
    "no plan": (lambda out: (out / "plan.json").unlink(), r"cannot read the plan: No such file"),
    "a model that is a pipe": (lambda out: pipe(out / "part1/model.onnx"), r"part1/model.onnx is not a file"),
    "weights that are a pipe": (lambda out: pipe(out / "part1/weights.bin"), r"part1/weights.bin is not a file"),
    "a part of another partition": (
        from_other("part1/model.onnx", "part1/weights.bin"),
        r"part1/model.onnx is of another partition than plan.json",
    ),
    "a sealed part of another partition": (
        from_other("part1/model.onnx", "part1/weights.bin", "part1.sha256"),
        r"part1/model.onnx is of another partition than plan.json",
    ),
    "the plan of another partition": (from_other("plan.json"), r"part1/model.onnx is of another partition than plan"),
    "weights of another partition": (from_other("part1/weights.bin"), r"part1/weights.bin is not the file that was pa"),
    "part 0 as part 1": (
        lambda out: [shutil.copy(out / "part0" / name, out / "part1" / name) for name in ("model.onnx", "weights.bin")],
        r"part1/model.onnx is part 0, plan.json has it as part 1",
    ),
    "checksums of part 0": (
        lambda out: shutil.copy(out / "part0.sha256", out / "part1.sha256"),
        r"part1.sha256 has no checksum of part1/model.onnx",
    ),
    "empty checksums": (lambda out: os.truncate(out / "part1.sha256", 0), r"part1.sha256 has no checksum of plan.json"),
    "checksums cut short": (
        lambda out: os.truncate(out / "part1.sha256", 200),
        r"part1.sha256 is no checksum file, or a damaged one: line 3",
    ),
    "other checksums": (lambda out: (out / "part1.sha256").write_bytes(b"\xff" * 99), r"part1.sha256 is no checksum"),
    "checksums twice": (
        lambda out: (out / "part1.sha256").write_text((out / "part1.sha256").read_text() * 2),
        r"part1.sha256 is no checksum file, or a damaged one: line 4",
    ),
    "checksums that are a pipe": (lambda out: pipe(out / "part1.sha256"), r"part1.sha256 is not a file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_part(copies: Path, fault: str) -> None:
    change, told = FAULTS[fault]
    change(copies / "out")
    with pytest.raises(IrparError, match=told) as caught:
        open_parts(copies / "out", [1])
    assert caught.value.do
    assert str(copies / "out") in str(caught.value.where)
    if "another partition" in told:
        ids = {json.loads((copies / name / "plan.json").read_text())["id"] for name in ("out", "other")}
        assert any(identity in str(caught.value) for identity in ids)


def test_the_damage_of_one_part_does_not_concern_another(copies: Path) -> None:
    flipped(copies / "out" / "part1" / "weights.bin")
    assert open_parts(copies / "out", [0]).parts


def test_without_checksum_files_nothing_is_compared(copies: Path) -> None:
    edited_plan(copies / "out")
    for part in (0, 1):
        (copies / "out" / sums_file(part)).unlink()
    assert len(open_parts(copies / "out").parts) == 2


def test_a_partition_with_checksum_files_can_be_replaced(copies: Path) -> None:
    models.save(copies / "mlp.onnx", "mlp")
    module = irpar.load(copies / "mlp.onnx")
    irpar.partition(module, "tp=2").save(copies / "out", force=True)
    assert not list((copies / "out").glob("*.sha256"))
