"""Values as bytes: what processes of one run tell each other. Nothing in a message is ever executed."""

import json
import struct
from typing import Any

import numpy as np

from irpar.ir import dtype_of_numpy, dtype_of_text

ALIGNMENT = 64
"""Bytes; the address of every array in a message is a multiple of it."""
_LENGTH = struct.Struct("<Q")
_ARRAY = "array"
_TEXTS = "texts"


def encode(value: Any) -> bytes:
    """None, bools, numbers, texts, lists, dicts with text keys, and arrays of any ONNX dtype, nested.

    Raises:
        TypeError: the value holds something else.
    """
    blobs = _Blobs()
    head = json.dumps(_plain(value, blobs)).encode()
    head += b" " * (-(_LENGTH.size + len(head)) % ALIGNMENT)
    return b"".join((_LENGTH.pack(len(head)), head, *blobs.parts))


def decode(message: bytes | bytearray | memoryview) -> Any:
    """The value that `encode` encoded; its arrays are read-only views of the message, or of an aligned copy.

    Raises:
        ValueError: the bytes are no such message.
    """
    view = _aligned(message)
    try:
        (length,) = _LENGTH.unpack_from(view)
        if _LENGTH.size + length > len(view):
            raise ValueError("not a message of irpar: it is cut short")
        head = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length]))
        return _rich(head, view[_LENGTH.size + length :])
    except (struct.error, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a message of irpar: {error}") from error


def _aligned(message: bytes | bytearray | memoryview) -> memoryview:
    """The message where arrays may lie: kernels compute other bits, or nothing, at odd addresses."""
    array = np.frombuffer(message, np.uint8)
    if array.ctypes.data % ALIGNMENT:
        room = np.empty(array.size + ALIGNMENT, np.uint8)
        first = -room.ctypes.data % ALIGNMENT
        room[first : first + array.size] = array
        array = room[first : first + array.size]
    return array.data.toreadonly()


class _Blobs:
    """The numbers of a message, one array after the other, each at a multiple of `ALIGNMENT`."""

    def __init__(self) -> None:
        self.parts: list[memoryview | bytes] = []
        self._size = 0

    def add(self, data: memoryview) -> int:
        """Add an array's bytes; returns where they begin."""
        begin, room = self._size, -len(data) % ALIGNMENT
        self.parts += [data, bytes(room)]
        self._size += len(data) + room
        return begin


def _plain(value: Any, blobs: "_Blobs") -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _plain_array(np.asarray(value), blobs)
    if isinstance(value, dict):
        # A pair of lists, so that no key of the value can be taken for one of ours.
        return {"keys": [str(key) for key in value], "values": [_plain(each, blobs) for each in value.values()]}
    if isinstance(value, list | tuple):
        return [_plain(each, blobs) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


def _plain_array(array: np.ndarray[Any, Any], blobs: "_Blobs") -> dict[str, Any]:
    kind = dtype_of_numpy(array.dtype)
    if kind.text == "str":
        return {_TEXTS: [_text(each) for each in array.reshape(-1)], "shape": array.shape}
    # The numbers are copied once, when all is joined. (Not every dtype has a memoryview of its own.)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return {_ARRAY: kind.text, "shape": array.shape, "offset": blobs.add(data)}


def _text(value: Any) -> str | dict[str, Any]:
    return value if isinstance(value, str) else {"bytes": bytes(value).decode("latin-1")}


def _rich(value: Any, blobs: memoryview) -> Any:
    if isinstance(value, list):
        return [_rich(each, blobs) for each in value]
    if not isinstance(value, dict):
        return value
    if "keys" in value:
        return dict(zip(value["keys"], (_rich(each, blobs) for each in value["values"]), strict=True))
    shape = tuple(value["shape"])
    if _TEXTS in value:
        texts = np.empty(shape, object)
        texts.reshape(-1)[:] = [
            each if isinstance(each, str) else each["bytes"].encode("latin-1") for each in value[_TEXTS]
        ]
        return texts
    known = dtype_of_text(value[_ARRAY])
    if known is None:
        raise ValueError(f"not a message of irpar: there is no dtype {value[_ARRAY]!r}")
    dtype = known.numpy
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(blobs, dtype, count, value["offset"]).reshape(shape) if count else np.empty(shape, dtype)
