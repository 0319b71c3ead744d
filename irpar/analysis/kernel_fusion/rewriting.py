"""Nodes that one kernel computes become one node, irpar.Fused, or ONNX's Attention."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from irpar.analysis.segments import is_segment, stretches
from irpar.ir import DOMAIN, Graph, Node, Strings, Value, captured_or_read, inherit
from irpar.ir.module import IRPAR_OPSET
from irpar.ops.memory_copies import node_place

from .added_rows import AddedRows, added_rows
from .alike import Alike, join_alike
from .attention import attentions
from .attention_form import VERSION, Attention
from .attention_training import Forward, Gradient, trainings
from .attention_writing import Make, written
from .copies import copy_cheap_steps
from .cross_entropy import LossForward, LossGradient, ScoresProduct, losses
from .groups import Group, Grouping, Stretch
from .joined_heads import JoinedHeads, joined_heads
from .order import turned
from .products import Product, join_products
from .shared_products import SharedProduct, share_products
from .turned_products import TurnedProduct, turned_products

Rewritten = Forward | Gradient | LossForward | LossGradient | ScoresProduct | TurnedProduct | JoinedHeads | AddedRows
Unit = Group | Attention | Rewritten | Product | SharedProduct | Alike


def fuse(graph: Graph) -> int:
    """Let nodes irpar.Fused and Attention take the place of what they compute; returns how many nodes that was.

    Results keep their values, so that names, shardings and what reads them stay. Nodes of a stretch between
    communication are put in an order in which each group can stand together; others stay where they are, and so does
    what the host computes. An operator set before that of Attention stays without it.
    """
    order: list[Node] = []
    count = 0
    for nodes in stretches(graph):
        units: Sequence[Unit | Node] = nodes
        if is_segment(nodes) and node_place(nodes[0]) == "device":
            units, unread = _units(_stretch_of(nodes), VERSION)
            count += len(unread)
            writers = {unit: (_writer(unit), _origin(unit)) for unit in units if not isinstance(unit, Node)}
            for node in unread:
                node.erase_forced()
        for unit in units:
            if isinstance(unit, Node):
                order.append(unit)
            else:
                count += len(unit.members)
                order += _replaced(unit, graph, *writers[unit])
    if count:
        graph.reorder(order)
    return count


def _stretch_of(nodes: list[Node]) -> Stretch:
    inside = set(nodes)
    made = (value for node in nodes for value in node.results)
    return Stretch(nodes, {value for value in made if any(user not in inside for user in value.users)})


def stand_ins(stretch: Stretch) -> list[Node]:
    """The nodes of a stretch for who runs them: one for each group in place of its nodes, which stay in their graph."""
    captured = {value for node in stretch.nodes if node.holds_graphs for value in captured_or_read(node)}
    stretch = replace(stretch, kept=stretch.kept | captured)
    units, _ = _units(stretch)
    return [node for unit in units for node in ([unit] if isinstance(unit, Node) else _stand_in(unit))]


def _units(stretch: Stretch, version: int = 0) -> tuple[list[Unit | Node], set[Node]]:
    """Groups, attentions and other nodes so that each follows what it must, else in the order of their last nodes.

    And nodes that nothing reads any more. Attentions are those of nodes of at least one version of the operator set;
    those with gradients are for who runs the nodes.
    """
    plain, unread = attentions(stretch.nodes, stretch.kept, version)
    found: list[Attention | Rewritten] = [*plain]
    if not version:
        for search in (trainings, losses, turned_products, joined_heads, added_rows):
            found += search(stretch.nodes, stretch.kept, {node for one in found for node in one.members})
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
    grouping = Grouping(stretch)
    groups = grouping.groups()
    copy_cheap_steps(groups)
    idle = stretch.drop_unread(groups)
    groups = [group for group in groups if group.last not in idle]
    stretch = replace(stretch, nodes=[node for node in stretch.nodes if node not in idle])
    joined = join_products(grouping, groups)
    units: list[Unit] = [*found, *(joined if version else join_alike(grouping, share_products(grouping, joined)))]
    return _in_order(stretch, units), unread | idle


def _in_order(stretch: Stretch, units: Sequence[Unit]) -> list[Unit | Node]:
    unit_of: dict[Node, Unit | Node] = {node: node for node in stretch.nodes}
    for one in units:
        unit_of.update(dict.fromkeys(one.members, one))
    ranks: dict[Unit | Node, int] = {}
    followers: dict[Unit | Node, dict[Unit | Node, None]] = {unit: {} for unit in unit_of.values()}
    waits: dict[Unit | Node, int] = dict.fromkeys(followers, 0)
    follows = {node: [*stretch.before[node]] for node in stretch.nodes}
    for one in units:
        # What is computed again is read although no node of the unit reads it.
        follows[one.last] += (value.node for value in _read_again(one) if value.node in stretch.places)
    for node in stretch.nodes:
        unit = unit_of[node]
        ranks[unit] = stretch.places[node]
        for before in map(unit_of.__getitem__, follows[node]):
            if before is not unit and unit not in followers[before]:
                followers[before][unit] = None
                waits[unit] += 1
    by_rank = {rank: unit for unit, rank in ranks.items()}
    ready = [ranks[unit] for unit, count in waits.items() if not count]
    heapify(ready)
    found: list[Unit | Node] = []
    while ready:
        unit = by_rank[heappop(ready)]
        found.append(unit)
        for follower in followers[unit]:
            waits[follower] -= 1
            if not waits[follower]:
                heappush(ready, ranks[follower])
    assert len(found) == len(waits)
    return found


def _read_again(unit: Unit) -> Iterable[Value]:
    """What groups of a unit read, whoever of their nodes does so."""
    if isinstance(unit, Product):
        return [value for value in (unit.bias, unit.residual) if value is not None]
    groups = unit.groups if isinstance(unit, Alike) else [unit] if isinstance(unit, Group) else []
    return (value for group in groups for value in group.operands())


def _replaced(unit: Unit, graph: Graph, write: Callable[[Make], list[Node]], origin: Node) -> list[Node]:
    """The nodes of a unit, in the graph in place of its members."""
    for node in reversed(unit.members):
        node.erase_forced()
    made = write(Node)
    for node in made:
        inherit(graph.append(node), origin)
    return made


def _stand_in(unit: Unit) -> list[Node]:
    """What one who runs a stretch has in place of a unit's members."""
    made = _writer(unit)(Node.stand_in)
    for node in made:
        inherit(node, _origin(unit))
    return made


def _writer(unit: Unit) -> Callable[[Make], list[Node]]:
    """What writes the nodes of a unit, whatever becomes of its members meanwhile."""
    if isinstance(unit, Attention):
        return lambda make: written(unit, make)
    if isinstance(unit, Rewritten):
        return unit.written
    if isinstance(unit, Product | SharedProduct | Alike):
        return unit.writer()
    return _fused(unit)


def _fused(group: Group) -> Callable[[Make], list[Node]]:
    """What writes the kernel of a group, and behind it a Transpose that the group has before it; see `order`."""
    operands, results = group.operands(), group.results()
    attributes = {"expression": Strings(group.expression().lines)}
    found = turned(group)
    if found is None:
        return lambda make: [make("Fused", operands, attributes, domain=DOMAIN, version=IRPAR_OPSET, results=results)]
    read = [found.source if value is found.operand else value for value in operands]
    shape, version = found.source.shape, found.version

    def write(make: Make) -> list[Node]:
        made = [Value(f"{value.name}_in_order", value.tensor_type.with_shape(shape)) for value in results]
        views = (
            make("Transpose", [own], {"perm": found.order}, version=version, results=[value])
            for own, value in zip(made, results, strict=True)
        )
        return [make("Fused", read, attributes, domain=DOMAIN, version=IRPAR_OPSET, results=made), *views]

    return write


def _origin(unit: Unit) -> Node:
    """The node of a unit that errors name: the last one that the imported model has."""
    return next((node for node in reversed(unit.members) if node.source), unit.last)
