"""Tensors in the safetensors format, written one after the other and read where they lie.

The safetensors library checks what is read; it writes from memory alone, which state may be larger than.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from irpar.errors import IrparError
from irpar.ir import DType, ExternalTensor, Tensor
from irpar.ir.copying import Progress, write_tensor

_NAMES = {
    DType.F64: "F64",
    DType.F32: "F32",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.F8E4M3FN: "F8_E4M3",
    DType.F8E5M2: "F8_E5M2",
    DType.F8E8M0: "F8_E8M0",
    DType.I64: "I64",
    DType.I32: "I32",
    DType.I16: "I16",
    DType.I8: "I8",
    DType.U64: "U64",
    DType.U32: "U32",
    DType.U16: "U16",
    DType.U8: "U8",
    DType.BOOL: "BOOL",
    DType.C64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_METADATA = "__metadata__"
"""What the header calls texts, and so no tensor."""


class SafetensorsError(IrparError):
    """A file that is no safetensors file, or a tensor that none can hold."""


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write tensors, none of them wholly in memory.

    Args:
        path: the file.
        tensors: by name.
        metadata: texts that stand in the header.
        progress: told about written bytes.

    Returns:
        The size of the file in bytes.

    Raises:
        SafetensorsError: a dtype or a name that the format does not have.
        OSError: the file cannot be written.
        TensorError: the bytes of a tensor cannot be read.
    """
    head: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise SafetensorsError(
                f'"{name}" is {tensor.type}: safetensors has no such element type',
                do=f"keep it as one of {', '.join(dtype.text for dtype in _NAMES)}",
            )
        if name == _METADATA:
            raise SafetensorsError(f'a tensor may not be called "{name}" in a safetensors file', do="rename it")
        begin, end = end, end + tensor.nbytes
        head[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        offset = _LENGTH.size + len(text)
        file.truncate(offset + end)
        for tensor in tensors.values():
            write_tensor(tensor, file, offset, progress or (lambda _: None))
            offset += tensor.nbytes
    return offset


def read_safetensors(path: Path) -> dict[str, ExternalTensor]:
    """The tensors of a file, lazy: each knows where in it its numbers lie.

    Raises:
        SafetensorsError: it cannot be read, is none or is damaged, or has a dtype that irpar does not know.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass  # It checks the header: sizes, offsets, no holes.
        with open(path, "rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            head = json.loads(file.read(length))
    except OSError as error:
        raise SafetensorsError(
            f"cannot read the tensors: {error.strerror or error}", where=str(path), do="give a .safetensors file"
        ) from error
    except (SafetensorError, ValueError) as error:
        raise SafetensorsError(
            f"not a safetensors file, or a damaged one: {error}", where=str(path), do="copy it again from its source"
        ) from None
    found = {}
    for name, entry in head.items():
        if name == _METADATA:
            continue
        if entry["dtype"] not in _DTYPES:
            raise SafetensorsError(
                f'"{name}" has elements {entry["dtype"]}, which irpar does not know',
                where=str(path),
                do=f"write it as one of {', '.join(_DTYPES)}",
            )
        begin, end = entry["data_offsets"]
        offset = _LENGTH.size + length + begin
        found[name] = ExternalTensor(
            _DTYPES[entry["dtype"]], entry["shape"], Path(path), Path(path).name, offset, end - begin
        )
    return found
