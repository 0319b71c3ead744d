"""Cut counts of operators matched to mesh axes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.cuts import CutsError, match_cuts
from irpar.ir.text import parse_module
from irpar.sharding import Mesh


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


@pytest.mark.parametrize("cuts", [((2, 1), (1, 1)), ((1, 2), (2, 1))])
def test_what_the_order_does_not_decide_is_refused_with_all_spellings(matmul, cuts):
    with pytest.raises(CutsError, match="in 2 ways") as raised:
        match(matmul, {"dp": 2, "tp": 2}, *cuts)
    assert len(raised.value.notes) == 2
    assert "dp" in raised.value.notes[0]
    assert "tp" in raised.value.notes[1]


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
    if len(decided) != 1:
        with pytest.raises(CutsError):
            match(node, mesh, (i, k), (k, j))
        return
    (way,) = decided
    expected = [[way["i"] or None, way["k"] or None], [way["k"] or None, way["j"] or None]]
    assert match(node, mesh, (i, k), (k, j)) == expected
