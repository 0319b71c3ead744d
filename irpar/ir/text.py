"""The text form of a module: print, parse, write to a file, read from one. Grammar: docs/text.md."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from irpar.sharding import IrparError

from .lexer import TextError
from .module import Module
from .parser import parse
from .printer import Printer
from .tensor import ExternalTensor, Tensor
from .types import TensorType

__all__ = ["Printed", "TextError", "parse_module", "print_module", "read_text", "write_text"]

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

    def file(self, tensor: ExternalTensor) -> str:
        name = f"./{tensor.name}" if tensor.name.startswith("#") else tensor.name
        known = self.resources.setdefault(name, tensor)
        # Two files that the model calls the same are told apart by their paths.
        return name if isinstance(known, ExternalTensor) and known.path == tensor.path else str(tensor.path)


class _FileStore:
    """Appends tensors to a data file beside the text, which is made when the first one comes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.beside = folder / f"{name}.partial"
        self._file: BinaryIO | None = None
        self._places: dict[int, tuple[Tensor, int]] = {}

    def put(self, tensor: Tensor) -> tuple[str, int]:
        place = self._places.get(id(tensor))
        if place is None:
            if self._file is None:
                self._file = open(self.beside, "wb")  # noqa: SIM115 (closed by close)
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            place = self._places[id(tensor)] = (tensor, self._file.tell())
            self._file.write(tensor.raw())
        return self.name, place[1]

    def file(self, tensor: ExternalTensor) -> str:
        if not tensor.name.startswith("#") and (self.folder / tensor.name).resolve() == tensor.path.resolve():
            return tensor.name
        return str(tensor.path.resolve())

    def close(self) -> bool:
        """Close the file; True where there is one."""
        if self._file is not None:
            self._file.close()
        return self._file is not None


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


def write_text(module: Module, path: str | os.PathLike[str]) -> None:
    """Write the text form to a file; tensors in memory that are too big for it go to `<path>.data`.

    Both files are written beside their places and moved there when complete.

    Raises:
        IrparError: a file cannot be written.
    """
    path = Path(path)
    store = _FileStore(path.parent.resolve(), f"{path.name}.data")
    beside = path.with_name(f"{path.name}.partial")
    try:
        try:
            beside.write_text(Printer(module, store).print(), encoding="utf-8")
        finally:
            has_data = store.close()
        if has_data:
            os.replace(store.beside, path.with_name(store.name))
        os.replace(beside, path)
    except OSError as error:
        raise IrparError(f"cannot write {path}: {error.strerror}", do="give a place that can be written") from error
    finally:
        beside.unlink(missing_ok=True)
        store.beside.unlink(missing_ok=True)


def read_text(path: str | os.PathLike[str]) -> Module:
    """Read a module from a file of the text form; tensors in data files are read when something needs them.

    Raises:
        IrparError: the file cannot be read, or is not the text form (TextError).
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise IrparError(f"cannot read {path}: {error.strerror}", do="give the path of a text file") from error
    except UnicodeDecodeError as error:
        raise IrparError(f"{path} is not UTF-8 text: byte {error.start}", do="give a file of the text form") from error
    return parse_module(text, filename=os.fspath(path))
