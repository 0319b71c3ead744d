"""Blocks: ceil-sized, the last ones short or empty, together the full tensor."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.sharding import (
    Axis,
    IrparError,
    Mesh,
    Sharding,
    ShardingError,
    all_regions,
    block_range,
    block_sizes,
    ceil_shape,
    filled_blocks,
    is_even,
    local_region,
    local_shape,
    minor_gather_is_aligned,
)

MESH = Mesh({"dp": 2, "tp": 4})


@pytest.mark.parametrize(
    ("size", "parts", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 3, 1]), (6, 4, [2, 2, 2, 0]), (1, 3, [1, 0, 0]), (0, 2, [0, 0])],
)
def test_sizes(size: int, parts: int, sizes: list[int]) -> None:
    assert block_sizes(size, parts) == sizes
    assert is_even(size, parts) == (len(set(sizes)) == 1)
    assert filled_blocks(size, parts) == sum(block > 0 for block in sizes)


@given(st.integers(0, 50), st.integers(1, 12))
def test_blocks_tile_a_dim(size: int, parts: int) -> None:
    ranges = [block_range(size, parts, index) for index in range(parts)]
    assert [place for start, stop in ranges for place in range(start, stop)] == list(range(size))
    assert block_sizes(size, parts) == sorted(block_sizes(size, parts), reverse=True)
    assert filled_blocks(size, parts) == parts - block_sizes(size, parts).count(0)


@given(st.integers(0, 9), st.integers(0, 9))
def test_every_element_lies_on_as_many_devices_as_replicate_it(rows: int, columns: int) -> None:
    sharding = Sharding.of_axes(MESH, [[Axis("tp", 2, 2)], [Axis("dp")]])
    count = np.zeros((rows, columns), int)
    for coords in MESH.all_coords():
        region = local_region(sharding, (rows, columns), coords)
        count[tuple(slice(*bounds) for bounds in region)] += 1
        shape = local_shape(sharding, (rows, columns), coords)
        assert shape == tuple(stop - start for start, stop in region)
        assert all(size <= largest for size, largest in zip(shape, ceil_shape(sharding, (rows, columns)), strict=True))
    assert (count == 2).all()


@given(st.integers(0, 40))
def test_where_a_minor_gather_is_aligned_minor_blocks_join_to_major_ones(size: int) -> None:
    axes = [Axis("dp"), Axis("tp")]
    minor = [block_range(size, 8, index) for index in range(8)]
    joined = [(minor[4 * k][0], minor[4 * k + 3][1]) for k in range(2)]
    aligned = minor_gather_is_aligned(size, MESH, axes, 1)
    assert aligned or size % 8
    assert not aligned or joined == [block_range(size, 2, k) for k in range(2)]
    assert minor_gather_is_aligned(size, MESH, axes, 2)


@pytest.mark.parametrize("spec", [[["dp"], ["tp"]], [["tp", "dp"], None], [["tp:(2)2"], ["dp"]], [None, None]])
def test_the_blocks_of_all_devices_are_those_of_each(spec: list[list[str] | None]) -> None:
    sharding = Sharding.of_spec(MESH, spec)
    assert all_regions(sharding, (9, 6)) == [local_region(sharding, (9, 6), coords) for coords in MESH.all_coords()]
    assert all_regions(Sharding.replicated(MESH, 0), ()) == [()] * MESH.size


def test_errors_tell_what_where_and_what_to_do() -> None:
    error = ShardingError("no axis", where="line 7", notes=("a fact", "another"), do="write tp")
    assert str(error) == "no axis\n  line 7\n  a fact\n  another\n  do: write tp"
    assert isinstance(error, IrparError)
    import pickle

    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert type(pickle.loads(pickle.dumps(error))) is ShardingError
