"""The cheapest way to part the nodes of a graph in two: a minimal cut.

source -4-> a -1-> b -4-> sink     a stays with the source, b with the sink; the cut costs 1
"""

from collections.abc import Hashable

UNBOUNDED = 1 << 62
"""A capacity that no cut pays."""
_SOURCE, _SINK = object(), object()


class MinCut:
    """Arcs with what they cost where they lead from the source's side to the sink's."""

    def __init__(self) -> None:
        import networkx as nx  # slow to import, and few modules need it

        # networkx gives the greatest source's side: of arcs turned round that is the sink's, and ours the fewest.
        self._turned = nx.DiGraph()
        self._turned.add_nodes_from((_SOURCE, _SINK))

    def from_source(self, node: Hashable, capacity: int) -> None:
        """What a node costs on the sink's side."""
        self.arc(_SOURCE, node, capacity)

    def to_sink(self, node: Hashable, capacity: int) -> None:
        """What a node costs on the source's side."""
        self.arc(node, _SINK, capacity)

    def arc(self, tail: Hashable, head: Hashable, capacity: int = UNBOUNDED) -> None:
        """What it costs that one node is on the source's side, and another one on the sink's."""
        known = self._turned.get_edge_data(head, tail, {"capacity": 0})["capacity"]
        self._turned.add_edge(head, tail, capacity=known + capacity)

    def source_side(self) -> set[Hashable]:
        """The fewest nodes that are on the source's side of a cheapest cut."""
        import networkx as nx

        _, (_, side) = nx.minimum_cut(self._turned, _SINK, _SOURCE)
        return {node for node in side if node is not _SOURCE}
