from pathlib import Path

import numpy as np
import pytest

from irpar.ir import ExternalTensor, TensorError
from irpar.onnx_io import OnnxError, check_external, load

from .models import external, mlp


def write(folder: Path, **entries: str) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(external(mlp(), "w", **entries).SerializeToString())
    return path


def test_reads_at_its_offset(tmp_path: Path) -> None:
    numbers = np.arange(2048, dtype=np.float32)
    (tmp_path / "w.bin").write_bytes(numbers.tobytes())
    module = load(write(tmp_path, location="w.bin", offset="4096", length="4096"))
    data = module.graph.value("w").data
    assert isinstance(data, ExternalTensor)
    assert (data.name, data.offset, data.length, data.path) == ("w.bin", 4096, 4096, tmp_path / "w.bin")
    np.testing.assert_array_equal(data.numpy(), numbers[1024:].reshape(32, 32))
    check_external(module)


def test_offset_and_length_may_be_left_out(tmp_path: Path) -> None:
    data = load(write(tmp_path, location="sub/w.bin")).graph.value("w").data
    assert isinstance(data, ExternalTensor)
    assert (data.offset, data.length, data.path) == (0, 4096, tmp_path / "sub/w.bin")


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("", "is empty"),
        ("/etc/passwd", "is absolute"),
        ("C:\\w.bin", "is absolute"),
        ("../w.bin", 'by ".."'),
        ("sub/../../w.bin", 'by ".."'),
        ("sub\\..\\..\\w.bin", 'by ".."'),
        ("w\0.bin", "zero byte"),
    ],
)
def test_locations_outside_the_folder(tmp_path: Path, location: str, reason: str) -> None:
    with pytest.raises(OnnxError, match=reason) as caught:
        load(write(tmp_path, location=location))
    assert "initializer w" in caught.value.where


def test_links_that_leave_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(4096))
    (folder / "w.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(OnnxError, match="symbolic link that leaves"):
        load(write(folder, location="w.bin"))
    (folder / "real.bin").write_bytes(bytes(4096))
    (folder / "inner.bin").symlink_to(folder / "real.bin")
    check_external(load(write(folder, location="inner.bin")))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "-1"}, 'offset "-1"'),
        ({"offset": "x"}, 'offset "x"'),
        ({"offset": "9" * 30}, "offset"),
        ({"length": "-4096"}, "length"),
        ({"length": "4095"}, "4095 bytes for a tensor f32"),
        ({"length": "0"}, "needs 4096"),
    ],
)
def test_ranges_that_cannot_be(tmp_path: Path, entries: dict[str, str], message: str) -> None:
    with pytest.raises(OnnxError, match=message):
        load(write(tmp_path, location="w.bin", **entries))


def test_missing_and_short_files(tmp_path: Path) -> None:
    module = load(write(tmp_path, location="w.bin", offset="64"))
    with pytest.raises(OnnxError, match=r"(?s)cannot read external data: No such file.*value w"):
        check_external(module)
    (tmp_path / "w.bin").write_bytes(bytes(4096))
    with pytest.raises(OnnxError, match=r"(?s)ends at byte 4096.*do: the file is cut short"):
        check_external(module)
    data = module.graph.value("w").data
    assert data is not None
    with pytest.raises(TensorError, match="ends at byte 4096"):
        data.numpy()


def test_all_missing_tensors_are_counted(tmp_path: Path) -> None:
    made = external(external(mlp(), "w", location="w.bin"), "b", location="b.bin")
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(OnnxError, match="and 1 more tensors lack their bytes"):
        check_external(load(tmp_path / "m.onnx"))
