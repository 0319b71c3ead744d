"""Minimal cuts against all cuts."""

from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.analysis.min_cut import UNBOUNDED, MinCut
from tests.budget import budget

NODES = range(5)
Arcs = list[tuple[int, int, int]]


def cost(side: set[int], sources: list[int], sinks: list[int], arcs: Arcs) -> int:
    """What it costs that some nodes are on the source's side, and the others on the sink's."""
    ends = sum(sinks[node] if node in side else sources[node] for node in NODES)
    return ends + sum(capacity for tail, head, capacity in arcs if tail in side and head not in side)


@settings(max_examples=budget(30), deadline=None)
@given(st.data())
def test_the_side_of_the_source_is_the_smallest_of_a_cheapest_cut(data: st.DataObject) -> None:
    capacities = st.integers(0, 6)
    sources, sinks = (data.draw(st.lists(capacities, min_size=5, max_size=5)) for _ in range(2))
    drawn = st.tuples(st.sampled_from(NODES), st.sampled_from(NODES), st.sampled_from((*range(6), UNBOUNDED)))
    arcs = data.draw(st.lists(drawn, max_size=12))
    cut = MinCut()
    for node in NODES:
        cut.from_source(node, sources[node])
        cut.to_sink(node, sinks[node])
    for arc in arcs:
        cut.arc(*arc)
    sides = map(set, chain.from_iterable(combinations(NODES, size) for size in range(len(NODES) + 1)))
    costs = [(cost(side, sources, sinks, arcs), side) for side in sides]
    least = min(price for price, _ in costs)
    assert cut.source_side() == set.intersection(*(side for price, side in costs if price == least))
