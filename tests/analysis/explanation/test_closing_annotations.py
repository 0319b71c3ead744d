"""What is gathered before a node because something made of it is annotated whole names that annotation, and mends it."""

from pathlib import Path
from typing import Any

import onnx
import pytest

import irpar
from irpar.advice.redistribution_limit import LargeRedistributionError
from irpar.annotations import mesh_tensorflow
from irpar.ir import Annotation
from tests.written import Specs, model_of_text

DIRECT = "g (float[8, 16] x) => (float[8, 32] y) { y = Concat<axis=1>(x, x) }"
BEHIND = "g (float[8, 16] x) => (float[8, 32] y) { a = Concat<axis=1>(x, x) b = Relu(a) y = Exp(b) }"
RESHAPED = """g (float[8, 16] x, int64[2] s) => (float[16, 16] y) {
  a = Concat<axis=1>(x, x)  b = Reshape(a, s)  y = Relu(b) }"""
TWO = """g (float[8, 16] x) => (float[8, 32] y, float[8, 16] z) {
  a = Concat<axis=1>(x, x)  y = Relu(a)  z = Neg(x) }"""
ROWS: Specs = {"x": [["tp"], None]}
WHOLE: Specs = {"y": [None, None]}


def planned(folder: Path, text: str, specs: Specs) -> irpar.Partition:
    weights = {"s": [16, 16]} if "int64[2] s" in text else {}
    onnx.save(model_of_text(text.replace(", int64[2] s", ""), integers=weights), folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    irpar.annotate(module, specs)
    return irpar.partition(module, "tp=4")


def conflicts(made: irpar.Partition) -> list[dict[str, Any]]:
    return [entry["conflict"] for entry in made.plan.collectives if entry["conflict"]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (DIRECT, 'it produces %y as [_, _] replicated (annotated "y")'),
        (BEHIND, 'it produces %a, of which %y is made as [_, _] replicated (annotated "y")'),
        (RESHAPED, 'it produces %a, of which %y is made as [_, _] replicated (annotated "y")'),
    ],
)
def test_the_annotation_is_named_and_what_it_advises_spares_the_move(text: str, told: str, tmp_path: Path) -> None:
    made = planned(tmp_path, text, ROWS | WHOLE)
    (conflict,) = conflicts(made)
    assert conflict["value"] == "x"
    assert conflict["needed_because"].endswith(
        f"along dim 0 of it, at a greater cost than to bring it together: {told}"
    )
    first, second, *_ = conflict["avoid"].split(", or ")
    assert first == 'annotate "y" as [[tp], null]'
    assert second == 'leave out the annotation "y"'
    for specs in (ROWS | {"y": [["tp"], None]}, ROWS):
        better = planned(tmp_path, text, specs)
        assert not conflicts(better)
        assert better.plan.totals["sent_bytes"] < made.plan.totals["sent_bytes"]


def test_an_open_dim_closes_nothing(tmp_path: Path) -> None:
    assert not conflicts(planned(tmp_path, BEHIND, ROWS | {"y": [["?"], None]}))


def test_what_is_cut_on_another_way_is_not_named(tmp_path: Path) -> None:
    """z goes on cut: what is gathered is so for y alone."""
    (conflict,) = conflicts(planned(tmp_path, TWO, ROWS | WHOLE | {"z": [["tp"], None]}))
    assert '(annotated "y")' in conflict["needed_because"]
    assert '"z"' not in conflict["avoid"]


def test_layout_rules_that_no_entry_names_are_no_annotation_to_leave_out(tmp_path: Path) -> None:
    text = "g (float[batch, 16] x) => (float[made_dim_0, 32] y) { y = Concat<axis=1>(x, x) }"
    onnx.save(model_of_text(text), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx", bind={"batch": 8})
    mesh_tensorflow.annotate(module, "batch:tp")
    (conflict,) = conflicts(irpar.partition(module, "tp=4"))
    assert conflict["needed_because"].endswith(
        'it produces %y as [_, _] replicated (annotated "y" [made_dim_0, _] by the layout rules, which have none of these names '
        "in layout 'batch:tp')"
    )
    assert conflict["avoid"] == 'annotate "y" as [[tp], null]'


def test_names_that_an_entry_gives_can_be_left_out_but_not_said_otherwise(tmp_path: Path) -> None:
    onnx.save(model_of_text(DIRECT), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    names = {"x": ["batch", None], "y": ["other", None]}
    mesh_tensorflow.annotate(module, "batch:tp", names=names)
    (conflict,) = conflicts(irpar.partition(module, "tp=4"))
    assert conflict["avoid"].startswith('leave out the annotation "y" [other, _] by the layout rules, ')
    assert "annotate " not in conflict["avoid"]


@pytest.mark.parametrize(
    ("entry", "rule", "can"),
    [
        ([["tp"], None], None, True),
        ([["tp"], None], [["tp"], ["?"]], False),
        (["tp", None], [["tp", "?"], None], False),
        ([None, ["tp"]], [["tp"], None], True),
        ([None, None], [["?"], None], True),
        ([None, None], [None, None], False),
    ],
)
def test_an_entry_that_says_what_the_rules_say_cannot_be_left_out(entry: Any, rule: Any, can: bool) -> None:
    behind = None if rule is None else Annotation("y", tuple(rule), is_implied=True)
    assert Annotation("y", tuple(entry), behind=behind).can_be_left_out == can
    assert behind is None or not behind.can_be_left_out


def test_an_entry_that_the_rules_repeat_is_not_advised_to_be_left_out(tmp_path: Path) -> None:
    text = """g (float[batch, 16] x) => (float[made_dim_0, 32] y, float[batch, 16] z) {
      y = Concat<axis=1>(x, x)  z = Neg(x) }"""
    onnx.save(model_of_text(text), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx", bind={"batch": 8})
    module.set_mesh(irpar.Mesh({"tp": 4}))
    irpar.annotate(module, {"x": [["tp"], None]})
    mesh_tensorflow.annotate(module, "batch:tp")
    made = irpar.partition(module)
    (conflict,) = conflicts(made)
    assert conflict["avoid"] == 'annotate "y" as [[tp], null]'
    with pytest.raises(LargeRedistributionError) as raised:
        irpar.partition(module, max_redistribution_mb=0)
    assert 'annotate "y" as [[tp], null] (tried' in raised.value.do
    assert "leave out" not in raised.value.do
