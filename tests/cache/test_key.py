import sys
from pathlib import Path

import pytest

from irpar.cache import key
from irpar.cache.key import key_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"model")
    return path


def test_the_same_is_the_same(model):
    assert key_of("partition", {"mesh": "tp=2"}, [model]) == key_of("partition", {"mesh": "tp=2"}, [model])


def test_everything_counts(model, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"model")
    keys = [
        key_of("partition", {"mesh": "tp=2"}, [model]),
        key_of("train", {"mesh": "tp=2"}, [model]),
        key_of("partition", {"mesh": "tp=4"}, [model]),
        key_of("partition", {"mesh": "tp=2", "seed": 1}, [model]),
        key_of("partition", {"mesh": "tp=2"}, [other]),
        key_of("partition", {"mesh": "tp=2"}, [model, other]),
    ]
    model.write_bytes(b"another")
    keys.append(key_of("partition", {"mesh": "tp=2"}, [model]))
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_what_cannot_be_read_has_no_key(tmp_path):
    assert key_of("partition", {}, [tmp_path / "nothing"]) is None


def test_irpar_itself_counts(model, monkeypatch, tmp_path):
    before = key_of("partition", {}, [model])
    package = tmp_path / "changed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(key, "_OWN", (*key._OWN, "changed"))
    first = key_of("partition", {}, [model])
    (package / "__init__.py").write_text("pass")
    assert len({before, first, key_of("partition", {}, [model])}) == 3


def test_the_sources_are_those_that_run(model):
    found = {
        Path(path).name
        for spec in map(key.find_spec, key._OWN)
        for path in key._sources(list(spec.submodule_search_locations))
    }
    assert {"api.py", "group_segments.py", "op_def.py", "matmul.py"} <= found


def test_installed_packages_count(model, monkeypatch, tmp_path):
    before = key_of("partition", {}, [model])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "onnx-99.0.dist-info").mkdir()
    assert key_of("partition", {}, [model]) not in (None, before)


@pytest.mark.parametrize("name", ["irpar.egg-info", "irpar-0.1.0.dev0.dist-info"])
def test_irpar_counts_by_its_sources_alone(model, monkeypatch, tmp_path, name):
    """A build leaves the first in the folder of irpar, from where some start it."""
    before = key_of("partition", {}, [model])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / name).mkdir()
    assert key_of("partition", {}, [model]) == before
    (tmp_path / "irparts-1.0.dist-info").mkdir()
    assert key_of("partition", {}, [model]) != before


def test_passes_of_other_packages_count_by_their_sources(model, monkeypatch, tmp_path):
    info = tmp_path / "fine_passes-1.0.dist-info"
    info.mkdir()
    (tmp_path / "fine_passes").mkdir()
    source = tmp_path / "fine_passes" / "halve.py"
    source.write_text("HALF = 2")
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = [key_of("partition", {}, [model])]
    (info / "entry_points.txt").write_text("[irpar.passes]\nhalve = fine_passes.halve:Halve\n")
    keys.append(key_of("partition", {}, [model]))
    source.write_text("HALF = 3")
    keys.append(key_of("partition", {}, [model]))
    assert None not in keys
    assert len(set(keys)) == 3
    monkeypatch.setattr(key, "_MOST_FOREIGN_FILES", 0)
    assert key_of("partition", {}, [model]) is None
