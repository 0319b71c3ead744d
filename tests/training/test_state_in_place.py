"""State that a step of training replaces: it is written over, let go, and never half new."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.analysis.memory.liveness import held_bytes, nested_bytes, roots_of, value_bytes
from irpar.analysis.memory.replaced import update_of, written_over
from irpar.ir import Graph, Node, Value
from irpar.pass_manager.default_pipeline import with_zero
from irpar.runtime.engines.arrays import Arrays
from irpar.runtime.engines.numpy import NumpyEngine
from irpar.runtime.engines.operation import Environment
from irpar.runtime.errors import StateLostError
from irpar.runtime.executor import Executor
from irpar.runtime.instructions import Commit, Compute, Free
from irpar.runtime.program import build_program
from irpar.runtime.rank_state import RankState
from irpar.runtime.tape import ComputeStep
from irpar.training.trainer import NotFiniteError, Trainer
from tests.budget import every, pairs
from tests.training.programs import MESHES, batch, classifier, on_mesh, same

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "momentum": {},
    "adam": {"optimizer": "adam", "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw"},
    "lamb": {"optimizer": "lamb"},
    "clipped": {"optimizer": "adamw", "clip_norm": 0.1},
    "bf16": {"optimizer": "adamw", "precision": "bf16"},
    "fp16": {"optimizer": "adamw", "precision": "fp16", "loss_scale": "dynamic"},
}


def zero_partition(step: irpar.Module, stage: int, mesh: str = "dp=2,tp=2") -> irpar.Partition:
    for name, cut in MESHES["dp=2,tp=2"].items():
        step.shard(name, cut)
    return irpar.partition(step, mesh, pipeline=with_zero(f"zero{{stage={stage}, threshold-kb=0}}") if stage else None)


CASES = pairs(list(OPTIONS), (None, 0, 1, 3))
"""Options, and the stage of ZeRO on four ranks; None: on one device."""


def made(name: str, stage: int | None) -> irpar.Partition:
    step = classifier(**OPTIONS[name])
    return on_mesh(step, "d=1") if stage is None else zero_partition(step, stage)


class Watch:
    """The bytes that a rank and the session hold of the values of a graph while each node runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[Node, int] = {}
        """While the nodes of the graph run, and those of the bodies in it: the most in any trip."""
        self._rank: RankState | None = None
        compute, kernel = RankState.compute, Arrays.kernel

        def watched_compute(state: RankState, step: Any) -> None:
            self._rank = state if state.rank == 0 else None
            compute(state, step)

        def watched_kernel(arrays: Arrays, node: Node, *arguments: Any) -> Any:
            run = kernel(arrays, node, *arguments)

            def watched(inputs: list[Any], environment: Environment) -> Sequence[Any]:
                results = run(inputs, environment)
                self._note(node, environment)
                return results

            return watched

        monkeypatch.setattr(RankState, "compute", watched_compute)
        monkeypatch.setattr(Arrays, "kernel", watched_kernel)

    def look_at(self, executor: Executor) -> Graph:
        """Note what rank 0 does of an executor's ranks."""
        graph = executor.parts[0].graph
        self._graphs = set(graph.graphs())
        self._roots = {value: root for inner in self._graphs for value, root in roots_of(inner).items()}
        self._over = written_over(graph)
        self._names = {value.source_name: value for value in graph.states}
        self._states = executor._held
        return graph

    def _note(self, node: Node, environment: Environment) -> None:
        if self._rank is None or node.graph not in self._graphs:
            return
        of_session = self._states._held.get(1, {}).get(0, {})
        states = (self._names[name] for name in of_session)
        written = chain.from_iterable(node.results for node in environment.into)
        under = (self._over[value] for value in written if value in self._over)
        values = set(chain(self._rank.held(), environment, node.results, states, under))
        roots = {root for value in values if not (root := self._root(value)).is_constant}
        self.held[node] = max(self.held.get(node, 0), sum(map(value_bytes, roots)))

    def _root(self, value: Value) -> Value:
        while value in self._roots:
            value = self._roots[value]
        return value


def predicted(graph: Graph, around: int = 0) -> Iterator[tuple[Node, int]]:
    """The bytes that are held while each node runs, those of bodies included: beside what is held around them."""
    for node, held in held_bytes(graph):
        if node is not None:
            yield node, around + held
            for body in node.nested_graphs():
                yield from predicted(body, around + held - nested_bytes(node))


@pytest.mark.parametrize(("name", "stage"), every(2, CASES))
def test_a_step_holds_what_the_plan_says(name: str, stage: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    with made(name, stage).trainer(engine="numpy") as trainer:
        graph = watch.look_at(trainer._executor)
        trainer.step(batch(0))  # The first state may lie in files, which nothing is written over.
        trainer.step(batch(1))
        before = dict(trainer._executor._held.blocks(1, 0))
        trainer.step(batch(2))
        after = trainer._executor._held.blocks(1, 0)
    expected = dict(predicted(graph))
    unread = sum(value_bytes(value) for value in graph.inputs if not value.has_uses)
    assert watch.held
    for node, held in watch.held.items():
        # Inputs that nothing reads stay with the rank.
        assert expected[node] <= held <= expected[node] + unread, node.label
    assert {state for state, block in before.items() if after[state] is block} == {
        value.source_name for value in written_over(graph).values() if value_bytes(value)
    }


@pytest.mark.parametrize(("name", "stage"), every(2, CASES))
def test_numbers_are_the_same_bits_as_with_a_second_copy(
    name: str, stage: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, found = made(name, stage), []
    for writes_over in (True, False):
        monkeypatch.setattr(NumpyEngine, "writes_over", writes_over)
        with partition.trainer(engine="numpy") as trainer:
            losses = [trainer.step(batch(number)) for number in range(4)]
            found.append({"loss": np.asarray(losses), **trainer.read_all()})
    same(*found)


@pytest.mark.parametrize("engine", ["numpy", "ort"])
def test_what_the_program_begins_with_stays(engine: str) -> None:
    partition = made("adamw", 0)
    losses = []
    for _ in range(2):
        with partition.trainer(engine=engine) as trainer:
            losses.append([trainer.step(batch(number)) for number in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("engine", ["numpy", "ort"])
def test_what_was_read_stays(engine: str) -> None:
    with made("momentum", None).trainer(engine=engine) as trainer:
        trainer.step(batch())
        state = trainer.read_all()
        copies = {name: array.copy() for name, array in state.items()}
        given = trainer.run({**batch(), "learning_rate": np.float32(0.1)}, fetch=["w.m", "w", "grad.w"])
        fetched = {name: given[name] for name in ("w.m", "w")}
        same(fetched, {name: copies[name] for name in fetched})
        trainer.step(batch(1))
        same(state, copies)
        same(fetched, {name: copies[name] for name in fetched})


@pytest.mark.parametrize(("name", "stage"), every(2, CASES))
def test_a_loss_that_is_not_finite_changes_nothing(name: str, stage: int | None) -> None:
    bad = batch(1) | {"x": np.full((8, 6), np.inf, np.float32)}
    with made(name, stage).trainer(engine="numpy") as trainer:
        for number in range(2):
            trainer.step(batch(number))
        before = trainer.read_all()
        with pytest.raises(NotFiniteError, match=r"the loss of step 3 is nan") as raised:
            trainer.step(bad)
        assert "the first tensor that is not finite: x, which holds infinity; the first with NaN: " in str(raised.value)
        same(trainer.read_all(), before)
        assert np.isfinite(trainer.step(batch(2)))


class Breakable:
    """Lets runs fail at nodes that are chosen: what nobody expects happens there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: Node | None = None
        kernel = Arrays.kernel

        def breakable_kernel(arrays: Arrays, node: Node, *arguments: Any) -> Any:
            run = kernel(arrays, node, *arguments)

            def breakable(inputs: list[Any], environment: Environment) -> Sequence[Any]:
                if node is self.at:
                    raise KeyboardInterrupt
                return run(inputs, environment)

            return breakable

        monkeypatch.setattr(Arrays, "kernel", breakable_kernel)

    def fail(self, trainer: Trainer, at: Node) -> None:
        self.at = at
        with pytest.raises(KeyboardInterrupt):
            trainer.step(batch(1))
        self.at = None


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_a_step_that_fails_before_the_update_changes_nothing(
    stage: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    breakable = Breakable(monkeypatch)
    with made("adamw", stage).trainer(engine="numpy") as trainer:
        trainer.step(batch())
        before = trainer.read_all()
        backward = [node for node in trainer._executor.parts[0].graph if node.phase == "backward"]
        breakable.fail(trainer, next(node for node in reversed(backward) if node.op_type == "MatMul"))
        same(trainer.read_all(), before)
        assert np.isfinite(trainer.step(batch(1)))


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_a_step_that_fails_in_the_update_leaves_no_state(
    stage: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    breakable = Breakable(monkeypatch)
    with made("adamw", stage).trainer(engine="numpy") as trainer:
        trainer.step(batch())
        trainer.save_checkpoint(tmp_path)
        before = trainer.read_all()
        graph = trainer._executor.parts[0].graph
        breakable.fail(trainer, next(node for node in reversed(graph) if node.result in written_over(graph)))
        for use in (lambda: trainer.step(batch(1)), trainer.read_all, lambda: trainer.save_checkpoint(tmp_path)):
            with pytest.raises(StateLostError, match="a run failed on rank 0 while it was replaced"):
                use()
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        trainer.load_checkpoint(tmp_path)
        same(trainer.read_all(), before)
        assert np.isfinite(trainer.step(batch(1)))


def test_nothing_is_lost_where_nothing_was_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime computes the step of one device in one piece, beside the state."""
    with made("adamw", None).trainer(engine="ort") as trainer:
        trainer.step(batch())
        before = trainer.read_all()
        compute = RankState.compute

        def failing(state: RankState, step: ComputeStep) -> None:
            compute(state, step)
            raise KeyboardInterrupt

        monkeypatch.setattr(RankState, "compute", failing)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(batch(1))
        same(trainer.read_all(), before)


def test_a_run_that_counts_cannot_be_undone() -> None:
    with made("adamw", None).trainer(engine="numpy") as trainer:
        trainer.step(batch())
        with pytest.raises(StateLostError, match="the state before the last run is gone"):
            trainer.undo()


def test_the_update_is_a_segment_of_its_own_where_it_is_written_over_state() -> None:
    graph = made("adamw", None).parts[0].graph
    one = build_program(graph)
    assert [type(found) for found in one.instructions if not isinstance(found, Free)] == [Compute, Commit]
    two = build_program(graph, writes_over=True)
    first, commit, last = (found for found in two.instructions if not isinstance(found, Free))
    assert isinstance(first, Compute)
    assert isinstance(commit, Commit)
    assert isinstance(last, Compute)
    assert {node.phase for node in last.segment.nodes} == {"optimizer"}
    assert last.segment.nodes[0] is update_of(graph)
    assert set(last.segment.over.values()) == set(written_over(graph).values())
    assert not first.segment.over
