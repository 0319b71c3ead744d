"""What the Python interface is given and cannot use is reported in words, whatever it is."""

from pathlib import Path
from typing import Any

import pytest

import irpar
from irpar.models import save
from irpar.sharding import ArgumentError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arguments") / "mlp.onnx"
    save(path, "mlp")
    return path


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"m.onnx"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("\0", "no path has a null character"),
        (Path("a\0b"), "no path has a null character"),
        ("\ud800", "which is no text of Unicode"),
        (BytesPath(), "is a path of bytes"),
    ],
)
def test_paths_that_no_file_has(model: Path, tmp_path: Path, path: Any, told: str) -> None:
    made = irpar.partition(irpar.load(model), "p=2")
    made.save(tmp_path / "out")
    for call in (
        lambda: irpar.load(path),
        lambda: irpar.partition(path, "p=2"),
        lambda: irpar.inspect(path),
        lambda: irpar.partition(model, "p=2", network=path),
        lambda: irpar.Partition.open(path),
        lambda: made.save(path),
        lambda: irpar.Partition.open(tmp_path / "out").verify(model=path),
    ):
        with pytest.raises(ArgumentError, match=told):
            call()


def test_names_that_are_too_long_for_a_file(model: Path) -> None:
    name = "x" * 5000
    for call in (
        lambda: irpar.load(name),
        lambda: irpar.partition(model, "p=2", network=name),
        lambda: irpar.partition(model, "p=2", network=f"{name}.yaml"),
        lambda: irpar.Partition.open(name),
    ):
        with pytest.raises(irpar.IrparError) as caught:
            call()
        assert len(str(caught.value)) < 6000


@pytest.mark.parametrize("values", [{1: 2}, {None: 2}, [1], {"": 2, b"x": 3}])
def test_names_of_set(model: Path, values: Any) -> None:
    with pytest.raises(ArgumentError, match="set"):
        irpar.load(model, set=values)
