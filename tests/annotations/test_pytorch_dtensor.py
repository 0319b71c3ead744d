"""DTensor's placements say what module.shard says."""

from dataclasses import dataclass

import numpy as np
import pytest

import irpar
from irpar.annotations.pytorch_dtensor import distribute_tensor
from irpar.models import save
from irpar.sharding import IrparError, Mesh
from tests.annotations.conftest import plain

# What PyTorch's objects have, as far as placements go.


@dataclass(frozen=True)
class Shard:
    dim: int


class Replicate:
    pass


@dataclass(frozen=True)
class Partial:
    reduce_op: str = "sum"


@dataclass(frozen=True)
class _StridedShard:
    dim: int
    split_factor: int


class DeviceMesh:
    def __init__(self, mesh, names=None):
        self.mesh, self.mesh_dim_names = np.asarray(mesh), names


UP = {"x": ["dp", None], "h.0.w": [None, "tp"]}


@pytest.mark.parametrize(
    ("x", "w"),
    [
        ([Shard(0), Replicate()], (Replicate(), Shard(1))),
        ([Shard(-2), Replicate()], (Replicate(), Shard(-1))),
        (["Shard(dim=0)", "Replicate()"], ["Replicate()", "Shard(1)"]),
        ("(Shard(dim=0), Replicate())", "(Replicate(), Shard(dim=1))"),
        ("[S(0), R]", "[R, S(1)]"),
    ],
)
def test_placements(meshed, x, w):
    assert distribute_tensor(meshed, "x", placements=x) == 1
    distribute_tensor(meshed, "h.0.w", placements=w)
    assert str(meshed) == str(plain(UP))


def test_two_dims_of_the_mesh_cut_one_of_the_tensor_the_first_outermost(meshed):
    distribute_tensor(meshed, "x", placements=[Shard(0), Shard(0)])
    assert str(meshed) == str(plain({"x": [["dp", "tp"], None]}))


def test_a_device_mesh_is_the_mesh_of_a_module_that_has_none(module):
    device_mesh = DeviceMesh([[3, 1], [2, 0]], ("dp", "tp"))
    distribute_tensor(module, "h.*.w", device_mesh, [Replicate(), Shard(1)])
    assert str(module) == str(plain({"h.*.w": [None, "tp"]}, Mesh({"dp": 2, "tp": 2}, devices=(3, 1, 2, 0))))


def test_a_device_mesh_may_be_another_view_of_the_mesh(meshed):
    distribute_tensor(meshed, "x", DeviceMesh(np.arange(8)), [Shard(0)])
    distribute_tensor(meshed, "h.0.w", np.arange(8).reshape(4, 2), [Replicate(), Shard(1)])
    assert str(meshed) == str(plain({"x": [["dp", "tp"], None], "h.0.w": [None, "tp:(2)2"]}))


def test_no_placements_are_copies_everywhere(meshed):
    distribute_tensor(meshed, "x", Mesh({"dp": 2, "tp": 4}))
    assert str(meshed) == str(plain({"x": [None, None]}))


@pytest.mark.parametrize(
    ("tensor", "placements", "message"),
    [
        ("x", [Shard(0)], r"there are 1 placements, the mesh dp=2,tp=4 has 2 dim"),
        ("x", [Shard(0), Replicate(), Replicate()], "there are 3 placements"),
        ("x", [Shard(2), Replicate()], r"Shard\(2\) is out of range: the tensor has 2 dim"),
        ("x", ["Shard(-3)", "Replicate()"], r"Shard\(-3\) is out of range"),
        ("x", [Replicate(), Partial()], r"Partial\(sum\): no input and no weight holds parts of a sum"),
        ("a", "(Replicate(), Partial(avg))", "irpar decides where a sum is carried out"),
        ("x", "[R, P(sum)]", "parts of a sum"),
        ("x", [_StridedShard(0, split_factor=2), Shard(0)], r'strided blocks.*\n.*\n.*\["tp", "dp"\]'),
        ("x", "(_StridedShard(dim=0, sf=2), Shard(dim=0))", "strided blocks"),
        ("x", ["Shrad(0)", "Replicate()"], r"'Shrad\(0\)' is no placement"),
        ("x", ["Shard(١)", "Replicate()"], "is no placement"),
        ("x", [0, 1], "'0' is no placement"),
        ("x", 3, "3 is no list of placements"),
        ("x", "(Shard(0", "is no list of placements"),
        ("z", [Shard(0), Replicate()], 'no tensor matches "z"'),
    ],
)
def test_placements_that_cannot_be(meshed, tensor, placements, message):
    with pytest.raises(IrparError, match=message):
        distribute_tensor(meshed, tensor, placements=placements)


def test_placements_need_a_mesh(module):
    with pytest.raises(IrparError, match="no mesh to distribute over"):
        distribute_tensor(module, "x", placements=[Shard(0)])


def test_other_devices(meshed):
    with pytest.raises(IrparError, match="does not have the devices of the mesh dp=2,tp=4"):
        distribute_tensor(meshed, "x", DeviceMesh([0, 1]), [Shard(0)])


@pytest.mark.parametrize("ids", [np.broadcast_to(np.int64(0), (10**6, 10**6)), range(10**15)])
def test_too_many_devices_are_not_listed(module, ids):
    with pytest.raises(IrparError, match="devices; irpar shards over 65,536 at most"):
        distribute_tensor(module, "x", ids, [Shard(0)])


def test_what_placements_say_is_computed(tmp_path):
    save(tmp_path / "mlp.onnx", "mlp")
    module = irpar.load(tmp_path / "mlp.onnx")
    distribute_tensor(module, "x", DeviceMesh(np.arange(4).reshape(2, 2), ("dp", "tp")), [Shard(0), Replicate()])
    distribute_tensor(module, "fc1.weight", placements=[Replicate(), Shard(1)])
    partition = irpar.partition(module, module.mesh)
    assert [entry["axes"] for entry in partition.plan.collectives] == [["tp"]]
    partition.verify().check()
