"""The cheapest assignment where the device has room for all: a minimal cut.

Units of the source's side are on the host. Of a value that unit u has, and a and b read:

    u -to_device-> near,  near -inf-> a, near -inf-> b     one copy to the device, however many readers are there
    far -to_host-> u,     a -inf-> far,  b -inf-> far      likewise to the host
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from irpar.analysis.min_cut import UNBOUNDED, MinCut

from .graph import PlacedValue, PlacementGraph
from .simulation import Array


class Cut:
    """The cut of a graph, for any prices that being on the device has besides."""

    def __init__(self, graph: PlacementGraph) -> None:
        self.graph = graph
        self._cut = MinCut()
        self._copies: dict[tuple[int, frozenset[int]], tuple[int, int]] = {}
        """(unit, others that read what it has) to the arcs that copies to the host and to the device cost; -1: none."""
        for number, unit in enumerate(graph.units):
            # What both sides cost decides nothing, and would only make flows longer.
            least = min(unit.host or 0, unit.device or 0) if None not in (unit.host, unit.device) else 0
            self._cut.from_source(number, UNBOUNDED if unit.device is None else unit.device - least)
            self._cut.to_sink(number, UNBOUNDED if unit.host is None else unit.host - least)
        for unit_, readers, to_host, to_device in copies(graph):
            self._copies[unit_, readers] = self._price(unit_, readers, to_host, to_device)

    def _price(self, unit: int, readers: frozenset[int], to_host: int, to_device: int) -> tuple[int, int]:
        """Nodes `far` and `near` are where some reader is; others have numbers."""
        cut, arcs = self._cut, [-1, -1]
        if to_host:
            far = ("far", len(self._copies))
            arcs[0] = cut.arc(far, unit, to_host)
            for reader in readers:
                cut.arc(reader, far)
        if to_device:
            near = ("near", len(self._copies))
            arcs[1] = cut.arc(unit, near, to_device)
            for reader in readers:
                cut.arc(near, reader)
        return arcs[0], arcs[1]

    def cheapest(
        self, prices: Mapping[int, int] | None = None, less: "tuple[Array, Array] | None" = None
    ) -> tuple[bool, ...]:
        """Of each unit whether it is on the device, in a cheapest assignment; of such one with as many there as can be.

        Args:
            prices: number of a unit to what it costs on the device besides; below 0, what on the host.
            less: of each value how much less a copy of it to the host costs, and one to the device.
        """
        unlike = {unit: -price for unit, price in (prices or {}).items()}
        side = self._cut.source_side(unlike, None if less is None else self._less(*less))
        return tuple(number not in side for number in range(len(self.graph.units)))

    def _less(self, to_host: Array, to_device: Array) -> Array:
        less = np.zeros(self._cut.arcs, np.int64)
        for of_values, arcs in zip((to_host, to_device), self._arcs_of_values, strict=True):
            known = arcs >= 0
            np.add.at(less, arcs[known], of_values[known])
        return less

    @cached_property
    def _arcs_of_values(self) -> Array:
        """Of each value the arcs that copies to the host and to the device cost; -1 where there is none."""
        none = -1, -1
        return np.array(
            [self._copies.get((value.unit, _others(value)), none) for value in self.graph.values], np.int64
        ).T


def _others(value: PlacedValue) -> frozenset[int]:
    return frozenset(unit for _, unit in value.reads if unit != value.unit)


def copies(graph: PlacementGraph) -> list[tuple[int, frozenset[int], int, int]]:
    """(unit, others that read what it has, cost of copies to the host, to the device); what is read alike as one."""
    found: dict[tuple[int, frozenset[int]], tuple[int, int]] = {}
    for value in graph.values:
        readers = _others(value)
        if readers and (value.to_host or value.to_device):
            to_host, to_device = found.get((value.unit, readers), (0, 0))
            found[value.unit, readers] = to_host + value.to_host, to_device + value.to_device
    return [(*key, *costs) for key, costs in found.items()]
