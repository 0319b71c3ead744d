"""The text form of a module: print, parse, write to a file, read from one. Grammar: docs/text.md."""

import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from irpar.files.atomic import WriteError, check_file, new_file, new_pair
from irpar.files.regular_file import open_file
from irpar.files.regular_file import read_text as read_file
from irpar.ir.module import Module
from irpar.ir.tensor import ExternalTensor, Tensor
from irpar.ir.types import TensorType
from irpar.sharding import IrparError

from .lexer import TextError
from .parser import TOP_LEVEL, parse
from .printer import Printer

__all__ = ["Printed", "TextError", "TextFolder", "parse_module", "print_module", "read_text", "write_text"]

_WHAT = "the text"
_MOST_CHARACTERS = 4096
"""Of a line that is looked at to tell whether a file is text."""
_ALIGNMENT = 64
"""Bytes; tensors in a data file start at multiples of it."""


@dataclass(frozen=True)
class Printed:
    """A module as text, with the tensors that the text names but does not hold.

    Attributes:
        text: the text.
        resources: what `data("...")` names: "#1", "#2" ... for tensors in memory, and for each data file of the module
            one tensor that lies in it.
    """

    text: str
    resources: Mapping[str, Tensor]


class _MemoryStore:
    """Names tensors "#1", "#2" ..., one name for one tensor."""

    def __init__(self) -> None:
        self.resources: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def put(self, tensor: Tensor) -> tuple[str, int]:
        name = self._names.get(id(tensor))
        if name is None:
            name = self._names[id(tensor)] = f"#{len(self._names) + 1}"
            self.resources[name] = tensor
        return name, 0

    def place(self, tensor: ExternalTensor) -> tuple[str, int]:
        name = f"./{tensor.name}" if tensor.name.startswith("#") else tensor.name
        known = self.resources.setdefault(name, tensor)
        # Two files that the model calls the same are told apart by their paths.
        is_same = isinstance(known, ExternalTensor) and known.path == tensor.path
        return name if is_same else str(tensor.path), tensor.offset


class _FileStore:
    """Appends tensors to the data file of a text.

    Args:
        path: the data file that the text names.
        file: the open file that takes its place.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._places: dict[int, tuple[Tensor, int]] = {}

    def go_on(self, file: BinaryIO) -> None:
        """Append to the file from here on, which was opened again."""
        self._file = file

    def put(self, tensor: Tensor) -> tuple[str, int]:
        place = self._places.get(id(tensor))
        if place is None:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            place = self._places[id(tensor)] = (tensor, self._file.tell())
            self._file.write(tensor.raw())
        return self.path.name, place[1]

    def place(self, tensor: ExternalTensor) -> tuple[str, int]:
        path = tensor.path.resolve()
        if path == self.path:
            return self.put(tensor)  # The file that it lies in is written anew.
        if not tensor.name.startswith("#") and (self.path.parent / tensor.name).resolve() == path:
            return tensor.name, tensor.offset
        return str(path), tensor.offset


def print_module(module: Module) -> Printed:
    """The text form of a module. Nothing is read but the constants of up to 16 elements that are in memory."""
    store = _MemoryStore()
    text = Printer(module, store).print()
    return Printed(text, store.resources)


def parse_module(text: str, *, filename: str = "<text>", resources: Mapping[str, Tensor] | None = None) -> Module:
    """Read the text form.

    Args:
        text: the text.
        filename: what messages call it; data files are looked for in its folder.
        resources: tensors that the text names, as `print_module` gives them.

    Raises:
        TextError: the text is not the text form; the message shows the place.
    """
    known = resources or {}
    folder = Path(filename).parent

    def resolve(file: str, offset: int, length: int, type_: TensorType) -> Tensor:
        found = known.get(file)
        if file.startswith("#"):
            return _of_memory(found, file, offset, length, type_)
        path = found.path if isinstance(found, ExternalTensor) else folder / file
        return ExternalTensor(type_.dtype, type_.static_shape, path, file, offset, length)

    return parse(text, filename, resolve)


def _of_memory(found: Tensor | None, name: str, offset: int, length: int, type_: TensorType) -> Tensor:
    if found is None:
        raise ValueError(f"the text does not hold tensor {name}: give its resources, or use write_text and read_text")
    if found.type != type_ or offset or length != found.nbytes:
        raise ValueError(f"tensor {name} is {found.type} of {found.nbytes} bytes")
    return found


def write_text(module: Module, path: str | os.PathLike[str], comment: str = "", end: str = "") -> None:
    """Write the text form to a file; tensors in memory that are too big for it go to `<path>.data`.

    Both files are written beside their places and moved there when complete.

    Args:
        module: what to write.
        path: the file.
        comment: lines that begin with `//`, for the top of the file.
        end: lines of the text form, for its end.

    Raises:
        IrparError: a file cannot be written, or is there and is not of the text form.
    """
    check_text_target(path)
    path = Path(path)
    data = _data_path(path)
    with new_pair(path, data, _WHAT) as (fresh, fresh_data):
        with open(fresh_data, "wb") as file:
            text = Printer(module, _FileStore(data.resolve(), file)).print()
        fresh.write_text(comment + text + end, encoding="utf-8")


class TextFolder:
    """Texts of one module at several times, in a folder; tensors in memory go to one data file, each once.

    Args:
        folder: where to; it must be there.
        data: the name of the data file; one that is there is written anew.

    Raises:
        OSError: the data file cannot be written.
    """

    def __init__(self, folder: Path, data: str) -> None:
        self.folder = folder
        self._path = (folder / data).resolve()
        self._path.unlink(missing_ok=True)
        self._store: _FileStore | None = None

    def write(self, module: Module, name: str) -> None:
        """Write the text of a module, as it is now, to the file `name`.

        Raises:
            IrparError: a file cannot be written.
            OSError: the data file cannot be written.
        """
        with open(self._path, "ab") as file:
            if self._store is None:
                self._store = _FileStore(self._path, file)
            self._store.go_on(file)
            text = Printer(module, self._store).print()
        if not self._path.stat().st_size:
            self._path.unlink()
        with new_file(self.folder / name, _WHAT) as fresh:
            fresh.write_text(text, encoding="utf-8")


def check_text_target(path: str | os.PathLike[str]) -> None:
    """Refuse to write the text form over what is there and is no such text.

    Raises:
        IrparError: saying what is there.
    """
    path = Path(path)
    check_file(path, _WHAT)
    if not path.exists():
        data = _data_path(path)
        if data.exists():
            do = "give another file, or remove this one yourself"
            raise WriteError(f"cannot write {_WHAT}: its data file is there, and no text", where=str(data), do=do)
    elif not _is_text(path):
        do = "give another file, or remove this one yourself"
        raise WriteError(f"cannot write {_WHAT} over a file that holds something else", where=str(path), do=do)


def _data_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _is_text(path: Path) -> bool:
    """Whether the first word of a file is one that the text form begins with; an empty file counts."""
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8-sig") as file:
            while line := file.readline(_MOST_CHARACTERS):
                line = line.strip()
                if line and not line.startswith("//"):
                    return re.split(r"\W", line, maxsplit=1)[0] in TOP_LEVEL
    except UnicodeDecodeError:
        return False
    except OSError:
        return True  # The writing will tell.
    return True


def read_text(path: str | os.PathLike[str]) -> Module:
    """Read a module from a file of the text form; tensors in data files are read when something needs them.

    Raises:
        IrparError: the file cannot be read, or is not the text form (TextError).
    """
    try:
        text = read_file(path, "utf-8-sig")
    except OSError as error:
        raise IrparError(f"cannot read {path}: {error.strerror}", do="give the path of a text file") from error
    except UnicodeDecodeError as error:
        raise IrparError(f"{path} is not UTF-8 text: byte {error.start}", do="give a file of the text form") from error
    return parse_module(text, filename=os.fspath(path))
