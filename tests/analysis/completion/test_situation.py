"""The ways to run a node that its values suggest: all, or where these are too many, one factor after the other."""

import pytest

from irpar.analysis.completion.node_placement import rule_view
from irpar.analysis.completion.situation import Situation
from irpar.ir.text.files import parse_module
from irpar.sharding import Axis, Mesh, Sharding

AXES = "pqrs"


def rotated(rank: int) -> Situation:
    """A sum of four values, each dim of which is sharded by another axis in each of them."""
    types = ", ".join(f"%{name}: f32[{', '.join(['16'] * rank)}]" for name in "abcd")
    text = f"graph @g({types}) -> (%y) opset 21 {{\n  %y = Sum(%a, %b, %c, %d) : f32[{', '.join(['16'] * rank)}]\n}}"
    node = parse_module(text).graph.first
    assert node is not None
    mesh = Mesh(dict.fromkeys(AXES, 2))
    view = rule_view(node, mesh)
    assert view is not None
    lies = [Sharding.of_axes(mesh, [[Axis(AXES[(dim + at) % 4])] for dim in range(rank)]) for at in range(4)]
    return Situation(view, [*lies, None], [False] * 5)


def test_few_ways_are_all_there() -> None:
    situation = rotated(3)
    found = [placement.factors for placement in situation.placements(situation.view)]
    # Each of three dims by one of four axes or by none, no axis twice.
    assert len(found) == len(set(found)) == 1 + 3 * 4 + 3 * 12 + 24


@pytest.mark.parametrize("place", range(4))
def test_of_many_ways_each_factor_is_tried_with_all_axes_and_with_none(place: int) -> None:
    situation = rotated(4)
    found = list(situation.placements(situation.view))
    assert len(found) <= 4 * 5
    assert () in {placement.factors[place] for placement in found}
    assert situation.price(found[0]) == min(map(situation.price, found))
    assert situation.choose() == found[0]
