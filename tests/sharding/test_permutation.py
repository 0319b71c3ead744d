"""Which block goes from which device to which."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.sharding import (
    Axis,
    Mesh,
    Sharding,
    ShardingError,
    is_permutation,
    local_region,
    local_shape,
    permutation,
    permuted_shapes,
)

MESH = Mesh({"x": 2, "y": 2, "z": 2})


def spec(mesh: Mesh, *dims: list[str] | None, partial: str = "") -> Sharding:
    return Sharding.of_spec(mesh, dims).with_partial([Axis(name) for name in partial])


def test_axes_change_places() -> None:
    mesh = Mesh({"x": 2, "y": 2})
    axes, pairs = permutation(spec(mesh, ["x"], ["y"]), spec(mesh, ["y"], ["x"]))
    assert axes == (Axis("x"), Axis("y"))
    assert pairs == (0, 0, 1, 2, 2, 1, 3, 3)


def test_only_what_moves_takes_part() -> None:
    axes, _ = permutation(spec(MESH, ["z", "x", "y"]), spec(MESH, ["z", "y", "x"]))
    assert axes == (Axis("x"), Axis("y"))


def test_who_needs_what_it_holds_keeps_it() -> None:
    # x replicates before and z after: 4 of the 8 devices hold the block that they need.
    axes, pairs = permutation(spec(MESH, ["z"], None), spec(MESH, ["x"], None))
    assert axes == (Axis("x"), Axis("z"))
    assert pairs == (0, 0, 1, 2, 2, 1, 3, 3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (spec(MESH, ["x"], None), spec(MESH, None, ["x"])),
        (spec(MESH, ["x"], None), spec(MESH, ["x", "y"], None)),
        (spec(MESH, ["x"], None, partial="y"), spec(MESH, ["x"], None)),
    ],
)
def test_other_blocks_are_refused(before: Sharding, after: Sharding) -> None:
    with pytest.raises(ShardingError, match="do not split a tensor into the same blocks"):
        permutation(before, after)


@st.composite
def rearranged(draw: st.DrawFn) -> tuple[Sharding, Sharding, tuple[int, int]]:
    """Two shardings of as many blocks in each dim, and as many shares."""
    mesh = draw(st.sampled_from([MESH, Mesh({"x": 4, "y": 2}), Mesh({"x": 2, "y": 3, "z": 2})]))
    names = [Axis(name) for name in mesh.axis_names]
    if mesh.axes["x"] == 4:
        names = [Axis("x", 1, 2), Axis("x", 2, 2), Axis("y")]

    def drawn() -> Sharding:
        dims: list[list[Axis]] = [[], [], []]
        for axis in draw(st.permutations(names)):
            place = draw(st.integers(-1, 2))
            if place >= 0:
                dims[place].append(axis)
        return Sharding.of_axes(mesh, dims[:2], dims[2])

    def counts(sharding: Sharding) -> list[int]:
        return [mesh.group_size(axes) for axes in (*sharding.axes, sharding.partial)]

    before = drawn()
    after = next((other for other in (drawn() for _ in range(30)) if counts(other) == counts(before)), before)
    return before, after, (draw(st.integers(1, 9)), draw(st.integers(1, 9)))


@given(rearranged())
def test_every_block_arrives(case: tuple[Sharding, Sharding, tuple[int, int]]) -> None:
    before, after, shape = case
    mesh = before.mesh
    axes, pairs = permutation(before, after)
    assert is_permutation(before, after, axes, pairs)
    sources = dict(zip(pairs[1::2], pairs[::2], strict=True))
    shares: dict[tuple[object, int], list[int]] = {}
    for group in mesh.groups(axes):
        listed = permuted_shapes(before, shape, axes, mesh.coords(group[0]))
        for position, rank in enumerate(group):
            sender = mesh.coords(group[sources[position]])
            region = local_region(after, shape, mesh.coords(rank))
            assert region == local_region(before, shape, sender)
            assert tuple(listed[2 * position : 2 * position + 2]) == local_shape(before, shape, mesh.coords(rank))
            blocks = tuple(mesh.position(mesh.coords(rank), of_dim) for of_dim in after.axes)
            share = mesh.position(mesh.coords(rank), after.partial)
            shares.setdefault((blocks, share), []).append(mesh.position(sender, before.partial))
    by_block: dict[object, set[int]] = {}
    for (blocks, _), sent in shares.items():
        assert len(set(sent)) == 1
        assert sent[0] not in by_block.setdefault(blocks, set())
        by_block[blocks].add(sent[0])


def test_other_pairs_are_told_apart() -> None:
    mesh = Mesh({"x": 2, "y": 2})
    before, after = spec(mesh, ["x"], ["y"]), spec(mesh, ["y"], ["x"])
    axes, right = permutation(before, after)
    for order in itertools.permutations(range(4)):
        pairs = tuple(np.array([order, range(4)]).T.reshape(-1))
        is_right = dict(zip(pairs[1::2], pairs[::2], strict=True)) == dict(zip(right[1::2], right[::2], strict=True))
        assert is_permutation(before, after, axes, pairs) == is_right
    assert not is_permutation(before, after, axes, right[:-2])
    assert not is_permutation(before, after, axes[:1], (0, 0, 1, 1))


def test_shares_do_not_get_lost() -> None:
    mesh = Mesh({"x": 2, "y": 2})
    before, after = spec(mesh, None, partial="x"), spec(mesh, None, partial="y")
    axes = (Axis("x"), Axis("y"))
    assert is_permutation(before, after, axes, (0, 0, 2, 1, 1, 2, 3, 3))
    assert not is_permutation(before, after, axes, (0, 0, 1, 1, 0, 2, 0, 3))
