"""Nodes run in the order of the text, and hold what liveness says, on all builders, whole and over ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from irpar import models
from irpar.analysis.memory.liveness import held_bytes, roots_of, value_bytes
from irpar.ir import Graph, Module, Node, Value
from irpar.onnx_io import to_module
from irpar.runtime.engines.arrays import Arrays
from irpar.runtime.executor import Executor
from irpar.runtime.rank_state import RankState
from irpar.sharding import Mesh
from irpar.verification.inputs import random_inputs
from tests.budget import every, of_each
from tests.test_families import CASES, partitioned


class Watch:
    """What one rank runs, and the bytes that it holds while it does."""

    def __init__(self, graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[Node] = []
        self.held: dict[Node, int] = {}
        self._graph = graph
        self._roots = roots_of(graph)
        self._state: RankState | None = None
        compute, kernel = RankState.compute, Arrays.kernel

        def watched_compute(state: RankState, step: Any) -> None:
            self._state = state if state.rank == 0 else None
            compute(state, step)

        def watched_kernel(arrays: Arrays, node: Node, *arguments: Any) -> Any:
            run = kernel(arrays, node, *arguments)

            def watched(inputs: list[Any], environment: Mapping[Value, Any]) -> Sequence[Any]:
                results = run(inputs, environment)
                self._note(node, environment, results)
                return results

            return watched

        monkeypatch.setattr(RankState, "compute", watched_compute)
        monkeypatch.setattr(Arrays, "kernel", watched_kernel)

    def _note(self, node: Node, environment: Mapping[Value, Any], results: Sequence[Any]) -> None:
        if self._state is None or node.graph is not self._graph:
            return
        self.order.append(node)
        held = {**self._state.held(), **environment, **dict(zip(node.results, results, strict=True))}
        roots = {self._roots.get(value, value) for value in held}
        self.held[node] = sum(value_bytes(value) for value in roots if not value.is_constant)


def check(loaded: Module, mesh: Mesh, inputs: Mapping[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare a run with the text and with liveness; gives how many nodes were compared."""
    graph = loaded.graphs[0] if loaded.is_local else loaded.graph
    with monkeypatch.context() as patched:
        watch = Watch(graph, patched)
        with Executor(loaded, mesh, engine="numpy") as executor:
            executor.run(inputs)
    places = {node: place for place, node in enumerate(graph)}
    ran = [places[node] for node in watch.order]
    assert ran == sorted(ran)
    predicted = {node: held for node, held in held_bytes(graph) if node is not None}
    unread = sum(value_bytes(value) for value in graph.inputs if not value.has_uses and value not in graph.outputs)
    for node, held in watch.held.items():
        # Inputs that nothing reads stay with the caller, and with the rank.
        assert predicted[node] <= held <= predicted[node] + unread, node.label
    return len(ran)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_whole_models(family, monkeypatch):
    loaded = to_module(models.build(family))
    with Executor(loaded, Mesh({"x": 1}), engine="numpy") as executor:
        inputs = random_inputs(executor.inputs, loaded.graph)
    assert check(loaded, Mesh({"x": 1}), inputs, monkeypatch) > 1


@pytest.mark.parametrize("case", every(2, of_each(lambda case: case.family, CASES)), ids=str)
def test_programs_of_ranks(case, monkeypatch, tmp_path):
    partition = partitioned(case, {"dp": 2, "tp": 3}, tmp_path)
    module = partition.module
    inputs = random_inputs(partition.executor("numpy").inputs, module.graph)
    assert check(module, partition.plan.mesh_of_ranks, inputs, monkeypatch) > 1
