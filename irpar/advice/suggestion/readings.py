"""What the nodes of a partition really do with its weights, so that reasons say no more than is true."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from irpar.advice.uses import where
from irpar.ir import Graph, Node, Value
from irpar.ops import traits
from irpar.ops.collectives import sends


@dataclass(frozen=True)
class Reading:
    """How one node reads a weight.

    Attributes:
        reader: where the node stands in the source model.
        is_moved: the blocks of the weight are moved before it reads them, most often brought together.
        summed: the mesh axes over which it gives parts of sums.
    """

    reader: str
    is_moved: bool
    summed: frozenset[str]


class Readings:
    """Those of a partition.

    Args:
        graph: in local view.
        heads: of weights that have a dim of them in it, and none in the source model: how many.
    """

    def __init__(self, graph: Graph, heads: Mapping[str, int]) -> None:
        self.heads = heads
        self._of: dict[str, list[Reading]] = {}
        self._moved: set[str] = set()
        for inner in graph.graphs():
            for value in inner.constants:
                self._of.setdefault(value.source_name, []).extend(_readings(value, is_moved=False))
            self._moved.update(value.source_name for node in inner if sends(node) for value in node.inputs)

    def of(self, value: Value, reader: Node) -> list[Reading]:
        """How a node of the source model reads a weight: by its name there, since nodes are copied and split."""
        return [each for each in self._of.get(value.source_name, ()) if each.reader == where(reader)]

    def is_moved(self, value: Value) -> bool:
        """Whether blocks of a value are sent to other ranks."""
        return value.source_name in self._moved


def _readings(value: Value, *, is_moved: bool) -> Iterator[Reading]:
    for node, index in value.uses:
        if sends(node):
            # What is sent together comes back one by one.
            results = node.results[index : index + 1] if len(node.results) == len(node.operands) else node.results
            for result in results:
                yield from _readings(result, is_moved=True)
            continue
        if traits(node).view:
            yield from _readings(node.result, is_moved=is_moved)
        lies = [result.sharding for result in node.results if result.sharding is not None]
        yield Reading(where(node), is_moved, frozenset(axis.name for each in lies for axis in each.partial))
