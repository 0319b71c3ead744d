"""What the commands print: numbers, tables that fit a terminal of 80 columns, progress bars, JSON."""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from irpar.visible import visible

ROWS = 20
"""How many lines a table has where not all are asked for."""
MOST_OF_A_WORD = 48
"""Characters of a name in a table."""
_UNBROKEN = 1_000_000
"""Columns where nobody has a width: no line is that long."""


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
