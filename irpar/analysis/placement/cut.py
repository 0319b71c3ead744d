"""The cheapest assignment where the device has room for all: a minimal cut.

Units of the source's side are on the host. Of a value that unit u has, and a and b read:

    u -to_device-> near,  near -inf-> a, near -inf-> b     one copy to the device, however many readers are there
    far -to_host-> u,     a -inf-> far,  b -inf-> far      likewise to the host
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from irpar.analysis.min_cut import UNBOUNDED, MinCut

from .graph import PlacementGraph


class Cut:
    """The cut of a graph, for any prices that being on the device has besides."""

    def __init__(self, graph: PlacementGraph) -> None:
        self.graph = graph

    @cached_property
    def _copies(self) -> list[tuple[int, frozenset[int], int, int]]:
        return copies(self.graph)

    @cached_property
    def _cut(self) -> MinCut:
        cut = MinCut()
        for number, unit in enumerate(self.graph.units):
            # What both sides cost decides nothing, and would only make flows longer.
            least = min(unit.host or 0, unit.device or 0) if None not in (unit.host, unit.device) else 0
            cut.from_source(number, UNBOUNDED if unit.device is None else unit.device - least)
            cut.to_sink(number, UNBOUNDED if unit.host is None else unit.host - least)
        for copy in self._copies:
            self._price(cut, *copy)
        return cut

    @staticmethod
    def _price(cut: MinCut, unit: int, readers: frozenset[int], to_host: int, to_device: int) -> None:
        """Nodes `far` and `near` of a value are where some reader of it is."""
        far, near = ("far", unit, readers), ("near", unit, readers)
        if to_device:
            cut.arc(unit, near, to_device)
        if to_host:
            cut.arc(far, unit, to_host)
        for reader in readers:
            if to_device:
                cut.arc(near, reader)
            if to_host:
                cut.arc(reader, far)

    def cheapest(self, prices: Mapping[int, int] | None = None) -> tuple[bool, ...]:
        """Of each unit whether it is on the device, in a cheapest assignment; of such one with as many there as can be.

        Args:
            prices: number of a unit to what it costs on the device besides; below 0, what on the host.
        """
        side = self._cut.source_side({unit: -price for unit, price in (prices or {}).items()})
        return tuple(number not in side for number in range(len(self.graph.units)))

    def cost(self, on_device: Sequence[bool]) -> int:
        """What an assignment costs."""
        units = sum(
            (unit.device if there else unit.host) or 0 for unit, there in zip(self.graph.units, on_device, strict=True)
        )
        for unit, readers, to_host, to_device in self._copies:
            where = on_device[unit]
            if any(on_device[reader] != where for reader in readers):
                units += to_host if where else to_device
        return units


def copies(graph: PlacementGraph) -> list[tuple[int, frozenset[int], int, int]]:
    """(unit, others that read what it has, cost of copies to the host, to the device); what is read alike as one."""
    found: dict[tuple[int, frozenset[int]], tuple[int, int]] = {}
    for value in graph.values:
        readers = frozenset(unit for _, unit in value.reads if unit != value.unit)
        if readers and (value.to_host or value.to_device):
            to_host, to_device = found.get((value.unit, readers), (0, 0))
            found[value.unit, readers] = to_host + value.to_host, to_device + value.to_device
    return [(*key, *costs) for key, costs in found.items()]
