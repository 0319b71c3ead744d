"""One program of a folded module, which has the layers that were planned."""

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from irpar.ir import Graph, Node, Value

from .chain import FIRST, MODEL, Chain
from .chain_names import Around, Words
from .numbered_names import NumberedNames
from .units import NotAlike, Stretch

Place = tuple[int, int, int]
"""Which stretch of a layer, which node of it counted from the end, and which of its results.

What passes have put before the first layer of all belongs to this one, too.
"""
Part = Sequence[Sequence[Node]]
"""The nodes of a layer, by stretches."""


class Run(NamedTuple):
    """Values of a layer that stand side by side in a list.

    Attributes:
        start, stop: where.
        is_before: what is like them in the next layer stands before them, rather than behind them.
    """

    start: int
    stop: int
    is_before: bool


class PlannedProgram:
    """One program.

    Args:
        graph: it.
        chain: the layers of the model.
        known: the names of values of the model.

    Attributes:
        parts: the nodes of each planned layer, by stretches: from its first one to the first of the next, and nothing
            where no other layer follows. What passes have put before its first one, as what brings weights together,
            belongs to it.
        backward: for each stretch whether the last layer comes first in it.
        steps: names that count on, and by how much a layer.
        own: the constants and inputs of the layer that stands for others.
        pairs: values of that layer, and those of the next one that are like them.
        over_all: nodes elsewhere that read the same of every layer.
        inner, before, behind: results of nodes of that layer and of those beside it, by their places.
        at: those of that layer, each by its place.
        called: what values of that layer are called in the folded module.
    """

    def __init__(self, graph: Graph, chain: Chain, known: Container[str]) -> None:
        self.graph = graph
        self.known = known
        self.chain = chain
        self.order = list(graph)
        self.backward = [stretch.backward for stretch in chain.stretches]
        self.parts = self._parts()
        self.steps: dict[str, int] = {}
        self.own: dict[Value, None] = {}
        self.called: dict[Value, str] = {}
        self.pairs: dict[Value, Value] = {}
        self.over_all: dict[Node, None] = {}
        self.before, self.inner, self.behind = (places_of(part) for part in self.parts[MODEL - 1 : MODEL + 2])
        self.at = {place: value for value, place in self.inner.items()}
        names = chain.names.around(MODEL, behind=chain.kept[FIRST])
        self.words = Words(names)

    def results_of(self, number: int) -> list[Value]:
        """What replaces state of one of the folded layers."""
        chain, graph = self.chain, self.graph
        kept = chain.kept_results(graph.output_count + len(chain.left_out) * len(chain.results[MODEL]))
        place = {index: here for here, index in enumerate(kept)}
        return [graph.output(place[index]) for index in chain.results[chain.kept[number]]]

    def _parts(self) -> list[list[list[Node]]]:
        place = {node: number for number, node in enumerate(self.order)}
        parts: list[list[list[Node]]] = [[] for _ in self.chain.kept]
        for stretch in self.chain.stretches:
            starts = [self._start(stretch, layer, place) for layer in self.chain.kept]
            way = -1 if stretch.backward else 1
            if starts != sorted(starts)[::way]:
                raise NotAlike("layers stand in another order")
            stops = [*starts[way:], 0] if way > 0 else [0, *starts[:way]]
            for part, start, stop in zip(parts, starts, stops, strict=True):
                part.append(self.order[start:stop])
        self._add_ends(parts, max(starts), place)
        return parts

    def _add_ends(self, parts: list[list[list[Node]]], last: int, place: Mapping[Node, int]) -> None:
        """One more stretch, where passes bring what replaces state to where this lies: behind all layers."""
        results = [self.results_of(number) for number in range(len(parts) - 1)]
        nodes = [[value.node for value in values if value.node is not None] for values in results]
        places = [[place[node] for node in its if node in place] for its in nodes]
        stops = [1 + max((each for each in its if each > last), default=-1) for its in places]
        if not any(stops):
            return
        if not all(stops) or stops != sorted(stops):
            raise NotAlike("states are replaced in another order than that of layers")
        self.backward.append(False)
        ends = [self.order[start:stop] for start, stop in itertools.pairwise(stops)]
        for part, end in zip(parts, [[], *ends, []], strict=True):
            part.append(end)

    def _start(self, stretch: Stretch, layer: int, place: Mapping[Node, int]) -> int:
        table, nodes = self.graph.names.table, stretch.of(self.chain.layers.members[layer])
        values = (table.get(value.name) for node in nodes for value in node.results)
        made = (value.node for value in values if value is not None and value.node is not None)
        own = [place[node] for node in made if node in place]
        if not own:
            raise NotAlike("nothing is left of a layer")
        start = min(own)
        while start and self._is_between(self.order[start - 1]):
            start -= 1
        return start

    def _is_between(self, node: Node) -> bool:
        """Whether passes have put a node there, and it is not the last of a layer."""
        end = self.graph.return_node
        return not any(value.name in self.known or end in value.users for value in node.results)

    @cached_property
    def given(self) -> dict[Value, tuple[int, Place]]:
        """Which of the planned layers gives a value, and at which place."""
        return {value: (number, at) for number, part in enumerate(self.parts) for value, at in places_of(part).items()}

    def folded_names(self, number: int) -> Around:
        """The names of one of the folded layers, and of those beside it there."""
        kept = self.chain.kept
        before = kept[number - 1] if number else -1
        return self.chain.names.around(kept[number], before, kept[number + 1])

    def runs(self, listed: Sequence[Value]) -> Iterator[Run]:
        """Where what is of the layer stands side by side in a list.

        Raises:
            NotAlike: that stands neither before nor behind it.
        """
        start = 0
        for is_own, values in itertools.groupby(listed, lambda value: value in self.own or value in self.inner):
            run = list(values)
            stop, size = start + len(run), len(run)
            if is_own:
                pairs = [self.pairs.get(value) for value in run]
                is_before = listed[max(0, start - size) : start] == pairs
                if not is_before and listed[stop : stop + size] != pairs:
                    raise NotAlike(f"%{run[0].name} and what belongs to it stand otherwise in their list")
                yield Run(start, stop, is_before)
            start = stop

    def is_of_one_layer(self, text: str, numbered: NumberedNames, *, is_near: bool) -> bool:
        """Whether a text names a value that is another one, or another's, with all layers, or may do so.

        What is said near, of the layer and those beside it, may name no value that counts on; what is said elsewhere
        none of the layer itself.
        """
        if is_near:
            return numbered.is_in(text)
        return self.words.names_own(text) or not numbered.is_clear(text, self.graph.names.table)

    def check_texts(self, numbered: NumberedNames) -> None:
        """Refuse programs with nodes that are there because of one layer."""
        near = {node for part in self.parts[MODEL - 1 : MODEL + 2] for nodes in part for node in nodes}
        for node in (node for node in self.order if node.doc):
            if self.is_of_one_layer(node.doc, numbered, is_near=node in near):
                raise NotAlike(f"{node.title} is there because of one layer")


def places_of(part: Part) -> dict[Value, Place]:
    """The results of a layer's nodes, by their places."""
    return {
        value: (stretch, len(nodes) - number, index)
        for stretch, nodes in enumerate(part)
        for number, node in enumerate(nodes)
        for index, value in enumerate(node.results)
    }
