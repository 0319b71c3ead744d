"""Cut counts of operators matched to mesh axes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.annotations.cuts import CutsError, match_cuts
from irpar.ir.text.files import parse_module
from irpar.sharding import Mesh, Sharding


def node_of(line, inputs, version=18):
    text = f"graph @g({', '.join(f'%{name}: {type_}' for name, type_ in inputs.items())}) -> (%y) opset {version} {{\n"
    module = parse_module(f"{text}  {line}\n}}\n")
    return module.graph.first


def match(node, mesh, *cuts):
    given = [(value, place, counts) for place, (value, counts) in enumerate(zip(node.operands, cuts, strict=False))]
    return [spec for _, spec in match_cuts(node, given, Mesh(mesh))]


@pytest.fixture
def matmul():
    return node_of("%y = MatMul(%x, %w) : f32[16, 16]", {"x": "f32[16, 16]", "w": "f32[16, 16]"})


@pytest.mark.parametrize(
    ("mesh", "cuts", "expected"),
    [
        ({"dp": 2, "tp": 4}, ((2, 1), (1, 4)), [[["dp"], None], [None, ["tp"]]]),
        ({"dp": 2, "tp": 4}, ((4, 1), (1, 2)), [[["tp"], None], [None, ["dp"]]]),
        ({"dp": 2, "tp": 4}, ((1, 4), (4, 1)), [[None, ["tp"]], [["tp"], None]]),
        ({"dp": 2, "tp": 4}, ((8, 1), (1, 1)), [[["dp", "tp"], None], [None, None]]),
        # Equal sizes: the order of the mesh decides, over the whole operator.
        ({"dp": 2, "tp": 2}, ((2, 1), (1, 2)), [[["dp"], None], [None, ["tp"]]]),
        ({"dp": 2, "tp": 2}, ((2, 2), (2, 1)), [[["dp"], ["tp"]], [["tp"], None]]),
        ({"a": 2, "b": 2, "c": 2}, ((2, 2), (2, 2)), [[["a"], ["b"]], [["b"], ["c"]]]),
        ({"a": 2, "one": 1}, ((2, 1), (1, 1)), [[["a"], None], [None, None]]),
        ({"dp": 2, "tp": 4}, ((1, 1), (1, 1)), [[None, None], [None, None]]),
    ],
)
def test_counts_become_axes(matmul, mesh, cuts, expected):
    assert match(matmul, mesh, *cuts) == expected


@pytest.mark.parametrize(
    ("mesh", "cuts", "expected"),
    [
        ({"d": 8}, ((2, 1), (1, 4)), [[["d:(1)2"], None], [None, ["d:(2)4"]]]),
        ({"d": 8}, ((2, 4), (4, 1)), [[["d:(1)2"], ["d:(2)4"]], [["d:(2)4"], None]]),
        ({"d": 8}, ((2, 1), (1, 2)), [[["d:(1)2"], None], [None, ["d:(2)2"]]]),  # the last dim repeats
        ({"d": 8}, ((2, 2), (2, 2)), [[["d:(1)2"], ["d:(2)2"]], [["d:(2)2"], ["d:(4)2"]]]),
        ({"d": 8}, ((1, 1), (1, 4)), [[None, None], [None, ["d:(1)4"]]]),
        ({"a": 2, "b": 2, "c": 2}, ((2, 1), (1, 4)), [[["a"], None], [None, ["b", "c"]]]),
        ({"a": 2, "b": 2, "c": 2}, ((2, 1), (1, 2)), [[["a"], None], [None, ["b"]]]),
        ({"a": 4, "b": 2}, ((2, 2), (2, 2)), [[["a:(1)2"], ["a:(2)2"]], [["a:(2)2"], ["b"]]]),
        ({"dp": 2, "tp": 2}, ((2, 1), (1, 1)), [[["dp"], None], [None, None]]),
        ({"dp": 2, "tp": 2}, ((1, 2), (2, 1)), [[None, ["dp"]], [["dp"], None]]),
        ({"a": 4, "b": 2, "c": 2}, ((2, 1), (1, 1)), [[["a:(1)2"], None], [None, None]]),
        ({"d": 6}, ((3, 1), (1, 2)), [[["d:(1)3"], None], [None, ["d:(3)2"]]]),
    ],
)
def test_counts_without_axes_of_their_sizes_mean_mindspores_devices(matmul, mesh, cuts, expected):
    assert match(matmul, mesh, *cuts) == expected


def test_what_the_strategy_leaves_open_is_refused_with_all_spellings(matmul):
    """Whether the rows of x are sharded decides which devices the columns of w mean."""
    with pytest.raises(CutsError, match="in 2 ways") as raised:
        match_cuts(matmul, [(matmul.operands[1], 1, (1, 4))], Mesh({"d": 8}))
    assert raised.value.notes == ('"w": [null, ["d:(1)4"]]', '"w": [null, ["d:(2)4"]]')
    with pytest.raises(CutsError, match="in 2 ways") as raised:
        match_cuts(matmul, [(matmul.operands[1], 1, (1, 2))], Mesh({"dp": 2, "tp": 2}))
    assert raised.value.notes == ('"w": [null, ["dp"]]', '"w": [null, ["tp"]]')


def test_what_is_left_out_may_decide_nothing(matmul):
    """The rows are the first dim of the matrix, whatever the columns are sharded into."""
    x = matmul.operands[0]
    assert match_cuts(matmul, [(x, 0, (2, 1))], Mesh({"d": 8})) == [(x, [["d:(1)2"], None])]
    w = matmul.operands[1]
    assert match_cuts(matmul, [(w, 1, (1, 8))], Mesh({"a": 4, "b": 2})) == [(w, [None, ["a", "b"]])]


def test_devices_that_no_axes_are(matmul):
    with pytest.raises(CutsError, match="no axes of the mesh a=3,b=4"):
        match(matmul, {"a": 3, "b": 4}, (2, 1), (1, 1))


@pytest.mark.parametrize(
    ("line", "inputs", "cuts", "expected"),
    [
        # The dims of an elementwise operator are those of its result, whichever operand has them.
        (
            "%y = Add(%b, %x) : f32[8, 16]",
            {"b": "f32[16]", "x": "f32[8, 16]"},
            ((2,), (4, 2)),
            [[["d:(4)2"]], [["d:(1)4"], ["d:(4)2"]]],
        ),
        # Products: batch, rows, contracted, columns, also where the second has more dims or one is transposed.
        (
            "%y = MatMul(%x, %w) : f32[4, 16, 16]",
            {"x": "f32[16, 16]", "w": "f32[4, 16, 16]"},
            ((2, 1), (2, 1, 2)),
            [[["d:(2)2"], None], [["d:(1)2"], None, ["d:(4)2"]]],
        ),
        (
            "%y = Gemm(%x, %w) {transA=1, transB=1} : f32[16, 16]",
            {"x": "f32[16, 16]", "w": "f32[16, 16]"},
            ((2, 4), (1, 2)),
            [[["d:(4)2"], ["d:(1)4"]], [None, ["d:(4)2"]]],
        ),
        # Conv: batch, input channels, places, output channels.
        (
            "%y = Conv(%x, %w) : f32[8, 16, 4, 4]",
            {"x": "f32[8, 16, 4, 4]", "w": "f32[16, 16, 1, 1]"},
            ((2, 2, 1, 1), (2, 2, 1, 1)),
            [[["d:(1)2"], ["d:(2)2"], None, None], [["d:(4)2"], ["d:(2)2"], None, None]],
        ),
        # Gather: the indices come before the table; from cut rows, repetition comes first.
        (
            "%y = Gather(%x, %w) : f32[8, 16]",
            {"x": "f32[16, 16]", "w": "i64[8]"},
            ((1, 4), (2,)),
            [[None, ["d:(2)4"]], [["d:(1)2"]]],
        ),
        (
            "%y = Gather(%x, %w) : f32[8, 16]",
            {"x": "f32[16, 16]", "w": "i64[8]"},
            ((4, 1), (1,)),
            [[["d:(2)4"], None], [None]],
        ),
        (
            "%y = Gather(%x, %w) : f32[8, 16]",
            {"x": "f32[16, 16]", "w": "i64[8]"},
            ((4, 2), (1,)),
            [[["d:(1)4"], ["d:(4)2"]], [None]],
        ),
    ],
)
def test_the_order_of_the_device_matrix(line, inputs, cuts, expected):
    assert match(node_of(line, inputs), {"d": 8}, *cuts) == expected


def test_an_operator_without_a_rule_is_matched_tensor_by_tensor():
    node = node_of("%y = custom.Thing(%x, %w) : ?", {"x": "f32[16, 16]", "w": "f32[16, 16]"})
    assert match(node, {"dp": 2, "tp": 4}, (2, 1), (1, 2)) == [[["dp"], None], [None, ["dp"]]]


def test_broadcast_dims_stand_for_themselves():
    node = node_of("%y = Add(%x, %b) : f32[8, 16]", {"x": "f32[8, 16]", "b": "f32[16]"})
    assert match(node, {"dp": 2, "tp": 4}, (2, 4), (4,)) == [[["dp"], ["tp"]], [["tp"]]]


@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8])] * 3),
)
def test_every_answer_has_the_counts_that_were_asked_for(sizes, wanted):
    node = node_of("%y = MatMul(%x, %w) : f32[48, 48]", {"x": "f32[48, 48]", "w": "f32[48, 48]"})
    mesh = dict(zip("abc", sizes, strict=False))
    i, k, j = wanted
    axes = [axis for axis, size in mesh.items() if size > 1]
    # All ways to hand out axes, by brute force.
    ways = []
    for owners in itertools.product("ikj-", repeat=len(axes)):
        got = {factor: [axis for axis, owner in zip(axes, owners, strict=True) if owner == factor] for factor in "ikj"}
        if [math.prod(mesh[axis] for axis in got[factor]) for factor in "ikj"] == [i, k, j]:
            ways.append(got)
    ordered = [way for way in ways if (flat := [*way["i"], *way["k"], *way["j"]]) == sorted(flat)]
    decided = ways if len(ways) == 1 else ordered
    if len(decided) == 1:
        (way,) = decided
        expected = [[way["i"] or None, way["k"] or None], [way["k"] or None, way["j"] or None]]
        assert match(node, mesh, (i, k), (k, j)) == expected
        return
    # MindSpore's numbers of blocks, rank by rank: those of a matrix of rows, contracted dim, columns, repetition.
    whole = Mesh(mesh)
    repeated, remainder = divmod(whole.size, i * k * j)
    try:
        found = match(node, mesh, (i, k), (k, j))
    except CutsError:
        assert remainder or 3 in sizes  # 3 x 2 devices as 2 x 3 run along no axes.
        return
    assert not remainder
    (rows, contracted), (same, columns) = (Sharding.of_spec(whole, spec).axes for spec in found)
    assert contracted == same
    for rank, (row, inner, column, _) in enumerate(itertools.product(*map(range, (i, k, j, repeated)))):
        held = [whole.position(whole.coords(rank), axes) for axes in (rows, contracted, columns)]
        assert held == [row, inner, column]
