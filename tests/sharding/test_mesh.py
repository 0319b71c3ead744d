"""Meshes and axes: numbering, sub-axes, groups, refusals."""

import itertools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.sharding import Axis, Mesh, ShardingError, common_atoms, join_axes, split_axis

MESH = Mesh({"dp": 2, "tp": 8})


def test_coordinates_are_row_major() -> None:
    mesh = Mesh({"a": 2, "b": 3})
    assert [mesh.coords(rank) for rank in range(6)] == list(mesh.all_coords())
    assert [mesh.rank(coords) for coords in mesh.all_coords()] == list(range(6))
    assert mesh.coords(4) == (1, 1)


def test_device_ids() -> None:
    mesh = Mesh({"a": 4}, (3, 1, 2, 0))
    assert [mesh.device(rank) for rank in range(4)] == [3, 1, 2, 0]
    assert Mesh({"a": 2}, (0, 1)) == Mesh({"a": 2})
    assert Mesh({"a": 2}, (1, 0)) != Mesh({"a": 2})
    assert Mesh({"a": 2}, name="n") != Mesh({"a": 2})


@pytest.mark.parametrize("devices", [(0,), (0, 0), (-1, 0), (0, 1, 2), ()])
def test_device_ids_that_do_not_fit(devices: tuple[int, ...]) -> None:
    with pytest.raises(ShardingError, match="has 2 places but its device list is"):
        Mesh({"a": 2}, devices)


def test_a_mistyped_size_does_not_make_a_list_of_that_many_devices() -> None:
    with pytest.raises(ShardingError, match="1,000,000,000,000,000 devices"):
        Mesh({"a": 10**15}, (0, 1))


def test_text() -> None:
    assert str(Mesh.parse(" dp = 2 , tp=4 ")) == "dp=2,tp=4"
    assert Mesh.parse("dp=2,tp=4") == Mesh({"dp": 2, "tp": 4})
    assert pickle.loads(pickle.dumps(MESH)) == MESH


@pytest.mark.parametrize(
    "text", ["", "dp", "dp=", "dp=x", "dp=2,", "dp=2;tp=2", "dp=-1", "dp=2,dp=2", "dp=0", "1a=2", "²=2"]
)
def test_what_is_no_mesh(text: str) -> None:
    with pytest.raises(ShardingError):
        Mesh.parse(text)


@pytest.mark.parametrize(("text", "axis"), [("tp", Axis("tp")), ("tp:(2)4", Axis("tp", 2, 4))])
def test_axes_read_back(text: str, axis: Axis) -> None:
    assert Axis.parse(text) == axis
    assert str(axis) == text


@pytest.mark.parametrize("text", ["", "tp:", "tp:(2)", "tp:2", "tp (2)", "t p", "tp:(a)2"])
def test_what_is_no_axis(text: str) -> None:
    with pytest.raises(ShardingError, match="is not a mesh axis"):
        Axis.parse(text)


def test_sizes_of_axes() -> None:
    assert MESH.axis_size(Axis("tp")) == 8
    assert MESH.axis_size(Axis("tp", 2, 2)) == 2
    assert MESH.group_size([Axis("dp"), Axis("tp", 1, 4)]) == 8
    with pytest.raises(ShardingError, match=r'no axis "mp" in mesh dp=2,tp=8'):
        MESH.axis_size(Axis("mp"))
    for axis in (Axis("tp", 3, 2), Axis("tp", 1, 1), Axis("tp", 0, 2), Axis("tp", 4, 4)):
        with pytest.raises(ShardingError, match="does not fit axis tp of size 8"):
            MESH.axis_size(axis)


def test_positions_along_sub_axes() -> None:
    # tp = 8 as (2, 2, 2): 5 is (1, 0, 1).
    axes = [Axis("tp", 1, 2), Axis("tp", 2, 2), Axis("tp", 4, 2)]
    assert [MESH.position((0, 5), [axis]) for axis in axes] == [1, 0, 1]
    assert MESH.position((0, 5), axes) == 5
    assert MESH.position((0, 5), axes[::-1]) == 5
    assert MESH.position((1, 5), [Axis("dp"), Axis("tp")]) == 13
    assert MESH.position((1, 5), [Axis("tp"), Axis("dp")]) == 11


AXES = [
    Axis("dp"),
    Axis("tp"),
    Axis("tp", 1, 2),
    Axis("tp", 2, 2),
    Axis("tp", 4, 2),
    Axis("tp", 1, 4),
    Axis("tp", 2, 4),
]


@pytest.mark.parametrize("axes", [[], *([axis] for axis in AXES), [AXES[0], AXES[3]], [AXES[4], AXES[2]]])
def test_groups_differ_only_in_their_axes(axes: list[Axis]) -> None:
    groups = MESH.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(16))
    assert {len(group) for group in groups} == {MESH.group_size(axes)}
    rest = [
        axis for axis in (Axis("dp"), AXES[2], AXES[3], AXES[4]) if not any(_overlap(axis, other) for other in axes)
    ]
    for group in groups:
        assert [MESH.position(MESH.coords(rank), axes) for rank in group] == list(range(len(group)))
        assert len({MESH.position(MESH.coords(rank), rest) for rank in group}) == 1


def _overlap(a: Axis, b: Axis) -> bool:
    def places(axis: Axis) -> set[int]:
        size = math.log2(MESH.axis_size(axis))
        start = math.log2(axis.pre)
        return set(range(int(start), int(start + size)))

    return a.name == b.name and bool(places(a) & places(b))


@given(st.sampled_from([2, 4, 6, 12]), st.data())
def test_split_and_join_are_inverse(size: int, data: st.DataObject) -> None:
    mesh = Mesh({"x": size})
    major = data.draw(st.sampled_from([k for k in range(2, size) if size % k == 0 and size // k > 1] or [size]))
    if major == size:
        return
    parts = split_axis(mesh, Axis("x"), major)
    assert mesh.group_size(parts) == size
    assert join_axes(mesh, parts) == (Axis("x"),)
    assert [mesh.position((place,), parts) for place in range(size)] == list(range(size))


def test_atoms() -> None:
    whole, outer, inner = Axis("tp"), Axis("tp", 1, 2), Axis("tp", 2, 4)
    assert common_atoms(MESH, [whole, outer]) == {whole: (outer, inner), outer: (outer,)}
    assert common_atoms(MESH, [whole]) == {whole: (whole,)}


@pytest.mark.parametrize(
    "axes", [{"tp": 999_999_999}, {"tp": 65_537}, {f"a{number}": 2 for number in range(40)}, {"tp": 10**5000}]
)
def test_a_mesh_of_too_many_devices(axes):
    with pytest.raises(ShardingError, match=r"devices; irpar shards over 65,536 at most"):
        Mesh(axes)


@pytest.mark.parametrize("digit", ["２", "٢", "²"])
def test_digits_of_other_scripts_are_no_sizes(digit):
    with pytest.raises(ShardingError, match="cannot read"):
        Mesh.parse(f"tp={digit}")
    with pytest.raises(ShardingError, match="is not a mesh axis"):
        Axis.parse(f"tp:({digit})2")


def test_the_largest_mesh():
    assert Mesh({"tp": 65_536}).size == 65_536
