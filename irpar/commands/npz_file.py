"""Arrays in .npz files: the inputs and outputs of `irpar run` and `irpar verify`."""

import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from irpar.files.atomic import check_file, new_file
from irpar.files.regular_file import open_file
from irpar.ir import dtype_of_text
from irpar.sharding import IrparError

Array = np.ndarray[Any, Any]
_ZIP_STARTS = (b"PK\x03\x04", b"PK\x05\x06")
"""Of a zip file with entries, and of an empty one."""


class NpzError(IrparError):
    """A file that is no .npz, or one that cannot be written."""


def read_npz(path: str | Path, specs: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Array]:
    """Read all arrays of a file.

    Where the inputs of a plan are given, the headers are compared with them before any array is unpacked: a small file
    may declare arrays of any size.

    Args:
        path: the file.
        specs: `inputs` of plan.json: numpy writes dtypes that it does not know itself (bfloat16 ...) as bare bytes,
            which become the dtype that is planned for the name again; texts become objects, as ONNX Runtime takes them.

    Raises:
        NpzError: the file is missing or damaged, or holds Python objects.
        InputError: the arrays do not fit the plan.
    """
    path = Path(path)
    do = 'write it with numpy.savez("in.npz", name=array, ...)'
    dtypes = {spec["name"]: spec["dtype"] for spec in specs or ()}
    try:
        with open_file(path) as file:
            if file.read(6) == b"\x93NUMPY":
                raise NpzError("the file holds one array without a name", where=str(path), do=do)
            if specs is not None:
                _check_headers(file, specs, dtypes)
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return {name: _as_planned(arrays[name], dtypes.get(name)) for name in arrays.files}
    except OSError as error:
        raise NpzError(f"cannot read the arrays: {error.strerror or error}", where=str(path), do=do) from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, struct.error) as error:
        raise NpzError(f"not an .npz file of arrays: {_reason(error)}", where=str(path), do=do) from None


def _check_headers(file: BinaryIO, specs: Sequence[Mapping[str, Any]], dtypes: Mapping[str, str | None]) -> None:
    """Compare what the members of a zip file declare with the inputs of a plan.

    Raises:
        InputError: they do not fit.
        OutOfMemoryError: there is not so much memory.
        ValueError: a member is no array.
    """
    from irpar.runtime.layout import TensorSpec
    from irpar.runtime.memory import check_memory
    from irpar.runtime.specs import check_inputs

    declared: dict[str, Array] = {}
    total = 0
    with zipfile.ZipFile(file) as members:
        for entry in members.namelist():
            name = entry.removesuffix(".npy")
            with members.open(entry) as member:
                shape, dtype = _header(member)
            total += math.prod(shape) * dtype.itemsize
            # One element that is seen everywhere takes no memory.
            element = np.zeros((), object if dtype.kind == "U" else dtype)
            declared[name] = _as_planned(np.broadcast_to(element, shape), dtypes.get(name))
    planned = [
        TensorSpec(
            spec["name"], dtype_of_text(spec["dtype"] or ""), None if spec["shape"] is None else tuple(spec["shape"])
        )
        for spec in specs
    ]
    check_inputs(planned, declared)
    # Texts may be of any length, and a sequence of any size.
    check_memory(total, "the file of inputs")


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype that a .npy file declares.

    Raises:
        ValueError: it is no array, or one of Python objects.
    """
    try:
        version = np.lib.format.read_magic(member)
    except ValueError:
        raise ValueError("it holds a file that is no array") from None
    read = _HEADER_READERS.get(version)
    if read is None:
        raise ValueError(f"it holds an array in .npy version {version[0]}.{version[1]}")
    shape, _, dtype = read(member)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded")
    return shape, dtype


_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
"""Version 3 is for names of fields in Unicode alone, and inputs have no fields."""


def _reason(error: Exception) -> str:
    text = str(error)
    if "Object arrays" in text:
        return "it holds Python objects, which are not read"
    return "it is no zip file" if "pickle" in text or not text else text.splitlines()[0]


def _as_planned(array: Array | bytes, dtype: str | None) -> Array:
    if isinstance(array, bytes):
        raise ValueError("it holds a file that is no array")
    if dtype == "str" or array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind == "V" and dtype is not None:
        known = dtype_of_text(dtype)
        if known is not None and np.dtype(known.numpy).itemsize == array.dtype.itemsize:
            return array.view(known.numpy)
    return array


def write_npz(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays under their names; the file takes its place only when it is complete.

    Raises:
        NpzError: a value is no array, or the file cannot be written.
    """
    check_npz_target(path)
    # numpy.savez takes names as keyword arguments, and so cannot write an array called "file".
    with new_file(path, "the arrays", NpzError) as fresh, zipfile.ZipFile(fresh, "w", zipfile.ZIP_STORED) as file:
        for name, value in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, _writable(name, value), allow_pickle=False)


def check_npz_target(path: str | Path) -> None:
    """Refuse to write arrays over what is there and is no .npz file.

    Raises:
        NpzError: it is no file, or one of another kind.
    """
    check_file(path, "the arrays", NpzError)
    try:
        with open_file(path) as file:
            start = file.read(4)
    except OSError:
        return  # There is none, or the writing will tell.
    if start and start not in _ZIP_STARTS:
        raise NpzError(
            "cannot write the arrays over a file that is no .npz",
            where=str(path),
            do="give another file, or remove this one yourself",
        )


def _writable(name: str, value: Any) -> Array:
    if isinstance(value, (list, tuple)) or value is None:
        do = "run the partition from Python, which gives sequences as lists"
        raise NpzError(f"{name} is no tensor, and an .npz file holds only arrays", do=do)
    array = np.asarray(value)
    return array.astype(np.str_) if array.dtype.kind == "O" else array
