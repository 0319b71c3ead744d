"""Nodes that one kernel computes become one node, irpar.Fused."""

from heapq import heapify, heappop, heappush

from irpar.analysis.segments import is_segment, stretches
from irpar.ir import DOMAIN, Graph, Node, Strings, Value, captured_or_read, inherit
from irpar.ir.module import IRPAR_OPSET
from irpar.kernels.expression import Expression, Number, Step

from .groups import Group, groups_of
from .lowering import Given, Ref


def fuse(graph: Graph) -> int:
    """Let nodes irpar.Fused take the place of what they compute; returns how many nodes that was.

    Results keep their values, so that names, shardings and what reads them stay. Nodes of a stretch between
    communication are put in an order in which each group can stand together; others stay where they are.
    """
    order: list[Node] = []
    count = 0
    for stretch in stretches(graph):
        groups = groups_of(stretch) if is_segment(stretch) else []
        if not groups:
            order += stretch
            continue
        count += sum(len(group.members) for group in groups)
        units = _ordered(stretch, groups)
        order += [_fused(unit, graph) if isinstance(unit, Group) else unit for unit in units]
    if count:
        graph.reorder(order)
    return count


def _ordered(nodes: list[Node], groups: list[Group]) -> list[Group | Node]:
    """Groups and other nodes so that each follows what it reads, else in the order of their last nodes."""
    places = {node: place for place, node in enumerate(nodes)}
    unit_of: dict[Node, Group | Node] = {node: node for node in nodes}
    for group in groups:
        unit_of.update(dict.fromkeys(group.members, group))
    ranks: dict[Group | Node, int] = {}
    followers: dict[Group | Node, dict[Group | Node, None]] = {unit: {} for unit in unit_of.values()}
    waits: dict[Group | Node, int] = dict.fromkeys(followers, 0)
    for node in nodes:
        unit = unit_of[node]
        ranks[unit] = places[node]
        for value in captured_or_read(node):
            before = unit_of.get(value.node) if value.node is not None else None
            if before is not None and before is not unit and unit not in followers[before]:
                followers[before][unit] = None
                waits[unit] += 1
    by_rank = {rank: unit for unit, rank in ranks.items()}
    ready = [ranks[unit] for unit, count in waits.items() if not count]
    heapify(ready)
    found: list[Group | Node] = []
    while ready:
        unit = by_rank[heappop(ready)]
        found.append(unit)
        for follower in followers[unit]:
            waits[follower] -= 1
            if not waits[follower]:
                heappush(ready, ranks[follower])
    assert len(found) == len(waits)
    return found


def _fused(group: Group, graph: Graph) -> Node:
    """The node of a group, whose nodes are gone."""
    operands, results = group.operands(), group.results()
    expression = _expression(group, operands, results)
    last = next(reversed(group.members))
    for node in reversed(group.members):
        node.erase_forced()
    made = Node("Fused", operands, {"expression": Strings(expression.lines)}, domain=DOMAIN, version=IRPAR_OPSET, results=results)
    inherit(made, last)
    return graph.append(made)


def _expression(group: Group, operands: tuple[Value, ...], results: tuple[Value, ...]) -> Expression:
    """What a group computes: operands and results by their places, other steps by their numbers."""
    names: dict[Value, str] = {value: f"x{place}" for place, value in enumerate(operands)}
    chosen = {value: f"y{place}" for place, value in enumerate(results)}
    steps: list[Step] = []
    for one in group.members.values():
        targets: dict[int, str] = {}
        for value, ref in zip(one.node.results, one.results, strict=True):
            if ref is not None and value in chosen:
                targets[ref.place] = chosen[value]

        def name(given: Given, targets: dict[int, str] = targets) -> str | Number:
            if isinstance(given, Number):
                return given
            return targets[given.place] if isinstance(given, Ref) else names[given]

        for place, draft in enumerate(one.steps):
            read = tuple(map(name, draft.operands))
            targets.setdefault(place, f"t{len(steps)}")
            steps.append(Step(targets[place], draft.op_type, read, draft.attributes))
        for value, ref in zip(one.node.results, one.results, strict=True):
            if ref is not None:
                names[value] = targets[ref.place]
    return Expression(tuple(steps))
