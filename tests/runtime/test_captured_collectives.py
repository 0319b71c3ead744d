"""Collectives captured with their segments, ranks in threads, on a stand-in for a device and its graphs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.training_facts import facts_of
from irpar.onnx_io import to_module
from irpar.runtime.communication import Choice, Communication
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call
from irpar.runtime.groups.results import EXECUTED
from irpar.runtime.groups.spmd import Finish
from irpar.training.trainer import Trainer
from irpar.verification.inputs import random_inputs
from tests import strict_graphs
from tests.runtime.devices import strict_device
from tests.runtime.groups.spmd_threads import ThreadRank, run_ranks
from tests.runtime.programs import STARTED, module
from tests.strict_device import StrictArray
from tests.training.programs import batch, classifier, on_mesh


class CapturingRank(ThreadRank):
    """A rank whose collectives can be captured: what is replayed meets the others again.

    Attributes:
        one_by_one: how many collectives were done outside of graphs.
        graphs: what was captured.
    """

    takes_device_arrays = True
    captures = True

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.one_by_one = 0
        self.graphs: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def _begin(self, call: Call) -> Finish:
        assert isinstance(call.operand, StrictArray)
        self.one_by_one += 1
        finish = super()._begin(Call(call.rank, call.coords, call.collective, call.operand._array.copy()))
        return lambda: StrictArray(np.array(finish()))

    def can_capture(self, collective: Any, dtype: Any) -> bool:
        return len(self.members(collective.axes)) > 1

    def capture(self, call: Call) -> Any:
        """Begins at once, and is noted."""
        meeting = self._meeting(call)

        def exchange(operand: np.ndarray) -> np.ndarray:
            number = self._numbers[meeting.collective] = self._numbers.get(meeting.collective, 0) + 1
            key = "captured", meeting.collective.id, number
            for peer in meeting.members:
                self.wires.data[(*key, self.rank, peer)].put(operand.copy())
            operands = [self._get((*key, peer, self.rank), peer) for peer in meeting.members]
            return np.array(EXECUTED[meeting.collective.kind].result(meeting.collective, operands, meeting.position))

        return StrictArray(strict_graphs.launch(exchange, (call.operand._array,), {}))

    def captured_result(self, begun: Any) -> Any:
        return begun

    def watch(self, stream: Any, seconds: float) -> None:
        assert seconds >= 0

    def add_graph(self, graph: Any) -> None:
        self.graphs.append(graph)


@pytest.fixture
def ranks() -> list[CapturingRank]:
    """Those of the last run."""
    return []


def run(
    partition: irpar.Partition, drive: Callable[[Executor], Any], ranks: list[CapturingRank]
) -> tuple[Any, dict[int, BaseException]]:
    """Let every rank run on the stand-in, in a thread."""
    assert partition.module is not None
    module, mesh = partition.module, partition.module.mesh

    def make(rank: ThreadRank) -> Executor:
        ranks.append(CapturingRank(mesh, rank.rank, rank.wires))
        return Executor(module, mesh, engine="cupy", group=ranks[-1], parts=partition.parts)

    with strict_device():
        return run_ranks(mesh, make, drive)


def split(family: str, mesh: str = "dp=1,tp=2", pipeline: str = "") -> tuple[irpar.Partition, Any]:
    """A family over two ranks, and its inputs."""
    loaded = to_module(models.build(family))
    irpar.annotate(loaded, models.annotations(family, "dp", "tp"))
    partition = irpar.partition(loaded, irpar.Mesh.parse(mesh))
    if pipeline:
        partition = irpar.partition(loaded, irpar.Mesh.parse(mesh), pipeline=f"{partition.plan.pipeline},{pipeline}")
    specs = partition.executor("numpy").inputs
    return partition, [random_inputs(specs, loaded.graph, seed=seed) for seed in range(5)]


def driven(inputs: Any, expected: Any, records: Any) -> Callable[[Executor], None]:
    """What a driver does: runs, whose results and collectives are those of another executor."""

    def drive(executor: Executor) -> None:
        for given, wanted in zip(inputs, expected, strict=True):
            found = executor.run(given)
            for name, array in wanted.items():
                np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4)
            assert list(executor.log) == records

    return drive


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [
        ("mlp", ""),
        pytest.param("gpt", "", marks=pytest.mark.slow),
        pytest.param("gpt", "extract-communication", marks=pytest.mark.slow),
    ],
)
def test_a_program_is_one_graph_with_its_collectives(family: str, pipeline: str, ranks: list[CapturingRank]) -> None:
    """Where they are no functions; the log tells of each run of a collective."""
    partition, inputs = split(family, pipeline=pipeline)
    plain = partition.executor("numpy")
    expected = [plain.run(given) for given in inputs]
    records = list(plain.log)
    assert records
    _, raised = run(partition, driven(inputs, expected, records), ranks)
    assert not raised
    is_one = pipeline != "extract-communication"
    assert {rank.one_by_one for rank in ranks} == {len(records) * (1 if is_one else len(inputs))}
    assert {len(rank.graphs) for rank in ranks} == {int(is_one)}


@pytest.mark.parametrize("lost", [0, 1])
def test_no_rank_captures_what_one_cannot(
    lost: int, ranks: list[CapturingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, inputs = split("mlp")
    plain = partition.executor("numpy")
    expected = [plain.run(given) for given in inputs]

    def failing(self: CapturingRank, call: Call) -> Any:
        if self.rank == lost:
            raise MemoryError("no room")
        return StrictArray(call.operand._array.copy())

    monkeypatch.setattr(CapturingRank, "capture", failing)
    _, raised = run(partition, driven(inputs, expected, list(plain.log)), ranks)
    assert not raised
    assert {rank.one_by_one for rank in ranks} == {len(list(plain.log)) * len(inputs)}
    assert not any(rank.graphs for rank in ranks)


def test_programs_that_differ_run_their_collectives_one_by_one(
    ranks: list[CapturingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, inputs = split("mlp")
    plain = partition.executor("numpy")
    expected = [plain.run(given) for given in inputs]
    joins = Communication.joins
    monkeypatch.setattr(Communication, "joins", lambda self, node: self.group.rank == 0 and joins(self, node))
    _, raised = run(partition, driven(inputs, expected, list(plain.log)), ranks)
    assert not raised
    assert {rank.one_by_one for rank in ranks} == {len(list(plain.log)) * len(inputs)}


@pytest.mark.slow
def test_a_training_step_replays_its_collectives(ranks: list[CapturingRank]) -> None:
    partition = on_mesh(classifier(optimizer="adamw"), "dp=2")
    with partition.trainer(engine="numpy") as trainer:
        losses = [trainer.step(batch(number)) for number in range(6)]
        expected = trainer.read_all()
    assert partition.module is not None
    facts = facts_of(partition.module.metadata)
    assert facts is not None

    def drive(executor: Executor) -> None:
        trainer = Trainer(executor, facts)
        np.testing.assert_allclose([trainer.step(batch(number)) for number in range(6)], losses, rtol=1e-5)
        for name, array in trainer.read_all().items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-5)

    _, raised = run(partition, drive, ranks)
    assert not raised
    assert all(rank.graphs for rank in ranks)


def test_what_has_begun_is_waited_for_in_the_graph(ranks: list[CapturingRank]) -> None:
    mesh, given = irpar.Mesh({"x": 2}), {name: np.arange(4, dtype=np.float32) for name in "ab"}
    expected = Executor(module(STARTED), mesh, engine="numpy").run(given)

    def drive(executor: Executor) -> None:
        for _ in range(4):
            for name, found in executor.run(given).items():
                np.testing.assert_allclose(found, expected[name], rtol=1e-6)
        assert len(executor.log) == 2

    def make(rank: ThreadRank) -> Executor:
        ranks.append(CapturingRank(mesh, rank.rank, rank.wires))
        return Executor(module(STARTED), mesh, engine="cupy", group=ranks[-1])

    with strict_device():
        _, raised = run_ranks(mesh, make, drive)
    assert not raised
    assert {len(rank.graphs) for rank in ranks} == {1}


def test_ranks_do_what_all_of_them_can() -> None:
    def agreed(*choices: int) -> int:
        group: Any = SimpleNamespace(agree=lambda choice: list(choices))
        return Communication(group, (0,)).agree(choices[0])

    first = int(Choice.GRAPH)
    assert agreed(first, first) == first
    assert agreed(first, first + 1) == Choice.CAPTURE
    assert agreed(first, Choice.CAPTURE) == Choice.CAPTURE
    assert agreed(Choice.CAPTURE, Choice.ONE_BY_ONE) == Choice.ONE_BY_ONE
    assert agreed(first, Choice.NEVER, Choice.ONE_BY_ONE) == Choice.NEVER
