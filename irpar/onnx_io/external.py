"""External data: where it may lie, and whether its files are there and long enough."""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx

from irpar.ir import DType, ExternalTensor, Module, Tensor, TensorError, Tensors

from .errors import OnnxError, text_of


class ExternalFolder:
    """The folder of a model: gives its external tensors, each file name checked once.

    Args:
        folder: the folder, or None for a model in memory that has none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._paths: dict[str, Path] = {}

    def tensor(self, proto: onnx.TensorProto, dtype: DType, shape: tuple[int, ...]) -> ExternalTensor:
        """The tensor whose bytes a TensorProto says lie in a file; the file is not opened.

        Raises:
            OnnxError: the file is outside the folder, or the range cannot hold the tensor.
        """
        entries = {entry.key: entry.value for entry in proto.external_data}
        location = text_of(entries.get("location", ""))
        path = self._paths.get(location) or self._path(location)
        needed = _needed(dtype, shape)
        offset = _number(entries, "offset", 0)
        length = _number(entries, "length", needed)
        if length != needed:
            raise OnnxError(
                f"external data of {length} bytes for a tensor {dtype}{list(shape)}, which needs {needed}",
                where=f"{location}, offset {offset}",
                do="write the model again; its external data does not fit its tensors",
            )
        return ExternalTensor(dtype, shape, path, location, offset, length)

    def _path(self, location: str) -> Path:
        if self.folder is None:
            raise OnnxError(
                f'external data in "{location}", but the model has no folder',
                do="load the model from its file, or pass folder=",
            )
        reason = _unsafe(location)
        path = self.folder / location if reason is None else self.folder
        if reason is None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.folder)):
            reason = "is a symbolic link that leaves the model's folder"
        if reason is not None:
            raise OnnxError(
                f'external data location "{location}" {reason}',
                do="put the data file itself beside the model, and name it by a relative path",
            )
        self._paths[location] = path
        return path


def _needed(dtype: DType, shape: tuple[int, ...]) -> int:
    if dtype is DType.STR:
        raise OnnxError("strings in external data", do="keep string tensors inside the model")
    size = 1
    for dim in shape:
        size *= dim
    return (size * dtype.bits + 7) // 8


def _unsafe(location: str) -> str | None:
    """Why a location may not be used, or None."""
    if not location:
        return "is empty"
    if "\0" in location:
        return "holds a zero byte"
    for kind in (PurePosixPath, PureWindowsPath):
        path = kind(location)
        if path.is_absolute() or path.anchor:
            return "is absolute"
        if ".." in path.parts:
            return 'leaves the model\'s folder by ".."'
    return None


def _number(entries: dict[str, str], key: str, default: int) -> int:
    text = entries.get(key)
    if text is None:
        return default
    text_of(text)
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise OnnxError(
            f'external data with {key} "{text[:40]}"',
            where=entries.get("location", ""),
            do=f"write {key} as a number of bytes, 0 or more",
        )
    return int(text)


def check_external(module: Module) -> None:
    """Check that all external data is there; looks once at each file, and reads none.

    Raises:
        OnnxError: a file is missing or too short; names the first value that lacks its bytes and counts the others.
    """
    sizes: dict[Path, int | None] = {}
    problems: list[tuple[str, TensorError]] = []
    for name, tensor in _external_tensors(module):
        if tensor.path not in sizes:
            sizes[tensor.path] = _file_size(tensor.path)
        size = sizes[tensor.path]
        if size is None or tensor.offset + tensor.length > size or tensor.length != tensor.nbytes:
            try:
                tensor.check()
            except TensorError as error:
                problems.append((name, error))
    if problems:
        name, first = problems[0]
        others = (f"and {len(problems) - 1} more tensors lack their bytes",) if len(problems) > 1 else ()
        raise OnnxError(first.what, where=f"value {name}, {first.where}", notes=(*first.notes, *others), do=first.do)


def _file_size(path: Path) -> int | None:
    """The size of a file; None for what is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _external_tensors(module: Module) -> Iterator[tuple[str, ExternalTensor]]:
    for graph in module.all_graphs():
        for value in graph.constants:
            yield from _external(value.name, (value.data,))
        for node in graph:
            for name, attribute in node.attributes.items():
                if isinstance(attribute, Tensor):
                    yield from _external(f"{node.label}.{name}", (attribute,))
                elif isinstance(attribute, Tensors):
                    yield from _external(f"{node.label}.{name}", attribute)


def _external(name: str, tensors: Iterable[Tensor | None]) -> Iterator[tuple[str, ExternalTensor]]:
    for tensor in tensors:
        for base in tensor.bases if tensor is not None else ():
            if isinstance(base, ExternalTensor):
                yield name, base
