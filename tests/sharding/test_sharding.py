"""Shardings: specs, text, what cannot be."""

import pytest

from irpar.sharding import (
    Axis,
    DimSharding,
    DimSpec,
    Mesh,
    Sharding,
    ShardingError,
    are_disjoint,
    check_disjoint,
    with_priority,
)

MESH = Mesh({"dp": 2, "tp": 8})
DP, TP = Axis("dp"), Axis("tp")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ([["dp"], None], "[@dp, _]"),
        (["dp", ["tp", "?"]], "[@dp, @tp?]"),
        ([["dp", "tp"], ["?"]], "[@(dp,tp), ?]"),
        ([["tp:(2)4"]], "[@tp:(2)4]"),
        ([["tp", "?", "priority=1"], ["?", "priority = 2"]], "[@tp?!1, ?!2]"),
        ([["dp", "tp", "priority=0"], ["priority=3"]], "[@(dp,tp), !3]"),
        ([None, None], "[_, _] replicated"),
        ([], "[] replicated"),
    ],
)
def test_specs(spec: list[DimSpec], text: str) -> None:
    sharding = Sharding.of_spec(MESH, spec)
    assert str(sharding) == text
    assert Sharding.of_spec(MESH, sharding.spec()) == sharding


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dp", "is not a sharding"),
        (None, "is not a sharding"),
        ([1], "does not say how a dim is sharded"),
        ([["?", "dp"]], '"\\?" must come last'),
        ([["dp", "priority=-1"]], '"-1" is no priority'),
        ([["dp", "priority=high"]], '"high" is no priority'),
        ([["dp", "priority=1.5"]], '"1.5" is no priority'),
        ([["dp", "priority=1000000000"]], '"1000000000" is no priority'),
        ([["dp", "priority=1", "priority=1"]], "has 2 priorities"),
        ([["priority=1", "dp"]], '"priority=1" must come last'),
        ([["dp", "priority=1", "?"]], '"priority=1" must come last'),
        ([["mp"]], 'no axis "mp"'),
        ([["dp"], ["dp"]], "mesh axis dp is used twice"),
        ([["tp", "tp:(1)2"]], r"mesh axis tp:\(1\)2 is used twice"),
        ([["tp:(1)4"], ["tp:(2)4"]], r"mesh axis tp:\(2\)4 is used twice"),
        ([["tp:(3)2"]], "does not fit axis tp of size 8"),
    ],
)
def test_specs_that_cannot_be(spec: object, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        Sharding.of_spec(MESH, spec)  # type: ignore[arg-type]


def test_sub_axes_that_lie_side_by_side_may_be_used_together() -> None:
    Sharding.of_axes(MESH, [[Axis("tp", 1, 2)], [Axis("tp", 2, 2)]], [Axis("tp", 4, 2)])


def test_partial() -> None:
    sharding = Sharding.of_axes(MESH, [[]], [TP, DP], "max")
    assert sharding.partial == (DP, TP)
    assert sharding == Sharding.of_axes(MESH, [[]], [DP, TP], "max")
    assert sharding.suffix() == " partial(max: dp, tp)"
    assert not sharding.is_replicated
    assert sharding.with_partial(()) == Sharding.replicated(MESH, 1)
    assert Sharding.of_axes(MESH, [[]], [], "max").reduce == "sum"
    with pytest.raises(ShardingError, match='unknown reduction "mean"'):
        Sharding.of_axes(MESH, [[]], [TP], "mean")  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="is used twice"):
        Sharding.of_axes(MESH, [[TP]], [TP])


def test_open_and_closed() -> None:
    free = Sharding.open(MESH, 2)
    assert free.is_open
    assert free.is_replicated
    assert free.closed() == Sharding.replicated(MESH, 2)
    assert free.with_dim(1, [TP]).dims == (DimSharding((), True), DimSharding((TP,), True))
    closed = Sharding.of_axes(MESH, [[DP], []])
    assert closed.closed() is closed
    assert Sharding.open(MESH, 0) == Sharding.replicated(MESH, 0)


def test_one_spelling_of_the_same_blocks() -> None:
    mesh = Mesh({"one": 1, "x": 4, "y": 2})
    x, y, one, outer, inner = Axis("x"), Axis("y"), Axis("one"), Axis("x", 1, 2), Axis("x", 2, 2)
    plain = Sharding.of_axes(mesh, [[x], [y]])
    assert plain.canonical is plain
    assert Sharding.of_axes(mesh, [[outer, inner], [one, y]]).canonical == plain
    assert Sharding.of_axes(mesh, [[Axis("x", 1, 4)], [y]], [one], "max").canonical == plain
    assert Sharding.of_spec(mesh, [["x", "?"], ["y", "priority=2"]]).canonical == plain
    assert Sharding.of_axes(mesh, [[inner, outer], [y]]).canonical != plain
    partial = Sharding.of_axes(mesh, [[one], []], [outer, inner], "min").canonical
    assert partial == Sharding.of_axes(mesh, [[], []], [x], "min")


def test_priorities() -> None:
    waiting = Sharding.of_spec(MESH, [["dp", "priority=1"], None])
    assert waiting.priorities == (1, 0)
    assert waiting != Sharding.of_axes(MESH, [[DP], []])
    assert waiting.closed() == Sharding.of_axes(MESH, [[DP], []])
    assert (waiting.is_settled, waiting.closed().is_settled) == (False, True)
    assert waiting.with_dim(0, [TP]).dims[0] == DimSharding((TP,), priority=1)
    assert Sharding.of_spec(MESH, [["priority=1"]]).suffix() == ""


def test_a_priority_for_a_whole_tensor() -> None:
    assert with_priority(["dp", None, ["?"], ["tp", "priority=0"]], 2) == [
        ["dp", "priority=2"],
        None,
        ["?", "priority=2"],
        ["tp", "priority=0"],
    ]
    assert with_priority(["dp", None], 0) == ["dp", None]
    for priority in (-1, True, "1", 10**9):
        with pytest.raises(ShardingError, match="is no priority"):
            with_priority(["dp"], priority)  # type: ignore[arg-type]


def test_parts_and_equality() -> None:
    sharding = Sharding.of_axes(MESH, [[DP, Axis("tp", 1, 2)], []])
    assert [sharding.dim_parts(dim) for dim in range(2)] == [4, 1]
    assert sharding.axes == ((DP, Axis("tp", 1, 2)), ())
    assert hash(sharding) == hash(Sharding.of_axes(Mesh({"dp": 2, "tp": 8}), [[DP, Axis("tp", 1, 2)], []]))
    assert sharding != Sharding.of_axes(Mesh({"dp": 2, "tp": 8}, name="n"), [[DP, Axis("tp", 1, 2)], []])


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (["x:(1)2", "x:(2)3"], True),
        (["x:(2)3", "x:(1)2"], True),
        # No device is counted twice, but the cuts cross: blocks of 3 devices and blocks of 2.
        (["x:(1)2", "x:(3)2"], False),
        (["x", "x:(1)2"], False),
        (["one", "one"], False),
        (["x", "one"], True),
    ],
)
def test_axes_that_one_sharding_may_use_together(axes: list[str], expected: bool) -> None:
    mesh = Mesh({"x": 6, "one": 1})
    parsed = [Axis.parse(axis) for axis in axes]
    assert are_disjoint(mesh, parsed) is expected
    if not expected:
        with pytest.raises(ShardingError, match="is used twice"):
            check_disjoint(mesh, parsed)


def test_one_dim_is_cut_further_into_equal_blocks() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    lies = Sharding.of_axes(mesh, [[Axis("dp")], [], []], [Axis("tp")])
    assert list(map(str, lies.cut_further(lies.partial, (16, 4, 6)))) == ["[@(dp,tp), _, _]", "[@dp, @tp, _]"]
    assert not list(lies.cut_further([Axis("dp")], (16, 4, 6)))
    assert not list(lies.cut_further([Axis("dp", 1, 2)], (16, 4, 6)))


@pytest.mark.parametrize(
    ("said", "lies", "expected"),
    [
        ([["dp"], None], [["dp"], None], True),
        ([["dp"], None], [["dp"], ["tp"]], False),
        ([["dp"], ["?"]], [["dp"], ["tp"]], True),
        ([["dp", "?"], None], [["dp", "tp"], None], True),
        ([["dp", "?"], None], [["tp", "dp"], None], False),
        ([["dp", "?"], None], [None, None], False),
        ([["tp:(1)2", "?"], None], [["tp"], None], True),
        ([["tp:(2)4", "?"], None], [["tp"], None], False),
        ([["tp:(1)2", "tp:(2)4"], None], [["tp"], None], True),
        ([["one"], None], [None, ["one"]], True),
        ([["dp"], None, None], [["dp"], None], False),
    ],
)
def test_what_was_said_allows_the_same_blocks_and_of_open_dims_parts_of_them(
    said: list[list[str] | None], lies: list[list[str] | None], expected: bool
) -> None:
    mesh = Mesh({"dp": 2, "tp": 8, "one": 1})
    sharding = Sharding.of_spec(mesh, lies)
    assert Sharding.of_spec(mesh, said).allows(sharding) is expected
    if not any(axis.name == "tp" for axis in sharding.all_axes):
        assert not Sharding.of_spec(mesh, said).allows(sharding.with_partial([Axis("tp")]))
