"""What ranks of one run have in common, and those of others have not."""

import os
import sys
import time
from dataclasses import replace

from irpar.runtime.environment import World
from irpar.runtime.groups.shared_memory.joining import _run_key
from irpar.runtime.groups.shared_memory.system import parent_of, process_state, processor_time, start_of

WORLD = World(0, 4, launcher="torchrun", run_id="none-0", master_port=29500)


def test_ranks_of_one_run_have_one_key() -> None:
    assert _run_key(WORLD) == _run_key(replace(WORLD, rank=3, local_rank=3))


def test_other_runs_have_other_keys() -> None:
    others = [
        replace(WORLD, run_id="none-1"),
        replace(WORLD, master_port=29501),
        replace(WORLD, size=8),
        World(0, 4, launcher="MPICH"),
        World(0, 4, launcher="irpar launch", run_id="x"),
    ]
    assert len({_run_key(world) for world in [WORLD, *others]}) == 1 + len(others)


def test_where_nothing_names_the_run_the_process_does_that_started_the_ranks(monkeypatch) -> None:
    monkeypatch.delenv("PMI_RANK", raising=False)
    key = _run_key(World(0, 4, launcher="MPICH"))
    assert f" {os.getppid()} {start_of(os.getppid())}" in key


def test_what_the_system_tells_of_a_process() -> None:
    assert parent_of(os.getpid()) == os.getppid()
    assert process_state(os.getpid()) == "R"
    until = time.process_time() + 0.05
    before = processor_time(os.getpid())
    while time.process_time() < until:
        pass
    after = processor_time(os.getpid())
    assert before is not None
    assert after is not None
    assert after > before


def test_of_a_process_that_is_not_there_nothing_is_told() -> None:
    gone = sys.maxsize
    assert (process_state(gone), processor_time(gone), parent_of(gone)) == ("", None, 0)
