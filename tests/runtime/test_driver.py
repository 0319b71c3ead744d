"""Ranks that each have an executor of their own, driven by rank 0: here as threads."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import pytest

from irpar.runtime.driver import CLOSE, READY, Answer, Driver, Request, abort, serve
from irpar.runtime.errors import InputError, MismatchError, PeerError, ProgramError
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Messenger
from irpar.runtime.log import Record
from irpar.runtime.messages import encode

from .groups.spmd_threads import ThreadRank, run_ranks
from .programs import MLP, STARTED, mlp_input, mlp_reference, mlp_weights, module

CROSSED = """
    mesh @m = ["x"=2]
    graph local @first(%a: f32[2] of [4@x]) -> (%b, %c) opset 21 ranks [0] {
      %b = irpar.AllReduce(%a) {axes=["x"], reduce="sum", id=0} : f32[2] of [4@x]
      %c = irpar.AllGather(%a) {axes=["x"], dim=0, id=1} : f32[4] of [4]
    }
    graph local @second(%a: f32[2] of [4@x]) -> (%b, %c) opset 21 ranks [1] {
      %c = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[4] of [4]
      %b = irpar.AllReduce(%a) {axes=["x"], reduce="sum", id=1} : f32[2] of [4@x]
    }
"""


def mlp_ranks(drive, **options):
    loaded = module(MLP, **mlp_weights())
    return run_ranks(
        loaded.mesh, lambda group: Executor(loaded, loaded.mesh, group=group, engine="numpy"), drive, **options
    )


def test_the_driver_gets_whole_results_and_the_log_of_all_ranks():
    inputs = mlp_input()

    def drive(executor):
        assert [part.ranks for part in executor.parts] == [(0, 2)]
        first = executor.run(inputs, check_replicas=True)
        second = executor.run(inputs, fetch=["hidden", "w1"])
        return first, second, list(executor.log)

    (first, second, log), raised = mlp_ranks(drive)
    assert raised == {}
    expected = mlp_reference(inputs["x"], mlp_weights())
    np.testing.assert_allclose(first["y"], expected, rtol=1e-5)
    np.testing.assert_allclose(second["hidden"], inputs["x"] @ mlp_weights()["w1"], rtol=1e-5)
    np.testing.assert_array_equal(second["w1"], mlp_weights()["w1"])
    assert log == [Record(0, "all_reduce", "f32", 48, ("tp",))]


def test_a_log_like_the_last_one_is_not_sent_again():
    class Line:
        def __init__(self, come):
            self.come, self.sent = list(come), []

        def send(self, rank, message):
            self.sent.append(message)

        def receive(self, rank):
            return self.come.pop(0)

    class Log:
        texts = ()

        def add_text(self, rank, text):
            self.texts = (*self.texts, text)

    asking = Line([])
    for _ in range(4):
        Driver(asking, [1]).ask(1, Request({}))
    answers, logs = Line([*asking.sent, encode([CLOSE])]), ["first" * 99, "first" * 99, "second" * 99, "second" * 99]
    given = iter(logs)
    serve(answers, lambda request: Answer({}, next(given)))
    _ready, *sent = answers.sent
    assert [len(message) > 400 for message in sent] == [True, False, True, False]
    driver, log = Driver(Line(sent), [1]), Log()
    assert [driver.answer(1, log).log for _ in logs] == logs
    assert list(log.texts) == logs


def test_a_rank_that_takes_long_to_become_ready_is_told_of(capsys):
    class Slow:
        seconds = 0.2

        def receive(self, rank):
            if rank == 2:
                time.sleep(1)
            return encode([READY])

    Driver(cast(Messenger, Slow()), [1, 2, 3]).meet()
    time.sleep(0.5)
    told = "rank 2 has not become ready in 0.2 s: it may still be reading its part, or hang\n"
    assert capsys.readouterr().err == told


def test_a_mistake_of_the_user_ends_all_ranks():
    def drive(executor):
        executor.run({"z": np.zeros(3, np.float32)})

    _, raised = mlp_ranks(drive)
    assert isinstance(raised.pop(0), InputError)
    assert raised == {}


def test_a_rank_that_fails_stops_the_others():
    class Failing(Executor):
        def serve(self):
            if self._group.ranks == (2,):
                abort(self._messenger, ProgramError("the disk is gone", do="buy another"))
                raise ProgramError("the disk is gone")
            super().serve()

    loaded = module(MLP, **mlp_weights())
    _, raised = run_ranks(
        loaded.mesh,
        lambda group: Failing(loaded, loaded.mesh, group=group, engine="numpy"),
        lambda executor: executor.run(mlp_input()),
    )
    assert set(raised) == {0, 1, 2, 3}
    told = raised[0]
    assert isinstance(told, PeerError)
    assert told.rank == 2
    assert str(told) == "rank 2 (dp=1, tp=0) failed: the disk is gone\n  do: buy another"


def test_a_rank_that_does_not_come_is_named():
    class Late(ThreadRank):
        def begin(self, meeting):
            if self.rank == 3:
                raise SystemExit  # It ends without a word.
            return super().begin(meeting)

        def abort(self, reason):
            if self.rank != 3:
                super().abort(reason)

    loaded = module(MLP, **mlp_weights())
    _, raised = run_ranks(
        loaded.mesh,
        lambda group: Executor(
            loaded, loaded.mesh, group=Late(group.mesh, group.rank, group.wires, 0.5), engine="numpy"
        ),
        lambda executor: executor.run(mlp_input()),
    )
    assert isinstance(raised[2], PeerError)
    assert "rank 3 (dp=1, tp=1) did not come to collective 0 in 0.5 s" in str(raised[2])


def test_collectives_in_another_order_are_both_named():
    loaded = module(CROSSED)
    _, raised = run_ranks(
        loaded.mesh,
        lambda group: Executor(loaded, loaded.mesh, group=group, engine="numpy"),
        lambda executor: executor.run({"a": np.ones(4, np.float32)}),
    )
    found = [error for error in raised.values() if isinstance(error, MismatchError)]
    assert found
    assert "rank 0 (x=0) is at AllReduce id=0 over x with f32[2]" in str(found[0])
    assert "rank 1 (x=1) is at AllGather id=0 over x with f32[2]" in str(found[0])


def test_only_the_driver_runs():
    loaded = module(MLP, **mlp_weights())

    class Wrong(Executor):
        def serve(self):
            self.run({})

    _, raised = run_ranks(
        loaded.mesh,
        lambda group: Wrong(loaded, loaded.mesh, group=group, engine="numpy"),
        lambda executor: executor.run(mlp_input()),
        seconds=0.5,
    )
    assert "run, and begin sessions, where executor.is_driver" in str(raised[1])


def check_started(outputs, log):
    np.testing.assert_array_equal(outputs["y"], [6.0, 4.0])
    np.testing.assert_allclose(outputs["z"], np.exp([-1.0, -2.0, -3.0, -4.0]), rtol=1e-6)
    assert sorted(record[:2] for record in log) == [(0, "all_reduce"), (1, "all_gather")]


STARTED_INPUTS = {"a": np.array([1, -6, 5, 2], np.float32), "b": np.array([1, 2, 3, 4], np.float32)}


def test_started_collectives_of_ranks_in_processes_of_their_own():
    loaded = module(STARTED)

    def drive(executor):
        return executor.run(STARTED_INPUTS), list(executor.log)

    given, raised = run_ranks(
        loaded.mesh, lambda group: Executor(loaded, loaded.mesh, group=group, engine="numpy"), drive
    )
    assert raised == {}
    check_started(*given)


def test_started_collectives_in_one_process():
    loaded = module(STARTED)
    with Executor(loaded, loaded.mesh) as executor:
        check_started(executor.run(STARTED_INPUTS), executor.log)


def test_threads_of_the_driver_take_turns():
    inputs = [{"x": np.full((4, 6), number, np.float32)} for number in range(12)]

    def drive(executor):
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda given: executor.run(given)["y"], inputs))

    given, raised = mlp_ranks(drive)
    assert raised == {}
    for result, each in zip(given, inputs, strict=True):
        np.testing.assert_allclose(result, mlp_reference(each["x"], mlp_weights()), rtol=1e-5)


def test_rank_0_does_not_serve():
    def drive(executor):
        with pytest.raises(ProgramError, match="rank 0 drives the others"):
            executor.serve()

    assert mlp_ranks(drive)[1] == {}


def test_after_a_run_that_failed_there_is_none():
    class Broken(Executor):
        fails = True

        def _computed(self, *arguments):
            if self.is_driver and Broken.fails:
                Broken.fails = False
                raise KeyboardInterrupt
            return super()._computed(*arguments)

    loaded = module(MLP, **mlp_weights())

    def drive(executor):
        with pytest.raises(KeyboardInterrupt):
            executor.run(mlp_input())
        with pytest.raises(ProgramError, match="the ranks have ended: an earlier run of them failed"):
            executor.run(mlp_input())

    _, raised = run_ranks(loaded.mesh, lambda group: Broken(loaded, loaded.mesh, group=group, engine="numpy"), drive)
    assert 0 not in raised
