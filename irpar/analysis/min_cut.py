"""The cheapest way to part the nodes of a graph in two: a minimal cut.

source -4-> a -1-> b -4-> sink     a stays with the source, b with the sink; the cut costs 1
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import numpy as np

from irpar.process import import_native

Array = np.ndarray[Any, Any]

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
        self._capacities: list[int] = []
        self._arrays: tuple[Array, Array, Array] | None = None

    def from_source(self, node: Hashable, capacity: int) -> None:
        """What a node costs on the sink's side."""
        self.arc(_SOURCE, node, capacity)

    def to_sink(self, node: Hashable, capacity: int) -> None:
        """What a node costs on the source's side."""
        self.arc(node, _SINK, capacity)

    def arc(self, tail: Hashable, head: Hashable, capacity: int = UNBOUNDED) -> int:
        """What it costs that one node is on the source's side, and another one on the sink's; returns its number."""
        number = self._arcs.setdefault((self._number(tail), self._number(head)), len(self._capacities))
        if number == len(self._capacities):
            self._capacities.append(capacity)
        else:
            self._capacities[number] = min(UNBOUNDED, self._capacities[number] + capacity)
        self._arrays = None
        return number

    @property
    def arcs(self) -> int:
        """How many there are."""
        return len(self._capacities)

    def _number(self, node: Hashable) -> int:
        return self._numbers.setdefault(node, len(self._numbers))

    def source_side(self, prices: Mapping[Any, int] | None = None, less: Array | None = None) -> set[Hashable]:
        """The fewest nodes that are on the source's side of a cheapest cut.

        Args:
            prices: what nodes cost on the source's side besides; below 0, what they cost on the sink's.
            less: of each arc how much less than its capacity it has.
        """
        flow = _flows().SimpleMaxFlow()
        numbered = [(self._number(node), price) for node, price in (prices or {}).items()]
        tails, heads, capacities = self._as_arrays()
        flow.add_arcs_with_capacity(tails, heads, capacities if less is None else capacities - np.append(less, 0))
        priced = [(0, number, -price) if price < 0 else (number, 1, price) for number, price in numbered]
        flow.add_arcs_with_capacity(*np.array(priced, np.int64).reshape(-1, 3).T)
        status = flow.solve(0, 1)
        if status != flow.OPTIMAL:
            raise AssertionError(f"no minimal cut: {status}")
        nodes = list(self._numbers)
        return {nodes[number] for number in flow.get_source_side_min_cut() if number > 1}

    def _as_arrays(self) -> tuple[Array, Array, Array]:
        """Tails, heads and capacities of the arcs, and at the end of one without capacity from source to sink."""
        if self._arrays is None:
            ends = np.array([*self._arcs, (0, 1)], np.int64)
            self._arrays = ends[:, 0], ends[:, 1], np.array([*self._capacities, 0], np.int64)
        return self._arrays
