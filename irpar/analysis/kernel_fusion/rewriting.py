"""Nodes that one kernel computes become one node, irpar.Fused."""

from heapq import heapify, heappop, heappush

from irpar.analysis.segments import is_segment, stretches
from irpar.ir import DOMAIN, Graph, Node, Strings, Value, inherit
from irpar.ir.module import IRPAR_OPSET
from irpar.kernels.expression import Expression, Number, Step

from .groups import Group, Stretch, groups_of
from .lowering import Given, Ref

Unit = Group | Node


def fuse(graph: Graph) -> int:
    """Let nodes irpar.Fused take the place of what they compute; returns how many nodes that was.

    Results keep their values, so that names, shardings and what reads them stay. Nodes of a stretch between
    communication are put in an order in which each group can stand together; others stay where they are.
    """
    order: list[Node] = []
    count = 0
    for nodes in stretches(graph):
        units = _units(_stretch_of(nodes)) if is_segment(nodes) else nodes
        for unit in units:
            if isinstance(unit, Group):
                count += len(unit.members)
                order.append(_replaced(unit, graph))
            else:
                order.append(unit)
    if count:
        graph.reorder(order)
    return count


def _stretch_of(nodes: list[Node]) -> Stretch:
    inside = set(nodes)
    made = (value for node in nodes for value in node.results)
    return Stretch(nodes, {value for value in made if any(user not in inside for user in value.users)})


def stand_ins(stretch: Stretch) -> list[Node]:
    """The nodes of a stretch for who runs them: one for each group in place of its nodes, which stay in their graph."""
    return [_stand_in(unit) if isinstance(unit, Group) else unit for unit in _units(stretch)]


def _units(stretch: Stretch) -> list[Unit]:
    """Groups and other nodes so that each follows what it must, else in the order of their last nodes."""
    unit_of: dict[Node, Unit] = {node: node for node in stretch.nodes}
    for group in groups_of(stretch):
        unit_of.update(dict.fromkeys(group.members, group))
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


def _replaced(group: Group, graph: Graph) -> Node:
    """The node of a group, in the graph in place of its nodes."""
    operands, results = group.operands(), group.results()
    attributes = {"expression": Strings(_expression(group, operands, results).lines)}
    origin = _origin(group)
    for node in reversed(group.members):
        node.erase_forced()
    made = Node("Fused", operands, attributes, domain=DOMAIN, version=IRPAR_OPSET, results=results)
    inherit(made, origin)
    return graph.append(made)


def _stand_in(group: Group) -> Node:
    operands, results = group.operands(), group.results()
    attributes = {"expression": Strings(_expression(group, operands, results).lines)}
    made = Node.stand_in("Fused", operands, attributes, results, domain=DOMAIN, version=IRPAR_OPSET)
    inherit(made, _origin(group))
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
