"""MindSpore's strategies and layouts say what module.shard says."""

import pytest

from irpar.annotations.mindspore import Layout, shard
from irpar.sharding import IrparError, Mesh
from tests.annotations.conftest import plain

UP = {"x": ["dp", None], "h.0.w": [None, "tp"]}


def test_counts(meshed):
    assert shard(meshed, "up", ((2, 1), (1, 4)), ((2, 4),)) == 1
    assert str(meshed) == str(plain({**UP, "a": ["dp", "tp"]}))


def test_layouts(meshed):
    layout = Layout((2, 4), ("dp", "tp"))
    shard(meshed, "up", (layout("dp", "None"), layout("None", "tp")), (layout("dp", ("tp",)),))
    assert str(meshed) == str(plain({**UP, "a": ["dp", "tp"]}))


def test_layouts_and_counts_and_free_operands(meshed):
    layout = Layout((2, 4), ("dp", "tp"))
    shard(meshed, "up", (None, layout(None, "tp")), ((2, 4),))
    assert str(meshed) == str(plain({"h.0.w": [None, "tp"], "a": ["dp", "tp"]}))


def test_a_layout_gives_the_module_its_mesh(module):
    layout = Layout((2, 2, 2), ("dp", "cp", "mp"), rank_list=(7, 6, 5, 4, 3, 2, 1, 0))
    shard(module, "down", (layout("dp", ("cp", "mp")), layout(("mp", "cp"), "None")))
    mesh = Mesh({"dp": 2, "cp": 2, "mp": 2}, devices=(7, 6, 5, 4, 3, 2, 1, 0))
    assert str(module) == str(plain({"r": ["dp", ["cp", "mp"]], "h.1.w": [["mp", "cp"], None]}, mesh))


def test_a_layout_may_be_another_view_of_the_mesh(meshed):
    layout = Layout((2, 2, 2), ("outer", "cp", "mp"))
    shard(meshed, "down", (layout("outer", ("cp", "mp")), layout("mp", "None")))
    assert str(meshed) == str(plain({"r": ["dp", "tp"], "h.1.w": ["tp:(2)2", None]}))


@pytest.mark.parametrize(
    ("matrix", "names", "message"),
    [
        ((2, 0), ("a", "b"), "do not fit"),
        ((2,), ("a", "b"), "do not fit"),
        ((), (), "do not fit"),
        ((2.0,), ("a",), "do not fit"),
        ((65_536, 2), ("a", "b"), "has 131,072 devices; irpar shards over 65,536 at most"),
        ((10**5000,), ("a",), "has far too many devices"),
        ((2, 2), ("a", "a"), "comes twice"),
        ((2,), ("None",), "comes twice"),
        ((2,), ("a b",), "cannot name a mesh axis"),
        ((2, 2), ("dp", "interleaved_parallel"), "interleaved_parallel"),
    ],
)
def test_layouts_that_cannot_be(matrix, names, message):
    with pytest.raises(IrparError, match=message):
        Layout(matrix, names)


def test_rank_lists_that_cannot_be():
    with pytest.raises(IrparError, match="rank list has 3 devices, the matrix 4"):
        Layout((2, 2), ("a", "b"), (0, 1, 2))
    with pytest.raises(IrparError, match="a device twice"):
        Layout((2, 2), ("a", "b"), (0, 1, 2, 2)).devices  # noqa: B018


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (("mp",), "no alias 'mp'"),
        (("dp", "dp"), '"dp" comes twice'),
        ((("tp", "tp"),), "twice"),
        ((3,), "no alias|int"),
    ],
)
def test_aliases_that_cannot_be(dims, message):
    with pytest.raises((IrparError, TypeError), match=message):
        Layout((2, 4), ("dp", "tp"))(*dims)


def test_an_alias_must_be_the_axis_of_its_name(meshed):
    layout = Layout((4, 2), ("dp", "tp"))
    with pytest.raises(IrparError, match=r'"dp" of the layout is another thing than axis dp of the mesh dp=2,tp=4'):
        shard(meshed, "up", (layout("dp", "None"), None))
    with pytest.raises(IrparError, match="does not have the devices"):
        shard(meshed, "up", (Layout((2, 2), ("dp", "tp"))("dp", "None"), None))


@pytest.mark.parametrize(
    ("op", "strategies", "message"),
    [
        ("upp", (((2, 1), (1, 4)),), 'no op is called "upp"'),
        ("up", (), "there is no strategy"),
        ("up", (3,), "no tuple of one for each tensor"),
        ("up", (((2, 1),),), "up has 2 operands, the entry has cuts for 1"),
        ("up", (((2,), (1, 4)),), r"the cuts \[2\] are for 1 dims"),
        ("up", (((3, 1), (1, 1)),), "no axes of the mesh"),
        ("up", (((2, 4), (2, 1)),), "dim 1 of x is sharded into 4, dim 0 of h.0.w into 2"),
        ("up", (((2, 0), (1, 4)),), r"\(2, 0\) is no strategy"),
        ("up", (("21", (1, 4)),), "'21' is no strategy"),
        ("up", ((2, 1),), "2 is no strategy"),
    ],
)
def test_strategies_that_cannot_be(meshed, op, strategies, message):
    with pytest.raises(IrparError, match=message):
        shard(meshed, op, *strategies)


def test_a_layout_of_another_rank(meshed):
    layout = Layout((2, 4), ("dp", "tp"))
    with pytest.raises(IrparError, match="the annotation has 1 dims, but x is"):
        shard(meshed, "up", (layout("dp"), None))


def test_counts_need_a_mesh(module):
    with pytest.raises(IrparError, match="no mesh to match cut counts to"):
        shard(module, "up", ((2, 1), (1, 4)))
