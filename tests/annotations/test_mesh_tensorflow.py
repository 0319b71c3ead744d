"""Mesh-TensorFlow's layout rules say what module.shard says."""

import pytest

from irpar.annotations.mesh_tensorflow import annotate, read_mesh_shape, read_rules
from irpar.ir import clone_module
from irpar.passes.bind_dims import BindDims
from irpar.sharding import IrparError, Mesh
from tests.annotations.conftest import NAMED
from tests.annotations.conftest import plain as plain_of

NAMES = {"h.0.w": ["embed", "hidden"], "h.1.w": ["hidden", None]}
EXPECTED = {"x": ["dp", ["?"]], "y": ["dp", ["?"]], "h.0.w": [None, "tp"], "h.1.w": ["tp", None]}


def plain(annotations):
    return plain_of(annotations, text=NAMED)


@pytest.fixture
def meshed(named):
    named.set_mesh(Mesh({"dp": 2, "tp": 4}))
    return named


def test_the_same_ir(meshed):
    assert annotate(meshed, "batch:dp;hidden:tp", names=NAMES) == 4
    assert str(meshed) == str(plain(EXPECTED))


def test_mesh_shape(named):
    annotate(named, {"batch": "dp", "hidden": ["tp"]}, mesh_shape="dp:2;tp:4", names=NAMES)
    assert str(named) == str(plain(EXPECTED))


def test_rules_wait_for_a_mesh(named):
    annotate(named, "batch:dp;hidden:tp", names=NAMES)
    named.set_mesh(Mesh({"dp": 2, "tp": 4}))
    assert str(named) == str(plain(EXPECTED))


def test_names_outlive_their_sizes(meshed):
    BindDims(sizes={"batch": 8}).run(meshed)
    copy = clone_module(meshed)
    annotate(copy, "batch:dp;hidden:tp", names=NAMES)
    expected = plain(EXPECTED)
    BindDims(sizes={"batch": 8}).run(expected)
    assert str(copy) == str(expected)


def test_a_table_goes_before_symbols_and_annotations_before_both(meshed):
    meshed.shard("y", [None, None])
    names = {"x": ["other", "wide"], "h.*.w": [None, "wide"], "h.1.w": ["wide", None]}
    annotate(meshed, "wide:tp", names=names)
    expected = {"y": [None, None], "x": [None, "tp"], "h.0.w": [None, "tp"], "h.1.w": ["tp", None]}
    assert str(meshed) == str(plain(expected))
    with pytest.raises(IrparError, match='no tensor has a dim called "batch"'):
        annotate(plain({"y": [None, None]}), "batch:dp", names={"x": ["other", "wide"]})


def test_several_axes_of_one_name(meshed):
    annotate(meshed, {"hidden": ["dp", "tp"]}, names={"h.0.w": [None, "hidden"]})
    expected = {"h.0.w": [None, ["dp", "tp"]], "x": [None, ["?"]], "y": [None, ["?"]]}
    assert str(meshed) == str(plain(expected))


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ("bach:dp", {}, 'no tensor has a dim called "bach"'),
        ("batch:mp", {}, 'no axis "mp"'),
        ("batch:dp;hidden:dp", {"x": ["batch", "hidden"]}, "mesh axis dp is used twice"),
        ("hidden:tp", {"h.0.w": ["hidden", "hidden"]}, "mesh axis tp is used twice"),
        ("hidden:tp", {"h.0.w": ["hidden"]}, "1 names for the dims of h.0.w"),
        ("hidden:tp", {"h.9.w": ["hidden", None]}, 'no tensor matches "h.9.w"'),
        ("hidden:tp", {"h.*.w": ["hidden", None], "*.w": [None, "hidden"]}, "have names twice"),
        ({"batch": 3}, {}, 'the rule of "batch" is no axis: 3'),
        ({"batch": []}, {}, 'the rule of "batch" is no axis'),
        ("batch:dp", {"x": "ab"}, "'ab' does not name the dims of x"),
        ("batch:dp", {"x": ["batch", 3]}, "does not name the dims of x"),
        ("batch", {}, 'cannot read "batch"'),
        ("batch:dp;batch:tp", {}, "names batch twice"),
        ("", {}, "layout is empty"),
        (":dp", {}, 'cannot read ":dp"'),
        ("batch:", {}, 'cannot read "batch:"'),
    ],
)
def test_rules_that_cannot_be(meshed, layout, names, message):
    with pytest.raises(IrparError, match=message):
        annotate(meshed, layout, names=names)


def test_the_nearest_name_is_told(meshed):
    with pytest.raises(IrparError) as raised:
        annotate(meshed, "bacth:dp")
    assert "nearest names: batch" in raised.value.notes


def test_forms_of_rules_and_shapes():
    assert read_rules("[batch:dp, hidden:tp]") == {"batch": ("dp",), "hidden": ("tp",)}
    assert read_mesh_shape("dp:2;tp:4") == read_mesh_shape({"dp": 2, "tp": 4}) == Mesh({"dp": 2, "tp": 4})
    for shape in ("dp:2;tp:x", "dp", "dp:-1", "dp:0"):
        with pytest.raises(IrparError):
            read_mesh_shape(shape)


def test_another_mesh_shape_than_the_mesh(meshed):
    with pytest.raises(IrparError, match="does not agree"):
        annotate(meshed, "batch:dp", mesh_shape="dp:4")
