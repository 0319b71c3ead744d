"""TensorFlow's DTensor layouts say what module.shard says."""

import numpy as np
import pytest

from irpar.annotations.tensorflow_dtensor import UNSHARDED, relayout
from irpar.sharding import IrparError, Mesh
from tests.annotations.conftest import plain

# What TensorFlow's objects have, as far as layouts go.


class TensorFlowMesh:
    def __init__(self, ids, names):
        self.ids, self.dim_names = np.asarray(ids), list(names)

    def dim_size(self, name):
        return self.ids.shape[self.dim_names.index(name)]

    def global_device_ids(self):
        return self.ids


class HugeMesh(TensorFlowMesh):
    def dim_size(self, name):
        return 10**5000


class Layout:
    def __init__(self, sharding_specs, mesh):
        self.sharding_specs, self.mesh = list(sharding_specs), mesh


UP = {"x": ["dp", None], "h.0.w": [None, "tp"]}
MESH = TensorFlowMesh(np.arange(8).reshape(2, 4), ("dp", "tp"))
TEXT = "sharding_specs:{}, mesh:|dp=2,tp=4|0,1,2,3,4,5,6,7|0,1,2,3|/job:localhost/device:CPU:0"


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (["dp", UNSHARDED], ["unsharded", "tp"]),
        (("dp", None), (None, "tp")),
        (Layout(["dp", "unsharded"], MESH), Layout(["unsharded", "tp"], MESH)),
        (TEXT.format("dp,unsharded"), TEXT.format("unsharded,tp,")),
        ("sharding_specs:dp,unsharded, mesh:CPU|dp=2,tp=4|*CPU", "sharding_specs:unsharded,tp mesh:|dp=2,tp=4"),
    ],
)
def test_layouts(meshed, x, w):
    assert relayout(meshed, "x", x) == 1
    relayout(meshed, "h.0.w", w)
    assert str(meshed) == str(plain(UP))


def test_a_layout_gives_the_module_its_mesh(module):
    relayout(module, "h.*.w", Layout(["unsharded", "model"], TensorFlowMesh([[3, 1], [2, 0]], ("batch", "model"))))
    mesh = Mesh({"batch": 2, "model": 2}, devices=(3, 1, 2, 0))
    assert str(module) == str(plain({"h.*.w": [None, "model"]}, mesh))


def test_a_layout_may_be_another_view_of_the_mesh(meshed):
    relayout(meshed, "x", "sharding_specs:all,unsharded, mesh:|all=8|0,1,2,3,4,5,6,7|")
    assert str(meshed) == str(plain({"x": [["dp", "tp"], None]}))


@pytest.mark.parametrize(
    ("tensor", "layout", "message"),
    [
        ("x", ["mp", UNSHARDED], 'no axis "mp" in mesh dp=2,tp=4'),
        ("x", Layout(["mp", UNSHARDED], MESH), 'the mesh of the layout has no dim "mp"'),
        ("x", TEXT.format("mp,unsharded"), 'the mesh of the layout has no dim "mp"'),
        ("x", ["dp", "dp"], "mesh axis dp is used twice"),
        ("x", Layout(["dp", "dp"], MESH), '"dp" comes twice'),
        ("x", ["dp"], "the annotation has 1 dims, but x is"),
        ("x", "dp,unsharded", "'dp,unsharded' is no layout"),
        ("x", "sharding_specs:dp,unsharded, mesh:none", 'the mesh "none" of the layout cannot be read'),
        ("x", "sharding_specs:dp,unsharded, mesh:|dp=99999999999999999999,tp=2|", "of the layout cannot be read"),
        ("x", "sharding_specs:dp,unsharded, mesh:|dp=2,tp=4|0,1,2,x|", "of the layout cannot be read"),
        ("x", "sharding_specs:dp,unsharded, mesh:|dp=999999999,tp=2|", "has 1,999,999,998 devices; irpar shards over"),
        ("x", "sharding_specs:dp,unsharded, mesh:|dp=999999999,tp=2|0,1|", "has 1,999,999,998 devices"),
        (
            "x",
            Layout(["dp", "unsharded"], HugeMesh([[0, 1]], ("dp", "tp"))),
            "has far too many devices; irpar shards over 65,536 at most",
        ),
        ("x", [3, "dp"], "is no layout"),
        ("x", 3, "3 is no layout"),
        ("x", Layout(["dp", "unsharded"], object()), "the mesh of the layout is a object"),
        ("x", "sharding_specs:a,unsharded, mesh:|a=4|0,1,2,3|", "does not have the devices of the mesh"),
        ("x", "sharding_specs:tp,unsharded, mesh:|tp=2,dp=4|", "another thing than axis tp of the mesh dp=2,tp=4"),
        ("z", ["dp", UNSHARDED], 'no tensor matches "z"'),
    ],
)
def test_layouts_that_cannot_be(meshed, tensor, layout, message):
    with pytest.raises(IrparError, match=message):
        relayout(meshed, tensor, layout)
