"""The group of GPUs on one: ranks share it, as docs/clusters.md tells."""

from pathlib import Path

import onnx
import pytest

import irpar
from irpar import models
from irpar.sharding import Mesh

from .launched_ranks import run_ranks


@pytest.mark.gpu
@pytest.mark.parametrize(("mesh", "seeds"), [("x=2", 20), ("a=2,b=2", 6)])
def test_gpu_collectives(mesh: str, seeds: int) -> None:
    count = Mesh.parse(mesh).size
    for rank in run_ranks(count, "nccl", "collectives", mesh, f"0-{seeds - 1}:3", seconds=240, nccl=True):
        assert rank.code == 0, rank.err
        assert "collectives are right" in rank.out


@pytest.mark.gpu
def test_gpu_large_collectives() -> None:
    for rank in run_ranks(2, "nccl", "collectives", "x=2", "0-1:20000", seconds=120, nccl=True):
        assert rank.code == 0, rank.err


@pytest.mark.gpu
def test_gpu_program() -> None:
    driver, *others = run_ranks(4, "nccl", "mlp", seconds=90, nccl=True)
    assert (driver.code, driver.out.splitlines()[-1:]) == (0, ["the numbers are right"]), driver.err
    assert [rank.code for rank in others] == [0] * 3, others


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("kill-before", "rank 2 (dp=1, tp=0) failed: it ended without a word"),
        ("kill-begun", "rank 2 (dp=1, tp=0) failed: it ended without a word"),
        ("kill-met", "rank 2 (dp=1, tp=0) failed: it ended without a word"),
        ("kill-met-1", "rank 2 (dp=1, tp=0) failed: it ended without a word"),
        ("exit-met", "rank 2 (dp=1, tp=0) failed: it ended without a word"),
        ("fail-before", "rank 2 (dp=1, tp=0) failed: the disk is gone"),
        ("fail-met", "rank 2 (dp=1, tp=0) failed: the disk is gone"),
    ],
)
def test_gpu_a_rank_that_fails(fault: str, told: str) -> None:
    ranks = run_ranks(4, "nccl", "mlp", fault, seconds=60, nccl=True)
    assert all(rank.code for rank in ranks)
    for rank in (0, 1, 3):
        assert told in ranks[rank].err, ranks[rank].err
        assert "Traceback" not in ranks[rank].err


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("hang-before", "rank 2 (dp=1, tp=0) did not come to collective 0 in 5 s"),
        ("hang-met", "collective 0 did not end in 5 s, though all its ranks came to it"),
        ("hang-met-1", "rank 2 (dp=1, tp=0) did not come to collective 0 in 5 s"),
    ],
)
def test_gpu_a_rank_that_hangs(fault: str, told: str) -> None:
    ranks = run_ranks(4, "nccl", "mlp", fault, "5", seconds=40, nccl=True, hanging=2)
    assert any(told in rank.err for rank in ranks), ranks
    assert all(rank.code == 1 for number, rank in enumerate(ranks) if number != 2), ranks


@pytest.mark.gpu
def test_gpu_program_in_a_graph() -> None:
    driver, *others = run_ranks(4, "nccl", "captured", seconds=90, nccl=True)
    assert (driver.code, driver.out.splitlines()[-1:]) == (0, ["the numbers are right"]), driver.err
    assert [rank.code for rank in others] == [0] * 3, others


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("kill", "rank 2 (dp=1, tp=0) failed: it ended without a word"),
        ("hang", "a CUDA graph with collectives did not end in"),
    ],
)
def test_gpu_a_rank_that_fails_where_others_replay(fault: str, told: str) -> None:
    hanging = 2 if fault == "hang" else None
    ranks = run_ranks(4, "nccl", "captured", fault, "5", seconds=45, nccl=True, hanging=hanging)
    assert any(told in rank.err for rank in ranks), ranks
    assert all(rank.code for number, rank in enumerate(ranks) if number != hanging), ranks


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["hang-met-1", "kill-met-1"])
def test_gpu_a_rank_for_which_nccl_waits_to_connect(fault: str) -> None:
    hanging = 3 if fault.startswith("hang") else None
    ranks = run_ranks(4, "nccl", "mlp", fault, "5", "3", seconds=40, nccl=True, hanging=hanging)
    told = (
        "rank 3 (dp=1, tp=1) did not connect with NCCL for collective 0"
        if hanging
        else "rank 3 (dp=1, tp=1) failed: it ended without a word"
    )
    assert told in ranks[2].err, ranks
    assert all(rank.code == 1 for rank in ranks[:3]), ranks


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["id", "kind", "dtype", "shape"])
def test_gpu_ranks_that_do_not_fit(what: str) -> None:
    for rank in run_ranks(2, "nccl", "unlike", "2", what, nccl=True):
        assert rank.code == 1
        assert "rank 0 (x=0) is at AllReduce id=0 over x" in rank.err
        assert "rank 1 (x=1) is at" in rank.err


@pytest.mark.gpu
def test_gpu_another_order_over_another_axis() -> None:
    for rank in run_ranks(4, "nccl", "crossed", nccl=True):
        assert rank.code == 1
        assert "is at AllReduce id=0 over a" in rank.err
        assert "is at AllReduce id=1 over b" in rank.err


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "engine"), [("mlp", "numpy"), ("gpt", "cupy"), ("llama", "cupy"), ("moe", "cupy")])
def test_gpu_families(family: str, engine: str, tmp_path: Path) -> None:
    path = tmp_path / f"{family}.onnx"
    onnx.save(models.build(family), path)
    module = irpar.load(path)
    for name, spec in models.annotations(family).items():
        module.shard(name, [[axis for axis in dim or () if axis == "tp"] or None for dim in spec])
    with irpar.partition(module, Mesh({"tp": 2})) as partition:
        partition.save(tmp_path / "partitions" / family)
    folder = str(tmp_path / "partitions")
    driver, other = run_ranks(2, "nccl", "partitions", folder, engine, "1e-4", seconds=90, nccl=True)
    assert (driver.code, other.code) == (0, 0), driver.err + other.err
    assert driver.out.splitlines()[-1].startswith(f"{family} is right: ")


@pytest.mark.gpu
def test_gpu_ranks_on_one_device_without_being_asked() -> None:
    for rank in run_ranks(2, "nccl", "unlike", "2", "id"):
        assert rank.code == 1
        assert "ranks 0 and 1 have one GPU of" in rank.err
