"""A layer that was left out, put into a program as the one that stands for it."""

from collections.abc import Sequence

from irpar.ir import Node, Value, clone_node, clone_value
from irpar.ops.bodies import is_numbered
from irpar.ops.facts import int_attribute

from .chain import MODEL
from .layer_data import LayerData
from .numbered_names import NumberedNames
from .planned_program import PlannedProgram
from .units import NotAlike

_MANY_IDS = 1 << 32
"""More than a program has collectives."""


class LayerCopy:
    """A layer that is put in.

    Args:
        program: that gets it.
        layer: which.
        numbered: names that count on.

    Attributes:
        values: what stands there for what the layer that it is like reads and makes.
    """

    def __init__(self, program: PlannedProgram, layer: int, numbered: NumberedNames) -> None:
        self.program = program
        self.further = layer - MODEL
        self.around = program.chain.names.around(layer)
        self.words = program.words
        self.numbered = numbered
        self.data = LayerData(program.chain, layer)
        self.values: dict[Value, Value] = {}

    def add_own(self) -> None:
        """Make constants and inputs of the layer."""
        graph = self.program.graph
        for value in self.program.own:
            made = self.values[value] = clone_value(value)
            self._tell(made, value)
            if value.data is not None:
                made.data = self.data.of(value.data) or value.data
            made.graph = graph
            self._claim(made)

    def insert(self, nodes: Sequence[Node], before: Node) -> None:
        """Insert nodes of the layer."""
        words, around, graph = self.words, self.around, self.program.graph
        for node in nodes:
            made = clone_node(node, self.values)
            made.name, made.doc = words.text(node.name, around), words.text(node.doc, around)
            made.source, made.scope = words.optional(node.source, around), words.optional(node.scope, around)
            if is_numbered(made):
                made.attributes["id"] = int_attribute(made, "id") + self.further * _MANY_IDS
            for value, result in zip(node.results, made.results, strict=True):
                self._tell(result, value)
            names = [value.name for value in made.results]
            graph.insert_before(before, made)
            if names != [value.name for value in made.results]:
                raise NotAlike(f"%{names[0]} has a name that is taken")

    def _tell(self, made: Value, value: Value) -> None:
        """Let a copy of a value have the names of the layer."""
        words, around, name = self.words, self.around, self.program.called[value]
        counts_on = name in self.numbered.steps
        made.name = self.numbered.of_layer(name, self.further) if counts_on else words.text(name, around)
        made.source, made.doc = words.optional(value.source, around), words.text(value.doc, around)

    def _claim(self, made: Value) -> None:
        name = made.name
        self.program.graph.names.claim(made)
        if made.name != name:
            raise NotAlike(f"%{name} has a name that is taken")
