"""One program of a folded module, which has the layers that were planned."""

import itertools
from collections.abc import Collection, Iterable, Sequence

from irpar.ir import Graph, Node, Value

from .chain import FIRST, MODEL, Chain, NotAlike
from .chain_names import Around, Words
from .numbered_names import NumberedNames

Place = tuple[int, int]
"""Which node of a layer, and which of its results."""


class PlannedProgram:
    """One program.

    Attributes:
        parts: the nodes from the first of a planned layer to the first of the next; what brings weights of a layer
            together right before it belongs to it.
        steps: names that count on, and by how much a layer.
        own: the constants and inputs of the layer that stands for others.
        pairs: values of that layer, and those of the next one that are like them.
        inner, before: results of nodes of that layer and of the one before, by their places.
        called: what values of that layer are called in the folded module.
    """

    def __init__(self, graph: Graph, chain: Chain) -> None:
        self.graph = graph
        self.chain = chain
        self.order = list(graph)
        self.parts = self._parts()
        self.steps: dict[str, int] = {}
        self.own: dict[Value, None] = {}
        self.called: dict[Value, str] = {}
        self.pairs: dict[Value, Value] = {}
        model = self.parts[MODEL]
        self.inner = places_of(model)
        self.before = places_of(self.parts[MODEL - 1])
        kept = chain.kept
        names = chain.names.around(MODEL, behind=kept[FIRST])
        self.words = Words(names)

    def _parts(self) -> list[list[Node]]:
        place = {node: number for number, node in enumerate(self.order)}
        table, layers = self.graph.names.table, self.chain.layers
        starts = []
        for layer in self.chain.kept:
            values = (table.get(value.name) for node in layers.members[layer] for value in node.results)
            own = [place[value.node] for value in values if value is not None and value.node in place]
            if not own:
                raise NotAlike("nothing is left of a layer")
            starts.append(self._with_gathers(min(own), layer))
        if starts != sorted(starts):
            raise NotAlike("layers stand in another order")
        return [self.order[start:stop] for start, stop in itertools.pairwise(starts)]

    def _with_gathers(self, start: int, layer: int) -> int:
        """Where a layer begins, with what brings weights of its own together right before its first node."""
        table = self.graph.names.table
        inside = {table.get(value.name) for value in self.chain.own_of(layer)}
        while start and _reads_only(self.order[start - 1], inside):
            start -= 1
            inside.update(self.order[start].results)
        return start

    def folded_names(self, number: int) -> Around:
        """The names of one of the folded layers, and of those beside it there."""
        kept = self.chain.kept
        before = kept[number - 1] if number else -1
        return self.chain.names.around(kept[number], before, kept[number + 1])

    def runs(self, listed: Iterable[Value]) -> dict[Value, list[Value]]:
        """What is the layer's own and stands side by side in a list, by the last of each run."""
        found: dict[Value, list[Value]] = {}
        run: list[Value] = []
        for value in listed:
            if value in self.own:
                run.append(value)
            elif run:
                found[run[-1]], run = run, []
        if run:
            found[run[-1]] = run
        return found

    def check_texts(self, numbered: NumberedNames) -> None:
        """Refuse programs in which what is said elsewhere names the layer that stands for others."""
        near = {node for part in self.parts[MODEL - 1 : MODEL + 2] for node in part}
        for node in self.order:
            if node.doc and ((node not in near and self.words.names_own(node.doc)) or numbered.is_in(node.doc)):
                raise NotAlike(f"{node.title} is there because of one layer")


def _reads_only(node: Node, values: Collection[Value | None]) -> bool:
    return bool(node.inputs) and all(value in values for value in node.inputs)


def places_of(part: Sequence[Node]) -> dict[Value, Place]:
    """The results of some nodes, by node and result."""
    return {value: (number, index) for number, node in enumerate(part) for index, value in enumerate(node.results)}
