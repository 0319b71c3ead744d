"""GSPMD's mesh_split says what module.shard says."""

import numpy as np
import pytest

from irpar.annotations.gspmd import mesh_split
from irpar.sharding import IrparError, Mesh
from tests.annotations.conftest import plain

IDS = np.arange(8).reshape(2, 4)


@pytest.mark.parametrize(
    ("device_mesh", "dims_mapping", "spec"),
    [
        (IDS, [0, -1], ["dp", None]),
        (IDS, [1, 0], ["tp", "dp"]),
        (IDS, [-1, -1], [None, None]),
        (IDS, np.array([-1, 1]), [None, "tp"]),
        (IDS.tolist(), (-1, 1), [None, "tp"]),
        (Mesh({"dp": 2, "tp": 4}), [0, 1], ["dp", "tp"]),
        (np.arange(8), [0, -1], [["dp", "tp"], None]),
        (np.arange(8).reshape(2, 2, 2), [2, 0], ["tp:(2)2", "dp"]),
        (np.arange(8).reshape(2, 2, 2), [1, 0], ["tp:(1)2", "dp"]),
        (IDS.T, [0, -1], ["tp", None]),
    ],
)
def test_the_same_ir(meshed, device_mesh, dims_mapping, spec):
    assert mesh_split(meshed, "h.*.w", device_mesh, dims_mapping) == 2
    assert str(meshed) == str(plain({"h.*.w": spec}))


def test_the_first_device_mesh_is_the_mesh_of_the_module(module):
    mesh_split(module, "x", [[3, 1], [0, 2]], [0, -1])
    mesh_split(module, "h.0.w", [[3, 1], [0, 2]], [-1, 1])
    # Another view of the same devices.
    mesh_split(module, "h.1.w", [3, 1, 0, 2], [0, -1])
    mesh = Mesh({"d0": 2, "d1": 2}, devices=(3, 1, 0, 2))
    expected = plain({"x": ["d0", None], "h.0.w": [None, "d1"], "h.1.w": [["d0", "d1"], None]}, mesh)
    assert str(module) == str(expected)
    assert "devices [3, 1, 0, 2]" in str(module)


def test_axis_names(module):
    mesh_split(module, "x", IDS, [0, -1], axis_names=["dp", "tp"])
    assert str(module) == str(plain({"x": ["dp", None]}))


def test_axes_of_one_device_keep_their_name(module):
    mesh = Mesh({"dp": 1, "tp": 2})
    module.set_mesh(mesh)
    mesh_split(module, "x", [[0, 1]], [0, 1])
    assert str(module) == str(plain({"x": ["dp", "tp"]}, mesh))


@pytest.mark.parametrize(
    ("dims_mapping", "message"),
    [
        ([2, -1], "dims_mapping has 2, the device mesh has 2"),
        ([-2, -1], "dims_mapping has -2"),
        ([0, 0], "uses dim 0 of the device mesh twice"),
        ([0.0, -1], "dims_mapping has 0.0"),
        ([True, -1], "dims_mapping has True"),
        (["dp", None], "dims_mapping has 'dp'"),
        (3, "dims_mapping is 3"),
        ("01", "dims_mapping is '01'"),
        ([0], "the annotation has 1 dims, but x is f32"),
        ([0, -1, -1], "the annotation has 3 dims, but x is f32"),
    ],
)
def test_refusals_leave_the_module_alone(module, dims_mapping, message):
    before = str(module)
    with pytest.raises(IrparError, match=message) as raised:
        mesh_split(module, "x", IDS, dims_mapping)
    assert "mesh_split" in str(raised.value)
    assert str(module) == before


def test_a_name_that_matches_nothing(module):
    with pytest.raises(IrparError, match='no tensor matches "xx"'):
        mesh_split(module, "xx", IDS, [0, -1])
    assert not module.meshes


def test_an_order_that_the_mesh_has_not(meshed):
    with pytest.raises(IrparError, match="no view of the mesh"):
        mesh_split(meshed, "x", [[7, 1, 2, 3], [4, 5, 6, 0]], [0, -1])
