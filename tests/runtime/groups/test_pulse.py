"""Signs of life: how they are given, and when a rank that gives none is given up."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from irpar.runtime.groups import pulse
from irpar.runtime.groups.pulse import LOOK_SECONDS, Pulse, Silence
from tests.patience import patient


class Beats:
    """Counts the beats of a pulse.

    Args:
        enough: so many are waited for.
        has_more: whether there is more to do at once, after so many.
    """

    def __init__(self, enough: int, has_more: Callable[[int], bool]) -> None:
        self.intervals: list[float] = []
        self.is_enough = threading.Event()
        self._enough = enough
        self._has_more = has_more

    def __call__(self, interval: float) -> bool:
        self.intervals.append(interval)
        if len(self.intervals) == self._enough:
            self.is_enough.set()
        return self._has_more(len(self.intervals))


def test_signs_come_at_once_then_at_intervals_until_the_end() -> None:
    beats = Beats(4, lambda _: False)
    beating = Pulse(beats, 0.2)
    assert beats.intervals[0] == pytest.approx(0.05)
    assert beats.is_enough.wait(patient(20))
    beating.end()
    count = len(beats.intervals)
    time.sleep(0.15)
    assert len(beats.intervals) == count


def test_what_there_is_to_do_is_done_at_once() -> None:
    beats = Beats(5, lambda count: 1 < count < 5)
    beating = Pulse(beats, 400.0)
    began = time.monotonic()
    beating.wake()
    assert beats.is_enough.wait(patient(20))
    assert time.monotonic() - began < beats.intervals[0]
    beating.end()
    assert len(beats.intervals) == 5


class Clock:
    """The time, as a test likes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: self.now))

    def looks(self, silence: Silence, signs: int, seconds: float, step: float = LOOK_SECONDS) -> bool:
        """Look for so long at a rank that gives no more signs; whether it must be given up."""
        for _ in range(round(seconds / step)):
            self.now += step
            if silence.is_too_long(signs, 1.0):
                return True
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_rank_that_falls_silent_is_given_up(clock: Clock) -> None:
    silence = Silence(4.0)
    assert not clock.looks(silence, 3, 5.0)
    assert not clock.looks(silence, 4, 5.0)
    assert clock.looks(silence, 4, 1.0)


def test_a_rank_that_gives_no_signs_is_waited_for(clock: Clock) -> None:
    assert not clock.looks(Silence(4.0), 0, 1000.0)


def test_what_this_rank_slept_is_no_silence_of_the_other(clock: Clock) -> None:
    silence = Silence(4.0)
    assert not clock.looks(silence, 1, 300.0, step=100.0)
    assert clock.looks(silence, 1, 10.0)
