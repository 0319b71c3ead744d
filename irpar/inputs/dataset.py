"""Samples to train on: arrays on disk of which each rank reads the rows and columns that it computes with."""

import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from irpar.errors import IrparError, listed, nearest_names
from irpar.sharding import Sharding, local_region, option

Array = np.ndarray[Any, Any]
Limits = Mapping[str, tuple[int, int, int | None]]
"""For inputs of class numbers the least and the most that they may be, and one that may be there besides."""
_UNREADABLE = (
    ValueError,
    EOFError,
    KeyError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    NotImplementedError,  # Another compression, or a password.
    RuntimeError,
    MemoryError,  # A shape that the file does not hold.
)
"""What reading a damaged file ends with."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
"""Of a member of a zip file; its last two fields are the lengths of its name and of what is extra."""


class DataError(IrparError):
    """Samples that cannot be read, or do not fit the program."""


class Dataset:
    """An array for each input, whose first dim counts samples; none of them is in memory.

    Attributes:
        path: where it was opened.
        arrays: by name.
    """

    def __init__(self, path: Path, arrays: Mapping[str, Array]) -> None:
        self.path = path
        self.arrays = arrays

    @classmethod
    def open(cls, path: str | Path) -> "Dataset":
        """Open an .npz file, or a folder with an .npy file for each input.

        Members of an .npz that are not compressed are mapped, as .npy files are; others are read at once.

        Raises:
            DataError: it is neither, or is damaged.
        """
        path = Path(path)
        do = "give an .npz file, or a folder with an .npy file for each input"
        try:
            arrays = _folder(path) if path.is_dir() else _mapped(path)
        except OSError as error:
            raise DataError(f"cannot read the data: {error.strerror or error}", where=str(path), do=do) from None
        except _UNREADABLE as error:
            raise DataError(f"cannot read the data: {error}", where=str(path), do=do) from None
        if not arrays:
            raise DataError("the data have no arrays", where=str(path), do=do)
        return cls(path, arrays)

    def check(
        self,
        specs: Mapping[str, Mapping[str, Any]],
        *,
        taker: str = "a step",
        may_be_short: bool = False,
        fewer: str = "--bind, --micro-batches, --short-batches",
    ) -> tuple[int, int]:
        """Compare the arrays with the inputs that they are for.

        Args:
            specs: the entry of plan.json's `inputs`, by name.
            taker: what takes samples, in words.
            may_be_short: whether a step may have fewer samples.
            fewer: the options that make it take fewer.

        Returns:
            How many samples there are, and how many a step takes.

        Raises:
            DataError: an array is missing, or has another dtype or shape; there are too few samples for a step.
        """
        problems = []
        for name, spec in specs.items():
            found = self.arrays.get(name)
            wanted = f"{spec['dtype']}[samples, {', '.join(map(str, spec['shape'][1:]))}]".replace(", ]", "]")
            if not spec["shape"]:
                problems.append(f"{name} is a single number in the program, and has no samples: give it by --input")
            elif found is None:
                near = nearest_names(name, self.arrays)
                problems.append(f"{name} is missing, expected {wanted}" + "".join(f"; {note}" for note in near))
            elif _text(found) != spec["dtype"] or list(found.shape[1:]) != list(spec["shape"][1:]):
                problems.append(f"{name} is {_text(found)}{list(found.shape)}, expected {wanted}")
        if problems:
            raise DataError(
                "the data do not fit the program",
                where=str(self.path),
                notes=tuple(problems),
                do="give an array for each input, of its dtype, its first dim the samples",
            )
        samples, batch = self._counts(specs, taker)
        if samples < (1 if may_be_short else batch):
            raise DataError(
                f"there are {samples} samples, and {taker} takes {batch}",
                where=str(self.path),
                do="give one or more" if may_be_short else f"give more, or make the step for fewer: {fewer}",
            )
        return samples, batch

    def _counts(self, specs: Mapping[str, Mapping[str, Any]], taker: str) -> tuple[int, int]:
        sizes = {name: (len(self.arrays[name]), spec["shape"][0]) for name, spec in specs.items()}
        samples, batch = max(sizes.values())
        for name, (has, takes) in sizes.items():
            if takes != batch or has != samples:
                other = next(other for other, size in sizes.items() if size == (samples, batch))
                raise DataError(
                    f"{name} has {has} samples, of which {taker} takes {takes}; {other} has {samples}, and {taker} "
                    f"takes {batch}",
                    where=str(self.path),
                    do="give arrays with equally many samples; an input that is no batch gets its value by --input",
                )
        return samples, batch

    def block(self, name: str, rows: Array, sharding: Sharding | None, coords: Sequence[int]) -> Array:
        """What a rank holds of some samples of an input; nothing else is read.

        Args:
            name: of the input.
            rows: the samples of the step; of several micro-batches a row of each.
            sharding: of the input on the mesh; None: every rank holds it in full.
            coords: of the rank.
        """
        array = self.arrays[name]
        if sharding is not None and not sharding.is_replicated:
            region = [slice(*each) for each in local_region(sharding, (*rows.shape, *array.shape[1:]), coords)]
            rows = rows[tuple(region[: rows.ndim])]
            array = array[(slice(None), *region[rows.ndim :])]
        # Files may have been written on a machine of another byte order.
        return np.ascontiguousarray(array[rows], array.dtype.newbyteorder("="))


def dataset_of(path: str) -> Dataset:
    """The samples at a path, opened once in this process, and again where the files are others."""
    return _opened(path, _files(Path(path)))


@lru_cache(maxsize=8)
def _opened(path: str, files: tuple[tuple[str, int, int, int], ...]) -> Dataset:
    return Dataset.open(path)


def _files(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """What tells the files at a path from others."""
    with suppress(OSError):
        parts = sorted(path.glob("*.npy")) if path.is_dir() else [path]
        found = [(part.name, part.stat()) for part in parts]
        return tuple((name, facts.st_ino, facts.st_size, facts.st_mtime_ns) for name, facts in found)
    return ()


class Batch:
    """Some samples, of which each rank reads what it computes with.

    Args:
        path: of the dataset.
        rows: which samples; of several micro-batches a row of each.
        names: of the inputs that they are for.
        limits: name of an input to the least and the most that its numbers may be, and one that may be there besides.
    """

    def __init__(
        self,
        path: str,
        rows: Array,
        names: Sequence[str],
        limits: Limits | None = None,
    ) -> None:
        self.path = path
        self.rows = rows
        self.names = tuple(names)
        self.limits = dict(limits or {})

    def message(self) -> list[Any]:
        """The batch as plain data and arrays, for ranks in other processes; `Batch(*message)` is the batch again."""
        return [self.path, self.rows, list(self.names), {name: list(each) for name, each in self.limits.items()}]

    def blocks(self, shardings: Mapping[str, Sharding | None], coords: Sequence[int]) -> dict[str, Array]:
        """The blocks of a rank by name.

        Raises:
            DataError: a number is not within its limits.
        """
        data = dataset_of(self.path)
        found = {name: data.block(name, self.rows, shardings[name], coords) for name in self.names}
        for name, (low, high, other) in self.limits.items():
            check_range(name, found[name], low, high, other, self.path)
        return found


def check_range(name: str, array: Array, low: int, high: int, other: int | None, where: str = "") -> None:
    """Refuse class numbers that there are not.

    Args:
        name: of the input.
        array: its numbers.
        low, high: the least and the most that they may be.
        other: one that may be there besides; None: none.

    Raises:
        DataError: naming the first such number.
    """
    wrong = (array < low) | (array > high)
    if other is not None:
        wrong &= array != other
    if wrong.any():
        found = sorted({int(number) for number in array[wrong][:1000]})
        besides = "" if other is None else f", or {other} for what does not count"
        raise DataError(
            f"{name} has {listed([str(number) for number in found], 3)}: it is from {low} to {high}{besides}",
            where=where,
            do=f"correct the data, or say which targets do not count: {option('ignore_index', found[0])}",
        )


def _text(array: Array) -> str:
    from irpar.ir import dtype_of_numpy

    try:
        return dtype_of_numpy(array.dtype).text
    except TypeError:
        return str(array.dtype)


def _folder(path: Path) -> dict[str, Array]:
    return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted(path.glob("*.npy"))}


def _mapped(path: Path) -> dict[str, Array]:
    found = {}
    with zipfile.ZipFile(path) as members, open(path, "rb") as file:
        for member in members.infolist():
            name = member.filename.removesuffix(".npy")
            if member.compress_type == zipfile.ZIP_STORED:
                found[name] = _member(path, file, member)
            else:
                with members.open(member) as entry:
                    found[name] = np.lib.format.read_array(entry, allow_pickle=False)
    return found


def _member(path: Path, file: IO[bytes], member: zipfile.ZipInfo) -> Array:
    """An array of an .npz file where it lies."""
    file.seek(member.header_offset)
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    first = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    file.seek(first)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not read")
    if not math.prod(shape):
        return np.empty(shape, dtype)
    if file.tell() + math.prod(shape) * dtype.itemsize != first + member.file_size:
        raise ValueError(f"{member.filename} is to be {dtype}{list(shape)}, and has {member.file_size} bytes")
    order: Any = "F" if is_fortran else "C"
    return np.memmap(path, dtype, "r", file.tell(), shape, order)
