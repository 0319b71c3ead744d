"""What the driver does for the others while it computes, or waits for its user: it gives signs of life.

Between two runs, and after the last, the driver may do nothing for hours. What tells it from one that was stopped, or
whose host hangs, is a thread of it that sends a sign now and then. It also sends on what a connection did not take at
once: inputs may be large, and the others wait for them.
"""

import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.25
"""How often a rank that waits looks for signs."""
_LONGEST_INTERVAL = 5.0
ASLEEP_SECONDS = 1.0
"""After that between two looks this process itself did not run, as where all are stopped and let go on."""


class Pulse:
    """Gives a sign at once, and from then on at intervals, in a thread of its own.

    Args:
        beat: gives one, and is passed the interval in seconds; returns whether it has more to do at once. It raises
            nothing.
        seconds: how long ranks wait for each other: there are some signs in that time.
    """

    def __init__(self, beat: Callable[[float], bool], seconds: float) -> None:
        self._beat = beat
        self._interval = min(seconds / 4, _LONGEST_INTERVAL)
        self._wanted = threading.Event()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="irpar-pulse", daemon=True)
        beat(self._interval)
        self._thread.start()

    def wake(self) -> None:
        """There is something to do before the interval is over."""
        self._wanted.set()

    def end(self) -> None:
        """Give no sign any more, from now on."""
        self._has_ended = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        has_more = False
        while True:
            if not has_more:
                self._wanted.wait(self._interval)
                self._wanted.clear()
            if self._has_ended:
                return
            has_more = self._beat(self._interval)


class Silence:
    """How long a rank that gives signs has given none, for one that looks every `LOOK_SECONDS` at least.

    Args:
        seconds: how long ranks wait for each other.
    """

    def __init__(self, seconds: float) -> None:
        self._bound = seconds
        self._signs = -1
        self._lasts = 0.0
        self._looked = time.monotonic()

    def is_too_long(self, signs: int, interval: float) -> bool:
        """Whether the rank must be given up.

        Args:
            signs: grows with each; 0: it gives none, and is never given up.
            interval: seconds in which it gives one.
        """
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        if signs != self._signs:
            self._signs, self._lasts = signs, 0.0
        else:
            self._lasts += passed if passed < ASLEEP_SECONDS else LOOK_SECONDS
        return signs > 0 and self._lasts > self._bound + interval
