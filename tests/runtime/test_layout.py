"""Scattering and gathering full tensors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.runtime.errors import ReplicaError, RunError
from irpar.runtime.layout import check_replicas, gather, scatter
from irpar.sharding import Axis, Mesh, Sharding

MESH = Mesh({"dp": 2, "tp": 4})

shardings = st.sampled_from(
    [
        Sharding.of_spec(MESH, [None, None]),
        Sharding.of_spec(MESH, ["dp", "tp"]),
        Sharding.of_spec(MESH, [["tp", "dp"], None]),
        Sharding.of_spec(MESH, ["tp:(2)2", "tp:(1)2"]),
        Sharding.of_spec(MESH, [None, ["dp", "tp:(1)2"]]),
    ]
)


@given(shardings, st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_gather_undoes_scatter(sharding: Sharding, shape: tuple[int, int]) -> None:
    whole = np.random.default_rng(0).standard_normal(shape)
    blocks = {rank: scatter(whole, sharding, MESH.coords(rank)) for rank in range(MESH.size)}
    np.testing.assert_array_equal(gather(blocks, sharding, shape), whole)


@given(st.integers(1, 9), st.sampled_from([["tp"], ["tp", "dp"], ["tp:(2)2"]]))
def test_partial_values_are_reduced(size: int, axes: list[str]) -> None:
    partial = [Axis.parse(axis) for axis in axes]
    dim = "dp" if "dp" not in axes else None
    sharding = Sharding.of_spec(MESH, [dim]).with_partial(partial, "sum")
    terms = np.random.default_rng(1).integers(-9, 9, (MESH.group_size(partial), size)).astype(np.float32)
    blocks = {}
    for rank, coords in enumerate(MESH.all_coords()):
        term = terms[MESH.position(coords, sharding.partial)]
        blocks[rank] = scatter(term, Sharding.of_spec(MESH, [dim]), coords)
    np.testing.assert_array_equal(gather(blocks, sharding, (size,)), terms.sum(axis=0))


def test_scatter_gives_views() -> None:
    whole = np.zeros((8, 4))
    assert np.shares_memory(scatter(whole, Sharding.of_spec(MESH, ["dp", "tp"]), (1, 3)), whole)


def test_an_input_cannot_be_partial() -> None:
    with pytest.raises(RunError, match="partial over tp"):
        scatter(np.zeros(4), Sharding.of_spec(MESH, [None]).with_partial([Axis("tp")]), (0, 0))


def test_blocks_that_are_missing_or_misshapen() -> None:
    sharding = Sharding.of_spec(MESH, ["tp"])
    blocks = {rank: np.zeros(2) for rank in range(3)}
    with pytest.raises(RunError, match=r"no rank holds block \[3\]"):
        gather(blocks, sharding, (8,))
    with pytest.raises(RunError, match=r"a block of \[2\]"):
        gather({rank: np.zeros(2) for rank in range(8)}, sharding, (7,))


def test_blocks_without_elements_need_not_be_there() -> None:
    blocks = {rank: np.arange(rank, rank + 1.0) for rank in range(3)}
    for missing in ({}, {3: np.zeros(0)}):
        whole = gather({**blocks, **missing}, Sharding.of_spec(MESH, ["tp"]), (3,))
        np.testing.assert_array_equal(whole, [0, 1, 2])


def test_replicas_that_differ() -> None:
    sharding = Sharding.of_spec(MESH, ["dp"])
    blocks = {rank: np.full(2, rank // 4, np.float32) for rank in range(8)}
    check_replicas("y", blocks, sharding)
    blocks[6] = blocks[6] + np.float32(1e-7)
    check_replicas("y", blocks, sharding)
    blocks[6] = blocks[6] + np.float32(0.25)
    with pytest.raises(ReplicaError, match=r"y should be equal on ranks 4 and 6, but the largest difference is 0.25"):
        check_replicas("y", blocks, sharding)


def test_integer_replicas_must_be_equal() -> None:
    with pytest.raises(ReplicaError, match="1 of 3 elements differ"):
        check_replicas("n", {0: np.array([1, 2, 3]), 1: np.array([1, 2, 4])}, None)
