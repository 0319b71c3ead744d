"""Axes found again from the blocks that devices hold."""

from hypothesis import given
from hypothesis import strategies as st

from irpar.sharding import Axis, Mesh, Sharding, are_disjoint, join_axes
from irpar.sharding.tiles import axes_of_blocks, blocks_over

MESHES = [{"x": 4}, {"x": 6}, {"x": 12}, {"dp": 2, "tp": 4}, {"a": 2, "b": 3, "c": 2}, {"one": 1, "x": 8}, {}]


def names(axes):
    return None if axes is None else [[str(axis) for axis in of_dim] for of_dim in axes]


def test_order_and_parts_of_axes():
    mesh = Mesh({"dp": 2, "tp": 2})
    assert names(axes_of_blocks(mesh, [[0], [1], [2], [3]], [4])) == [["dp", "tp"]]
    assert names(axes_of_blocks(mesh, [[0], [2], [1], [3]], [4])) == [["tp", "dp"]]
    assert names(axes_of_blocks(mesh, [[0, 0], [0, 1], [1, 0], [1, 1]], [2, 2])) == [["dp"], ["tp"]]
    assert names(axes_of_blocks(mesh, [[], [], [], []], [])) == []
    one = Mesh({"x": 4})
    assert names(axes_of_blocks(one, [[0, 0], [0, 1], [1, 0], [1, 1]], [2, 2])) == [["x:(1)2"], ["x:(2)2"]]
    assert names(axes_of_blocks(one, [[0], [0], [1], [1]], [2])) == [["x:(1)2"]]
    assert names(axes_of_blocks(one, [[0], [1], [0], [1]], [2])) == [["x:(2)2"]]


def test_what_no_axes_mean():
    mesh = Mesh({"x": 4})
    for blocks, count in (
        ([3, 1, 0, 2], 4),
        ([0, 1, 1, 0], 2),
        ([0, 0, 0, 1], 2),
        ([0, 1, 2, 2], 3),
        ([0, 0, 0, 0], 2),
    ):
        assert axes_of_blocks(mesh, [[block] for block in blocks], [count]) is None
    assert axes_of_blocks(Mesh({"x": 2}), [[0, 0], [1, 1]], [2, 2]) is None


def test_blocks_by_device_id():
    mesh = Mesh({"x": 4}, devices=(3, 1, 0, 2))
    assert blocks_over(mesh, {0: [2], 1: [1], 2: [3], 3: [0]}) == [[0], [1], [2], [3]]
    assert blocks_over(mesh, {0: [0], 1: [1], 2: [2], 4: [3]}) is None
    assert blocks_over(mesh, {0: [0]}) is None


def divisors(number):
    return [size for size in range(2, number + 1) if number % size == 0]


@st.composite
def shardings(draw):
    """A mesh and the axes of up to three dims, sub-axes among them."""
    mesh = Mesh(draw(st.sampled_from(MESHES)))
    pieces = []
    for name, size in mesh.axes.items():
        pre, rest = 1, size
        while rest > 1 and draw(st.booleans()):
            part = draw(st.sampled_from(divisors(rest)))
            pieces.append(Axis(name, pre, part))
            pre, rest = pre * part, rest // part
    pieces = draw(st.permutations(pieces))
    dims = [[] for _ in range(draw(st.integers(1, 3)))]
    for piece in pieces:
        place = draw(st.integers(0, len(dims)))
        if place < len(dims):
            dims[place].append(piece)
    return mesh, dims


@given(shardings())
def test_axes_are_found_again(drawn):
    mesh, dims = drawn
    blocks = [[mesh.position(coords, axes) for axes in dims] for coords in mesh.all_coords()]
    found = axes_of_blocks(mesh, blocks, [mesh.group_size(axes) for axes in dims])
    assert found is not None
    assert are_disjoint(mesh, [axis for axes in found for axis in axes])
    assert blocks == [[mesh.position(coords, axes) for axes in found] for coords in mesh.all_coords()]
    assert [join_axes(mesh, axes) for axes in found] == found
    Sharding.of_axes(mesh, found)


@given(st.sampled_from(MESHES), st.data())
def test_found_axes_are_right(axes, data):
    mesh = Mesh(axes)
    count = data.draw(st.sampled_from([1, 2, 3, 4]))
    blocks = [[data.draw(st.integers(0, count - 1))] for _ in range(mesh.size)]
    found = axes_of_blocks(mesh, blocks, [count])
    if found is not None:
        assert blocks == [[mesh.position(coords, found[0])] for coords in mesh.all_coords()]
