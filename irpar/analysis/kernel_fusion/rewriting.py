"""Nodes that one kernel computes become one node, irpar.Fused, or ONNX's Attention."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from irpar.analysis.segments import is_segment, stretches
from irpar.ir import DOMAIN, Graph, Node, Strings, Value, inherit
from irpar.ir.module import IRPAR_OPSET
from irpar.kernels.expression import Expression, Number, Step

from .attention import VERSION, Attention, attentions, written
from .groups import Group, Stretch, groups_of
from .lowering import Given, Ref

Unit = Group | Attention | Node


def fuse(graph: Graph) -> int:
    """Let nodes irpar.Fused and Attention take the place of what they compute; returns how many nodes that was.

    Results keep their values, so that names, shardings and what reads them stay. Nodes of a stretch between
    communication are put in an order in which each group can stand together; others stay where they are. An operator
    set before that of Attention stays without it.
    """
    order: list[Node] = []
    count = 0
    for nodes in stretches(graph):
        units: Sequence[Unit] = nodes
        if is_segment(nodes):
            units, unread = _units(_stretch_of(nodes), VERSION)
            count += len(unread)
            for node in unread:
                node.erase_forced()
        for unit in units:
            if isinstance(unit, Node):
                order.append(unit)
            else:
                count += len(unit.members)
                order += _replaced(unit, graph)
    if count:
        graph.reorder(order)
    return count


def _stretch_of(nodes: list[Node]) -> Stretch:
    inside = set(nodes)
    made = (value for node in nodes for value in node.results)
    return Stretch(nodes, {value for value in made if any(user not in inside for user in value.users)})


def stand_ins(stretch: Stretch) -> list[Node]:
    """The nodes of a stretch for who runs them: one for each group in place of its nodes, which stay in their graph."""
    units, _ = _units(stretch)
    return [node for unit in units for node in ([unit] if isinstance(unit, Node) else _stand_in(unit))]


def _units(stretch: Stretch, version: int = 0) -> tuple[list[Unit], set[Node]]:
    """Groups, attentions and other nodes so that each follows what it must, else in the order of their last nodes.

    And nodes that nothing reads any more. Attentions are those of nodes of at least one version of the operator set.
    """
    found, unread = attentions(stretch.nodes, stretch.kept, version)
    gone = unread.union(*(attention.members for attention in found))
    if any(value.node in gone for value in stretch.over):
        found, unread = [], set()
    if found:
        stretch = replace(
            stretch,
            nodes=[node for node in stretch.nodes if node not in unread],
            kept=stretch.kept | {value for attention in found for value in attention.operands()},
            taken=frozenset(node for attention in found for node in attention.members),
        )
    units: list[Group | Attention] = [*found, *groups_of(stretch)]
    return _in_order(stretch, units), unread


def _in_order(stretch: Stretch, units: Sequence[Group | Attention]) -> list[Unit]:
    unit_of: dict[Node, Unit] = {node: node for node in stretch.nodes}
    for one in units:
        unit_of.update(dict.fromkeys(one.members, one))
    ranks: dict[Unit, int] = {}
    followers: dict[Unit, dict[Unit, None]] = {unit: {} for unit in unit_of.values()}
    waits: dict[Unit, int] = dict.fromkeys(followers, 0)
    for node in stretch.nodes:
        unit = unit_of[node]
        ranks[unit] = stretch.places[node]
        for before in map(unit_of.__getitem__, stretch.before[node]):
            if before is not unit and unit not in followers[before]:
                followers[before][unit] = None
                waits[unit] += 1
    by_rank = {rank: unit for unit, rank in ranks.items()}
    ready = [ranks[unit] for unit, count in waits.items() if not count]
    heapify(ready)
    found: list[Unit] = []
    while ready:
        unit = by_rank[heappop(ready)]
        found.append(unit)
        for follower in followers[unit]:
            waits[follower] -= 1
            if not waits[follower]:
                heappush(ready, ranks[follower])
    assert len(found) == len(waits)
    return found


def _replaced(unit: Group | Attention, graph: Graph) -> list[Node]:
    """The nodes of a group or an attention, in the graph in place of its own."""
    if isinstance(unit, Group):
        return [_fused(unit, graph)]
    for node in reversed(unit.members):
        node.erase_forced()
    made = written(unit, Node)
    for node in made:
        inherit(graph.append(node), unit.last)
    return made


def _fused(group: Group, graph: Graph) -> Node:
    operands, results = group.operands(), group.results()
    attributes = {"expression": Strings(_expression(group, operands, results).lines)}
    origin = _origin(group)
    for node in reversed(group.members):
        node.erase_forced()
    made = Node("Fused", operands, attributes, domain=DOMAIN, version=IRPAR_OPSET, results=results)
    inherit(made, origin)
    return graph.append(made)


def _stand_in(unit: Group | Attention) -> list[Node]:
    """What one who runs a stretch has in place of a unit's nodes."""
    if isinstance(unit, Attention):
        made, origin = written(unit, Node.stand_in), unit.last
    else:
        operands, results = unit.operands(), unit.results()
        attributes = {"expression": Strings(_expression(unit, operands, results).lines)}
        made = [Node.stand_in("Fused", operands, attributes, results, domain=DOMAIN, version=IRPAR_OPSET)]
        origin = _origin(unit)
    for node in made:
        inherit(node, origin)
    return made


def _origin(group: Group) -> Node:
    """The node of a group that errors name: the last one that the imported model has."""
    return next((node for node in reversed(group.members) if node.source), group.last)


def _expression(group: Group, operands: tuple[Value, ...], results: tuple[Value, ...]) -> Expression:
    """What a group computes: operands and results by their places, other steps by their numbers."""
    names: dict[Value, str] = {value: f"x{place}" for place, value in enumerate(operands)}
    chosen = {value: f"y{place}" for place, value in enumerate(results)}
    steps: list[Step] = []
    for one in group.members.values():
        own: list[str] = [""] * len(one.steps)
        for value, ref in one.results.items():
            own[ref.place] = chosen.get(value, "")
        for place, draft in enumerate(one.steps):
            own[place] = own[place] or f"t{len(steps)}"
            steps.append(Step(own[place], draft.op_type, _named(draft.operands, own, names), draft.attributes))
        names.update((value, own[ref.place]) for value, ref in one.results.items())
    return Expression(tuple(steps))


def _named(given: tuple[Given, ...], own: list[str], names: dict[Value, str]) -> tuple[str | Number, ...]:
    """Operands of a step by their names."""
    return tuple(
        operand if isinstance(operand, Number) else own[operand.place] if isinstance(operand, Ref) else names[operand]
        for operand in given
    )
