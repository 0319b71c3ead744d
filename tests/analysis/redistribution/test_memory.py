"""The bound of memory: blocks no larger than those of the ends and a chunk, where uneven blocks allow it."""

import pytest

from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.redistribution import redistribution
from irpar.sharding import Mesh, Sharding

MESH = Mesh({"x": 2, "y": 2})


def spec(*dims: list[str] | None) -> Sharding:
    return Sharding.of_spec(MESH, dims)


def test_blocks_that_do_not_nest_take_the_least_peak() -> None:
    # 10 over 4 is 3, 3, 3, 1, and 10 over 2 is 5, 5: there is nothing but the full tensor in between.
    found = redistribution(spec(["x", "y"]), spec(["x"]), (10,), 32, chunk_bytes=0)
    assert (found.peak_bytes, found.ends_bytes) == (40, 20)


def test_another_dim_may_be_the_way_around() -> None:
    found = redistribution(spec(["x", "y"], None), spec(["x"], None), (10, 8), 32, chunk_bytes=0)
    assert found.peak_bytes <= found.ends_bytes
    free = redistribution(spec(["x", "y"], None), spec(["x"], None), (10, 8), 32)
    assert free.sent_bytes <= found.sent_bytes


@pytest.mark.parametrize("chunk_bytes", [0, 1 << 20])
def test_small_tensors_may_be_gathered_where_launches_count(chunk_bytes: int) -> None:
    """Two launches instead of three pay off for a tensor of 1 kB, but take all of it on every device."""
    mesh = Mesh({"x": 2, "y": 4})
    source, target = (Sharding.of_spec(mesh, dims) for dims in ([["x"], ["y"]], [["y"], ["x"]]))
    network = network_of("h100-nvlink-ib")
    found = redistribution(source, target, (16, 16), 32, network, chunk_bytes=chunk_bytes)
    assert found.peak_bytes <= found.ends_bytes + chunk_bytes
    assert redistribution(source, target, (16, 16), 32, network).key <= found.key
