"""Where in a model file the raw bytes of its initializers lie, read off the protobuf's own form, without parsing it."""

import mmap
from collections.abc import Iterator
from pathlib import Path

_GRAPH, _INITIALIZER, _NAME, _RAW_DATA = 7, 5, 8, 9
"""Fields: of a ModelProto, of a GraphProto, and two of a TensorProto."""
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5

Ranges = dict[str, tuple[int, int]]


def initializer_ranges(path: Path) -> Ranges:
    """The offset and the length of the raw data of each initializer of the main graph, by its name.

    Raises:
        ValueError: the file is no protobuf, or is cut short.
        OSError: it cannot be read.
    """
    found: Ranges = {}
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for field, start, end in _fields(data, 0, len(data)):
            if field != _GRAPH:
                continue
            for inner, first, last in _fields(data, start, end):
                if inner == _INITIALIZER:
                    parts = {number: (begin, stop) for number, begin, stop in _fields(data, first, last)}
                    if _NAME in parts and _RAW_DATA in parts:
                        name = data[slice(*parts[_NAME])].decode(errors="replace")
                        begin, stop = parts[_RAW_DATA]
                        found[name] = begin, stop - begin
    return found


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of a message that have a length: number, start and end of the content."""
    place = start
    while place < end:
        key, place = _varint(data, place, end)
        kind = key & 7
        if kind == _LENGTH_DELIMITED:
            length, place = _varint(data, place, end)
            if place + length > end:
                raise ValueError(f"a field ends at byte {place + length}, its message at byte {end}")
            yield key >> 3, place, place + length
            place += length
        elif kind == _VARINT:
            _, place = _varint(data, place, end)
        elif kind in (_FIXED64, _FIXED32):
            place += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"a field of kind {kind} at byte {place}")
    if place != end:
        raise ValueError(f"a field ends at byte {place}, its message at byte {end}")


def _varint(data: mmap.mmap, place: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while place < end and shift < 70:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError(f"a number without an end at byte {place}")
