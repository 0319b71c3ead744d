"""GShard's replicate, split and shard say what module.shard says."""

import numpy as np
import pytest

from irpar.annotations.gshard import replicate, shard, split
from irpar.sharding import IrparError, Mesh
from tests.annotations.conftest import plain


def test_replicate(meshed):
    # Tensors of different ranks, in one call.
    assert replicate(meshed, "h.*") == 3
    assert str(meshed) == str(plain({"h.*.w": [None, None], "h.0.b": [None]}))


def test_replicate_without_a_mesh_waits_for_one(module):
    replicate(module, "h.*")
    module.set_mesh(Mesh({"dp": 2, "tp": 4}))
    assert str(module) == str(plain({"h.*.w": [None, None], "h.0.b": [None]}))


@pytest.mark.parametrize(
    ("dim", "number", "spec"),
    [
        (0, 2, ["dp", None]),
        (1, 4, [None, "tp"]),
        (-1, 4, [None, "tp"]),
        (0, 8, [["dp", "tp"], None]),
        (0, 1, [None, None]),
    ],
)
def test_split(meshed, dim, number, spec):
    split(meshed, "h.*.w", dim, number)
    assert str(meshed) == str(plain({"h.*.w": spec}))


@pytest.mark.parametrize(
    ("dim", "number", "message"),
    [
        (0, 3, r"no axes of the mesh dp=2,tp=4 \(8 devices\) have 3 places"),
        (0, 16, "have 16 places"),
        (0, 0, "have 0 places"),
        (0, -2, "have -2 places"),
        (2, 2, "split_dimension is 2, the tensor has 2 dim"),
        (-3, 2, "split_dimension is -3"),
        (0.0, 2, "split_dimension is 0.0"),
        (0, True, "num_partitions is True"),
    ],
)
def test_splits_that_cannot_be(meshed, dim, number, message):
    with pytest.raises(IrparError, match=message):
        split(meshed, "x", dim, number)


def test_a_split_that_fits_in_two_ways(module):
    with pytest.raises(IrparError, match="there is no mesh to split over"):
        split(module, "x", 0, 2)
    module.set_mesh(Mesh({"dp": 2, "tp": 2}))
    with pytest.raises(IrparError, match="2 choices of axes") as raised:
        split(module, "x", 0, 2)
    assert raised.value.notes == ("axes: dp", "axes: tp")


@pytest.mark.parametrize(
    ("assignment", "spec"),
    [
        (np.arange(8).reshape(2, 4), ["dp", "tp"]),
        (np.arange(8).reshape(8, 1), [["dp", "tp"], None]),
        # A dim more: the devices that hold copies.
        (np.arange(8).reshape(2, 1, 4), ["dp", None]),
        (np.arange(8).reshape(2, 4).T.reshape(1, 4, 2), [None, "tp"]),
        (np.arange(8).reshape(1, 1, 8), [None, None]),
        # Copies may be listed in any order.
        ([[[2, 1, 0, 3]], [[4, 7, 6, 5]]], ["dp", None]),
    ],
)
def test_shard(meshed, assignment, spec):
    assert shard(meshed, "h.*.w", assignment) == 2
    assert str(meshed) == str(plain({"h.*.w": spec}))


def test_shard_gives_the_module_its_mesh(module):
    shard(module, "h.0.w", [[2, 0], [1, 3]], axis_names=["a", "b"])
    assert str(module) == str(plain({"h.0.w": ["a", "b"]}, Mesh({"a": 2, "b": 2}, devices=(2, 0, 1, 3))))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (np.arange(8), "device_assignment has 1 dims, the tensor 2"),
        (np.arange(8).reshape(2, 2, 2, 1), "device_assignment has 4 dims"),
        ([[0, 1]], "does not have the devices of the mesh"),
        ([[0, 1, 2, 4], [3, 5, 6, 7]], "no view of the mesh"),
        ([[0, 1, 2, 3], [4, 5, 6, 6]], "a device twice"),
    ],
)
def test_assignments_that_cannot_be(meshed, assignment, message):
    with pytest.raises(IrparError, match=message):
        shard(meshed, "x", assignment)
