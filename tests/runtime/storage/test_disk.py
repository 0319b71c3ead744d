"""Reading and writing on disk while a program runs: weights where they lie, and what is evicted."""

import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.ir import ArrayTensor, DType, ExternalTensor, JoinedTensor, Tensor
from irpar.ir.tensor import pack
from irpar.runtime.errors import StorageError
from irpar.runtime.storage import direct_file
from irpar.runtime.storage.direct_file import BLOCK
from irpar.runtime.storage.disk import Disk
from irpar.runtime.storage.disk_array import offset_in_file


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.close()


def external(path: Path, array: np.ndarray[Any, Any], offset: int = 0, dtype: DType = DType.F32) -> ExternalTensor:
    raw = pack(array, dtype)
    path.write_bytes(b"\1" * offset + raw + b"\1" * 7)
    return ExternalTensor(dtype, array.shape, path, path.name, offset, len(raw))


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def read(disk: Disk, tensor: Tensor) -> np.ndarray[Any, Any]:
    return disk.begin_read(disk.tensor(tensor, 0)).wait()


# -- where the bytes are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_block_has_an_offset_where_its_bytes_follow_each_other(seed: int, tmp_path: Path) -> None:
    """Of the bytes themselves: each element knows its own number, and these are consecutive or not."""
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(1, 5, random.integers(1, 4)))
    whole = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    tensor = ExternalTensor(DType.I64, shape, tmp_path / "w", "w", 24, whole.nbytes)
    region = [(int(a), int(random.integers(a + 1, size + 1))) for size in shape for a in [random.integers(0, size)]]
    block = whole[tuple(slice(*each) for each in region)].ravel()
    follows = bool((np.diff(block) == 1).all())
    assert offset_in_file(tensor.slice(region)) == (24 + 8 * int(block[0]) if follows else None)


@pytest.mark.parametrize("offset", [0, 1, 4, 64, BLOCK - 4, BLOCK, BLOCK + 12])
@pytest.mark.parametrize("count", [0, 1, 1000, 3 * BLOCK])
def test_a_weight_is_read_where_it_is(offset: int, count: int, disk: Disk, tmp_path: Path) -> None:
    found = read(disk, external(tmp_path / "w", numbers(count), offset))
    np.testing.assert_array_equal(found, numbers(count))
    assert found.flags.aligned
    assert not disk._spilled


def test_rows_are_read_where_they_are_and_columns_are_copied_once(disk: Disk, tmp_path: Path) -> None:
    whole = external(tmp_path / "w", numbers(64, 96), 20)
    np.testing.assert_array_equal(read(disk, whole.slice([(8, 24), (0, 96)])), numbers(64, 96)[8:24])
    assert not disk._spilled
    columns = disk.tensor(whole.slice([(0, 64), (32, 48)]), 0)
    for _ in range(2):
        np.testing.assert_array_equal(disk.begin_read(columns).wait(), numbers(64, 96)[:, 32:48])
    assert disk._spilled[0].nbytes == BLOCK


def test_tensors_of_all_kinds_are_read(disk: Disk, tmp_path: Path) -> None:
    first, second = external(tmp_path / "a", numbers(4, 6)), external(tmp_path / "b", numbers(4, 2))
    joined = JoinedTensor([first, second], 1, 2)
    np.testing.assert_array_equal(read(disk, joined), joined.numpy())
    np.testing.assert_array_equal(read(disk, ArrayTensor(numbers(3))), numbers(3))
    half = numbers(5, 5).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(read(disk, external(tmp_path / "c", half, 3, DType.BF16)), half)
    small = np.array([-8, 7, 3, -1, 0], ml_dtypes.int4)
    np.testing.assert_array_equal(read(disk, external(tmp_path / "d", small, 5, DType.I4)), small)


def test_a_scalar_keeps_its_shape(disk: Disk, tmp_path: Path) -> None:
    assert read(disk, external(tmp_path / "w", np.array(2.5, np.float32))).shape == ()
    assert disk.begin_read(disk.begin_write(np.array(2.5), 0).wait()).wait().shape == ()


# -- what is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 16, 1000, 1023])
@pytest.mark.parametrize("count", [0, 1, 23, 1024, 5000])
def test_what_is_written_is_read_back_from_where_ever_it_lay(first: int, count: int, disk: Disk) -> None:
    array = direct_file.aligned(4 * 6100).view(np.float32)[first : first + count]
    array[:] = numbers(count)
    np.testing.assert_array_equal(disk.begin_read(disk.begin_write(array, 0).wait()).wait(), numbers(count))


def test_large_arrays_take_several_requests(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irpar.runtime.storage.disk.PIECE_BYTES", 4 * BLOCK)
    arrays = [numbers(50, 700)[place:] for place in range(3)]
    kept = [transfer.wait() for transfer in [disk.begin_write(array, place) for place, array in enumerate(arrays)]]
    for array, transfer in zip(arrays, [disk.begin_read(each) for each in kept], strict=True):
        np.testing.assert_array_equal(transfer.wait(), array)
    assert sorted(disk._spilled) == [0, 1, 2]


def test_other_layouts_are_written_in_order(disk: Disk) -> None:
    turned = numbers(40, 30).T[::2]
    np.testing.assert_array_equal(disk.begin_read(disk.begin_write(turned, 0).wait()).wait(), turned)


def test_room_is_used_again_once_nobody_holds_it(disk: Disk) -> None:
    memory = direct_file.aligned(3 * BLOCK)
    held = disk.begin_write(memory, 0).wait()
    for _ in range(5):
        disk.begin_write(memory, 0).wait()
    assert disk._spilled[0].nbytes == 6 * BLOCK
    np.testing.assert_array_equal(disk.begin_read(held).wait(), memory)


def test_strings_are_refused(disk: Disk) -> None:
    with pytest.raises(StorageError, match="strings have no form on disk"):
        disk.begin_write(np.array(["a"], object), 0)


# -- what fails ----------------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_short_is_named(disk: Disk, tmp_path: Path) -> None:
    tensor = disk.tensor(external(tmp_path / "w.bin", numbers(4000)), 0)
    os.truncate(tmp_path / "w.bin", 9000)
    with pytest.raises(StorageError, match=r"9,000 of 16,000 bytes at byte 0 could be read") as caught:
        disk.begin_read(tensor).wait()
    assert caught.value.where == str(tmp_path / "w.bin")
    assert "the file has 9,000 bytes" in caught.value.notes


@pytest.mark.parametrize("is_direct", [True, False])
def test_short_reads_and_writes_go_on(is_direct: bool, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the cache the system may stop inside a block, but goes on at its beginning only."""
    monkeypatch.setattr(direct_file, "_O_DIRECT", direct_file._O_DIRECT if is_direct else 0)
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda file, to, at: preadv(file, [to[0][: BLOCK + 512]], at))
    monkeypatch.setattr(os, "pwritev", lambda file, of, at: pwritev(file, [of[0][: BLOCK + 512]], at))
    array = numbers(10_000)
    np.testing.assert_array_equal(disk.begin_read(disk.begin_write(array, 0).wait()).wait(), array)


def test_a_full_disk_is_told(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, of: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = disk.begin_write(numbers(3000), 1).wait()
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        disk.begin_write(numbers(3000), 1).wait()
    assert caught.value.where == f"what rank 1 keeps on disk in {tmp_path}"
    assert caught.value.do is not None
    assert caught.value.do.startswith("free some room, or write to another disk: IRPAR_OFFLOAD_PATH=FOLDER for a run")
    monkeypatch.setattr("irpar.runtime.storage.disk.write_tensor", lambda *_: full(0, 0, 0))
    with pytest.raises(StorageError, match="No space left on device"):
        disk.tensor(ArrayTensor(numbers(9)), 1)
    np.testing.assert_array_equal(disk.begin_read(kept).wait(), numbers(3000))


def test_what_stops_without_an_error_is_one(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StorageError, match="bytes at byte 0 could be written"):
        disk.begin_write(direct_file.aligned(2 * BLOCK), 0).wait()


def test_a_file_system_without_direct_access_is_told(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some refuse to open a file so, some refuse the first read."""
    preadv = os.preadv
    tensor = external(tmp_path / "w.bin", numbers(3000))

    def refuse(file: int, to: Any, at: int) -> int:
        if file == disk._read[tmp_path / "w.bin"]._direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(file, to, at)

    monkeypatch.setattr(os, "preadv", refuse)
    np.testing.assert_array_equal(read(disk, tensor), numbers(3000))
    monkeypatch.setattr(direct_file, "_O_DIRECT", 0)
    np.testing.assert_array_equal(disk.begin_read(disk.begin_write(numbers(9), 0).wait()).wait(), numbers(9))
    rest = "through the system's cache, its file system has no O_DIRECT"
    assert disk.notes == (f"{tmp_path / 'w.bin'}: {rest}", f"what rank 0 keeps on disk in {tmp_path}: {rest}")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "gone")
    with pytest.raises(StorageError, match="cannot make a file for what rank 0 keeps on disk") as caught:
        disk.begin_write(numbers(3), 0)
    assert caught.value.where == str(tmp_path / "gone")
    disk.close()


# -- what stays ----------------------------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys, numpy
from irpar.runtime.storage import direct_file
from irpar.runtime.storage.disk import Disk
direct_file._O_TMPFILE *= int(sys.argv[2])
disk = Disk(sys.argv[1])
kept = disk.begin_write(numpy.ones(100_000), 0).wait()
assert disk.begin_read(kept).wait().all()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("nameless", [1, 0])
def test_a_killed_run_leaves_no_file(nameless: int, tmp_path: Path) -> None:
    code = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), str(nameless)], check=False).returncode
    assert code == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_two_runs_with_one_path_do_not_disturb_each_other(tmp_path: Path) -> None:
    runs = [Disk(tmp_path), Disk(tmp_path)]
    kept = [run.begin_write(numbers(5000) + place, 0).wait() for place, run in enumerate(runs)]
    for place, run in enumerate(runs):
        np.testing.assert_array_equal(run.begin_read(kept[place]).wait(), numbers(5000) + place)
        run.close()
    assert not list(tmp_path.iterdir())


def test_files_that_nobody_closed_are_closed_with_what_held_them(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    disks = [Disk(tmp_path) for _ in range(4)]
    for disk in disks:
        disk.begin_write(np.ones(8), 0).wait()
    assert len(os.listdir("/proc/self/fd")) > before
    del disk, disks
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_ranks_that_are_the_first_to_write_at_once_share_what_is_made(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: disk.begin_write(np.full(8, number), number % 2).wait(), range(64)))
    assert len({array.extent.file for array in found}) == 2
    assert len({(array.extent.file, array.extent.offset) for array in found}) == 64
    disk.close()
