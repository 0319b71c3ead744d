"""Numbers and shardings as people read them."""

from collections.abc import Sequence
from decimal import ROUND_UP, Context
from typing import Any

_UNITS = ("", "k", "M", "G", "T", "P", "E")


GIGABYTE = 10**9
"""Bytes of a GB, as options take them."""
MOST_BYTES = 2**62
"""The largest limit that there is."""


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


def gigabytes(number: float) -> int:
    """The bytes of a number of gigabytes: none of 0, at least one of more, and at most what can be addressed."""
    return min(max(1, round(min(number, MOST_BYTES / GIGABYTE) * GIGABYTE)), MOST_BYTES) if number else 0


def gigabytes_option(nbytes: int) -> str:
    """The least number of gigabytes of few digits in which so many bytes fit, as options take it: `16.13`."""
    rounded = Context(prec=4, rounding=ROUND_UP).create_decimal(nbytes)
    return f"{rounded.scaleb(-9).normalize():f}"


def flops_text(number: float) -> str:
    """Floating-point operations: `3.2 GFLOP`."""
    return scaled(number, "FLOP")


def share_text(part: float, whole: float) -> str:
    """A share in percent; empty where there is no whole."""
    return f"{part / whole:.1%}" if whole else ""


def count_text(number: int, noun: str) -> str:
    """`1 tensor`, `2,000 tensors`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
