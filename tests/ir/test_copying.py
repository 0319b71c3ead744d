from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.ir import ArrayTensor, DType, ExternalTensor, TensorError, copying, joined_tensor, range_along
from tests.budget import budget

SHAPES = [(7,), (40, 33), (5, 6, 7), (60, 411), (3, 2, 5, 4), (9, 3, 200, 3), (4, 1, 6), ()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copying")


def stored(folder: Path, array: np.ndarray) -> ExternalTensor:
    path = folder / "source.bin"
    path.write_bytes(b"x" * 100 + array.tobytes())
    return ExternalTensor(DType.I32, array.shape, path, path.name, 100, array.nbytes)


def written(folder: Path, tensor: object, size: int, offset: int = 64) -> tuple[bytes, int]:
    """What is in the file after the offset, and how many bytes were reported."""
    reported = []
    with open(folder / "target.bin", "wb") as file:
        file.truncate(offset + size)
        copying.write_tensor(tensor, file, offset, reported.append)
    return (folder / "target.bin").read_bytes()[offset:], sum(reported)


@given(st.data())
@settings(max_examples=budget(200), deadline=None)
def test_any_block_of_any_tensor(folder: Path, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    array = np.random.default_rng(0).integers(0, 1 << 30, shape).astype(np.int32)
    region = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        region.append((start, data.draw(st.integers(start, size))) if data.draw(st.booleans()) else (0, size))
    buffer, least = data.draw(st.sampled_from([(16 << 20, 16 << 10), (4096, 64), (100, 10)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BUFFER_BYTES", buffer)
        patch.setattr(copying, "LEAST_RANGE_BYTES", least)
        tensor = stored(folder, array).slice(region)
        got, reported = written(folder, tensor, tensor.nbytes)
    expected = array[tuple(slice(*bounds) for bounds in region)].tobytes()
    assert got == expected
    assert reported == len(expected)


@pytest.mark.parametrize("buffer", [1 << 20, 100])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sections_side_by_side(folder: Path, monkeypatch: pytest.MonkeyPatch, dim: int, buffer: int) -> None:
    """What the second of three devices has of three sections, of one tensor, less the elements in between."""
    monkeypatch.setattr(copying, "BUFFER_BYTES", buffer)
    array = np.random.default_rng(0).integers(0, 1 << 30, [1 if dim == 1 else 24] * 3).astype(np.int32)
    array = np.resize(array, [24 if at == dim else size for at, size in enumerate(array.shape)])
    sections = [range_along(stored(folder, array), dim, start, stop) for start, stop in ((0, 6), (6, 9), (12, 24))]
    joined = joined_tensor(sections, dim, 3)
    mine = range_along(joined, dim, 7, 14)
    got, reported = written(folder, mine, mine.nbytes)
    assert got == np.take(array, [2, 3, 7, 16, 17, 18, 19], dim).tobytes()
    assert reported == mine.nbytes


def test_without_the_kernel_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(18, "cross-device")

    monkeypatch.setattr(copying.os, "copy_file_range", refuse)
    array = np.arange(5000, dtype=np.int32)
    assert written(folder, stored(folder, array), array.nbytes) == (array.tobytes(), array.nbytes)


def test_holes_stay_holes(folder: Path) -> None:
    path = folder / "sparse.bin"
    size = 64 << 20
    with open(path, "wb") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"data")
    tensor = ExternalTensor(DType.U8, (size,), path, path.name, 0, size)
    with open(folder / "target.bin", "wb") as file:
        file.truncate(size)
        copying.write_tensor(tensor, file, 0)
    found = (folder / "target.bin").stat()
    assert found.st_size == size
    assert found.st_blocks * 512 < 1 << 20
    with open(folder / "target.bin", "rb") as file:
        file.seek(size // 2)
        assert file.read(4) == b"data"


def test_tensors_in_memory_and_small_types(folder: Path) -> None:
    array = np.arange(12, dtype=np.float64).reshape(3, 4)
    block = ArrayTensor(array).slice([(1, 3), (0, 2)])
    assert written(folder, block, block.nbytes)[0] == array[1:3, :2].tobytes()
    packed = ArrayTensor(np.array([1, -2, 3], np.int8), DType.I4)
    assert written(folder, packed, 2)[0] == bytes([0xE1, 0x03])


def test_a_file_that_is_cut_short(folder: Path) -> None:
    tensor = stored(folder, np.arange(10, dtype=np.int32))
    with open(tensor.path, "r+b") as file:
        file.truncate(120)
    with pytest.raises(TensorError, match="ends at byte 120, but a tensor i32"), open(folder / "t", "wb") as out:
        copying.write_tensor(tensor, out, 0)
