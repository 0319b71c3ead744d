"""Threads that share the tasks of one that asks."""

import gc
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from irpar.runtime.side_threads import SideThreads
from tests.patience import patient


@pytest.fixture
def threads() -> Iterator[SideThreads]:
    made = SideThreads(2, "beside")
    yield made
    made.close()


def meet(barrier: threading.Barrier, number: int) -> tuple[int, str]:
    barrier.wait(patient(10))
    return number, threading.current_thread().name


def test_tasks_run_at_once_and_results_come_in_order(threads: SideThreads) -> None:
    barrier = threading.Barrier(3)
    found = threads.run([partial(meet, barrier, number) for number in range(3)])
    assert [number for number, _ in found] == [0, 1, 2]
    assert {name for _, name in found} == {"beside_0", "beside_1", threading.current_thread().name}


@pytest.mark.parametrize("count", [0, 1, 2, 20])
def test_there_may_be_any_number_of_tasks(threads: SideThreads, count: int) -> None:
    for _ in range(50):
        assert threads.run([partial(int, number) for number in range(count)]) == list(range(count))


def test_all_tasks_end_before_the_first_error_is_raised(threads: SideThreads) -> None:
    ended = []

    def fail(number: int) -> None:
        time.sleep(0.05 * (3 - number))
        ended.append(number)
        raise ValueError(f"task {number}")

    with pytest.raises(ValueError, match="task 0"):
        threads.run([partial(fail, number) for number in range(3)])
    assert sorted(ended) == [0, 1, 2]
    assert threads.run([lambda: "goes on"]) == ["goes on"]


def test_who_asks_while_they_work_for_another_works_alone(threads: SideThreads) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert goes_on.wait(patient(10))

    other = threading.Thread(target=threads.run, args=([hold, hold, hold],))
    other.start()
    assert begun.wait(patient(10))
    mine = threading.current_thread().name
    assert threads.run([lambda: threading.current_thread().name] * 4) == [mine] * 4
    goes_on.set()
    other.join(patient(10))
    assert not other.is_alive()


def test_once_closed_who_asks_works_alone() -> None:
    before = set(threading.enumerate())  # Some of an earlier test may end meanwhile.
    threads = SideThreads(2, "beside")
    threads.close()
    threads.close()
    assert set(threading.enumerate()) <= before
    assert threads.run([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]


def test_they_end_with_the_last_reference() -> None:
    threads = SideThreads(1, "forgotten")
    threads.run([lambda: 1, lambda: 2])
    del threads
    gc.collect()
    until = time.monotonic() + patient(10)
    while any(each.name == "forgotten_0" for each in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(each.name == "forgotten_0" for each in threading.enumerate())
