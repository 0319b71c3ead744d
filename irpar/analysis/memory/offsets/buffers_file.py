"""Lifetimes as a CSV file, in the form of google/minimalloc: a row for each buffer, held from `lower` until `upper`."""

import csv
import io
import os
from collections.abc import Mapping, Sequence

from irpar.errors import IrparError
from irpar.files.atomic import WriteError, new_file
from irpar.files.regular_file import read_text

from .lifetimes import Lifetime

COLUMNS = ("id", "lower", "upper", "size")
OFFSET, GAPS = "offset", "gaps"
_OLDER = {"buffer": "id", "start": "lower", "end": "upper"}
"""Names of columns in older files."""
MOST_BYTES = 2**50
"""Of all sizes together."""
_MOST_STEPS = 2**50
_DIGITS = 16
"""Of one number."""


class BuffersFileError(IrparError):
    """A file of buffers cannot be read."""


def read_buffers(path: str | os.PathLike[str]) -> list[Lifetime[str]]:
    """The buffers of a file; columns may stand in any order, others than `COLUMNS` and `GAPS` are not read.

    Raises:
        BuffersFileError: it cannot be read, or a line is not what it should be.
    """
    name = os.fspath(path)
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise BuffersFileError(f"cannot read the buffers: {told}", where=name, do="give a CSV file") from error
    rows = csv.reader(io.StringIO(text), strict=True)
    found: dict[str, Lifetime[str]] = {}
    columns: dict[str, int] | None = None
    total = 0
    try:
        for row in rows:
            if not any(map(str.strip, row)):
                continue
            if columns is None:
                columns = _columns(row)
                continue
            buffer = _buffer(row, columns)
            if buffer.key in found:
                raise ValueError(f'there is a buffer "{buffer.key}" already')
            total += buffer.nbytes
            if total > MOST_BYTES:
                raise ValueError(f"the sizes so far add up to {total:,}, more than {MOST_BYTES:,}")
            found[buffer.key] = buffer
        if columns is None:
            raise ValueError(f"there is no line of names, such as {','.join(COLUMNS)}")
    except (ValueError, csv.Error) as error:
        raise BuffersFileError(
            str(error),
            where=f"{name}, line {max(rows.line_num, 1)}",
            do=f"give a CSV file with the columns {', '.join(COLUMNS)}, where a buffer is held from lower until upper, "
            "which is not in it",
        ) from error
    return list(found.values())


def _columns(row: Sequence[str]) -> dict[str, int]:
    """The place of each column, by the line of names."""
    names = [_OLDER.get(name, name) for name in (name.strip().lower() for name in row)]
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ValueError(f"no column is called {missing[0]}")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"two columns are called {twice[0]}")
    return {name: names.index(name) for name in names}


def _buffer(row: Sequence[str], columns: Mapping[str, int]) -> Lifetime[str]:
    if len(row) != len(columns):
        raise ValueError(f"{len(row)} columns, and the line of names has {len(columns)}")
    if GAPS in columns and row[columns[GAPS]].strip():
        raise ValueError(f"there are {GAPS}, steps in which the buffer is not held: they are not supported")
    name = row[columns["id"]].strip()
    if not name:
        raise ValueError("the id is empty")
    lower, upper, size = (_number(column, row[columns[column]].strip()) for column in COLUMNS[1:])
    if upper <= lower:
        raise ValueError(f"upper is {upper}, which must be greater than lower, {lower}")
    return Lifetime(name, size, lower, upper - 1)


def _number(column: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS:
        raise ValueError(f'{column} is "{text}", not a whole number from 0 to {10**_DIGITS - 1}')
    number = int(text)
    if number > _MOST_STEPS:
        raise ValueError(f"{column} is {number}, more than {_MOST_STEPS:,}")
    return number


def write_buffers(path: str | os.PathLike[str], held: Sequence[Lifetime[str]], offsets: Mapping[str, int]) -> None:
    """Write buffers and where they lie.

    Raises:
        WriteError: the system refuses.
    """
    with new_file(path, "the buffers", WriteError) as fresh, open(fresh, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*COLUMNS, OFFSET))
        for one in held:
            writer.writerow((one.key, one.first, one.last + 1, one.nbytes, offsets[one.key]))
