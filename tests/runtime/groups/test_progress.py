"""The thread that lets started collectives go on."""

import threading

from irpar.runtime.groups.progress import Progress
from tests.patience import patient


def test_it_steps_while_there_is_something_to_do_and_again_when_woken() -> None:
    left = [3]
    rests = threading.Semaphore(0)

    def step() -> bool:
        left[0] -= 1
        if left[0] == 0:
            rests.release()
        return left[0] > 0

    progress = Progress(step)
    for _ in range(5):
        left[0] = 3
        progress.wake()
        assert rests.acquire(timeout=patient(10))
    progress.end()
    assert left == [0]
    assert threading.active_count() == 1 or "irpar-progress" not in {each.name for each in threading.enumerate()}


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
    before = threading.active_count()
    progress = Progress(lambda: False)
    assert threading.active_count() == before
    progress.end()
    progress.wake()
    assert threading.active_count() == before
