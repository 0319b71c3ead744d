"""The thread that lets started collectives go on."""

import threading

from irpar.runtime.groups.progress import Progress
from tests.patience import patient


def test_it_steps_while_there_is_something_to_do_and_again_when_woken() -> None:
    before = set(threading.enumerate())
    left = [3]
    rests = threading.Semaphore(0)

    def step() -> bool:
        left[0] -= 1
        has_more = left[0] > 0  # From the release on there may be more, for which it is woken.
        if not has_more:
            rests.release()
        return has_more

    progress = Progress(step)
    for _ in range(5):
        left[0] = 3
        progress.wake()
        assert rests.acquire(timeout=patient(10))
    progress.end()
    assert left == [0]
    assert set(threading.enumerate()) <= before


def test_it_ends_in_the_middle_and_for_good() -> None:
    steps = []
    first = threading.Event()

    def step() -> bool:
        steps.append(1)
        first.set()
        return True

    progress = Progress(step)
    progress.wake()
    assert first.wait(patient(10))
    progress.end()
    taken = len(steps)
    progress.wake()
    progress.end()
    assert len(steps) == taken


def test_there_is_no_thread_before_there_is_something_to_do() -> None:
    before = set(threading.enumerate())  # Some of an earlier test may end meanwhile.
    progress = Progress(lambda: False)
    assert set(threading.enumerate()) <= before
    progress.end()
    progress.wake()
    assert set(threading.enumerate()) <= before
