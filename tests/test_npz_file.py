"""Arrays in .npz files."""

import ml_dtypes
import numpy as np
import pytest

from irpar.npz_file import NpzError, read_npz, write_npz


def test_arrays_come_back_under_their_names(tmp_path):
    arrays = {
        "file": np.arange(3),  # numpy.savez cannot write this name
        "a/b.c": np.zeros((2, 0), np.float32),
        "scalar": np.float64(3),
        "texts": np.array(["x", "größe"], object),
        "half": np.arange(4, dtype=ml_dtypes.bfloat16),
    }
    write_npz(tmp_path / "a.npz", arrays)
    found = read_npz(tmp_path / "a.npz", [{"name": "half", "dtype": "bf16"}, {"name": "other", "dtype": "f32"}])
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == np.asarray(array).dtype
        np.testing.assert_array_equal(found[name], array)
    assert list(np.load(tmp_path / "a.npz")["file"]) == [0, 1, 2]


def test_a_file_is_replaced_only_when_the_new_one_is_complete(tmp_path):
    write_npz(tmp_path / "a.npz", {"x": np.arange(3)})
    with pytest.raises(NpzError, match="y is no tensor"):
        write_npz(tmp_path / "a.npz", {"x": np.zeros(3), "y": [np.zeros(1)]})
    assert list(read_npz(tmp_path / "a.npz")["x"]) == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(NpzError, match="cannot write the arrays: No such file"):
        write_npz(tmp_path / "new" / "a.npz", {"x": np.zeros(1)})


def damaged_zip(path):
    np.savez(path, x=np.arange(1000))
    content = bytearray(path.read_bytes())
    content[500] ^= 255
    path.write_bytes(content)


DAMAGED = {
    "not an .npz file of arrays: it is no zip file": lambda path: path.write_bytes(b"hello"),
    "not an .npz file of arrays: No data left": lambda path: path.write_bytes(b""),
    "not an .npz file of arrays: File is not a zip": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(50)),
    "not an .npz file of arrays: Bad CRC-32": damaged_zip,
    "holds Python objects": lambda path: np.savez(path, x=np.array([{}], object)),
    "one array without a name": lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"),
    "cannot read the arrays: Is a directory": lambda path: path.mkdir(),
    "cannot read the arrays: No such file": lambda path: None,
}


@pytest.mark.parametrize("told", DAMAGED)
def test_files_that_are_none(tmp_path, told):
    DAMAGED[told](tmp_path / "a.npz")
    with pytest.raises(NpzError, match=told):
        read_npz(tmp_path / "a.npz")
