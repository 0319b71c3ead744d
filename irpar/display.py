"""What the commands print: numbers, tables that fit a terminal of 80 columns, progress bars, JSON."""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from irpar.sharding.visible import visible

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from .instrumentation import Progress

Justify = str
ROWS = 20
"""How many lines a table has where not all are asked for."""
_UNITS = ("", "k", "M", "G", "T", "P", "E")
QUIET_SECONDS = 2.0
"""Where standard error is no terminal, nothing is told about work that takes less."""
MOST_OF_A_WORD = 48
"""Characters of a name in a table."""
SECONDS_BETWEEN_LINES = 5.0
_UNBROKEN = 1_000_000
"""Columns where nobody has a width: no line is that long."""


def scaled(number: float, unit: str) -> str:
    """A number with a decimal prefix: `scaled(131072, "B")` is `131 kB`, three significant digits."""
    value, prefix = float(number), 0
    while abs(value) >= 999.5 and prefix < len(_UNITS) - 1:
        value, prefix = value / 1000, prefix + 1
    text = f"{value:.0f}" if prefix == 0 or abs(value) >= 99.95 else f"{value:.3g}"
    return f"{text} {_UNITS[prefix]}{unit}".rstrip()


def seconds_text(number: float) -> str:
    """Seconds: `12.5 ms`, `830 us`, `0 s`; three significant digits."""
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if number >= scale:
            value = number / scale
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"
    return f"{number / 1e-9:.3g} ns" if number else "0 s"


def bytes_text(number: float) -> str:
    """Bytes: `1.25 MB` (a megabyte is 10^6 bytes)."""
    return scaled(number, "B")


def flops_text(number: float) -> str:
    """Floating-point operations: `3.2 GFLOP`."""
    return scaled(number, "FLOP")


def share_text(part: float, whole: float) -> str:
    """A share in percent; empty where there is no whole."""
    return f"{part / whole:.1%}" if whole else ""


def count_text(number: int, noun: str) -> str:
    """`1 tensor`, `2,000 tensors`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shortened(text: str, most: int = MOST_OF_A_WORD) -> str:
    """A text whose longer words, such as exporters' names, have `…` for their middle; what differs at an end is kept.

    Args:
        text: of any number of words.
        most: characters of a word.
    """
    return " ".join(_shortened_word(word, most) for word in text.split(" "))


def _shortened_word(word: str, most: int) -> str:
    if len(word) <= most:
        return word
    end = (most - 1) * 3 // 5  # The last parts of a name say more than the first.
    return f"{word[: most - 1 - end]}…{word[-end:]}"


def difference_text(number: float) -> str:
    """A difference of numbers: `0`, `2.4e-07`."""
    return "0" if number == 0 else f"{number:.2g}"


def sharding_text(spec: Sequence[Sequence[str] | None] | None, shape: Sequence[Any] | None = None) -> str:
    """A sharding as the text form has it inside a type: `[8@dp, 64]`."""
    if shape is None:
        shape = ["_"] * len(spec or ())
    dims = []
    for size, axes in zip(shape, spec if spec is not None else [None] * len(shape), strict=False):
        names = [axis for axis in axes or () if axis != "?"]
        cut = f"@({','.join(names)})" if len(names) > 1 else f"@{names[0]}" if names else ""
        dims.append(f"{size}{cut}{'?' if axes and '?' in axes else ''}")
    return f"[{', '.join(dims)}]"


class _Console(Console):
    """Tables that cannot be made as narrow as the terminal are not cut off.

    Where there is no terminal nothing is folded, unless COLUMNS says at what width, and no line ends in blanks: what is
    printed can be searched and pasted. Names are printed as `visible` has them.
    """

    def __init__(self, *, stderr: bool = False, file: TextIO | None = None) -> None:
        super().__init__(stderr=stderr, file=file, markup=False, emoji=False, highlight=False)
        if not self.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
            self.width = _UNBROKEN

    def render_str(self, text: str, **options: Any) -> Text:
        """See `Console.render_str`."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """See `Console.render`; for what is no plain text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def print(self, *objects: Any, crop: bool = False, **options: Any) -> None:
        if self.is_terminal:
            super().print(*objects, crop=crop, **options)
            return
        with self.capture() as captured:
            super().print(*objects, crop=crop, **options)
        self.file.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))
        self.file.flush()


class _Table(Table):
    """A table that folds no word of a title, nor a number; where it must, it is wider than the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in self.columns:
            column.min_width = _least_width(column)
        least = sum(column.min_width or 0 for column in self.columns) + 2 * (len(self.columns) - 1)
        yield from super().__rich_console__(console, options.update(max_width=max(options.max_width, least)))


def _least_width(column: Column) -> int:
    """Of the longest word of the title; of a column of numbers, or without a title, also of what is in it."""
    texts = [str(column.header), *(map(str, column.cells) if column.no_wrap or not column.header else ())]
    parts = texts if column.no_wrap else [word for text in texts for word in text.split()]
    return max(map(cell_len, parts), default=1)


def output() -> Console:
    """Standard output: what is asked for."""
    return _Console()


def messages() -> Console:
    """Standard error: tables that go beside the answer, such as timings."""
    return _Console(stderr=True)


def report_text(report: Callable[[Console], None]) -> str:
    """What a report prints, as text: no line is folded."""
    console = _Console(file=io.StringIO())
    report(console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.rstrip("\n")


def table(*columns: str, title: str = "", right: Iterable[str] = ()) -> Table:
    """An empty table; columns in `right` hold numbers, the others fold what does not fit."""
    made = _Table(box=None, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
    numbers = set(right)
    for column in columns:
        if column in numbers:
            made.add_column(column, justify="right", no_wrap=True, header_style="dim")
        else:
            made.add_column(column, overflow="fold", header_style="dim")
    return made


def print_rows(console: Console, made: Table, count: int, rows: int | None) -> None:
    """Print a table below an empty line, and of how many of `count` lines it shows only `rows`."""
    console.print()
    console.print(made)
    if rows is not None and count > rows:
        console.print(f"{count - rows} more: --all shows them")


def name_with(name: str, lines: Iterable[str]) -> RenderableType:
    """A name for a cell of a table, and below it, indented, what else is to be said of it."""
    return Group(
        Text(visible(name)), *(Padding(Text(visible(line), style="dim"), (0, 0, 0, 2), expand=False) for line in lines)
    )


def facts(rows: Mapping[str, str]) -> Table:
    """Names and values, a line each."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, text in rows.items():
        if text:
            made.add_row(name, text)
    return made


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output, and nothing else; numbers that JSON has not become null."""
    text = json.dumps(_plain(value), indent=2, ensure_ascii=False)
    # Between quotes alone, where JSON has an escape for each: what a terminal would take for a command.
    print("".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


class ProgressReport:
    """Tells on standard error how far the work is: a bar on a terminal, else a line now and then after two seconds.

    with ProgressReport() as report:
        manager = PassManager.parse(pipeline, Instrumentation(progress=report.passes))
        partition.save(out, progress=report.bytes("writing weights"))

    Args:
        is_shown: False keeps quiet.
        quiet: seconds of work about which nothing is told where standard error is no terminal.
    """

    def __init__(self, is_shown: bool = True, quiet: float = QUIET_SECONDS) -> None:
        self._is_shown = is_shown
        self._quiet = quiet
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

    def _tell(self, task: str, what: str, done: int, total: int, amount: str) -> None:
        if not self._is_shown:
            return
        if self._is_terminal:
            self._move_bar(task, what, done, total, amount)
            return
        now = time.monotonic()
        if now - self._start > self._quiet and now - self._last_line > SECONDS_BETWEEN_LINES:
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
