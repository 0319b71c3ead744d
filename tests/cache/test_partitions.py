"""Commands with a cache write what they write without one, byte for byte, and print the same."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from irpar import models
from irpar.cache import key, partitions
from irpar.cache.partitions import PartitionCache
from irpar.cli import main
from tests.budget import every, pairs
from tests.patience import patient

SURROUNDINGS = functools.cache(key._surroundings)
SHARDINGS = '{"tensors": {"h.*.mlp.c_fc.weight": [null, ["tp"]]}}'
PLANNED, WRITTEN_AGAIN = False, True


@pytest.fixture(autouse=True)
def _settled(monkeypatch):
    """Files that a test has just written count as old enough; what is installed stays as it is."""
    monkeypatch.setattr(partitions, "_SETTLED_NS", 0)
    monkeypatch.setattr(key, "_surroundings", SURROUNDINGS)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("IRPAR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("IRPAR_CACHE_LIMIT", "1GB")
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    onnx.save(models.build("gpt", layers=1), tmp_path / "gpt.onnx")
    (tmp_path / "s.json").write_text(SHARDINGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., tuple[bool, str]]:
    """Runs a command; gives whether it wrote what it found, and what it printed."""
    found = []

    def restore(self, *arguments, **options):
        found.append(RESTORE(self, *arguments, **options))
        return found[-1]

    monkeypatch.setattr(PartitionCache, "restore", restore)

    def run(*arguments: str, code: int = 0) -> tuple[bool, str]:
        found.clear()
        capsys.readouterr()
        assert main(arguments) == code
        return any(each is not None for each in found), capsys.readouterr().out

    return run


RESTORE = PartitionCache.restore
PARTITION = ("partition", "gpt.onnx", "--mesh", "tp=2", "--shardings", "s.json", "--force", "-o")
TRAIN = ("train", "gpt.onnx", "--mesh", "tp=2", "--shardings", "s.json", "--force", "--loss", "cross_entropy", "-o")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("command", "weights"), pairs([PARTITION, TRAIN, (*TRAIN[:-1], "--precision", "bf16", "-o")], ["copy", "none"])
)
def test_the_same_bytes_and_the_same_words(cache, folder, run, command, weights):
    command = (command[0], *(("--weights", weights)), *command[1:])
    assert run(*command, "out", "--no-cache")[0] is PLANNED
    without = files(folder / "out")
    assert not cache.exists()
    is_again, first = run(*command, "out")
    assert is_again is PLANNED
    is_again, second = run(*command, "out")
    assert is_again is WRITTEN_AGAIN
    assert (second, files(folder / "out")) == (first, without)
    assert any(name.endswith("weights.bin") for name in without) is (weights == "copy" or command[0] == "train")


def test_json_says_the_same(cache, folder, run):
    first = json.loads(run(*PARTITION, "out", "--json")[1])
    is_again, text = run(*PARTITION, "out", "--json")
    assert is_again is WRITTEN_AGAIN
    assert json.loads(text) == first


def test_no_weights_are_in_the_cache(cache, folder, run):
    run(*PARTITION, "out")
    (entry,) = cache.iterdir()
    held = sum(path.stat().st_size for path in (folder / "out").rglob("weights.bin"))
    weight = numpy_helper.to_array(
        next(w for w in onnx.load("gpt.onnx").graph.initializer if w.name == "h.0.mlp.c_fc.weight")
    )
    decoded = partitions.Entry.decode(entry.read_bytes()[32:])
    assert held > weight.nbytes
    assert not any(weight[0].tobytes() in content for content in (*decoded.files.values(), decoded.numbers))


OTHERS = {
    "mesh": ("--mesh", "tp=4"),
    "set": ("--set", "input_ids=1"),
    "pipeline": ("--pipeline", "infer-types,complete-sharding,insert-redistribution,localize"),
    "network": ("--network", "h100-nvlink-ib"),
    "network file": ("--network", "n.yaml"),
    "weights": ("--weights", "none"),
    "redistribution": ("--max-redistribution-mb", "1000"),
    "configuration": ("--configuration", "none"),
}


def test_other_options_are_other_partitions(cache, folder, run):
    Path("n.yaml").write_text("links: [{name: wire, latency: 1e-6, bandwidth: 1e9}]")
    others = [(*PARTITION[:-1], *options, "-o") for options in OTHERS.values()]
    check_others(run, PARTITION, others)


def test_other_sizes_are_other_partitions(cache, folder, run):
    onnx.save(models.build("gpt", layers=1, dynamic=True), "gpt.onnx")
    four, two = ((*PARTITION[:-1], "--bind", f"batch={batch}", "--bind", "seq=32", "-o") for batch in (4, 2))
    check_others(run, four, [two])


def check_others(run, base, others):
    for command in (base, *others):
        assert run(*command, "out")[0] is PLANNED, command
    for command in (base, *others):
        assert run(*command, "out")[0] is WRITTEN_AGAIN, command


def test_files_that_change_are_other_partitions(cache, folder, run):
    (folder / "n.yaml").write_text("links: [{name: wire, latency: 1e-6, bandwidth: 1e9}]")
    command = (*PARTITION[:-1], "--network", "n.yaml", "-o")
    run(*command, "out")
    assert run(*command, "out")[0] is WRITTEN_AGAIN
    (folder / "n.yaml").write_text("links: [{name: wire, latency: 1e-6, bandwidth: 2e9}]")
    assert run(*command, "out")[0] is PLANNED
    (folder / "s.json").write_text(SHARDINGS.replace("c_fc", "proj").replace('null, ["tp"]', '["tp"], null'))
    assert run(*command, "out")[0] is PLANNED
    onnx.save(models.build("gpt", layers=1, seed=1), "gpt.onnx")
    assert run(*command, "out")[0] is PLANNED
    assert run(*command, "out")[0] is WRITTEN_AGAIN


def test_values_of_files_count(cache, folder, run):
    np.save("ids.npy", np.zeros((4, 32), np.int64))
    command = (*PARTITION[:-1], "--set", "input_ids=ids.npy", "-o")
    run(*command, "out")
    assert run(*command, "out")[0] is WRITTEN_AGAIN
    np.save("ids.npy", np.ones((4, 32), np.int64))
    assert run(*command, "out")[0] is PLANNED


def test_options_of_training_count(cache, folder, run):
    onnx.save(models.build("mlp"), "mlp.onnx")
    train = ("train", "mlp.onnx", "--mesh", "tp=2", "--force", "--loss", "mse", "-o", "out")
    run(*train)
    for options in (("--optimizer", "sgd"), ("--lr", "0.5"), ("--seed", "3"), ("--dropout", "*=0.5")):
        assert run(*train, *options)[0] is PLANNED
    assert run(*train)[0] is WRITTEN_AGAIN


def test_external_data_that_changes(cache, folder, run):
    onnx.save(models.build("gpt", layers=1), "gpt.onnx", save_as_external_data=True, location="gpt.data")
    run(*PARTITION, "out")
    first = files(folder / "out")
    assert run(*PARTITION, "out")[0] is WRITTEN_AGAIN
    assert files(folder / "out") == first
    data = bytearray(Path("gpt.data").read_bytes())
    data[4096] ^= 1
    known = os.stat("gpt.data")
    Path("gpt.data").write_bytes(data)
    os.utime("gpt.data", ns=(known.st_atime_ns, known.st_mtime_ns))  # Whoever copies with times kept does so.
    assert run(*PARTITION, "out")[0] is PLANNED
    assert run(*PARTITION, "out")[0] is WRITTEN_AGAIN
    again = files(folder / "out")
    assert run(*PARTITION, "out", "--no-cache")[0] is PLANNED
    assert files(folder / "out") == again != first


def test_external_data_of_a_moment_ago_is_not_trusted(cache, folder, run, monkeypatch):
    monkeypatch.setattr(partitions, "_SETTLED_NS", 3600 * 10**9)
    onnx.save(models.build("gpt", layers=1), "gpt.onnx", save_as_external_data=True, location="gpt.data")
    run(*PARTITION, "out")
    assert not cache.exists()


def test_external_data_that_is_gone(cache, folder, run, capsys):
    onnx.save(models.build("gpt", layers=1), "gpt.onnx", save_as_external_data=True, location="gpt.data")
    run(*PARTITION, "out")
    Path("gpt.data").unlink()
    assert main([*PARTITION, "out"]) == 2
    assert "gpt.data" in capsys.readouterr().err


def test_the_same_model_elsewhere_is_another_one(cache, folder, run, monkeypatch):
    run(*PARTITION, "out")
    (folder / "elsewhere").mkdir()
    for name in ("gpt.onnx", "s.json"):
        (folder / "elsewhere" / name).write_bytes((folder / name).read_bytes())
    monkeypatch.chdir(folder / "elsewhere")
    assert run(*PARTITION, "out")[0] is PLANNED
    assert json.loads(Path("out/plan.json").read_text())["source"]["model"] == str(folder / "elsewhere" / "gpt.onnx")


WATCHED = [
    ("--timing",),
    ("--statistics",),
    ("--verify-each",),
    ("--dump-ir", "dump"),
    ("--annotate", "annotated.onnx"),
]


@pytest.mark.parametrize("options", every(2, [*WATCHED, ("--print-ir-after", "localize"), ("--no-cache",)]))
def test_who_watches_the_passes_sees_them(cache, folder, run, options):
    assert run(*PARTITION, "first", *options)[0] is PLANNED
    assert not cache.exists()
    run(*PARTITION, "out")
    assert run(*PARTITION, "out", *options)[0] is PLANNED


def test_a_target_that_may_not_be_replaced(cache, folder, run, capsys):
    command = tuple(word for word in PARTITION if word != "--force")
    run(*command, "out")
    before = files(folder / "out")
    run(*command, "out", code=2)
    assert run(*command, "other")[0] is WRITTEN_AGAIN
    assert files(folder / "other") == files(folder / "out") == before


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"", lambda data: data[:-9] + b"otherwise"])
def test_a_damaged_entry_is_made_again(cache, folder, run, damage):
    run(*PARTITION, "out")
    first = files(folder / "out")
    (entry,) = cache.iterdir()
    kept = entry.read_bytes()
    entry.write_bytes(damage(kept))
    assert run(*PARTITION, "out")[0] is PLANNED
    assert entry.exists()
    assert run(*PARTITION, "out")[0] is WRITTEN_AGAIN
    assert files(folder / "out") == first


@pytest.mark.parametrize(
    "content", [b"none", partitions.Entry({}).encode(), partitions.Entry({}, files={"plan.json": b"{}"}).encode()]
)
def test_an_entry_of_something_else_is_made_again(cache, folder, run, content):
    run(*PARTITION, "out")
    (entry,) = cache.iterdir()
    partitions.CacheFolder(cache, 1 << 20).store(entry.stem, content)
    assert run(*PARTITION, "out")[0] is PLANNED
    assert run(*PARTITION, "out")[0] is WRITTEN_AGAIN


def test_files_outside_the_folder_are_not_written():
    for path in ("../plan.json", "/plan.json"):
        with pytest.raises(ValueError, match="outside"):
            partitions.Entry.decode(partitions.Entry({}, files={path: b"{}"}).encode())


def test_a_cache_that_cannot_be_written_is_none(cache, folder, run, monkeypatch):
    (folder / "file").write_bytes(b"")
    monkeypatch.setenv("IRPAR_CACHE_DIR", str(folder / "file" / "cache"))
    for _ in range(2):
        assert run(*PARTITION, "out")[0] is PLANNED


def test_a_full_disk_is_none(cache, folder, run, monkeypatch):
    from irpar.cache import folder as cache_folder

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_folder, "new_file", full)
    for _ in range(2):
        assert run(*PARTITION, "out")[0] is PLANNED


def test_what_is_larger_than_the_cache_is_not_kept(cache, folder, run, monkeypatch):
    monkeypatch.setenv("IRPAR_CACHE_LIMIT", "10KB")
    for _ in range(2):
        assert run(*PARTITION, "out")[0] is PLANNED


def test_a_limit_that_cannot_be_read(cache, folder, run, capsys, monkeypatch):
    monkeypatch.setenv("IRPAR_CACHE_LIMIT", "much")
    assert main([*PARTITION, "out"]) == 2
    assert 'IRPAR_CACHE_LIMIT is "much"' in capsys.readouterr().err


def test_many_numbers_that_no_file_has_are_not_kept(cache, tmp_path, monkeypatch, run):
    """A Constant node of 2 MiB, which is no initializer: nobody looks for it in the file."""
    monkeypatch.chdir(tmp_path)
    weight = numpy_helper.from_array(np.arange(1 << 19, dtype=np.float32).reshape(512, 1024))
    nodes = [helper.make_node("Constant", [], ["w"], value=weight), helper.make_node("MatMul", ["x", "w"], ["y"])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 512])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 1024])]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), "m.onnx")
    command = ("partition", "m.onnx", "--mesh", "tp=2", "--force", "-o", "out")
    for _ in range(2):
        assert run(*command)[0] is PLANNED
    assert not cache.exists()
    run(*command, "--weights", "none")
    assert run(*command, "--weights", "none")[0] is WRITTEN_AGAIN


def test_a_model_that_changes_meanwhile_is_not_kept(cache, folder, run, monkeypatch):
    from irpar.commands import partition

    write = partition._write_new

    def changing(*arguments):
        (folder / "s.json").write_text(SHARDINGS + " ")
        return write(*arguments)

    monkeypatch.setattr(partition, "_write_new", changing)
    run(*PARTITION, "out")
    assert not cache.exists()


def test_two_at_once(cache, folder):
    command = [sys.executable, "-m", "irpar", *PARTITION]
    for _ in range(2):  # None has it, both have it.
        both = [subprocess.Popen([*command, name], stdout=subprocess.PIPE) for name in ("first", "second")]
        printed = [process.communicate(timeout=patient(120))[0] for process in both]
        assert [process.returncode for process in both] == [0, 0]
        assert printed[0].replace(b"first", b"second") == printed[1]
        assert files(folder / "first") == files(folder / "second")
        assert len(list(cache.iterdir())) == 1


def test_without_weights_nothing_is_imported_that_plans(cache, folder, run):
    command = [*PARTITION[:-1], "--weights", "none", "-o", "out"]
    run(*command)
    code = f"import sys; from irpar.cli import main; assert main({command}) == 0; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60), check=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "irpar.cache.partitions" in imported
    assert not imported & {"numpy", "onnx", "irpar.ir", "irpar.passes", "irpar.api"}
