"""Parts: ranks that run the same program on the same shards."""

from dataclasses import dataclass

from irpar.ir import Graph, Module, Tensor, Value
from irpar.sharding import Mesh, local_region


@dataclass(frozen=True)
class Part:
    """One program with one set of shards.

    Attributes:
        index: its number.
        graph: the local graph.
        ranks: the ranks that run it.
        coords: mesh coordinates of the first of them; its blocks of all constants are those of the others too.
    """

    index: int
    graph: Graph
    ranks: tuple[int, ...]
    coords: tuple[int, ...]

    def tensor(self, value: Value) -> Tensor:
        """The numbers of a constant of the graph as this part holds them (lazy)."""
        assert value.data is not None
        if value.sharding is None or value.global_shape is None or value.data.shape == value.shape:
            return value.data
        return value.data.slice(local_region(value.sharding, value.global_shape, self.coords))


def parts_of(module: Module, mesh: Mesh) -> list[Part]:
    """The parts of a local module, in order of their first rank."""
    found: list[tuple[int, Graph, tuple[int, ...], tuple[int, ...]]] = []
    for graph in module.graphs:
        cut = dict.fromkeys(
            dim.axes
            for value in graph.constants
            if value.sharding is not None and value.data is not None and value.data.shape != value.shape
            for dim in value.sharding.dims
            if dim.axes
        )
        shards: dict[tuple[int, ...], list[int]] = {}
        for rank in graph.ranks:
            coords = mesh.coords(rank)
            shards.setdefault(tuple(mesh.position(coords, axes) for axes in cut), []).append(rank)
        found.extend((ranks[0], graph, tuple(ranks), mesh.coords(ranks[0])) for ranks in shards.values())
    found.sort(key=lambda part: part[0])
    return [Part(index, graph, ranks, coords) for index, (_, graph, ranks, coords) in enumerate(found)]
