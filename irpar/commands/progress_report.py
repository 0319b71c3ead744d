"""A progress bar, or lines where there is no terminal."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from irpar.tables.display import messages
from irpar.units import bytes_text

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from irpar.pass_manager import Progress

QUIET_SECONDS = 2.0
"""Where standard error is no terminal, nothing is reported about work that takes less."""
SECONDS_BETWEEN_LINES = 5.0


class ProgressReport:
    """Tells on standard error how far the work is: a bar on a terminal, else a line now and then after two seconds.

    with ProgressReport() as report:
        manager = PassManager.parse(pipeline, Instrumentation(progress=report.passes))
        partition.save(out, progress=report.bytes("writing weights"))

    Args:
        is_shown: False keeps quiet.
    """

    def __init__(self, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._is_terminal = sys.stderr.isatty()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._start = time.monotonic()
        self._last_line = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def passes(self, event: "Progress") -> None:
        """A pass starts or ends; for `Instrumentation.progress`."""
        done = event.index + (event.event == "end")
        self._tell("passes", f"pass {event.name}", done, event.total, f"{done} of {event.total}")

    def bytes(self, done: int, total: int) -> None:
        """Weights are written; for `Partition.save`."""
        self._tell("weights", "writing weights", done, total, f"{bytes_text(done)} of {bytes_text(total)}")

    def steps(self, done: int, total: int, amount: str) -> None:
        """Steps of training are made."""
        self._tell("steps", "training", done, total, amount)

    def segments(self, done: int, total: int) -> None:
        """Segments have run; for `irpar.runtime.warm`."""
        self._tell("segments", "compiling", done, total, f"{done} of {total} segments")

    def _tell(self, task: str, what: str, done: int, total: int, amount: str) -> None:
        if not self._is_shown:
            return
        if self._is_terminal:
            self._move_bar(task, what, done, total, amount)
            return
        now = time.monotonic()
        if now - self._start > QUIET_SECONDS and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"{what}: {amount}", file=sys.stderr, flush=True)

    def _move_bar(self, task: str, what: str, done: int, total: int, amount: str) -> None:
        if self._bars is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[amount]}", markup=False),
                TimeElapsedColumn(),
                console=messages(),
                transient=True,
            )
            self._bars.start()
        if task not in self._tasks:
            self._tasks[task] = self._bars.add_task(what, total=total, amount=amount)
        self._bars.update(self._tasks[task], description=what, completed=done, total=total, amount=amount)
