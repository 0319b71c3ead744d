"""benchmarks/real_models/check.py on a wheel that a test makes: what is right, what is wrong, what is not there."""

import json
import zipfile

import numpy as np
import pytest

import irpar
from benchmarks.real_models import check, models
from benchmarks.real_models.models import RealModel, features, mask, number, picture, sound, tokens, zeros
from irpar.models import save

MODEL = RealModel("tiny-gpt", "1.0", "tiny_gpt/data/model.onnx", "a gpt", {"batch": 4}, {"input_ids": tokens(0, 256)})


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    save(tmp_path / "model.onnx", "gpt", layers=1)
    with zipfile.ZipFile(tmp_path / "tiny_gpt-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "model.onnx", MODEL.file)
    monkeypatch.setattr(check, "MODELS", (RealModel(**{**vars(MODEL), "bind": {}}),))
    monkeypatch.setattr(check, "MORE", ())
    return tmp_path


def test_a_model_of_a_wheel(wheels, tmp_path, capsys):
    target = tmp_path / "results"
    assert check.main(["--wheels", str(wheels), "--mesh", "dp=2,tp=2", "--results", str(target)]) == 0
    assert "1 of 1 right" in capsys.readouterr().out
    (row,) = json.loads(target.with_suffix(".json").read_text())["rows"]
    assert row["is_right"]
    assert row["verify"] == "equal"
    assert row["flops_share"] < 0.3
    table = target.with_suffix(".md").read_text()
    assert "| tiny-gpt 1.0, model.onnx | dp=2,tp=2 |" in table
    assert str(tmp_path) not in table + target.with_suffix(".json").read_text()


def test_a_partition_that_computes_something_else_is_told(wheels, monkeypatch, capsys):
    run = irpar.Partition.run
    monkeypatch.setattr(
        irpar.Partition, "run", lambda self, inputs: {name: value + 0.01 for name, value in run(self, inputs).items()}
    )
    assert check.main(["--wheels", str(wheels), "--mesh", "tp=2"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_what_fails_is_told(wheels, capsys):
    assert check.main(["--wheels", str(wheels), "--mesh", "tp=nothing"]) == 1
    assert "irpar inspect: exit 2: error:" in capsys.readouterr().out


def test_a_file_and_a_package_that_is_not_there(wheels, capsys):
    assert check.main([str(wheels / "model.onnx"), "--mesh", "tp=2"]) == 0
    assert check.main(["tiny-gpt", "--mesh", "tp=2"]) == 1
    assert "neither installed nor among the wheels" in capsys.readouterr().out


def test_every_model_is_listed_once_with_its_package():
    listed = [model.file for model in (*models.MODELS, *models.MORE)]
    assert len(models.MODELS) == 10
    assert len(set(listed)) == len(listed)
    packages = (check.HERE / "packages.txt").read_text().split()
    assert sorted(packages) == sorted({f"{one.package}=={one.version}" for one in (*models.MODELS, *models.MORE)})


@pytest.mark.parametrize(
    "maker", [picture(-1, 1), tokens(1, 9), sound, features, zeros, number(3), mask("bool"), mask("int64", True)]
)
def test_inputs_have_their_shape_and_are_the_same_again(maker):
    first, second = maker((2, 3, 16)), maker((2, 3, 16))
    assert first.shape == (2, 3, 16)
    assert np.array_equal(first, second)
