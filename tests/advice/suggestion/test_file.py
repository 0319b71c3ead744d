"""The --shardings file of a suggestion."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.advice.suggestion.file import Spec, as_json, as_yaml, check_target, lines_of, pattern_of, text_of
from irpar.annotations.shardings_file import read_shardings
from irpar.files.atomic import WriteError
from irpar.sharding import Mesh

MESH = Mesh({"dp": 2, "tp": 4})
COLUMNS: Spec = (None, ("tp",))
ROWS: Spec = (("tp",), None)


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["wte"], "wte"),
        (["h.0.fc1", "h.1.fc1", "h.11.fc1"], "h.*.fc1"),
        (["layer1.0.1.conv", "layer2.1.1.conv"], "layer*.*.1.conv"),
        (["a1", "b1"], "a1"),
        (["onnx::MatMul_298", "onnx::MatMul_307"], "onnx::MatMul_*"),
    ],
)
def test_names_that_differ_in_numbers_are_a_glob(names: list[str], pattern: str) -> None:
    assert pattern_of(names) == pattern


def test_a_glob_is_written_only_where_it_means_just_these() -> None:
    tensors = {"h.0.w": COLUMNS, "h.1.w": COLUMNS, "m_1": COLUMNS, "m_2": COLUMNS, "m_3": ROWS}
    groups = [["h.0.w", "h.1.w"], ["m_1", "m_2"], ["m_3"]]
    known = [*tensors, "m_4"]
    assert lines_of(tensors, groups, known) == {"h.*.w": COLUMNS, "m_1": COLUMNS, "m_2": COLUMNS, "m_3": ROWS}
    # A tensor that is called as the glob would be taken for it.
    assert "h.*.w" not in lines_of(tensors, groups, [*known, "h.*.w"])


def test_names_with_the_characters_of_globs_stay_names() -> None:
    tensors = {"w[0]": COLUMNS, "w[1]": COLUMNS}
    assert lines_of(tensors, [list(tensors)], tensors) == tensors


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
SPECS = st.lists(st.sampled_from([None, ("tp",), ("dp", "tp"), ("tp:(1)2",)]), max_size=3).map(tuple)


@given(st.dictionaries(NAMES, SPECS, max_size=6), st.sampled_from(["yaml", "json"]))
def test_what_is_written_is_what_is_read(tensors: dict[str, Spec], kind: str) -> None:
    import tempfile

    comments = dict.fromkeys(tensors, "heads: 4, 1 a rank")
    text = as_yaml(MESH, tensors, comments, "m.onnx") if kind == "yaml" else as_json(MESH, tensors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"s.{kind}"
        path.write_text(text, encoding="utf-8")
        read = read_shardings(path)
    assert read.mesh == MESH
    found = {one.pattern: tuple(None if dim is None else tuple(dim) for dim in one.spec) for one in read.tensors}
    assert found == tensors


def test_reasons_and_names_of_odd_models_stay_on_their_lines() -> None:
    text = as_yaml(MESH, {"w": COLUMNS}, {"w": "rows: MatMul a\nb sums # over tp"}, "odd\nname.onnx")
    assert all(line.startswith(("#", "mesh:", "tensors:", "  w:")) for line in text.splitlines())


def test_the_ending_says_which_format(tmp_path: Path) -> None:
    assert text_of(tmp_path / "s.JSON", MESH, {"w": ROWS}, {}, "m.onnx").startswith("{")
    assert text_of(tmp_path / "s.yml", MESH, {"w": ROWS}, {}, "m.onnx").startswith("# Suggested")


def test_only_a_shardings_file_is_replaced_and_only_when_asked(tmp_path: Path) -> None:
    model, target = tmp_path / "m.onnx", tmp_path / "m.shardings.yaml"
    model.write_bytes(b"model")
    check_target(target, model, force=False)
    target.write_text(as_yaml(MESH, {"w": ROWS}, {}, "m.onnx"))
    with pytest.raises(WriteError, match="exists"):
        check_target(target, model, force=False)
    check_target(target, model, force=True)
    target.write_text("my: notes\n")
    with pytest.raises(WriteError, match="no --shardings file"):
        check_target(target, model, force=True)
    with pytest.raises(WriteError, match="replace the model"):
        check_target(model, model, force=True)
    with pytest.raises(WriteError, match="a folder"):
        check_target(tmp_path, model, force=True)
