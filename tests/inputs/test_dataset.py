"""Samples on disk: what is read of them, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irpar.inputs.dataset import Batch, DataError, Dataset, check_range, dataset_of
from irpar.sharding import Mesh, Sharding

Array = np.ndarray[Any, Any]

ARRAYS = {"x": np.arange(60, dtype=np.float32).reshape(10, 6), "target": np.arange(10) % 3}
SPECS = {"x": {"dtype": "f32", "shape": [4, 6]}, "target": {"dtype": "i64", "shape": [4]}}


def folder(path: Path, arrays: dict[str, Array]) -> Path:
    path.mkdir()
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    return path


def stored(path: Path, arrays: dict[str, Array]) -> Path:
    np.savez(path.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]
    return path.with_suffix(".npz")


def compressed(path: Path, arrays: dict[str, Array]) -> Path:
    np.savez_compressed(path.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]
    return path.with_suffix(".npz")


Write = Callable[[Path, dict[str, Array]], Path]


@pytest.mark.parametrize("write", [folder, stored, compressed])
def test_rows_are_those_of_the_arrays(write: Write, tmp_path: Path) -> None:
    data = Dataset.open(write(tmp_path / "data", ARRAYS))
    assert data.check(SPECS) == (10, 4)
    rows = np.array([7, 0, 9, 2])
    for name, array in ARRAYS.items():
        found = data.block(name, rows, None, [0])
        np.testing.assert_array_equal(found, array[rows])
        assert found.dtype == array.dtype
        assert found.flags.c_contiguous


@pytest.mark.parametrize("write", [folder, stored])
def test_arrays_are_mapped_and_not_read(write: Write, tmp_path: Path) -> None:
    data = Dataset.open(write(tmp_path / "data", ARRAYS))
    assert all(isinstance(array, np.memmap) for array in data.arrays.values())


@pytest.mark.parametrize("write", [folder, stored, compressed])
def test_arrays_of_any_order_and_dtype(write: Write, tmp_path: Path) -> None:
    arrays: dict[str, Array] = {
        "fortran": np.asfortranarray(np.arange(24, dtype=np.float64).reshape(4, 3, 2)),
        "half": np.arange(4, dtype=np.float16),
        "bool": np.array([True, False, True, True]),
        "bytes": np.arange(8, dtype=np.uint8).reshape(4, 2),
        "big": np.arange(4, dtype=">f4"),
        "empty": np.zeros((4, 0), np.float32),
    }
    data = Dataset.open(write(tmp_path / "data", arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(data.block(name, np.array([3, 1]), None, [0]), array[[3, 1]])


def test_a_rank_reads_only_its_block(tmp_path: Path) -> None:
    path = stored(tmp_path / "data", {"x": ARRAYS["x"]})
    mesh = Mesh({"dp": 3, "tp": 2})
    sharding = Sharding.of_spec(mesh, ["dp", "tp"])
    rows = np.array([7, 0, 9, 2])
    whole = ARRAYS["x"][rows]
    for rank in range(mesh.size):
        data = Dataset.open(path)
        coords = mesh.coords(rank)
        found = data.block("x", rows, sharding, coords)
        first = min(coords[0] * 2, 4)
        wanted = whole[first : min(first + 2, 4), coords[1] * 3 : coords[1] * 3 + 3]
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"x": ARRAYS["x"]}, "target is missing, expected i64[samples]"),
        ({**ARRAYS, "x": ARRAYS["x"].astype(np.float64)}, "x is f64[10, 6], expected f32[samples, 6]"),
        ({**ARRAYS, "x": ARRAYS["x"][:, :5]}, "x is f32[10, 5], expected f32[samples, 6]"),
        ({**ARRAYS, "x": ARRAYS["x"].reshape(10, 2, 3)}, "x is f32[10, 2, 3], expected f32[samples, 6]"),
        ({**ARRAYS, "x": np.float32(1)}, "x is f32[], expected f32[samples, 6]"),
        ({**ARRAYS, "target": np.array(["cat"] * 10)}, "target is str[10], expected i64[samples]"),
        ({"y": ARRAYS["x"], "targets": ARRAYS["target"]}, "x is missing, expected f32[samples, 6]"),
        ({name: array[:3] for name, array in ARRAYS.items()}, "there are 3 samples, and a step takes 4"),
        ({**ARRAYS, "x": ARRAYS["x"][:8]}, "x has 8 samples, of which a step takes 4; target has 10"),
        ({name: array[:0] for name, array in ARRAYS.items()}, "there are 0 samples, and a step takes 4"),
    ],
)
def test_arrays_that_do_not_fit(arrays: dict[str, Array], told: str, tmp_path: Path) -> None:
    path = stored(tmp_path / "data", arrays)
    with pytest.raises(DataError) as caught:
        Dataset.open(path).check(SPECS)
    assert told in str(caught.value)
    assert caught.value.where == str(path)
    assert caught.value.do


def test_inputs_whose_batches_differ_are_refused(tmp_path: Path) -> None:
    data = Dataset.open(stored(tmp_path / "data", ARRAYS))
    with pytest.raises(DataError, match="--input") as caught:
        data.check({**SPECS, "target": {"dtype": "i64", "shape": [5]}})
    assert "of which a step takes" in caught.value.what
    with pytest.raises(DataError, match="x is a single number in the program, and has no samples: give it by --input"):
        data.check({"x": {"dtype": "f32", "shape": []}})


def damaged(path: Path, how: str) -> Path:
    """Data that cannot be read."""
    file = stored(path / "data", ARRAYS)
    whole = file.read_bytes()
    match how:
        case "cut short":
            file.write_bytes(whole[: len(whole) // 2])
        case "empty":
            file.write_bytes(b"")
        case "no archive":
            file.write_text("step,loss\n1,2\n")
        case "header":
            place = whole.index(b"\x93NUMPY")
            file.write_bytes(whole[:place] + b"\x00" * 6 + whole[place + 6 :])
        case "longer than it is":
            file.write_bytes(whole.replace(b"(10, 6)", b"(19, 6)"))
        case "objects":
            np.savez(file, x=np.array([{}], object), allow_pickle=True)
        case "compressed objects":
            np.savez_compressed(file, x=np.array([{}], object), allow_pickle=True)
        case "compressed and damaged":
            np.savez_compressed(file, x=np.random.default_rng(0).random((100, 6)))
            content = bytearray(file.read_bytes())
            content[300:340] = bytes(40)
            file.write_bytes(bytes(content))
        case "another file":
            import zipfile

            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("notes.txt", "hello")
        case "missing":
            file.unlink()
        case "an empty folder":
            file.unlink()
            file.mkdir()
        case "a folder with a damaged file":
            file.unlink()
            folder(file, ARRAYS)
            (file / "x.npy").write_bytes(b"\x93NUMPY\x01\x00")
        case "a folder with a file cut short":
            file.unlink()
            folder(file, ARRAYS)
            (file / "x.npy").write_bytes((file / "x.npy").read_bytes()[:-10])
    return file


@pytest.mark.parametrize(
    "how",
    [
        "cut short",
        "empty",
        "no archive",
        "header",
        "longer than it is",
        "objects",
        "compressed objects",
        "compressed and damaged",
        "another file",
        "missing",
        "an empty folder",
        "a folder with a damaged file",
        "a folder with a file cut short",
    ],
)
def test_damaged_data_are_one_clear_error(how: str, tmp_path: Path) -> None:
    path = damaged(tmp_path, how)
    with pytest.raises(DataError) as caught:
        Dataset.open(path)
    assert caught.value.where == str(path)
    assert caught.value.do


def test_files_that_are_written_again_are_read_again(tmp_path: Path) -> None:
    path = stored(tmp_path / "data", ARRAYS)
    assert dataset_of(str(path)) is dataset_of(str(path))
    stored(tmp_path / "data", {**ARRAYS, "x": ARRAYS["x"][:9], "target": ARRAYS["target"][:9]})
    assert dataset_of(str(path)).check(SPECS) == (9, 4)
    other = folder(tmp_path / "folder", ARRAYS)
    assert dataset_of(str(other)).check(SPECS) == (10, 4)
    for name, array in ARRAYS.items():
        np.save(other / f"{name}.npy", array[:8])
    assert dataset_of(str(other)).check(SPECS) == (8, 4)


def test_a_batch_for_ranks_in_other_processes(tmp_path: Path) -> None:
    path = stored(tmp_path / "data", ARRAYS)
    batch = Batch(str(path), np.array([1, 2]), ["x", "target"], {"target": (0, 2, None)})
    again = Batch(*batch.message())
    found = again.blocks({"x": None, "target": None}, [0])
    np.testing.assert_array_equal(found["target"], ARRAYS["target"][1:3])
    assert again.limits["target"][1] == 2
    with pytest.raises(DataError, match="target has 2: it is from 0 to 1"):
        Batch(str(path), np.array([1, 2]), ["x", "target"], {"target": (0, 1, None)}).blocks(
            {"x": None, "target": None}, [0]
        )


def test_numbers_out_of_range() -> None:
    check_range("target", np.array([0, 2, -100]), 0, 2, -100)
    with pytest.raises(DataError) as caught:
        check_range("target", np.array([0, 5, -1, 9, 7]), 0, 2, -100, "data.npz")
    assert caught.value.what == "target has -1, 5, 7 and 1 more: it is from 0 to 2, or -100 for what does not count"
    check_range("target", np.zeros(0, np.int64), 0, 2, None)


def test_numbers_of_another_byte_order(tmp_path: Path) -> None:
    numbers = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.savez(tmp_path / "data.npz", x=numbers.astype(">f4"))
    found = Dataset.open(tmp_path / "data.npz").block("x", np.array([2, 0]), None, ())
    assert found.dtype == np.float32
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, numbers[[2, 0]])
