"""Which parameters are gathered together: those of a layer, or of a few, as a module says it.

What is said stands in the metadata of the module; fuse-communication reads it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from irpar.analysis.layers import find_layers
from irpar.analysis.memory.by_use import only_moves
from irpar.analysis.memory.liveness import value_bytes
from irpar.ir import Graph, Module, Node, Value
from irpar.ops.coords import root_of

from .said import read_said, write_said

SAID = "irpar.gathers"
"""The entry of a module's metadata."""


@dataclass(frozen=True)
class Gathers:
    """What a module says.

    Attributes:
        prefetch: layers whose parameters may be gathered together in the forward pass; in the backward pass one.
        layers: name of a parameter to the number of its layer, in the order of the forward pass.
    """

    prefetch: int = 1
    layers: Mapping[str, int] = field(default_factory=dict)

    def group(self, node: Node, parameter: Value) -> tuple[str, int] | None:
        """What a gather of a parameter has in common with those that it may be sent with; None: nothing is said."""
        layer = self.layers.get(parameter.source_name)
        if layer is None or node.phase not in ("forward", "backward"):
            return None
        return node.phase, layer // max(1, self.prefetch) if node.phase == "forward" else layer


def gathers_said(module: Module) -> Gathers:
    """What a module says.

    Raises:
        IrparError: its metadata cannot be read.
    """
    return read_said(module, SAID, Gathers, "run zero again, which writes it") or Gathers()


def say_gathers(module: Module, gathers: Gathers) -> bool:
    """Say it, where there are several layers; true where something else was said."""
    before = module.metadata.pop(SAID, None)
    if len(set(gathers.layers.values())) > 1:
        write_said(module, SAID, gathers)
    return module.metadata.get(SAID) != before


def layers_of(graph: Graph, parameters: Sequence[Value]) -> dict[str, int]:
    """The number of the layer that reads each parameter first, in the order of the forward pass: all, if none has said.

    Layers are what the forward pass repeats; of what stands outside of them, so many parameters in a row count as one
    as hold no more than the largest layer does, or the largest parameter.
    """
    forward = "forward" if any(node.phase == "forward" for node in graph) else None
    places = {node: place for place, node in enumerate(graph) if forward in (None, node.phase)}
    first = {value: _first_reader(value, places) for value in parameters}
    inside = _inside_layers(graph, {value for value, node in first.items() if node is not None}, places, forward)
    sizes: dict[int, int] = {}
    for value, layer in inside.items():
        sizes[layer] = sizes.get(layer, 0) + value_bytes(value)
    most = max(sizes.values(), default=max(map(value_bytes, parameters), default=0))
    found: dict[str, int] = {}
    number, before, held = -1, -1, 0
    read = [(places[node], place, value) for place, (value, node) in enumerate(first.items()) if node is not None]
    for _, _, value in sorted(read, key=lambda each: each[:2]):
        layer, size = inside.get(value, -1), value_bytes(value)
        is_same = number >= 0 and layer == before and (layer >= 0 or held + size <= most)
        number, held = (number, held + size) if is_same else (number + 1, size)
        before = layer
        found[value.source_name] = number
    return found


def _first_reader(value: Value, places: Mapping[Node, int]) -> Node | None:
    """The first node of the forward pass that reads a parameter."""
    readers = [node for node in value.users if node in places]
    return min(readers, key=places.__getitem__, default=None)


def _inside_layers(
    graph: Graph, parameters: set[Value], places: Mapping[Node, int], forward: str | None
) -> dict[Value, int]:
    """The place in the graph of the first layer that reads each parameter, of those that one does."""
    found: dict[Value, int] = {}
    for layers in find_layers(graph, phase=forward):
        for member, operands in zip(layers.members, layers.operands, strict=True):
            place = min(places[node] for node in member)
            for value in parameters.intersection(operands):
                found[value] = min(place, found.get(value, place))
    return found


def gathered(graph: Graph) -> Iterator[tuple[Node, Value]]:
    """The nodes that only move elements of a parameter that is state, of the graph around it in a body; and that."""
    states = root_of(graph).states
    moved: dict[Value, Value] = {value: value for value, state in states.items() if state.kind == "parameter"}
    for node in graph if moved else ():
        reads = [value for value in node.inputs if not value.is_constant]
        sources = {moved.get(value) for value in reads}
        if len(sources) == 1 and None not in sources and only_moves(node) and "reduce" not in node.attributes:
            (source,) = sources
            assert source is not None
            moved.update(dict.fromkeys(node.results, source))
            yield node, source
