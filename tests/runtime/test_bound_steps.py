"""Steps on small tensors that stay where they are from run to run."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from irpar.ir import Module
from irpar.runtime import bound_steps
from irpar.runtime.bound_steps import UNBOUND_RUNS, BoundSteps
from irpar.runtime.errors import RunError
from irpar.runtime.executor import Executor
from irpar.runtime.log import CollectiveLog
from irpar.runtime.rank_state import RankState
from tests.runtime.groups.spmd_threads import run_ranks
from tests.runtime.programs import MLP, mlp_reference, mlp_weights, module

MORE = 3
"""Runs after the first that is bound."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether bound steps were taken, each time that ranks came to some; no segment is too long for that."""
    monkeypatch.setattr("irpar.runtime.lockstep.PARALLEL_SECONDS", 10.0)
    found: list[bool] = []
    run = BoundSteps.run

    def noted(steps: BoundSteps, states: Sequence[RankState], log: CollectiveLog) -> bool:
        found.append(run(steps, states, log))
        return found[-1]

    monkeypatch.setattr(BoundSteps, "run", noted)
    return found


CHAIN = """
    mesh @m = ["x"=2]
    graph local @g(%a: f32[4] of [8@x], %b: f32[4] of [4]) -> (%y, %d, %s) opset 21 ranks [0, 1] {
      %c = Mul(%a, %b) : f32[4] of [8@x]
      %d = irpar.AllReduce(%c) {axes=["x"], reduce="sum", id=0} : f32[4] of [4] as "sum"
      %e = Add(%d, %a) : f32[4] of [8@x] as "inner"
      %f = irpar.AllGather(%e) {axes=["x"], dim=0, id=1} : f32[8] of [8]
      %g = Mul(%f, %f) : f32[8] of [8]
      %s = irpar.ReduceScatter(%g) {axes=["x"], reduce="sum", dim=0, id=2} : f32[4] of [8@x]
      %h = Sub(%s, %d) : f32[4] of [8@x]
      %y = irpar.AllGather(%h) {axes=["x"], dim=0, id=3} : f32[8] of [8]
    }
"""


def chain_reference(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """What CHAIN computes, of all ranks at once."""
    blocks = a.reshape(2, 4)
    d = (blocks * b).sum(0)
    s = 2 * np.square(blocks + d).reshape(8)
    return {"y": (s.reshape(2, 4) - d).reshape(8), "d": d, "s": s}


def chain_inputs(number: int) -> dict[str, np.ndarray]:
    """Other ones for each number."""
    random = np.random.default_rng(number)
    return {"a": random.standard_normal(8, np.float32), "b": random.standard_normal(4, np.float32)}


def check(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Compare results."""
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_results_and_log_are_those_of_runs_without(taken: list[bool]) -> None:
    loaded = module(CHAIN)
    results, logs = [], []
    with Executor(loaded, loaded.mesh) as executor:
        for number in range(UNBOUND_RUNS + MORE):
            results.append(executor.run(chain_inputs(number)))
            logs.append(list(executor.log))
    assert taken == [True] * MORE
    # What an earlier run gave is not written over by a later one.
    for number, found in enumerate(results):
        check(found, chain_reference(**chain_inputs(number)))
        assert found["y"].flags.writeable
    assert logs == [logs[0]] * len(logs)
    assert [record.id for record in logs[0]] == [0, 1, 2, 3]


def test_what_is_fetched_is_kept(taken: list[bool]) -> None:
    loaded = module(CHAIN)
    with Executor(loaded, loaded.mesh) as executor:
        for number in range(UNBOUND_RUNS + MORE):
            inputs = chain_inputs(number)
            inner = executor.run(inputs, fetch=["inner"], check_replicas=True)["inner"]
            sums = chain_reference(**inputs)["d"]
            np.testing.assert_allclose(inner, (inputs["a"].reshape(2, 4) + sums).reshape(8), rtol=1e-5)
    assert taken == [True] * MORE


def test_several_groups(taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one group read the sum where it lies; those of another one have theirs."""
    monkeypatch.setattr(bound_steps, "_FEWEST", 2)
    loaded, weights = module(MLP, **mlp_weights()), mlp_weights()
    with Executor(loaded, loaded.mesh) as executor:
        for number in range(UNBOUND_RUNS + MORE):
            x = np.random.default_rng(number).standard_normal((4, 6), np.float32)
            np.testing.assert_allclose(executor.run({"x": x})["y"], mlp_reference(x, weights), rtol=1e-5, atol=1e-5)
    assert taken == [True] * MORE


def test_ranks_by_themselves(taken: list[bool]) -> None:
    """As where each rank has a process: what goes from one to another is the same, whoever has bound its steps."""
    loaded = module(CHAIN)

    def drive(executor: Executor) -> None:
        for number in range(UNBOUND_RUNS + MORE):
            inputs = chain_inputs(number)
            check(executor.run(inputs), chain_reference(**inputs))
            assert [record.id for record in executor.log] == [0, 1, 2, 3]

    _, raised = run_ranks(loaded.mesh, lambda group: Executor(loaded, loaded.mesh, group=group), drive)
    assert not raised
    assert taken == [True] * 2 * MORE


FAILING = """
    mesh @m = ["x"=2]
    graph local @g(%table: f32[4] of [4], %i: i64[1] of [2@x]) -> (%y) opset 21 ranks [0, 1] {
      %a = Neg(%table) : f32[4] of [4]
      %b = irpar.AllReduce(%a) {axes=["x"], reduce="sum", id=0} : f32[4] of [4]
      %c = Gather(%b, %i) : f32[1] of [2@x] from "/embed/Gather"
      %y = irpar.AllReduce(%c) {axes=["x"], reduce="sum", id=1} : f32[1] of [1]
    }
"""


def test_a_failing_rank_stops_the_run_with_its_error(taken: list[bool]) -> None:
    loaded = module(FAILING)
    table = np.arange(4, dtype=np.float32)
    with Executor(loaded, loaded.mesh) as executor:
        for _ in range(UNBOUND_RUNS + 1):
            executor.run({"table": table, "i": np.array([0, 1])})
        with pytest.raises(RunError) as caught:
            executor.run({"table": table, "i": np.array([0, 5])})
        assert "rank 1 (x=1): Gather failed" in str(caught.value)
        assert "/embed/Gather" in str(caught.value)
        assert [record.id for record in executor.log] == [0]
        np.testing.assert_array_equal(executor.run({"table": table, "i": np.array([3, 1])})["y"], [-8.0])
    assert taken == [True, True]


def test_sizes_other_than_declared_are_not_bound(taken: list[bool]) -> None:
    """Exporters declare a window more than MaxPool computes."""
    text = """
        mesh @m = ["x"=2]
        graph local @g(%x: f32[1, 1, 4]) -> (%z) opset 13 ranks [0, 1] {
          %y = MaxPool(%x) {ceil_mode = 1, kernel_shape = [1], strides = [2]} : f32[1, 1, 3]
          %r = irpar.AllReduce(%y) {axes=["x"], reduce="sum", id=0} : f32[1, 1, 3]
          %z = irpar.AllReduce(%r) {axes=["x"], reduce="sum", id=1} : f32[1, 1, 3]
        }
    """
    loaded = module(text)
    with Executor(loaded, loaded.mesh) as executor:
        for number in range(UNBOUND_RUNS + MORE):
            given = np.full((1, 1, 4), number, np.float32)
            np.testing.assert_array_equal(executor.run({"x": given})["z"], np.full((1, 1, 2), 4.0 * number))
    assert not taken


def run_beside(loaded: Module) -> bool:
    """Runs of several threads through one executor."""
    with Executor(loaded, loaded.mesh) as executor, ThreadPoolExecutor(3) as pool:

        def work(number: int) -> bool:
            inputs = chain_inputs(number)
            expected = chain_reference(**inputs)["y"]
            return all(np.allclose(executor.run(inputs)["y"], expected, rtol=1e-5, atol=1e-5) for _ in range(20))

        return all(pool.map(work, range(6)))


def test_runs_beside_each_other(taken: list[bool]) -> None:
    assert run_beside(module(CHAIN))
    assert all(taken)


def test_no_more_than_so_many_bytes(taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_steps, "_MOST_BYTES", 100)
    assert run_beside(module(CHAIN))
    assert not taken


def test_long_segments_are_for_threads(taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irpar.runtime.lockstep.PARALLEL_SECONDS", 0.0)
    loaded = module(CHAIN)
    with Executor(loaded, loaded.mesh) as executor:
        for number in range(UNBOUND_RUNS + MORE):
            check(executor.run(chain_inputs(number)), chain_reference(**chain_inputs(number)))
    assert not taken


def test_a_rank_by_itself_that_fails_stops_all(taken: list[bool]) -> None:
    loaded = module(FAILING)
    table = np.arange(4, dtype=np.float32)

    def drive(executor: Executor) -> None:
        for _ in range(UNBOUND_RUNS + 1):
            executor.run({"table": table, "i": np.array([0, 1])})
        executor.run({"table": table, "i": np.array([0, 5])})

    _, raised = run_ranks(loaded.mesh, lambda group: Executor(loaded, loaded.mesh, group=group), drive)
    assert "rank 1 (x=1): Gather failed" in str(raised[1])
    assert "rank 1 (x=1) failed" in str(raised[0])
    assert taken == [True] * 2
