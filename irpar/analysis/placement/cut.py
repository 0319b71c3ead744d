"""The cheapest assignment where the device has room for all: a minimal cut.

Units of the source's side are on the host. Of a value that unit u has, and a and b read:

    u -to_device-> near,  near -inf-> a, near -inf-> b     one copy to the device, however many readers are there
    far -to_host-> u,     a -inf-> far,  b -inf-> far      likewise to the host
"""

from irpar.analysis.min_cut import UNBOUNDED, MinCut

from .graph import Assignment, PlacementGraph
from .terms import others_that_read


def cheapest(graph: PlacementGraph) -> Assignment:
    """A cheapest assignment; of such one with as many units on the device as can be."""
    cut = MinCut()
    for number, unit in enumerate(graph.units):
        # What both sides cost decides nothing, and would only make flows longer.
        least = min(unit.host or 0, unit.device or 0) if None not in (unit.host, unit.device) else 0
        cut.from_source(number, UNBOUNDED if unit.device is None else unit.device - least)
        cut.to_sink(number, UNBOUNDED if unit.host is None else unit.host - least)
    for place, (unit_, readers, to_host, to_device) in enumerate(copies(graph)):
        if to_host:
            cut.arc(("far", place), unit_, to_host)
        if to_device:
            cut.arc(unit_, ("near", place), to_device)
        for reader in readers:
            if to_host:
                cut.arc(reader, ("far", place))
            if to_device:
                cut.arc(("near", place), reader)
    side = cut.source_side()
    return tuple(number not in side for number in range(len(graph.units)))


def copies(graph: PlacementGraph) -> list[tuple[int, frozenset[int], int, int]]:
    """(unit, others that read what it has, cost of copies to the host, to the device); what is read alike as one."""
    found: dict[tuple[int, frozenset[int]], tuple[int, int]] = {}
    for value in graph.values:
        readers = others_that_read(value)
        if readers and (value.to_host or value.to_device):
            to_host, to_device = found.get((value.unit, readers), (0, 0))
            found[value.unit, readers] = to_host + value.to_host, to_device + value.to_device
    return [(*key, *costs) for key, costs in found.items()]
