"""The cheapest way to part the nodes of a graph in two: a minimal cut.

source -4-> a -1-> b -4-> sink     a stays with the source, b with the sink; the cut costs 1
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import numpy as np

from irpar.process import import_native

UNBOUNDED = 1 << 62
"""A capacity that no cut pays."""
_SOURCE, _SINK = object(), object()


@cache
def _flows() -> Any:
    """OR-Tools' module of maximal flows, imported when it is first needed.

    Its flow takes milliseconds where networkx takes seconds, for thousands of nodes: prices on bytes ask for many cuts.
    """
    return import_native("ortools.graph.python.max_flow")


class MinCut:
    """Arcs with what they cost where they lead from the source's side to the sink's."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {_SOURCE: 0, _SINK: 1}
        self._arcs: dict[tuple[int, int], int] = {}

    def from_source(self, node: Hashable, capacity: int) -> None:
        """What a node costs on the sink's side."""
        self.arc(_SOURCE, node, capacity)

    def to_sink(self, node: Hashable, capacity: int) -> None:
        """What a node costs on the source's side."""
        self.arc(node, _SINK, capacity)

    def arc(self, tail: Hashable, head: Hashable, capacity: int = UNBOUNDED) -> None:
        """What it costs that one node is on the source's side, and another one on the sink's."""
        ends = self._number(tail), self._number(head)
        self._arcs[ends] = min(UNBOUNDED, self._arcs.get(ends, 0) + capacity)

    def _number(self, node: Hashable) -> int:
        return self._numbers.setdefault(node, len(self._numbers))

    def source_side(self, prices: Mapping[Hashable, int] | None = None) -> set[Hashable]:
        """The fewest nodes that are on the source's side of a cheapest cut.

        Args:
            prices: what nodes cost on the source's side besides; below 0, what they cost on the sink's.
        """
        flow = _flows().SimpleMaxFlow()
        arcs = dict(self._arcs)
        for node, price in (prices or {}).items():
            ends = (self._number(node), 1) if price > 0 else (0, self._number(node))
            arcs[ends] = min(UNBOUNDED, arcs.get(ends, 0) + abs(price))
        tails, heads = zip(*arcs, strict=True) if arcs else ((0,), (1,))
        capacities = list(arcs.values()) or [0]
        flow.add_arcs_with_capacity(np.array(tails), np.array(heads), np.array(capacities, np.int64))
        status = flow.solve(0, 1)
        if status != flow.OPTIMAL:
            raise AssertionError(f"no minimal cut: {status}")
        nodes = list(self._numbers)
        return {nodes[number] for number in flow.get_source_side_min_cut() if number > 1}
