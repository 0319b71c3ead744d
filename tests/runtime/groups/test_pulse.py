"""Signs of life: how they are given, and when a rank that gives none is given up."""

import threading
import time
from types import SimpleNamespace

import pytest

from irpar.runtime.groups import pulse
from irpar.runtime.groups.pulse import LOOK_SECONDS, Pulse, Silence


def test_signs_come_at_once_then_at_intervals_until_the_end() -> None:
    given: list[float] = []
    is_enough = threading.Event()

    def beat(interval: float) -> bool:
        given.append(interval)
        if len(given) == 4:
            is_enough.set()
        return False

    beating = Pulse(beat, 0.2)
    assert given[0] == pytest.approx(0.05)
    assert is_enough.wait(20)
    beating.end()
    count = len(given)
    time.sleep(0.15)
    assert len(given) == count


def test_what_there_is_to_do_is_done_at_once() -> None:
    beats: list[float] = []
    is_done = threading.Event()

    def beat(interval: float) -> bool:
        beats.append(interval)
        if len(beats) == 5:
            is_done.set()
        return 1 < len(beats) < 5

    beating = Pulse(beat, 400.0)
    began = time.monotonic()
    beating.wake()
    assert is_done.wait(20)
    assert time.monotonic() - began < beats[0]
    beating.end()
    assert len(beats) == 5


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
