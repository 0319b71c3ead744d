"""What a run and a training step of one rank allocate at most, against what plan.json says of the rank."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import irpar
from irpar import models
from irpar.kernels.cuda import cublas_lt
from irpar.onnx_io import to_module
from irpar.verification.inputs import random_inputs

from . import held_blocks
from .findings import Context, Findings, markdown_table, problem_text

MOST_BEYOND = 1 << 20
"""Bytes that may be allocated beyond the plan."""
LISTED = 25
"""Rows of a listing."""
RUNS = 3
"""Of each program. The first does not count: it cannot write over the state that it begins with."""
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 512},
    "gpt": {"hidden": 128, "seq": 128, "vocab": 1000},
    "llama": {"hidden": 128, "seq": 128, "vocab": 1000},
    "moe": {"hidden": 128, "seq": 128, "vocab": 1000},
    "t5": {"hidden": 128},
    "vit": {"image": 64, "hidden": 128, "batch": 8},
    "resnet": {"image": 64, "width": 32, "batch": 8},
    "unet": {"image": 64},
    "dlrm": {"batch": 4096},
    "recurrent": {"batch": 64},
}
"""Builders of irpar.models, in sizes of which a fault would be larger than what is allowed."""


@dataclass(frozen=True)
class Program:
    """What is run.

    Attributes:
        name: that it is reported by.
        make: partitions it for one rank.
        runs: makes a run on an executor each time that it is asked for the next.
    """

    name: str
    make: Callable[[], irpar.Partition]
    runs: Callable[[irpar.Partition, Any], Iterator[None]]


def programs() -> Iterator[Program]:
    """Inference and a training step of each builder."""
    for family, size in SIZES.items():
        yield Program(f"{family}, inference", lambda family=family, size=size: _inference(family, size), _infer)
    for family, size in SIZES.items():
        yield Program(f"{family}, training step", lambda family=family, size=size: _step(family, size), _train)


def run(context: Context) -> Findings:
    """Run this process's share of the programs."""
    found = Findings(figures={"programs": {}})
    for number, program in enumerate(programs()):
        if not context.mine(number):
            continue
        if context.is_late:
            found.failures.append(f"out of time before {program.name}")
            break
        try:
            row = found.figures["programs"][program.name] = _measured(program, context)
            if listed := row.pop("held"):
                found.figures.setdefault("held", {})[program.name] = listed
            beyond = row["allocated"] - row["plan"] - MOST_BEYOND
            problem = f"{row['allocated']:,} bytes, {row['plan']:,} are planned" if beyond > 0 else None
        except Exception as error:
            problem = problem_text(error)
        found.check(f"{program.name}: {problem}" if problem else None)
    return found


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures for the report."""
    rows = [
        (
            name,
            *(f"{row[key]:,}" for key in ("weights", "peak", "plan", "allocated")),
            f"{row['allocated'] - row['plan']:+,}",
            *(f"{row[key]:,}" if row[key] else "" for key in ("workspace", "reserved")),
        )
        for name, row in figures.get("programs", {}).items()
    ]
    header = ("program", "weights", "peak of the plan", "weights and arena of the plan", "allocated at most")
    return [
        "Bytes that a rank on one device allocates at most in all runs but the first, weights, state and inputs among "
        "them, blocks of the pool as they are rounded up. Allowed: weights and arena as plan.json has them, and "
        f"{MOST_BEYOND:,} more. `workspace`: what cuBLASLt has of the stream beside it, whatever runs. "
        "`reserved`: what CuPy's pool holds of the device afterwards, free blocks among it.",
        "",
        *markdown_table((*header, "beyond", "workspace", "reserved"), rows),
        *(line for name, listed in figures.get("held", {}).items() for line in _listing(name, listed)),
    ]


def _listing(name: str, listed: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a program held when it held most."""
    header = ("bytes", "blocks", "functions that asked, the innermost first", "largest", "its node")
    rows = [
        (f"{row['bytes']:,}", row["blocks"], row["functions"], f"{row['largest']:,}", row["node"]) for row in listed
    ]
    return ["", f"{name}, at the most:", "", *markdown_table(header, rows)]


# -- what is run ------------------------------------------------------------------------------------------------------


def _inference(family: str, size: Mapping[str, Any]) -> irpar.Partition:
    return irpar.partition(to_module(models.build(family, **size)), "d=1")


def _step(family: str, size: Mapping[str, Any]) -> irpar.Partition:
    return irpar.partition(irpar.train_step(models.build(family, **size), loss="mse", optimizer="adamw"), "d=1")


def _infer(partition: irpar.Partition, executor: Any) -> Iterator[None]:
    inputs = _drawn(partition, executor)
    for _ in range(RUNS):
        executor.run(inputs)
        yield


def _train(partition: irpar.Partition, executor: Any) -> Iterator[None]:
    from irpar.runtime.session import Session

    batch = _drawn(partition, executor)
    with Session(executor) as session:
        for _ in range(RUNS):
            session.run(batch)
            yield


def _drawn(partition: irpar.Partition, executor: Any) -> dict[str, Any]:
    """Random inputs, but for the state, which begins as the program says."""
    assert partition.module is not None
    states = {state.spec.name for state in executor.states}
    return random_inputs([spec for spec in executor.inputs if spec.name not in states], partition.module.graph)


# -- what is measured -------------------------------------------------------------------------------------------------


def _measured(program: Program, context: Context) -> dict[str, Any]:
    with program.make() as partition:
        (rank,), (part,) = partition.plan.ranks, partition.plan.parts
        measure = _on_device if context.engine == "cupy" else _on_host
        allocated, workspace, reserved, held = measure(program, partition, context)
        weights = part["weight_bytes"]
        return {
            "weights": weights,
            "peak": rank["peak_bytes"],
            "plan": weights + rank["arena_bytes"],
            "allocated": allocated,
            "workspace": workspace,
            "reserved": reserved,
            "held": held,
        }


Measured = tuple[int, int, int, list[dict[str, Any]]]


def _on_device(program: Program, partition: irpar.Partition, context: Context) -> Measured:
    """What CuPy's pool gave out at most, workspaces apart; what these take; what the pool then holds; the listing."""
    import cupy

    gc.collect()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before, begin = cublas_lt.workspace_bytes(), pool.used_bytes()

    class Watch(cupy.cuda.MemoryHook):  # type: ignore[misc]
        """Looks whenever memory is given out to this thread, in which the only rank computes.

        Memory of CUDA graphs is taken from the default pool and given out by another, which tells of it too: what is
        used of the default pool is all of it once.
        """

        name = "irpar-memory-check"
        most = 0
        held = held_blocks.HeldBlocks(pool.used_bytes) if context.lists else None

        def begin(self) -> None:
            self.most = pool.used_bytes()
            if self.held is not None:
                self.held.begin()

        def malloc_postprocess(self, *, pmem_id: int, **_: int) -> None:
            self.most = max(self.most, pool.used_bytes())
            if self.held is not None:
                self.held.given(pmem_id)

        def free_postprocess(self, *, pmem_id: int, **_: int) -> None:
            if self.held is not None:
                self.held.taken_back(pmem_id)

    # By NCCL the state that stays with a rank from step to step stays on its device.
    group = context.group if partition.plan.state else "threads"
    with Watch() as watch, partition.executor(context.engine, group) as executor:
        for number, _ in enumerate(program.runs(partition, executor)):
            if number == 0:
                watch.begin()
        workspace = cublas_lt.workspace_bytes() - before
        listed = [] if watch.held is None else held_blocks.rows(watch.held.at_most, LISTED)
        return watch.most - begin - workspace, workspace, pool.total_bytes(), listed


def _on_host(program: Program, partition: irpar.Partition, context: Context) -> Measured:
    """The same without a device, for development: what NumPy allocates, and Python, for runs."""
    (part,) = partition.plan.parts
    with partition.executor(context.engine) as executor, _traced():
        for number, _ in enumerate(program.runs(partition, executor)):
            if number == 0:
                tracemalloc.reset_peak()
        return tracemalloc.get_traced_memory()[1] + part["weight_bytes"], 0, 0, []


@contextmanager
def _traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
