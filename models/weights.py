"""Where a model's weights go: into the model, into a file beside it, or into a sparse placeholder file.

A weight is normally distributed with a generator seeded by (seed, name), so that a tensor does not depend on which
others were made before it: layer 0 of a 2-layer and of a 12-layer model are equal.
"""

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, Self

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from .config import ConfigError

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype(np.float64),
}
ONNX_DTYPES: dict[str, int] = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float64": onnx.TensorProto.DOUBLE,
}

INLINE_LIMIT = 2**31 - 2**24  # bytes; a protobuf holds 2 GiB, 16 MiB of it are left to the graph itself
ALIGNMENT = 4096  # bytes; lets a reader map each tensor by itself
CHUNK = 1 << 22  # elements drawn at once, so that memory stays flat for a tensor of any size


class WeightStore(Protocol):
    """Makes the initializer of a weight and keeps its bytes somewhere."""

    parameters: int
    """Elements stored so far."""
    weight_bytes: int
    """Bytes of these elements, without any alignment."""

    def tensor(self, name: str, shape: Sequence[int], dtype: str, mean: float, std: float) -> onnx.TensorProto:
        """Return the initializer `name` of normally distributed values (mean, std)."""


def random_chunks(
    name: str, count: int, dtype: str, mean: float, std: float, seed: int
) -> Iterator[NDArray[np.generic]]:
    """Yield `count` normally distributed values of weight `name` in chunks; chunking does not change the values."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    for start in range(0, count, CHUNK):
        values = generator.standard_normal(min(CHUNK, count - start), dtype=np.float32)
        values *= np.float32(std)
        values += np.float32(mean)
        yield values.astype(NUMPY_DTYPES[dtype], copy=False)


class InlineWeights:
    """Keeps the weights inside the ModelProto, as raw data; at most 2 GB."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.parameters = 0
        self.weight_bytes = 0

    def tensor(self, name: str, shape: Sequence[int], dtype: str, mean: float, std: float) -> onnx.TensorProto:
        """Return the initializer with its values; raises `ConfigError` when the model would pass 2 GB."""
        count = math.prod(shape)
        self.weight_bytes += count * NUMPY_DTYPES[dtype].itemsize
        if self.weight_bytes > INLINE_LIMIT:
            raise ConfigError(
                f"the weights do not fit into one ONNX file (2 GB at most, passed at {name}): "
                "write them beside it with --external, or as a placeholder with --weights none"
            )
        data = b"".join(chunk.tobytes() for chunk in random_chunks(name, count, dtype, mean, std, self.seed))
        self.parameters += count
        return onnx.helper.make_tensor(name, ONNX_DTYPES[dtype], shape, data, raw=True)


class _DataFile:
    """A data file beside the model into which tensors are laid one after the other, each on a page of its own.

    Args:
        path: the file to write.
        name: what the model calls it; the file's own name if not given.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.name = name or path.name
        self.parameters = 0
        self.weight_bytes = 0
        self._end = 0  # bytes laid out so far
        self._file: BinaryIO = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The last tensor of a placeholder has no bytes written: the size alone makes the file complete.
        self._file.truncate(self._end)
        self._file.close()

    def _lay_out(self, name: str, shape: Sequence[int], dtype: str) -> onnx.TensorProto:
        """Return an initializer that points to the next free page, and move the end behind it."""
        count = math.prod(shape)
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        length = count * NUMPY_DTYPES[dtype].itemsize
        self._end = offset + length
        self.parameters += count
        self.weight_bytes += length
        tensor = onnx.TensorProto(
            name=name, dims=shape, data_type=ONNX_DTYPES[dtype], data_location=onnx.TensorProto.EXTERNAL
        )
        for key, value in (("location", self.name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self._file.seek(offset)
        return tensor


class ExternalWeights(_DataFile):
    """Streams the weights to a file; a context manager. Memory does not grow with the model."""

    def __init__(self, path: Path, seed: int = 0, name: str = "") -> None:
        super().__init__(path, name)
        self.seed = seed

    def tensor(self, name: str, shape: Sequence[int], dtype: str, mean: float, std: float) -> onnx.TensorProto:
        """Write the values to the file and return the initializer that points to them."""
        tensor = self._lay_out(name, shape, dtype)
        for chunk in random_chunks(name, math.prod(shape), dtype, mean, std, self.seed):
            self._file.write(chunk.tobytes())
        return tensor


class PlaceholderWeights(_DataFile):
    """Lays the weights out in a sparse file that reads as zeros and takes no disk; a context manager."""

    def tensor(self, name: str, shape: Sequence[int], dtype: str, mean: float, std: float) -> onnx.TensorProto:
        """Return an initializer that points to a hole of the right size."""
        return self._lay_out(name, shape, dtype)


def data_path(model_path: str | os.PathLike[str]) -> Path:
    """Return the data file that belongs to a model file: `gpt.onnx` -> `gpt.onnx.data`."""
    path = Path(model_path)
    return path.with_name(path.name + ".data")
