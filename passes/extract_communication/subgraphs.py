"""Subgraphs of communication: a collective with the nodes around it that only pack, cast or split for it.

%r = Reshape(%a, %s)          the subgraph of the AllReduce: inputs %a, %b; outputs %x, %y;
%f = Concat(%r, %b)           %s, %w and the values between stay inside
%c = irpar.AllReduce(%f)
%x, %y = Split(%c, %w)
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from irpar.analysis.equal_nodes import attribute_key, numbers_key
from irpar.ir import Graph, Node, Value
from irpar.ops import traits
from irpar.ops.collectives import STARTED, sends

PACKING = frozenset(
    ("", name)
    for name in (
        "Cast",
        "Concat",
        "Flatten",
        "Identity",
        "Pad",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    )
)
"""What may come along: operators that move, cut or cast what is sent."""


@dataclass(frozen=True, eq=False)
class Subgraph:
    """A collective with its neighbours.

    Attributes:
        collective: the node that communicates.
        nodes: these, in order; they stand behind each other in their graph.
        inputs: what they read of others, in order of first use.
        constants: what they alone read of the constants of the graph, with their places there.
        outputs: what others read of them, and what stands for a value of the source model.
    """

    collective: Node
    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    constants: Mapping[Value, int]
    outputs: tuple[Value, ...]

    def form(self) -> Hashable:
        """Equal for subgraphs that one function can stand for: all but ids, names and where they come from.

        None where it holds what cannot be compared.
        """
        numbers = {value: ("input", place) for place, value in enumerate(self.inputs)}
        data = [numbers_key(value.data) for value in self.constants if value.data is not None]
        lines: list[Hashable] = []
        for place, value in enumerate(self.constants):
            numbers[value] = ("constant", place)
        outputs = set(self.outputs)
        for line, node in enumerate(self.nodes):
            attributes = [
                (name, attribute_key(value)) for name, value in node.attributes.items() if not _is_id(node, name)
            ]
            operands = [None if value is None else numbers[value] for value in node.operands]
            numbers.update((value, (str(line), place)) for place, value in enumerate(node.results))
            made = [(value.type, None if value in outputs else _facts(value)) for value in node.results]
            if None in data or any(key is None for _, key in attributes):
                return None
            where = list(node.attributes).index("id") if "id" in node.attributes else -1
            operator = node.domain, node.op_type, node.version
            lines.append((operator, tuple(attributes), where, tuple(operands), tuple(made)))
        kinds = tuple(value.type for value in self.inputs)
        constants = tuple((key, _facts(value)) for key, value in zip(data, self.constants, strict=True))
        return kinds, constants, tuple(lines), tuple(numbers[value] for value in self.outputs)


def _is_id(node: Node, name: str) -> bool:
    return name == "id" and traits(node).communicates


def _facts(value: Value) -> Hashable:
    return value.sharding, value.global_shape, value.memory


def subgraphs(graph: Graph, *, packing: bool) -> Iterator[Subgraph]:
    """The subgraphs of a graph, without the bodies in it, in order.

    Args:
        graph: a local graph or a body in one.
        packing: take neighbours in; else collectives alone.
    """
    taken: set[Node] = set()
    places = {value: place for place, value in enumerate(graph.constants)}
    for node in list(graph):
        if node in taken or not (sends(node) or node.op_type in STARTED):
            continue
        nodes = _around(node, taken) if packing else [node]
        if "id" in node.attributes:
            found = _bounded(places, node, nodes)
            if len(nodes) > 1 and any(value.is_constant for value in found.inputs):
                found = _bounded(places, node, [node])  # What others read as well cannot go along.
            taken.update(found.nodes)
            yield found


def _around(collective: Node, taken: set[Node]) -> list[Node]:
    """A collective with the nodes directly before and behind it that come along."""
    nodes = [collective]
    inside = {collective}
    before = collective.previous
    while before is not None and before not in taken and _comes_along(before, collective):
        if not all(value.has_uses and inside.issuperset(value.users) for value in before.results):
            break
        nodes.insert(0, before)
        inside.add(before)
        before = before.previous
    after = collective.next
    while after is not None and (_comes_along(after, collective) or _waits(after, collective)):
        # What is made here alone; constants may come from outside.
        if not all(value.is_constant or value.node in inside for value in after.inputs):
            break
        nodes.append(after)
        inside.add(after)
        after = after.next
    return nodes


def _comes_along(node: Node, collective: Node) -> bool:
    """Whether a neighbour was made for the collective: no node of the source model, with the same facts."""
    if node.identity not in PACKING or node.callee is not None or node.metadata or node.strategy is not None:
        return False
    same = (node.phase, node.stage, node.place) == (collective.phase, collective.stage, collective.place)
    return same and not node.name and any(not value.is_constant for value in node.inputs)


def _waits(node: Node, collective: Node) -> bool:
    """Whether a node waits for the collective."""
    same = (node.phase, node.stage, node.place) == (collective.phase, collective.stage, collective.place)
    return traits(node).waits and node.inputs[0].node is collective and same and not node.metadata


def _bounded(places: Mapping[Value, int], collective: Node, nodes: Sequence[Node]) -> Subgraph:
    inside = set(nodes)
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value.node not in inside)
    own = {value: places[value] for value in read if value in places and _is_own(value, inside)}
    made = [value for node in nodes for value in node.results]
    return Subgraph(
        collective,
        tuple(nodes),
        tuple(value for value in read if value not in own),
        dict(sorted(own.items(), key=lambda entry: entry[1])),
        tuple(value for value in made if not _is_inner(value, inside)),
    )


def _is_own(value: Value, inside: set[Node]) -> bool:
    """Whether a constant can go into the function: nothing else reads it, and nobody asks for it."""
    if value.source is not None or value.doc or value.metadata:
        return False
    return inside.issuperset(value.users) and value.data is not None and value.type == value.data.type


def _is_inner(value: Value, inside: set[Node]) -> bool:
    """Whether a result need not leave the function: nothing else reads it, and it stands for nothing of the model."""
    return value.has_uses and inside.issuperset(value.users) and not (value.source or value.doc or value.metadata)
