"""Arrays of device ids that are none, or are no view of the mesh."""

import numpy as np
import pytest

from irpar.annotations.devices import SpellingError, axes_over, device_array, mesh_over
from irpar.sharding import Mesh


@pytest.mark.parametrize(
    "given",
    [
        [[0, 1], [2]],
        [],
        [[]],
        3,
        "01",
        [0.5, 1],
        [True, False],
        [None, 1],
        [0, 0],
        [0, -1],
        [[0, 1], [1, 2]],
        {"a": 1},
        [2**70, 1],
        ["0", "1"],
    ],
)
def test_what_is_no_array_of_devices(given):
    with pytest.raises(SpellingError, match="device_mesh") as raised:
        device_array(given, "device_mesh")
    assert raised.value.do


def test_too_many_devices_are_told_of():
    with pytest.raises(SpellingError, match="has 70,000 devices"):
        device_array(np.arange(70_000), "device_mesh")


def test_arrays_lists_and_meshes_are_the_same():
    expected = [[0, 1], [2, 3]]
    for given in (expected, np.array(expected, dtype=np.uint8), ((0, 1), (2, 3)), Mesh({"a": 2, "b": 2})):
        assert device_array(given, "m").tolist() == expected
    assert device_array(Mesh({"a": 2}, devices=(5, 3)), "m").tolist() == [5, 3]
    assert device_array(Mesh({}), "m").tolist() == [0]


def test_an_array_becomes_the_mesh_with_its_device_order(module):
    devices = device_array([[3, 1], [0, 2]], "m")
    assert mesh_over(module, devices, None, "m") == Mesh({"d0": 2, "d1": 2}, devices=(3, 1, 0, 2))
    assert mesh_over(module, devices, ["a", "b"], "m") == Mesh({"a": 2, "b": 2}, devices=(3, 1, 0, 2))
    assert not module.meshes
    for names in (["a"], ["a", "a"], "ab"):
        with pytest.raises(SpellingError, match="does not name"):
            mesh_over(module, devices, names, "m")


@pytest.mark.parametrize("given", [[0, 1], list(range(9)), [0, 1, 2, 3, 4, 5, 6, 8]])
def test_other_devices_than_the_mesh(meshed, given):
    with pytest.raises(SpellingError, match="does not have the devices of the mesh dp=2,tp=4"):
        mesh_over(meshed, device_array(given, "m"), None, "m")


def test_views_of_a_mesh():
    mesh = Mesh({"dp": 2, "tp": 4})

    def axes(given, *dims):
        return [tuple(map(str, found)) for found in axes_over(mesh, device_array(given, "m"), dims, "m")]

    assert axes(list(range(8)), 0) == [("dp", "tp")]
    assert axes(np.arange(8).reshape(4, 2), 0, 1) == [("dp", "tp:(1)2"), ("tp:(2)2",)]
    assert axes(np.arange(8).reshape(2, 4).T, 0, 1) == [("tp",), ("dp",)]
    assert axes(np.arange(8).reshape(2, 4).T.reshape(8), 0) == [("tp", "dp")]
    # Only the dims that cut must be axes.
    assert axes([[3, 2, 1, 0], [7, 6, 5, 4]], 0) == [("dp",)]
    with pytest.raises(SpellingError, match="no view of the mesh dp=2,tp=4"):
        axes([[3, 2, 1, 0], [7, 6, 5, 4]], 1)
