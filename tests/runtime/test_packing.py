"""Packs: what is in them, that they unpack to folders which run, and what they refuse."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import irpar
from irpar import models
from irpar.runtime import packing
from irpar.runtime.executor import Executor
from irpar.runtime.packing import PackError, default_target, write_pack
from irpar.runtime.pieces import open_parts
from irpar.sharding import IrparError
from tests.command_line import Capture, call, refused
from tests.patience import patient
from tests.runtime.groups import mpi_libraries

IDS = {"input_ids": np.random.default_rng(0).integers(0, 32, (4, 32))}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Partitions of a GPT over dp=2,tp=2, with weights in out/ and without in bare/; ranks 0 and 2 have part 0."""
    folder = tmp_path_factory.mktemp("packing")
    models.save(folder / "gpt.onnx", "gpt", layers=1)
    module = irpar.load(folder / "gpt.onnx")
    irpar.annotate(module, models.annotations("gpt", layers=1))
    made = irpar.partition(module, "dp=2,tp=2")
    made.save(folder / "out")
    made.save(folder / "bare", weights="none")
    return folder


@pytest.fixture
def here(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a copy of out/."""
    shutil.copytree(base / "out", tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def unpacked(path: Path, folder: Path) -> None:
    """Unpack as users do."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["tar", "-xf", path, "-C", folder], check=True)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# -- what is in them ----------------------------------------------------------------------------------------------


def test_a_pack_has_the_part_the_plan_and_checksums(capsys: Capture, here: Path) -> None:
    code, printed, _ = call(capsys, "pack", "out", "--rank", 3)
    assert code == 0
    assert "rank 3: written to out-rank3.tar" in printed
    with tarfile.open("out-rank3.tar") as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == [
        f"out/{name}" for name in ("part1.sha256", "part1/model.onnx", "part1/weights.bin", "plan.json")
    ]
    for member in members:
        assert member.isreg()
        assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
        assert member.mode == 0o644
    unpacked(here / "out-rank3.tar", here / "host")
    for name in ("part1/model.onnx", "part1/weights.bin", "plan.json"):
        assert (here / "host" / "out" / name).read_bytes() == (here / "out" / name).read_bytes()
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "part1.sha256"], cwd=here / "host" / "out", capture_output=True, check=True
    )
    assert checked.stdout.count(b": OK\n") == 3


def test_json_names_all_files(capsys: Capture, here: Path) -> None:
    code, printed, _ = call(capsys, "pack", "out", "--rank", "2,0", "-o", "p.tar", "--json")
    assert code == 0
    told = json.loads(printed)
    assert (told["file"], told["folder"], told["ranks"], told["parts"]) == ("p.tar", "out", [0, 2], [0])
    assert told["bytes"] == (here / "p.tar").stat().st_size
    for file in told["files"]:
        data = (here / "out" / file["name"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert [file["name"] for file in told["files"]] == ["part0/model.onnx", "part0/weights.bin", "plan.json"]


def test_the_bytes_are_those_of_the_files_alone(here: Path) -> None:
    first = write_pack("out", [3, 1], "a.tar").path.read_bytes()
    shutil.copytree("out", "elsewhere/out", copy_function=shutil.copyfile)
    for path in Path("elsewhere").rglob("*"):
        os.chmod(path, 0o700)
    assert write_pack("elsewhere/out", [1, 3, 3], "b.tar").path.read_bytes() == first


@pytest.mark.parametrize(
    ("words", "name", "parts"),
    [
        (["--rank", "3"], "out-rank3.tar", {1}),
        (["--rank", "2,0"], "out-ranks0+2.tar", {0}),
        (["--rank", "0-2", "--rank", "2, 3"], "out-ranks0-3.tar", {0, 1}),
        (["--rank", "0", "--rank", "1"], "out-ranks0-1.tar", {0, 1}),
    ],
)
def test_several_ranks(capsys: Capture, here: Path, words: list[str], name: str, parts: set[int]) -> None:
    assert call(capsys, "pack", here / "out", *words)[0] == 0
    with tarfile.open(name) as tar:
        found = tar.getnames()
    for ending in (".sha256", "/model.onnx", "/weights.bin"):
        assert {name for name in found if name.endswith(ending)} == {f"out/part{part}{ending}" for part in parts}


def test_names_of_packs() -> None:
    assert default_target("a/out", [4]) == Path("out-rank4.tar")
    assert default_target("a/out/", [9, 1, 2, 3, 7]) == Path("out-ranks1-3+7+9.tar")
    assert default_target("/", [0]) == Path("partition-rank0.tar")
    with pytest.raises(PackError, match=r"too long"):
        default_target("out", range(0, 1000, 2))


@pytest.mark.parametrize("name", ["x" * 120, "Ünï", "with space", b"\xff".decode("utf-8", "surrogateescape")])
def test_odd_names_of_folders(here: Path, name: str) -> None:
    os.rename("out", name)
    unpacked(write_pack(name, [0], "p.tar").path, here / "host")
    assert len(open_parts(here / "host" / name, [0]).parts) == 1


# -- running from them --------------------------------------------------------------------------------------------


def test_packs_run_as_the_partition_does(here: Path) -> None:
    with Executor.open(here / "out") as executor:
        expected = executor.run(IDS)["logits"]
    opened = []
    for rank in range(4):
        unpacked(write_pack("out", [rank], f"{rank}.tar").path, here / f"host{rank}")
        assert len(names(here / f"host{rank}" / "out")) == 4
        opened.append(open_parts(here / f"host{rank}" / "out", [rank]))
    parts = [part for one in opened for part in one.parts]
    with Executor(opened[0].modules[0], opened[0].mesh, parts=parts) as executor:
        np.testing.assert_array_equal(executor.run(IDS)["logits"], expected)


class Starter:
    """What starts four ranks, each with a folder of its own: hostRANK/out."""

    def __init__(self, name: str) -> None:
        self.words = [sys.executable, "-P", "-m", "irpar.cli", "launch"]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if name != "irpar launch":
            library = mpi_libraries.find(name)
            if isinstance(library, str):
                pytest.skip(library)
            self.words = list(library.launch)
            self.environment |= library.environment

    def run(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of irpar on all ranks."""
        folder = '"host${RANK:-${PMI_RANK:-$OMPI_COMM_WORLD_RANK}}/out"'
        program = f'exec "$0" -P -m irpar.cli {command} {folder} "$@"'
        return subprocess.run(
            [*self.words, "-n", "4", "sh", "-c", program, sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=patient(120),
            env=self.environment,
            check=False,
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["irpar launch", *mpi_libraries.NAMES])
def test_processes_run_from_their_packs(here: Path, base: Path, name: str) -> None:
    starter = Starter(name)
    with Executor.open(here / "out") as executor:
        expected = executor.run(IDS)["logits"]
    for rank in range(4):
        unpacked(write_pack("out", [rank], f"{rank}.tar").path, here / f"host{rank}")
    # Only rank 0 has these.
    np.savez("host0/in.npz", **IDS)
    done = starter.run("run", "--inputs", "host0/in.npz", "--outputs", "host0/o.npz")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load("host0/o.npz")["logits"], expected)
    done = starter.run("verify", "--model", str(base / "gpt.onnx"))
    assert (done.returncode, "equal to ONNX Runtime" in done.stdout) == (0, True), done.stderr
    before = (here / "host0" / "o.npz").read_bytes()
    data = bytearray((here / "host2" / "out" / "part0" / "weights.bin").read_bytes())
    data[1000] ^= 1
    (here / "host2" / "out" / "part0" / "weights.bin").write_bytes(data)
    done = starter.run("run", "--inputs", "host0/in.npz", "--outputs", "host0/o.npz")
    # An mpiexec has exit codes of its own.
    assert done.returncode == 2 or (done.returncode and name != "irpar launch")
    assert "part0/weights.bin is not the file that was packed" in done.stderr
    assert "host2/out" in done.stderr
    assert "Traceback" not in done.stderr
    assert (here / "host0" / "o.npz").read_bytes() == before


def test_packs_in_one_folder_make_the_partition_whole(capsys: Capture, here: Path, base: Path) -> None:
    np.savez("in.npz", **IDS)
    words = ["run", here / "host" / "out", "--inputs", "in.npz"]
    unpacked(write_pack("out", [0], "0.tar").path, here / "host")
    assert "part1 (ranks 1, 3)" in refused(capsys, "1 of 2 parts are not", *words)
    unpacked(write_pack("out", [1], "1.tar").path, here / "host")
    assert call(capsys, *words)[0] == 0
    assert call(capsys, "verify", here / "host" / "out", "--model", base / "gpt.onnx")[0] == 0
    # Such a folder can be packed again, to the same bytes.
    again = write_pack(here / "host" / "out", [1], "again.tar")
    assert again.path.read_bytes() == Path("1.tar").read_bytes()


def test_a_pack_cut_short_makes_no_folder_that_runs(capsys: Capture, here: Path) -> None:
    made = write_pack("out", [0], "p.tar")
    np.savez("in.npz", **IDS)
    for size in (made.size // 2, made.size - 60_000):
        shutil.copy("p.tar", "cut.tar")
        os.truncate("cut.tar", size)
        (here / "host").mkdir(exist_ok=True)
        assert subprocess.run(["tar", "-xf", "cut.tar", "-C", "host"], capture_output=True, check=False).returncode
        refused(capsys, "plan.json", "run", here / "host" / "out", "--inputs", "in.npz")
        shutil.rmtree(here / "host")


def test_a_partition_without_weights_in_files(capsys: Capture, here: Path) -> None:
    """Small weights are in the models; there may be no weights.bin to pack."""
    models.save(here / "m.onnx", "mlp", hidden=4, width=4)
    module = irpar.load(here / "m.onnx")
    made = irpar.partition(module, "tp=2")
    made.save(here / "small", weights="none")
    unpacked(write_pack("small", [1], "p.tar").path, here / "host")
    assert names(here / "host" / "small") == ["part0.sha256", "part0/model.onnx", "plan.json"]
    assert len(open_parts(here / "host" / "small").parts) == 1


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["4", "0-4", "0,9", "999999999999"])
def test_no_such_rank(capsys: Capture, here: Path, text: str) -> None:
    refused(capsys, "the partition has ranks 0 to 3", "pack", "out", "--rank", text)
    assert not list(here.glob("*.tar"))


@pytest.mark.parametrize("text", ["", "x", "-1", "3-1", "1-", "1,,2", "1.0", "²", "0-3-5", "1" * 30])
def test_ranks_that_cannot_be_read(capsys: Capture, here: Path, text: str) -> None:
    refused(capsys, "cannot read --rank", "pack", "out", f"--rank={text}")


def test_no_ranks(capsys: Capture, here: Path) -> None:
    refused(capsys, "missing option '--rank'", "pack", "out")
    with pytest.raises(IrparError, match=r"no ranks"):
        write_pack("out", [])


def test_weights_that_were_not_written(capsys: Capture, base: Path, here: Path) -> None:
    refused(capsys, "written with --weights none", "pack", base / "bare", "--rank", 0)
    assert list(here.glob("*")) == [here / "out"]


def put_link(path: Path) -> None:
    path.rename(path.parent.parent / "aside")
    path.symlink_to(path.parent.parent / "aside")


def edited(out: Path) -> None:
    shutil.copytree(out / "part0", out / "sub" / "part0")
    plan = json.loads((out / "plan.json").read_text())
    plan["parts"][0]["model"] = "sub/part0/model.onnx"
    (out / "plan.json").write_text(json.dumps(plan))


SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no partition": (shutil.rmtree, "cannot read the plan"),
    "no part": (lambda out: shutil.rmtree(out / "part0"), "not here: part0 (rank 0)"),
    "a model that is a link": (lambda out: put_link(out / "part0" / "model.onnx"), "is a link, or lies behind one"),
    "a part that is a link": (lambda out: put_link(out / "part0"), "is a link, or lies behind one"),
    "a plan that is a link": (lambda out: put_link(out / "plan.json"), "plan.json is a link"),
    "weights cut short": (lambda out: os.truncate(out / "part0" / "weights.bin", 9), "it was written with"),
    "another model": (lambda out: shutil.copy(out / "part1/model.onnx", out / "part0/model.onnx"), "is part 1, plan"),
    "a model elsewhere": (edited, "plan.json has sub/part0/model.onnx as the model of part 0"),
}


@pytest.mark.parametrize("fault", SOURCES)
def test_a_partition_that_is_not_whole(capsys: Capture, here: Path, fault: str) -> None:
    change, told = SOURCES[fault]
    change(here / "out")
    refused(capsys, told, "pack", "out", "--rank", 0)
    assert not list(here.glob("*.tar"))
    assert not list(here.glob(".*"))


def test_damage_in_other_parts_is_not_looked_for(capsys: Capture, here: Path) -> None:
    shutil.rmtree(here / "out" / "part0")
    assert call(capsys, "pack", "out", "--rank", 1)[0] == 0


def test_what_is_in_the_way(capsys: Capture, here: Path) -> None:
    words = ["pack", "out", "--rank", 0, "-o"]
    (here / "notes.txt").write_text("mine")
    (here / "empty").touch()
    os.mkfifo(here / "pipe")
    (here / "dangling").symlink_to("nothing")
    refused(capsys, "notes.txt exists already", *words, "notes.txt")
    refused(capsys, "notes.txt is no tar file", *words, "notes.txt", "--force")
    refused(capsys, "the target is a named pipe", *words, "pipe", "--force")
    refused(capsys, "the target is a folder", *words, "out", "--force")
    refused(capsys, "dangling exists already", *words, "dangling")
    refused(capsys, "cannot write the pack", *words, "no/such/p.tar")
    before = names(here)
    for target in ("out/p.tar", "out/plan.json", "out/part0/p.tar"):
        refused(capsys, "cannot be written into the partition", *words, target, "--force")
    (here / "to-plan").symlink_to(here / "out" / "plan.json")
    refused(capsys, "cannot be written into the partition", *words, "to-plan", "--force")
    (here / "to-plan").unlink()
    assert names(here) == before
    assert (here / "notes.txt").read_text() == "mine"
    for _ in range(2):
        assert call(capsys, *words, "empty", "--force")[0] == 0
    assert tarfile.is_tarfile(here / "empty")


def test_the_current_folder_may_be_the_partition(capsys: Capture, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here / "out")
    refused(capsys, "cannot be written into the partition", "pack", ".", "--rank", 0)
    assert call(capsys, "pack", ".", "--rank", 0, "-o", "../p.tar")[0] == 0
    with tarfile.open(here / "p.tar") as tar:
        assert tar.getnames()[0] == "out/part0.sha256"


def test_a_full_disk_leaves_what_was_there(capsys: Capture, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write_pack("out", [0], "p.tar").path.read_bytes()
    before = names(here)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
        refused(capsys, "bytes, the disk has 0 free", "pack", "out", "--rank", 1, "-o", "p.tar", "--force")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packing._Writer, "_pad", full)
    refused(capsys, "No space left on device", "pack", "out", "--rank", 1, "-o", "p.tar", "--force")
    assert names(here) == before
    assert (here / "p.tar").read_bytes() == old


@pytest.mark.parametrize("grows", [False, True])
def test_a_file_that_is_changed_meanwhile(here: Path, grows: bool) -> None:
    weights = here / "out" / "part0" / "weights.bin"
    size = weights.stat().st_size

    def write(done: int, total: int) -> None:
        if done < total:
            with open(weights, "r+b") as file:
                file.seek(size if grows else 0)
                file.write(b"yy")

    with pytest.raises(PackError, match=r"part0/weights.bin was changed while it was packed"):
        write_pack("out", [0], "p.tar", progress=write)
    assert not (here / "p.tar").exists()


def test_a_partition_that_is_replaced_meanwhile(here: Path) -> None:
    def replace(done: int, total: int) -> None:
        if done < total:
            plan = here / "out" / "plan.json"
            plan.write_text(plan.read_text().replace("localize", "localise"))

    size = (here / "out" / "plan.json").stat().st_size
    with pytest.raises(PackError, match=r"the partition was replaced while it was packed"):
        write_pack("out", [0], "p.tar", progress=replace)
    assert (here / "out" / "plan.json").stat().st_size == size
    assert not (here / "p.tar").exists()


# -- large weights ------------------------------------------------------------------------------------------------


def sparse_partition(folder: Path, rows: int) -> Path:
    """A partition of a look-up in a table of rows x 1024 float32 that are all a hole."""
    with open(folder / "table.bin", "wb") as file:
        file.truncate(rows * 4096)
    table = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[rows, 1024], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "table.bin", "offset": "0", "length": str(rows * 4096)}.items():
        table.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "ids"], ["y"])],
        "lookup",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 1024])],
        [table],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(model, folder / "m.onnx")
    irpar.partition(irpar.load(folder / "m.onnx"), "tp=1").save(folder / "out")
    return folder / "out"


def test_holes_stay_holes(tmp_path: Path) -> None:
    out = sparse_partition(tmp_path, 1 << 14)
    told: list[tuple[int, int]] = []
    made = write_pack(out, [0], tmp_path / "p.tar", progress=lambda done, total: told.append((done, total)))
    assert made.size > 64 << 20
    assert made.path.stat().st_blocks * 512 < 4 << 20
    assert told[-1][0] == told[-1][1] > 64 << 20
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    unpacked(made.path, tmp_path / "host")
    assert (tmp_path / "host" / "out" / "part0" / "weights.bin").stat().st_size == 64 << 20
    assert len(open_parts(tmp_path / "host" / "out").parts) == 1


@pytest.mark.slow
def test_weights_of_more_than_8_gb(tmp_path: Path) -> None:
    made = write_pack(sparse_partition(tmp_path, 2_200_000), [0], tmp_path / "p.tar")
    assert made.path.stat().st_blocks * 512 < 4 << 20
    listed = subprocess.run(["tar", "-tvf", made.path], capture_output=True, text=True, check=True).stdout
    assert str(2_200_000 * 4096) in listed
    assert "out/plan.json" in listed
