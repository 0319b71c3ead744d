"""The cheapest way to part the nodes of a graph in two: a minimal cut.

source -4-> a -1-> b -4-> sink     a stays with the source, b with the sink; the cut costs 1
"""

from collections.abc import Hashable, Iterator, Mapping
from functools import cache, cached_property
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
        self.__dict__.pop("_arrays", None)
        self._arcs[ends] = min(UNBOUNDED, self._arcs.get(ends, 0) + capacity)

    def _number(self, node: Hashable) -> int:
        return self._numbers.setdefault(node, len(self._numbers))

    def source_side(self, prices: Mapping[Hashable, int] | None = None) -> set[Hashable]:
        """The fewest nodes that are on the source's side of a cheapest cut.

        Args:
            prices: what nodes cost on the source's side besides; below 0, what they cost on the sink's.
        """
        flow = _flows().SimpleMaxFlow()
        flow.add_arcs_with_capacity(*self._arrays)
        priced = [(*((0, number) if price < 0 else (number, 1)), abs(price)) for number, price in self._each(prices)]
        flow.add_arcs_with_capacity(*np.array(priced, np.int64).reshape(-1, 3).T)
        status = flow.solve(0, 1)
        if status != flow.OPTIMAL:
            raise AssertionError(f"no minimal cut: {status}")
        nodes = self._nodes
        return {nodes[number] for number in flow.get_source_side_min_cut() if number > 1}

    def _each(self, prices: Mapping[Hashable, int] | None) -> Iterator[tuple[int, int]]:
        for node, price in (prices or {}).items():
            yield self._number(node), price

    @cached_property
    def _arrays(self) -> "tuple[np.ndarray[Any, Any], ...]":
        """Tails, heads and capacities of the arcs; of one without capacity between the ends where there is no other."""
        ends = np.array([*self._arcs, (0, 1)], np.int64)
        return ends[:, 0], ends[:, 1], np.array([*self._arcs.values(), 0], np.int64)

    @property
    def _nodes(self) -> list[Hashable]:
        return list(self._numbers)
