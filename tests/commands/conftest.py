"""A model to train, its samples, and a step of it."""

import shutil
from pathlib import Path

import pytest

from irpar.onnx_io import save
from tests.training.programs import CLASSIFIER, classifier, data_file, on_mesh, with_weights


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """The classifier as an ONNX model."""
    save(with_weights(CLASSIFIER), tmp_path / "network.onnx")
    return tmp_path / "network.onnx"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Its samples."""
    return data_file(tmp_path)


@pytest.fixture(scope="module")
def partitioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partitioned") / "trained"
    on_mesh(classifier(), "tp=2").save(folder)
    return folder


@pytest.fixture
def trained(partitioned: Path, tmp_path: Path) -> Path:
    """A partition of a step of it over two ranks."""
    return Path(shutil.copytree(partitioned, tmp_path / "trained"))
