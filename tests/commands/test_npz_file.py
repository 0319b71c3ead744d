"""Arrays in .npz files."""

import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest

from irpar.commands.npz_file import NpzError, read_npz, write_npz
from irpar.runtime.errors import InputError
from irpar.sharding import IrparError


def test_arrays_come_back_under_their_names(tmp_path):
    arrays = {
        "file": np.arange(3),  # numpy.savez cannot write this name
        "a/b.c": np.zeros((2, 0), np.float32),
        "scalar": np.float64(3),
        "texts": np.array(["x", "größe"], object),
        "half": np.arange(4, dtype=ml_dtypes.bfloat16),
    }
    write_npz(tmp_path / "a.npz", arrays)
    dtypes = ("i64", "f32", "f64", "str", "bf16")
    specs = [
        {"name": name, "dtype": dtype, "shape": list(np.shape(array))}
        for (name, array), dtype in zip(arrays.items(), dtypes, strict=True)
    ]
    found = read_npz(tmp_path / "a.npz", specs)
    assert list(found) == list(read_npz(tmp_path / "a.npz")) == list(arrays)
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


def declaring(path, descr="<f4", shape=(4, 8), version=b"\x01\x00"):
    """A .npz file whose member x declares what is given, and holds nothing."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header)


DECLARED = {
    "x has shape [100000, 1000000], expected [4, 8]": {"shape": (100000, 1000000)},
    "x is f64[4, 8], expected f32": {"descr": "<f8"},
    "the file of inputs needs about 7,999,999,984 bytes": {"descr": "<U499999999", "shape": (4,)},
    "it holds Python objects": {"descr": "|O"},
    "an array in .npy version 9.0": {"version": b"\x09\x00"},
    "not an .npz file of arrays": {"shape": (2**62, 2**62)},
    "not an .npz file of arrays: all elements": {"shape": (-4, -8)},
}


@pytest.mark.parametrize("told", DECLARED)
def test_what_does_not_fit_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, told):
    monkeypatch.setenv("IRPAR_MEMORY_LIMIT", "1000000000")
    monkeypatch.setattr(np, "load", None)
    declaring(tmp_path / "a.npz", **DECLARED[told])
    text = "<U" in str(DECLARED[told])
    with pytest.raises(IrparError) as caught:
        read_npz(
            tmp_path / "a.npz", [{"name": "x", "dtype": "str" if text else "f32", "shape": [4] if text else [4, 8]}]
        )
    assert told in str(caught.value)


def test_a_bomb_is_told_without_taking_memory(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file, file.open("x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(
            member, {"descr": "<f4", "fortran_order": False, "shape": (1 << 14, 1 << 12)}
        )
        for _ in range(256):
            member.write(bytes(1 << 20))
    assert (tmp_path / "a.npz").stat().st_size < 1 << 20
    tracemalloc.start()
    with pytest.raises(InputError, match="expected"):
        read_npz(tmp_path / "a.npz", [{"name": "x", "dtype": "f32", "shape": [4, 8]}])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20
