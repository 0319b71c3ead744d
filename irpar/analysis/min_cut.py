"""The cheapest way to part the nodes of a graph in two: a minimal cut.

source -4-> a -1-> b -4-> sink     a stays with the source, b with the sink; the cut costs 1
"""

from collections.abc import Hashable
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

    Its flow takes milliseconds where networkx takes seconds, for thousands of nodes.
    """
    return import_native("ortools.graph.python.max_flow")


class MinCut:
    """Arcs with what they cost where they lead from the source's side to the sink's."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {_SOURCE: 0, _SINK: 1}
        self._arcs: dict[tuple[int, int], int] = {}
        self._capacities: list[int] = []

    def from_source(self, node: Hashable, capacity: int) -> None:
        """What a node costs on the sink's side."""
        self.arc(_SOURCE, node, capacity)

    def to_sink(self, node: Hashable, capacity: int) -> None:
        """What a node costs on the source's side."""
        self.arc(node, _SINK, capacity)

    def arc(self, tail: Hashable, head: Hashable, capacity: int = UNBOUNDED) -> None:
        """What it costs that one node is on the source's side, and another one on the sink's."""
        number = self._arcs.setdefault((self._number(tail), self._number(head)), len(self._capacities))
        if number == len(self._capacities):
            self._capacities.append(capacity)
        else:
            self._capacities[number] = min(UNBOUNDED, self._capacities[number] + capacity)

    def _number(self, node: Hashable) -> int:
        return self._numbers.setdefault(node, len(self._numbers))

    def source_side(self) -> set[Hashable]:
        """The fewest nodes that are on the source's side of a cheapest cut."""
        flow = _flows().SimpleMaxFlow()
        # An arc without capacity: OR-Tools knows no source and no sink that nothing leads from or to.
        ends = np.array([*self._arcs, (0, 1)], np.int64)
        flow.add_arcs_with_capacity(ends[:, 0], ends[:, 1], np.array([*self._capacities, 0], np.int64))
        status = flow.solve(0, 1)
        if status != flow.OPTIMAL:
            raise AssertionError(f"no minimal cut: {status}")
        nodes = list(self._numbers)
        return {nodes[number] for number in flow.get_source_side_min_cut() if number > 1}
