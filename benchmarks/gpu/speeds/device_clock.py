"""What the device itself takes for something, however slowly the host asks for it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

RUNS = 20
"""In a row; few enough for what they launch to fit the device's queue."""
ROUNDS = 3
LONGEST = 0.3
"""Seconds that the device is kept waiting at most."""
TRIES = 3
"""Of a round, each with twice the wait of the one before, until the host has asked for all runs in time."""
_SPIN = r"""
extern "C" __global__ void spin(const long long nanoseconds) {
  long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
"""


class DeviceClock:
    """Measures by events on the current stream, behind a kernel that spins until the host has asked for all runs.

    Args:
        engine: of irpar; without a device the host's clock counts.

    Attributes:
        is_behind: whether the host was not done asking in time, so that what was measured last is its own time.
    """

    def __init__(self, engine: str) -> None:
        self._cupy: Any = __import__("cupy") if engine == "cupy" else None
        self.is_behind = False
        self._spin = None if self._cupy is None else self._cupy.RawKernel(_SPIN, "spin")

    def seconds(self, start: Callable[[], object], runs: int = RUNS) -> float:
        """Median seconds of a run.

        Args:
            start: begins one, and comes back before the device is done.
            runs: in a row.
        """
        for _ in range(3):
            start()
        self._wait()
        begin = time.perf_counter()
        start()
        host = time.perf_counter() - begin
        self._wait()
        runs = max(1, min(runs, int(2 / max(time.perf_counter() - begin, 1e-9))))
        wait = 2 * runs * host + 1e-3
        self.is_behind = False
        return statistics.median(self._round(start, runs, wait) for _ in range(ROUNDS))

    def _round(self, start: Callable[[], object], runs: int, wait: float) -> float:
        if self._cupy is None:
            begin = time.perf_counter()
            for _ in range(runs):
                start()
            return (time.perf_counter() - begin) / runs
        for number in range(TRIES):
            events = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            nanoseconds = int(min(wait * 2**number, LONGEST) * 1e9)
            self._spin((1,), (1,), (self._cupy.int64(nanoseconds),))
            events[0].record()
            for _ in range(runs):
                start()
            is_late = bool(events[0].done)
            events[1].record()
            events[1].synchronize()
            if not is_late:
                break
        self.is_behind = self.is_behind or is_late
        return float(self._cupy.cuda.get_elapsed_time(*events)) / 1e3 / runs

    def _wait(self) -> None:
        if self._cupy is not None:
            self._cupy.cuda.runtime.deviceSynchronize()
