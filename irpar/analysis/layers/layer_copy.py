"""A layer that was left out, put into a program as the one that stands for it."""

from collections.abc import Mapping, Sequence

from irpar.ir import Node, Value
from irpar.ir.clone import NodeTexts, ValueTexts, clone_node_as, clone_value_as
from irpar.ops.bodies import is_numbered
from irpar.ops.facts import int_attribute

from .chain import MODEL
from .layer_data import LayerData
from .layer_texts import LayerTexts
from .planned_program import PlannedProgram
from .units import NotAlike

_MANY_IDS = 1 << 32
"""More than a program has collectives."""


class Original:
    """A node of the layer that stands for others, with what is the same, or known before, for the copies of it.

    Args:
        node: it.
        program: that has it.
        texts: of the layers.

    Attributes:
        texts: what the node is called in each layer.
        results: what its results are called in each layer.
        id: the number of a collective; None where the node is none.
    """

    __slots__ = ("id", "node", "results", "texts")

    def __init__(self, node: Node, program: PlannedProgram, texts: LayerTexts) -> None:
        self.node = node
        self.texts: Sequence[NodeTexts] = texts.node(node)
        results = [texts.value(value, program.called[value]) for value in node.results]
        self.results: Sequence[Sequence[ValueTexts]] = list(zip(*results, strict=True)) or [()] * len(self.texts)
        self.id = int_attribute(node, "id") if is_numbered(node) else None


class LayerCopy:
    """A layer that is put in.

    Args:
        program: that gets it.
        layer: which.

    Attributes:
        values: what stands there for what the layer that it is like reads and makes.
    """

    def __init__(self, program: PlannedProgram, layer: int) -> None:
        self.program = program
        self.further = layer - MODEL
        self.data = LayerData(program.chain, layer)
        self.values: dict[Value, Value] = {}

    def add_own(self, called: Mapping[Value, Sequence[ValueTexts]]) -> None:
        """Make constants and inputs of the layer.

        Args:
            called: those of the layer that stands for others, with what they are called in each.
        """
        graph = self.program.graph
        for value, texts in called.items():
            made = self.values[value] = clone_value_as(value, texts[self.further])
            if value.data is not None:
                made.data = self.data.of(value.data) or value.data
            made.graph = graph
            graph.names.claim(made)
            _check_name(made, texts[self.further])

    def insert(self, originals: Sequence[Original], before: Node) -> None:
        """Insert nodes of the layer."""
        graph, values, further = self.program.graph, self.values, self.further
        for original in originals:
            called = original.results[further]
            made = clone_node_as(original.node, values, original.texts[further], called)
            if original.id is not None:
                made.attributes["id"] = original.id + further * _MANY_IDS
            graph.insert_before(before, made)
            for result, texts in zip(made.results, called, strict=True):
                _check_name(result, texts)


def _check_name(made: Value, texts: ValueTexts) -> None:
    if made.name != texts[0]:
        raise NotAlike(f"%{texts[0]} has a name that is taken")
