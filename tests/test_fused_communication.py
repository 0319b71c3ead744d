"""fuse-communication on whole partitions: the same numbers to the last bit, one order on all ranks, in every group."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import irpar
from irpar.ir import Module, Node, verify
from irpar.ops.collectives import is_planned, sent_bytes
from irpar.ops.facts import int_attribute

from .budget import SHARE, budget
from .partition_runs import GROUPS, may_run_out, run_out, same
from .random_graphs import GraphMaker
from .random_programs import Program, loaded, programs
from .runtime.groups.mpi_libraries import find

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
ANY_TIME = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
WITHOUT = "fuse-communication{mode=off}"
WITH = (
    "fuse-communication",
    "fuse-communication{mode=size}",
    "fuse-communication{mode=size, size-mb=0.0001}",
    "fuse-communication{mode=index, indices=[2, 5]}",
    "fuse-communication{mode=size},extract-communication",
    "fuse-communication{mode=size},extract-communication{take=collectives}",
)
HOW = st.sampled_from(WITH)
MANY = 500 if SHARE >= 1 else 250
"""Of these programs one takes half a second."""


def products(maker: GraphMaker) -> None:
    """Two to five products of one tensor: partial over the same ranks where the dim that they sum over is sharded."""
    inner = maker.number(2, 12)
    shared = maker.fresh([maker.number(1, 6), inner], weight=False)
    for _ in range(maker.number(2, 5)):
        maker.node("MatMul", [shared, maker.fresh([inner, maker.number(1, 6)])])


PROGRAMS = programs(also=[products])


def pair(program: Program, folder: Path, how: str) -> tuple[irpar.Partition, irpar.Partition] | None:
    """A partition in which nothing is merged, and one with what is merged; None where there is no partition."""
    try:
        plain, fused = (
            irpar.partition(
                loaded(program, folder),
                program.mesh,
                pipeline=program.pipeline.replace("fuse-communication", passes),
                network=program.network,
            )
            for passes in (WITHOUT, how)
        )
    except irpar.IrparError:
        return None  # What cannot be partitioned is told elsewhere.
    return plain, fused


def searched(count: int, least: int = 5) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As many programs, always the same ones."""
    return settings(
        max_examples=budget(count, least),
        deadline=None,
        suppress_health_check=ANY_TIME,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
    )


def sequences(module: Module) -> set[tuple[int, ...]]:
    """The ids of communication in the order of each program."""
    called = [
        [int_attribute(node, "id") for node in graph.walk() if "id" in node.attributes and _is_sent(node)]
        for graph in module.graphs
    ]
    return {tuple(ids) for ids in called}


def _is_sent(node: Node) -> bool:
    return is_planned(node) or node.callee is not None


def bytes_sent(module: Module) -> list[int]:
    """What the devices of each program send, in programs without calls."""
    nodes = [[node for node in graph.walk() if is_planned(node)] for graph in module.graphs]
    return [sum(sent_bytes(node, module.mesh) for node in each) for each in nodes]


def test_random_programs_in_threads() -> None:
    """With an engine of two: many programs, some of which have something to merge."""
    merged = 0

    @searched(MANY)
    @given(PROGRAMS, HOW)
    def check(program: Program, how: str) -> None:
        nonlocal merged
        with tempfile.TemporaryDirectory() as name:
            found = pair(program, Path(name), how)
            if found is None:
                return
            plain, fused = found
            verify(fused.module)
            if len(sequences(plain.module)) == 1:
                assert len(sequences(fused.module)) == 1
            fewer = len(plain.plan.collectives) - len(fused.plan.collectives)
            assert fewer >= 0
            if not fused.module.functions:  # A byte that is cut is counted once where several are sent together.
                for before, after in zip(bytes_sent(plain.module), bytes_sent(fused.module), strict=True):
                    assert 0 <= before - after <= fewer
            merged += fewer > 0
            engine = program.engines[len(program.drawn) % len(program.engines)]
            try:
                expected = plain.executor(engine).run(program.inputs)  # type: ignore[arg-type]
            except irpar.IrparError:
                return  # What cannot be run is told elsewhere.
            executor = fused.executor(engine)  # type: ignore[arg-type]
            same(executor.run(program.inputs, check_replicas=True), expected)
            assert executor.log.differences(fused.plan.collectives) == []

    check()
    assert merged >= max(1, budget(MANY) // 50)  # One in seven of them.


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS[1:])
def test_random_programs_in_processes(group: str, capfd: pytest.CaptureFixture[str]) -> None:
    if group == "mpi" and isinstance(find("MPICH"), str):
        pytest.skip(str(find("MPICH")))
    merged = 0

    @searched(250, least=100)
    @given(PROGRAMS, HOW)
    def check(program: Program, how: str) -> None:
        nonlocal merged
        if not may_run_out(program):
            return
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = pair(program, folder, how)
            if found is None or len(found[0].plan.collectives) == len(found[1].plan.collectives):
                return
            merged += 1
            plain, fused = found
            fused.save(folder / "out")
            same(run_out(folder, program.inputs, group, program.mesh.size), plain.run(program.inputs, engine="ort"))

    check()
    assert merged
    capfd.readouterr()
