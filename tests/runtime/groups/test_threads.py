"""Collectives among threads against formulas on full arrays."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.runtime.errors import MismatchError
from irpar.runtime.groups import Call, Collective, ThreadGroup, make_group
from irpar.sharding import Axis, IrparError, Mesh

MESH = Mesh({"dp": 2, "tp": 3})


def exchange(mesh: Mesh, operands: list[np.ndarray], **settings: Any) -> list[np.ndarray]:
    """One collective on all ranks of a mesh."""
    axes = tuple(map(Axis.parse, settings.pop("axes")))
    collective = Collective(id=0, axes=axes, **settings)
    calls = {rank: Call(rank, mesh.coords(rank), collective, operand) for rank, operand in enumerate(operands)}
    results = ThreadGroup(mesh).exchange(calls)
    return [results[rank] for rank in range(mesh.size)]


def draw_operands(shapes: list[tuple[int, ...]], dtype: Any = np.float32) -> list[np.ndarray]:
    """Random operands, one a rank, whose sums are exact."""
    random = np.random.default_rng(len(shapes))
    return [random.integers(-8, 9, shape).astype(dtype) for shape in shapes]


meshes = st.sampled_from(
    [
        (Mesh({"a": 2, "b": 3}), ["a"]),
        (Mesh({"a": 2, "b": 3}), ["b"]),
        (Mesh({"a": 2, "b": 3}), ["a", "b"]),
        (Mesh({"a": 2, "b": 3}), ["b", "a"]),
        (Mesh({"a": 8}), ["a:(2)2"]),
        (Mesh({"a": 4, "b": 2}), ["a:(1)2", "b"]),
        (Mesh({"a": 1}), ["a"]),
    ]
)
sizes = st.integers(0, 4)


@given(meshes, st.sampled_from(["sum", "max", "min", "prod"]), st.sampled_from([np.float32, np.int32, np.float16]))
def test_all_reduce(mesh_and_axes: tuple[Mesh, list[str]], reduce: str, dtype: Any) -> None:
    mesh, axes = mesh_and_axes
    # Products of eight numbers up to 2 are exact in every dtype.
    operands = [np.clip(operand, -2, 2) for operand in draw_operands([(2, 3)] * mesh.size, dtype)]
    formula = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}[reduce]
    results = exchange(mesh, operands, kind="AllReduce", axes=axes, reduce=reduce)
    for group in mesh.groups([Axis.parse(axis) for axis in axes]):
        expected = formula([operands[rank].astype(np.float64) for rank in group], axis=0).astype(dtype)
        for rank in group:
            assert results[rank].dtype == dtype
            np.testing.assert_array_equal(results[rank], expected)


@given(meshes, st.lists(sizes, min_size=8, max_size=8))
def test_all_gather_of_uneven_blocks(mesh_and_axes: tuple[Mesh, list[str]], drawn: list[int]) -> None:
    mesh, axes = mesh_and_axes
    parsed = [Axis.parse(axis) for axis in axes]
    blocks = drawn[: mesh.group_size(parsed)]
    operands = draw_operands([(2, blocks[mesh.position(coords, parsed)]) for coords in mesh.all_coords()])
    results = exchange(mesh, operands, kind="AllGather", axes=axes, dim=1, sizes=tuple(blocks))
    for group in mesh.groups(parsed):
        expected = np.concatenate([operands[rank] for rank in group], axis=1)
        for rank in group:
            np.testing.assert_array_equal(results[rank], expected)


@given(meshes, st.lists(sizes, min_size=8, max_size=8))
def test_reduce_scatter_of_uneven_blocks(mesh_and_axes: tuple[Mesh, list[str]], drawn: list[int]) -> None:
    mesh, axes = mesh_and_axes
    parsed = [Axis.parse(axis) for axis in axes]
    blocks = drawn[: mesh.group_size(parsed)]
    operands = draw_operands([(sum(blocks), 2)] * mesh.size)
    results = exchange(mesh, operands, kind="ReduceScatter", axes=axes, dim=0, reduce="sum", sizes=tuple(blocks))
    for group in mesh.groups(parsed):
        total = np.sum([operands[rank] for rank in group], axis=0)
        pieces = np.split(total, np.cumsum(blocks)[:-1], axis=0)
        for rank, expected in zip(group, pieces, strict=True):
            np.testing.assert_array_equal(results[rank], expected)


@given(meshes, st.lists(sizes, min_size=8, max_size=8), st.lists(sizes, min_size=8, max_size=8))
def test_all_to_all_turns_a_cut_of_columns_into_one_of_rows(
    mesh_and_axes: tuple[Mesh, list[str]], rows: list[int], columns: list[int]
) -> None:
    mesh, axes = mesh_and_axes
    parsed = [Axis.parse(axis) for axis in axes]
    count = mesh.group_size(parsed)
    rows, columns = rows[:count], columns[:count]
    wholes = {}
    operands: list[np.ndarray] = [np.empty(0)] * mesh.size
    for number, group in enumerate(mesh.groups(parsed)):
        whole = wholes[number] = np.random.default_rng(number).standard_normal((sum(rows), sum(columns)))
        for rank, block in zip(group, np.split(whole, np.cumsum(columns)[:-1], axis=1), strict=True):
            operands[rank] = block
    results = exchange(
        mesh,
        operands,
        kind="AllToAll",
        axes=axes,
        split_dim=0,
        concat_dim=1,
        split_sizes=tuple(rows),
        concat_sizes=tuple(columns),
    )
    for number, group in enumerate(mesh.groups(parsed)):
        pieces = np.split(wholes[number], np.cumsum(rows)[:-1], axis=0)
        for rank, expected in zip(group, pieces, strict=True):
            np.testing.assert_array_equal(results[rank], expected)


@given(meshes, st.randoms(use_true_random=False))
def test_permute_gives_zeros_where_nothing_arrives(mesh_and_axes: tuple[Mesh, list[str]], random: Any) -> None:
    mesh, axes = mesh_and_axes
    parsed = [Axis.parse(axis) for axis in axes]
    count = mesh.group_size(parsed)
    sources = [random.randrange(count) for _ in range(count)]
    kept = [target for target in range(count) if random.random() < 0.7]
    pairs = tuple(position for target in kept for position in (sources[target], target))
    operands = draw_operands([(3,)] * mesh.size)
    results = exchange(mesh, operands, kind="CollectivePermute", axes=axes, pairs=pairs)
    for group in mesh.groups(parsed):
        for position, rank in enumerate(group):
            expected = operands[group[sources[position]]] if position in kept else np.zeros(3, np.float32)
            np.testing.assert_array_equal(results[rank], expected)


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast(root: int) -> None:
    operands = draw_operands([(4,)] * 6)
    results = exchange(MESH, operands, kind="Broadcast", axes=["tp"], root=root)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, operands[rank // 3 * 3 + root])


def test_equal_blocks_need_no_sizes() -> None:
    operands = draw_operands([(3, 6)] * 6)
    scattered = exchange(MESH, operands, kind="ReduceScatter", axes=["tp"], dim=1, reduce="sum")
    gathered = exchange(MESH, scattered, kind="AllGather", axes=["tp"], dim=1)
    reduced = exchange(MESH, operands, kind="AllReduce", axes=["tp"], reduce="sum")
    for left, right in zip(gathered, reduced, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_summed_in_float32(dtype: Any) -> None:
    mesh = Mesh({"x": 5})
    # In bfloat16 or float16 alone, adding ones to 4096 one by one would change nothing.
    operands = [np.full(3, value, dtype) for value in (4096, 8, 8, 8, 8)]
    (result, *_) = exchange(mesh, operands, kind="AllReduce", axes=["x"], reduce="sum")
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, np.full(3, 4128, np.float32).astype(dtype))


@pytest.mark.parametrize(("reduce", "expected"), [("and", [True, False, False]), ("or", [True, True, False])])
def test_bools(reduce: str, expected: list[bool]) -> None:
    operands = [np.array([True, True, False]), np.array([True, False, False])]
    for result in exchange(Mesh({"x": 2}), operands, kind="AllReduce", axes=["x"], reduce=reduce):
        assert result.tolist() == expected


def test_sum_of_bools_is_refused() -> None:
    with pytest.raises(MismatchError, match="tensors of bool have no reduction 'sum'"):
        exchange(Mesh({"x": 2}), [np.array([True])] * 2, kind="AllReduce", axes=["x"], reduce="sum")


def call(rank: int, number: int, operand: np.ndarray, kind: str = "AllReduce", axes: str = "tp") -> Call:
    collective = Collective(kind, number, (Axis(axes),), label=f"%y{number} = {kind}(%x{number})")
    return Call(rank, MESH.coords(rank), collective, operand)


def test_different_collectives_name_both_ops_and_ranks() -> None:
    operand = np.zeros(2, np.float32)
    waiting = {rank: call(rank, 7 if rank == 1 else 5, operand) for rank in range(3)}
    with pytest.raises(MismatchError) as caught:
        ThreadGroup(MESH).exchange(waiting)
    text = str(caught.value)
    assert "rank 0 (dp=0, tp=0) is at AllReduce id=5 over tp" in text
    assert "rank 1 (dp=0, tp=1) is at AllReduce id=7 over tp" in text
    assert "%y7 = AllReduce(%x7)" in text


def test_a_rank_that_ended_is_named() -> None:
    operand = np.zeros(2, np.float32)
    with pytest.raises(MismatchError, match="rank 2 ended without it"):
        ThreadGroup(MESH).exchange({rank: call(rank, 5, operand) for rank in range(2)})


@pytest.mark.parametrize(
    ("operand", "kind", "message"),
    [
        (np.zeros(3, np.float32), "AllReduce", r"operand of \[3\]"),
        (np.zeros(2, np.float64), "AllReduce", "differ in dtype"),
        (np.zeros((2, 1), np.float32), "AllReduce", "differ in dtype or rank"),
        (np.zeros(2, np.float32), "Broadcast", "different attributes"),
    ],
)
def test_operands_that_do_not_fit(operand: np.ndarray, kind: str, message: str) -> None:
    waiting = {rank: call(rank, 5, np.zeros(2, np.float32)) for rank in range(3)}
    waiting[1] = call(1, 5, operand, kind)
    with pytest.raises(MismatchError, match=message) as caught:
        ThreadGroup(MESH).exchange(waiting)
    assert "rank 1 (dp=0, tp=1)" in str(caught.value)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(MismatchError, match=r"block sizes \[1, 1\] do not fit dim 0 of size 3"):
        exchange(Mesh({"x": 2}), [np.zeros(3)] * 2, kind="ReduceScatter", axes=["x"], dim=0, reduce="sum", sizes=(1, 1))
    with pytest.raises(MismatchError, match="has no 2 equal blocks"):
        exchange(Mesh({"x": 2}), [np.zeros(3)] * 2, kind="ReduceScatter", axes=["x"], dim=0, reduce="sum")
    with pytest.raises(MismatchError, match=r"operand of \[2\], where the other ranks call for \[1\]"):
        exchange(Mesh({"x": 2}), [np.zeros(2)] * 2, kind="AllGather", axes=["x"], dim=0, sizes=(2, 1))


def test_groups_that_are_complete_go_on_without_the_others() -> None:
    operand = np.ones(1, np.float32)
    waiting = {0: call(0, 1, operand, axes="dp"), 3: call(3, 1, operand, axes="dp"), 1: call(1, 2, operand)}
    results = ThreadGroup(MESH).exchange(waiting)
    assert sorted(results) == [0, 3]
    assert results[0].tolist() == [2.0]


def test_unknown_group() -> None:
    with pytest.raises(IrparError, match='no process group "pigeons"'):
        make_group("pigeons", MESH)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), 1e9])
def test_a_timeout_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(IrparError, match=r"the time-out is .* s\n  do: give seconds from above 0"):
        make_group("threads", MESH, seconds)


def test_the_environment_may_give_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRPAR_TIMEOUT", "soon")
    with pytest.raises(IrparError, match='IRPAR_TIMEOUT is "soon", not a number'):
        make_group("threads", MESH)
    make_group("threads", MESH, 5)
