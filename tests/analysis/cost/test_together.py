"""What collectives take that are sent as one is what the program that does so is predicted to take."""

import pytest

from irpar.analysis.cost.device import graph_seconds
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.together import Packed, Together, packed
from irpar.ops.collectives import KINDS
from irpar.sharding import Axis, Mesh
from tests.passes.golden import read, run_pipeline
from tests.passes.test_fuse_communication import KINDS_OF_FUSION, several, shapes_of

ENDS = {"AllGather": (False, True), "ReduceScatter": (True, False), "AllToAll": (True, True)}
"""Whether the operand is cut, and blocks are joined to the result."""
H100 = network_of("h100-nvlink-ib")
MESH = Mesh({"tp": 3})


def together(kind: str, most_bytes: int = 1 << 30) -> Together:
    return Together(H100, MESH, kind, (Axis("tp"),), most_bytes)


@pytest.mark.parametrize(("op", "attributes"), KINDS_OF_FUSION)
def test_the_copies_are_those_that_the_pass_writes(op: str, attributes: str) -> None:
    module = read(several(op, attributes, shapes_of(op)))
    device = H100.device
    assert device is not None
    before = graph_seconds(module.graph, device)
    run_pipeline("fuse-communication", module)
    copying = graph_seconds(module.graph, device) - before
    held = Packed()
    for dim, (operand, result) in enumerate(shapes_of(op)):
        sizes = [4 * operand[0] * operand[1] * operand[2], 4 * result[0] * result[1] * result[2]]
        cut, joined = ENDS.get(op, (False, False))
        held = held.with_(packed(dim if cut else None, dim if joined else None, *sizes))
    sending = H100.seconds(KINDS[op], [Axis("tp")], held.operand, MESH)
    assert together(KINDS[op]).seconds(held) - sending == pytest.approx(copying, rel=1e-4)


def test_one_is_not_copied() -> None:
    each = packed(None, 1, 1000, 3000)
    assert together("all_gather").seconds(each) == H100.seconds("all_gather", [Axis("tp")], 1000, MESH)


def test_buckets_hold_what_they_may() -> None:
    each = [packed(None, None, 1000, 1000)] * 5
    assert together("all_reduce").buckets(each) == [range(5)]
    assert together("all_reduce", 2500).buckets(each) == [range(2), range(2, 4), range(4, 5)]
    assert together("all_reduce").buckets([]) == []


def test_large_ones_are_sent_alone() -> None:
    each = [packed(None, None, 1 << 26, 1 << 26)] * 2
    assert together("all_reduce").buckets(each) == [range(1), range(1, 2)]


def test_one_more_costs_no_launch() -> None:
    each = packed(None, 0, 30_000, 90_000)
    many, more = Packed(), together("all_gather")
    for _ in range(50):
        many = many.with_(each)
    fifty = more.seconds(many)
    assert more.seconds(many.with_(each)) - fifty == pytest.approx(more.seconds_more(each), rel=1e-3)
    assert more.seconds_more(each) < more.seconds(each) / 2
