"""Memory over the steps of a program as a picture: SVG, stacked by what it is for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from irpar.units import bytes_text
from irpar.visible import visible

COLORS = {
    "parameters": "#0072b2",
    "optimizer": "#56b4e9",
    "buffers": "#cc79a7",
    "gradients": "#e69f00",
    "activations": "#009e73",
}
"""From the bottom up; those of Okabe and Ito, which people who see few colors tell apart."""
_WIDTH, _HEIGHT = 960, 320
"""Of a picture, and of each of its panels, in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 52, 58
_HEAD = 58
"""Above the panels: the title and what the colors mean."""
_MOST_COLUMNS = 800
"""Of steps that are drawn: of more the one with most is taken of each few."""
_TICKS = 6
_LIMIT_COLOR, _INK, _FAINT = "#b00020", "#222222", "#999999"


@dataclass(frozen=True)
class Panel:
    """One program.

    Attributes:
        title: what is shown.
        held: bytes at each step from 0 on, by use: see `irpar.analysis.memory.holdings.bytes_by_step`.
        peak_step: where most is held.
        peak_label: what runs there.
        phases: names of stretches of steps, and the first step of each, in order.
    """

    title: str
    held: Mapping[str, Sequence[int]]
    peak_step: int
    peak_label: str
    phases: Sequence[tuple[str, int]] = ()

    @property
    def totals(self) -> list[int]:
        """Bytes at each step."""
        return [sum(column) for column in zip(*self.held.values(), strict=True)]


def memory_picture(title: str, panels: Sequence[Panel], limit: tuple[str, int] | None = None) -> str:
    """The picture: panels one below the other, all on one scale.

    Args:
        title: of the whole.
        panels: at least one.
        limit: bytes that ranks may hold, with what to call it; drawn as a line where that leaves the rest readable.
    """
    most = max(max(panel.totals) for panel in panels)
    is_drawn = limit is not None and limit[1] <= 2 * most
    top = max(most, limit[1] if is_drawn and limit else 0) * 1.12 or 1
    height = _HEAD + _HEIGHT * len(panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" fill="{_INK}">',
        f"<title>{_written(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 24, title, size=16),
        *_legend(panels),
    ]
    if limit is not None and not is_drawn:
        lines.append(_text(_WIDTH - _RIGHT, 24, f"{limit[0]}: {bytes_text(limit[1])}", anchor="end"))
    for place, panel in enumerate(panels):
        lines.append(f'<g transform="translate(0 {_HEAD + _HEIGHT * place})">')
        lines += _panel(panel, top, limit if is_drawn else None)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


def _legend(panels: Sequence[Panel]) -> Iterator[str]:
    x = _LEFT
    for use, color in COLORS.items():
        if any(any(panel.held.get(use, ())) for panel in panels):
            yield f'<rect x="{x}" y="36" width="12" height="12" fill="{color}"/>'
            yield _text(x + 17, 46, use)
            x += 17 + 8 * len(use) + 16


def _panel(panel: Panel, top: float, limit: tuple[str, int] | None) -> Iterator[str]:
    totals = panel.totals
    steps = max(len(totals) - 1, 1)
    inner, floor = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM

    def x_of(step: float) -> float:
        return round(_LEFT + inner * step / (steps + 1), 1)

    def y_of(nbytes: float) -> float:
        return round(floor - (floor - _TOP) * nbytes / top, 1)

    yield _text(_LEFT, 22, panel.title, size=13)
    for tick in _ticks(top):
        yield _line(_LEFT, y_of(tick), _WIDTH - _RIGHT, y_of(tick), "#e4e4e4")
        yield _text(_LEFT - 6, y_of(tick) + 4, bytes_text(tick), anchor="end")
    yield from _areas(panel, totals, x_of, y_of)
    for name, first in panel.phases:
        yield _line(x_of(first), _TOP - 12, x_of(first), floor, _FAINT, dash="2 3")
        yield _text(x_of(first) + 4, _TOP - 4, name, color="#666666", size=11)
    yield _line(_LEFT, floor, _WIDTH - _RIGHT, floor, _INK)
    yield _line(_LEFT, _TOP - 12, _LEFT, floor, _INK)
    for tick in _ticks(steps):
        yield _line(x_of(tick), floor, x_of(tick), floor + 4, _INK)
        yield _text(x_of(tick), floor + 17, f"{tick:,}", anchor="middle")
    yield _text(_LEFT + inner / 2, floor + 36, "step of the program (node, in its order)", anchor="middle")
    middle = (_TOP + floor) / 2
    yield (
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">bytes that a rank holds'
        "</text>"
    )
    x, nbytes = x_of(panel.peak_step + 0.5), totals[panel.peak_step]
    is_right = x > (_LEFT + _WIDTH) / 2
    if limit is not None:
        # Its words stand on the side where those of the peak do not.
        y, label = y_of(limit[1]), f"{limit[0]}: {bytes_text(limit[1])}"
        yield _line(_LEFT, y, _WIDTH - _RIGHT, y, _LIMIT_COLOR, dash="7 4")
        yield (
            _text(_LEFT + 6, y - 5, label, color=_LIMIT_COLOR)
            if is_right
            else _text(_WIDTH - _RIGHT - 6, y - 5, label, anchor="end", color=_LIMIT_COLOR)
        )
    yield f'<circle cx="{x}" cy="{y_of(nbytes)}" r="4" fill="none" stroke="{_INK}" stroke-width="1.5"/>'
    words = f"peak {bytes_text(nbytes)}, step {panel.peak_step:,}: {panel.peak_label}"
    beside, anchor = (-9, "end") if is_right else (9, "start")
    yield _text(x + beside, y_of(nbytes) - 7, words, anchor=anchor, weight="bold")


def _areas(
    panel: Panel, totals: Sequence[int], x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> Iterator[str]:
    """The stacked areas, each a step function down to the floor: the highest first, which those below it cover."""
    columns = _columns(totals)
    sums = [0] * len(columns)
    areas: list[str] = []
    for use, color in COLORS.items():
        held = panel.held.get(use)
        if not held or not any(held):
            continue
        sums = [low + held[step] for low, (_, step) in zip(sums, columns, strict=True)]
        path, before = [f"M{x_of(0)} {y_of(0)}"], 0
        for (first, _), high in zip(columns, sums, strict=True):
            if high != before:
                path.append(f"H{x_of(first)}V{y_of(high)}")
                before = high
        path.append(f"H{x_of(len(totals))}V{y_of(0)}Z")
        areas.append(f'<path d="{"".join(path)}" fill="{color}"><title>{use}</title></path>')
    yield from reversed(areas)


def _columns(totals: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches of steps: the first of each, and the one that is drawn for it, at which most is held."""
    count = min(len(totals), _MOST_COLUMNS)
    starts = [len(totals) * number // count for number in range(count)]
    ends = [*starts[1:], len(totals)]
    return [(start, max(range(start, end), key=totals.__getitem__)) for start, end in zip(starts, ends, strict=True)]


def _ticks(most: float) -> list[int]:
    """Round numbers from 0 up to the most."""
    least = max(most / _TICKS, 1)
    unit = 10 ** (len(str(int(least))) - 1)
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= least)
    return list(range(0, int(most) + 1, step))


def _line(x: float, y: float, to_x: float, to_y: float, color: str, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{color}"{dashed}/>'


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, color: str = _INK, weight: str = "normal"
) -> str:
    return (
        f'<text x="{round(x, 2)}" y="{round(y, 2)}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="{color}" stroke="#ffffff" stroke-width="3" paint-order="stroke">'
        f"{_written(words)}</text>"
    )


def _written(words: str) -> str:
    """A text in which nothing is markup, and no character is one that XML has not."""
    return escape(visible(words))
