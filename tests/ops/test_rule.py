"""Factors of shapes that broadcast or are regrouped."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.ops import Kind, RuleBuilder, broadcast_rule, factor_rule, reshape_factors
from tests.budget import budget

from .rule_proof import Constant, Sample, cut, run_cut, same


def reshape_text(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    rule, left, right = reshape_factors(before, after)
    return str(rule.done([left], [right]))


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ((6, 4), (2, 3, 4), "([(ij),k])->([i,j,k])"),
        ((2, 3, 4), (6, 4), "([i,j,k])->([(ij),k])"),
        ((5, 12), (5, 4, 3), "([i,(jk)])->([i,j,k])"),
        ((4, 6), (24,), "([i,j])->([(ij)])"),
        ((1, 5, 1), (5,), "([1,i,1])->([i])"),
        ((6, 4), (4, 6), "([i,1])->([i,1])"),
        ((5, 4), (4, 5), "([1,1])->([1,1])"),
    ],
)
def test_a_reshape_has_compound_factors(before: tuple[int, ...], after: tuple[int, ...], text: str) -> None:
    assert reshape_text(before, after) == text


def test_a_rule_says_where_a_device_may_be_left_without_elements() -> None:
    rule = RuleBuilder()
    rows, inner, places, halo = (rule.factor(5, kind) for kind in (Kind.PASS, Kind.REDUCE, Kind.PASS, Kind.REPLICATE))
    operands = [[(rows,), (inner,), (places,), (halo,)]]
    # Rows stand in both results, places in one: a device without places would still have to give the other.
    results = [[(rows,), (places,)], [(rows,)]]
    assert rule.done(operands, results).accepts_empty == (True, True, False, False)
    assert rule.done(operands, results, runs_empty=[places]).accepts_empty == (True, True, True, False)


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of equal size, made of the same small numbers in other groups."""
    numbers = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        cuts = draw(st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers)))
        shape = [1]
        for number, starts in zip(draw(st.permutations(numbers)), cuts, strict=True):
            if starts:
                shape.append(number)
            else:
                shape[-1] *= number
        return tuple(shape)

    return grouped(), grouped()


@settings(max_examples=budget(60), deadline=None)
@given(regroupings(), st.sampled_from([2, 3, 4]))
def test_every_reshape_rule_is_right(shapes: tuple[tuple[int, ...], tuple[int, ...]], parts: int) -> None:
    before, after = shapes
    data = np.arange(math.prod(before), dtype=np.float32).reshape(before)
    sample = Sample("Reshape", (data, Constant(np.asarray(after, np.int64))))
    rule = factor_rule(sample.node)
    assert rule is not None
    for factor in range(len(rule.sizes)):
        how = cut(rule, sample.node, factor, parts)
        if how is not None:
            assert same(sample, run_cut(sample, how)), f"{rule}: factor {factor} over {parts}"


def test_dims_that_broadcast_have_no_factor() -> None:
    assert str(broadcast_rule([(6, 1, 4), (5, 1), None], (6, 5, 4))) == "([i,1,k],[j,1],[])->([i,j,k])"
    assert str(broadcast_rule([(1, 4)], (1, 4), results=2)) == "([1,i])->([1,i],[1,i])"


def test_a_rule_says_what_its_factors_mean() -> None:
    rule = RuleBuilder()
    batch, inner = rule.factor(8), rule.factor(64, Kind.REDUCE)
    found = rule.done([[(batch,), (inner,)]], [[(batch,)]], "max")
    assert str(found) == "([i,j])->([i]) reduce(j) max"
    assert found.places == (((0, 0, 0), (1, 0, 0)), ((0, 1, 0),))


def test_two_factors_that_the_same_axes_cut_are_one() -> None:
    rule = RuleBuilder()
    i, j, k = rule.factor(8), rule.factor(4, Kind.REDUCE), rule.factor(2)
    made = rule.done([[(i,), (k,)], [(j,), (k,)]], [[(i,), (k,)]], runs_empty=[k], moves=[((i,), (k,))])
    merged = made.merged(i, j, Kind.PERMUTE)
    assert str(merged) == "([i,j],[i,j])->([i,j]) permute(i)"
    assert (merged.sizes, merged.runs_empty, merged.moves) == ((8, 2), {1}, ())
    with pytest.raises(ValueError, match="factors 0 and 2 stand in one tensor"):
        made.merged(i, k, Kind.PASS)
