"""Dims that lie alike, and what cutting them costs."""

import pytest

from irpar.advice.suggestion.cut_classes import CutClass, CutClasses
from irpar.advice.suggestion.cut_rest import single_cuts
from irpar.analysis.completion.flow import USUAL_TRIPS
from irpar.ir import Value
from irpar.ir.text.files import parse_module
from irpar.sharding import Axis, Mesh

MLP = """
graph @g(%x: f32[6, 8]) -> (%y) opset 18 {
  %w1 = constant : f32[8, 16] data("w.bin", 0, 512)
  %b1 = constant : f32[16] data("w.bin", 512, 64)
  %w2 = constant : f32[16, 8] data("w.bin", 576, 512)
  %h = MatMul(%x, %w1) : f32[6, 16]
  %a = Add(%h, %b1) : f32[6, 16]
  %r = Relu(%a) : f32[6, 16]
  %y = MatMul(%r, %w2) : f32[6, 8]
}
"""


def classes_of(text: str, parts: int = 2) -> CutClasses:
    return CutClasses(parse_module(text).graph, Mesh({"tp": parts}), (Axis("tp"),))


def find(classes: CutClasses, name: str, dim: int) -> CutClass:
    held = classes.class_of(classes.graph.value(name), dim)
    assert held is not None
    return held


def weights(held: CutClass) -> set[str]:
    return {f"{value.name}.{dim}" for value, dim in held.weights.items()}


def test_classes_of_an_mlp_and_their_costs() -> None:
    classes = classes_of(MLP)
    hidden = find(classes, "h", 1)
    assert weights(hidden) == {"w1.1", "b1.0", "w2.0"}
    assert not hidden.inputs
    # Both products, the addition and the Relu by half; the sums of y are brought together.
    assert hidden.flops == (2 * 6 * 8 * 16 * 2 + 2 * 6 * 16) / 2
    assert hidden.weight_bytes == (512 + 64 + 512) / 2
    assert (hidden.summed_bytes, hidden.gathered_bytes, hidden.collectives) == (6 * 8 * 4, 0, 1)
    rows = find(classes, "x", 0)
    assert not rows.weights
    assert (rows.sent_bytes, rows.collectives) == (0, 0)
    assert [value.name for value in rows.inputs] == ["x"]
    features = find(classes, "x", 1)
    assert (weights(features), features.sums_weights) == ({"w1.0"}, True)


def test_classes_that_hold_two_dims_of_a_tensor_exclude_each_other() -> None:
    classes = classes_of(MLP)
    hidden, features, output = (find(classes, name, dim).number for name, dim in (("h", 1), ("w1", 0), ("y", 1)))
    conflicts = classes.conflicts([hidden, features, output])
    assert conflicts == {
        hidden: {features: classes.graph.value("w1"), output: classes.graph.value("w2")},
        features: {hidden: classes.graph.value("w1")},
        output: {hidden: classes.graph.value("w2")},
    }


HEADS = """
graph @g(%x: f32[4, 8]) -> (%y) opset 18 {
  %w = constant : f32[8, 12] data("w.bin", 0, 384)
  %shape = constant : i64[3] [4, 3, 4]
  %q = MatMul(%x, %w) : f32[4, 12]
  %h = Reshape(%q, %shape) : f32[4, 3, 4]
  %y = Relu(%h) : f32[4, 3, 4]
}
"""


def test_a_split_dim_goes_on_in_its_major_part() -> None:
    """12 columns are 3 heads of 4: three devices have a head each; two cannot, and must bring the columns together."""
    three = find(classes_of(HEADS, 3), "w", 1)
    assert (three.collectives, three.number) == (0, find(classes_of(HEADS, 3), "y", 1).number)
    two = find(classes_of(HEADS, 2), "w", 1)
    assert [value.name for value in two.gathered] == ["q"]
    assert two.gathered_bytes == 4 * 12 * 4 / 2
    assert classes_of(HEADS, 2).parts_that_fit(next(iter(two.gathered))) == 1


def test_a_part_of_the_axes_may_fit_where_all_do_not() -> None:
    text = HEADS.replace("i64[3] [4, 3, 4]", "i64[3] [4, 2, 6]").replace("[4, 3, 4]", "[4, 2, 6]")
    classes = classes_of(text, 4)
    columns = find(classes, "w", 1)
    assert [classes.parts_that_fit(value) for value in columns.gathered] == [2]


SHARED = """
graph @g(%x: f32[4, 8]) -> (%z) opset 18 {
  %w1 = constant : f32[8, 8] data("w.bin", 0, 256)
  %w2 = constant : f32[8, 8] data("w.bin", 256, 256)
  %zeros = constant : f32[8] [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
  %a = MatMul(%x, %w1) : f32[4, 8]
  %b = Add(%a, %zeros) : f32[4, 8]
  %c = MatMul(%b, %w2) : f32[4, 8]
  %z = Add(%c, %zeros) : f32[4, 8]
}
"""


def test_numbers_that_several_nodes_read_link_nothing() -> None:
    classes = classes_of(SHARED)
    assert classes.class_of(classes.graph.value("zeros"), 0) is None
    assert find(classes, "a", 1).twice is None
    assert find(classes, "a", 1).number != find(classes, "c", 1).number


def test_a_dim_that_meets_itself_cannot_be_cut() -> None:
    """x + x w: the columns of w are sharded as its rows."""
    classes = classes_of(
        """
graph @g(%x: f32[4, 8]) -> (%y) opset 18 {
  %w = constant : f32[8, 8] data("w.bin", 0, 256)
  %a = MatMul(%x, %w) : f32[4, 8]
  %y = Add(%x, %a) : f32[4, 8]
}
"""
    )
    assert find(classes, "w", 0).twice is classes.graph.value("w")


def test_classes_go_through_bodies() -> None:
    classes = classes_of(
        """
graph @g(%x: f32[4, 8], %p: bool[]) -> (%y) opset 18 {
  %w = constant : f32[8, 8] data("w.bin", 0, 256)
  %v = constant : f32[8, 8] data("w.bin", 256, 256)
  %a = MatMul(%x, %w) : f32[4, 8]
  %y = If(%p) {
    then_branch = graph @t() -> (%t) {
      %t = MatMul(%a, %v) : f32[4, 8]
    },
    else_branch = graph @e() -> (%e) {
      %e = Neg(%a) : f32[4, 8]
    }
  } : f32[4, 8]
}
"""
    )
    rows = find(classes, "x", 0)
    assert rows.flops == (2 * 2 * 4 * 8 * 8 + 4 * 8) / 2  # Both branches; the If itself does nothing.
    assert not rows.gathered
    # What one branch gives is sharded as what the other gives: the columns of a are those of y, and v has both.
    assert find(classes, "w", 1).twice is classes.graph.value("v")


def test_what_a_loop_does_counts_for_each_trip() -> None:
    classes = classes_of(
        """
graph @g(%x: f32[4, 8], %n: i64[], %go: bool[]) -> (%y) opset 18 {
  %w = constant : f32[8, 8] data("w.bin", 0, 256)
  %y = Loop(%n, %go, %x) {
    body = graph @b(%i: i64[], %c: bool[], %h: f32[4, 8]) -> (%c, %m) {
      %m = MatMul(%h, %w) : f32[4, 8]
    }
  } : f32[4, 8]
}
"""
    )
    rows = find(classes, "x", 0)
    assert rows.flops == USUAL_TRIPS * 2 * 4 * 8 * 8 / 2
    # Columns of a trip are rows of the next: they are one class with what the loop begins with, and so are both dims.
    assert find(classes, "w", 1).twice is classes.graph.value("w")


def test_a_node_that_is_left_whole_may_be_cut_alone() -> None:
    classes = classes_of(MLP)
    hidden = find(classes, "h", 1)

    def everything(value: Value) -> bool:
        return True

    assert single_cuts(classes, {hidden.number: hidden}, everything) == []
    first, second = single_cuts(classes, {}, everything)
    # What is made of the first product alone goes on in parts, up to where it is summed.
    assert [(first.weight[0].name, first.weight[1]), [value.name for value in first.kept_whole]] == [("w1", 1), ["r"]]
    assert [(second.weight[0].name, second.weight[1]), [value.name for value in second.kept_whole]] == [
        ("w2", 1),
        ["y"],
    ]
    assert single_cuts(classes, {}, lambda value: False) == []


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_uneven_blocks_count_as_the_largest(parts: int) -> None:
    columns = find(classes_of(MLP, parts), "y", 1)
    assert columns.weight_bytes == pytest.approx(512 * (1 - -(-8 // parts) / 8))
