"""What the ranks of a process have on disk while a program runs: weights where they are, and what is evicted.

Several requests are in flight at once, for a disk that has one to do waits for its next one. A request reads to, or
writes from, the memory where the array is used.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from irpar.ir import ExternalTensor, Tensor
from irpar.ir.copying import write_tensor
from irpar.runtime.errors import StorageError

from .direct_file import Array, DirectFile, aligned
from .disk_array import DiskArray, offset_in_file, tensor_at
from .spill_file import SpillFile, behind_block, pieces

OFFLOAD_PATH = "IRPAR_OFFLOAD_PATH"
"""The environment variable that names the folder of a run's files, whatever the program says."""
ELSEWHERE = f"{OFFLOAD_PATH}=FOLDER for a run, or store{{path=FOLDER}} in the pipeline"
"""How another folder is named."""
REQUESTS = 4
"""How many are in flight."""
PIECE_BYTES = 4 << 20
"""What one request reads or writes at most: of larger ones a disk gets no faster."""

T = TypeVar("T")


class Transfer(Generic[T]):
    """An array that is being read or written.

    Args:
        requests: what is in flight.
        made: what it gives in the end.
    """

    def __init__(self, requests: Sequence["Future[None]"], made: Callable[[], T]) -> None:
        self._requests = requests
        self._made = made

    def wait(self) -> T:
        """What was read, or where it is written.

        Raises:
            StorageError: it cannot be; all of it has ended then.
        """
        errors = [error for request in self._requests if (error := request.exception()) is not None]
        if errors:
            raise errors[0]
        return self._made()


class Disk:
    """Reads and writes for the ranks of a process.

    Args:
        folder: where files without a name are made for what is written; None: where the system has its temporary ones.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder
        self._read: dict[Path, DirectFile] = {}
        self._spilled: dict[int, SpillFile] = {}
        self._threads = ThreadPoolExecutor(REQUESTS, "irpar-disk")
        self._lock = threading.Lock()  # Several ranks may be the first to want a file.

    def close(self) -> None:
        """Wait for what is in flight, and let go of all files: what was written is gone."""
        self._threads.shutdown()
        for file in self._files():
            file.close()
        self._read, self._spilled = {}, {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know; a line each."""
        cached = [file.name for file in self._files() if not file.is_direct]
        return tuple(f"{name}: through the system's cache, its file system has no O_DIRECT" for name in cached)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Open the files in which constants lie: what is put there from now on under these names is another file.

        One that cannot be opened is told of where it is read.
        """
        paths = (each.base.path for each in tensors if isinstance(each.base, ExternalTensor))
        for path in dict.fromkeys(paths):
            with suppress(StorageError):
                self._file_of(path)

    def tensor(self, tensor: Tensor, rank: int) -> DiskArray:
        """A constant where it lies on disk: in its own file where its bytes stand there one after the other, else in a
        copy that is made now, piece by piece.

        Raises:
            StorageError: it cannot be read or written.
            TensorError: its file does not have it.
        """
        base, offset = tensor.base, offset_in_file(tensor)
        if isinstance(base, ExternalTensor) and offset is not None:
            base.check()
            return tensor_at(self._file_of(base.path), offset, tensor)
        spilled = self._spill_file(rank)
        extent = spilled.lend(tensor.nbytes)
        try:
            with spilled.file.stream() as stream:
                write_tensor(tensor, stream, extent.offset)
        except OSError as error:
            what = f"cannot write a weight of {tensor.nbytes:,} bytes: {error.strerror or error}"
            raise StorageError(what, where=spilled.file.name, do=spilled.file.remedy(error)) from error
        found = tensor_at(spilled.file, extent.offset, tensor)
        found.extent = extent
        return found

    def begin_read(self, array: DiskArray) -> Transfer[Array]:
        """Begin to read an array."""
        extent = array.extent
        memory = aligned(extent.room)
        end = extent.offset - extent.first_block + extent.nbytes if extent.nbytes else 0
        requests = [
            self._threads.submit(
                extent.read,
                memory[start : start + PIECE_BYTES],
                extent.first_block + start,
                min(PIECE_BYTES, end - start),
            )
            for start in range(0, end, PIECE_BYTES)
        ]
        return Transfer(requests, partial(array.of_blocks, memory))

    def begin_write(self, array: Array, rank: int) -> Transfer[DiskArray]:
        """Begin to write an array to the file of a rank; nobody writes to the array before that has ended.

        Raises:
            StorageError: there is no file to write to, or no form to write it in.
        """
        if array.dtype.hasobject:
            raise StorageError("strings have no form on disk", do="keep them in memory: leave them out of store")
        flat = np.ascontiguousarray(array)
        data = flat.reshape(-1).view(np.uint8)
        extent = self._spill_file(rank).lend(data.nbytes, behind_block(data))
        requests = [
            self._threads.submit(extent.write, memory, position)
            for memory, position in pieces(data, extent, PIECE_BYTES)
        ]
        return Transfer(requests, partial(DiskArray, extent, flat.dtype, array.shape))

    def _files(self) -> list[DirectFile]:
        return [*self._read.values(), *(spilled.file for spilled in self._spilled.values())]

    def _file_of(self, path: Path) -> DirectFile:
        with self._lock:
            file = self._read.get(path)
            if file is None:
                file = self._read[path] = DirectFile.of_path(path)
            return file

    def _spill_file(self, rank: int) -> SpillFile:
        with self._lock:
            file = self._spilled.get(rank)
            if file is None:
                folder = Path(tempfile.gettempdir() if self._folder is None else self._folder)
                file = self._spilled[rank] = SpillFile(folder, f"what rank {rank} keeps on disk", ELSEWHERE)
            return file
