"""Reports as HTML, for notebooks: what prints to a console prints to a page too. All text is escaped."""

from collections.abc import Callable, Iterator
from html import escape
from typing import Any

_CELL = 'style="text-align:{};vertical-align:top"'


class Page:
    """Takes what a report prints to a console: texts become paragraphs, tables become tables."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def print(self, *objects: Any, **_: Any) -> None:
        """Add each of them; how a console would fold them does not matter here."""
        for given in objects:
            rows = getattr(given, "columns", None)
            self._pieces.append(_paragraph(given) if rows is None else _table(given))

    def __str__(self) -> str:
        return "<div>" + "\n".join(filter(None, self._pieces)) + "</div>"


def report_html(report: Callable[[Any], None]) -> str:
    """What a report prints, as HTML."""
    page = Page()
    report(page)
    return str(page)


def _paragraph(given: Any) -> str:
    lines = [escape(line) for text in _texts(given) for line in text.split("\n") if line.strip()]
    text = "<br>".join(lines)
    return (f"<p><b>{text}</b></p>" if str(getattr(given, "style", "")) == "bold" else f"<p>{text}</p>") if text else ""


def _table(given: Any) -> str:
    columns = [(column, list(column.cells)) for column in given.columns]
    title = f"<caption>{_inline(given.title)}</caption>" if given.title else ""
    head = "".join(f"<th {_CELL.format(column.justify)}>{_inline(column.header)}</th>" for column, _ in columns)
    rows = [
        "".join(f"<td {_CELL.format(column.justify)}>{_inline(cells[row])}</td>" for column, cells in columns)
        for row in range(given.row_count)
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    header = f"<thead><tr>{head}</tr></thead>" if given.show_header else ""
    return f"<table>{title}{header}<tbody>{body}</tbody></table>"


def _inline(given: Any) -> str:
    return "<br>".join(escape(line) for text in _texts(given) for line in text.split("\n"))


def _texts(given: Any) -> Iterator[str]:
    """The texts in what Rich can print: a string, Text, Padding around one, or a Group of them."""
    if hasattr(given, "renderables"):
        for inner in given.renderables:
            yield from _texts(inner)
    elif hasattr(given, "renderable"):
        yield from _texts(given.renderable)
    else:
        yield getattr(given, "plain", None) or str(given)
