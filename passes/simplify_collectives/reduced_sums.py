"""Sums of values that were each reduced: their parts are added, and the sum is reduced once.

a = AllReduce(p)    b = AllReduce(q)    y = Add(a, b)        becomes    s = Add(p, q)    y = AllReduce(s)
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from irpar.analysis.explanation.gone_values import follow_instead, move_conflicts
from irpar.analysis.explanation.joined_reasons import few_texts
from irpar.analysis.explanation.origins import cutting_names
from irpar.analysis.explanation.redistribution_log import RedistributionLog
from irpar.analysis.redistribution.held import is_held
from irpar.ir import DOMAIN, Builder, Decision, Module, Node, Value
from irpar.ops.collectives import collective_axes, sent_bytes
from irpar.ops.effects import is_collective, is_compute
from irpar.ops.facts import int_attribute
from irpar.ops.linear import carriers
from irpar.sharding import Axis, Mesh, Reduction

MOST_NODES = 16
"""Of one sum."""


@dataclass(frozen=True)
class Way:
    """How values are reduced: all of one sum must be so alike."""

    axes: tuple[Axis, ...]
    reduce: Reduction


@dataclass
class _Sum:
    """A node whose operands are reduced before it, directly or before what only carries parts on.

    Attributes:
        node: it.
        leaves: the all_reduces.
        inner: the nodes between, each before its reader.
    """

    node: Node
    leaves: list[Node]
    inner: list[Node]

    @property
    def key(self) -> tuple[int, ...]:
        """The ids of what is reduced, which are the same in all programs."""
        return tuple(int_attribute(leaf, "id") for leaf in self.leaves)


def reduce_sums_once(module: Module) -> int:
    """Rewrite the sums of a module, in all programs alike, where that sends no more; returns how many there were."""
    mesh = next(iter(module.meshes.values()), None)
    if mesh is None:
        return 0
    total = 0
    while True:
        found = [_sums(graph.walk(), mesh, partial(is_held, module)) for graph in module.graphs]
        agreed = set.intersection(*(set(sums) for sums in found))
        if not agreed:
            return total
        names: dict[str, str] = {}
        reduced: dict[str, str] = {}
        for sums in found:
            for key in sums:
                if key in agreed:
                    gone, result = _rewrite(module, sums[key], mesh)
                    names.update(gone)
                    reduced.update(dict.fromkeys(gone, result.name))
        move_conflicts(module, reduced)
        follow_instead(module, names)
        total += len(agreed)


def _sums(nodes: Iterable[Node], mesh: Mesh, is_held: Callable[[Value], bool]) -> dict[tuple[int, ...], _Sum]:
    """The sums that are worth it, none with a node of another, and none of what readers must meet reduced."""
    found: dict[tuple[int, ...], _Sum] = {}
    taken: set[Node] = set()
    for leaf in nodes:
        made = _sum(leaf) if leaf.identity == (DOMAIN, "AllReduce") else None
        if made is None or any(is_held(value) for node in (*made.leaves, *made.inner) for value in node.results):
            continue
        if taken.isdisjoint((*made.leaves, *made.inner)) and _is_cheaper(made, mesh):
            taken.update((*made.leaves, *made.inner, made.node))
            found[made.key] = made
    return found


def _sum(leaf: Node) -> _Sum | None:
    """The first sum that a reduced value goes into with others that are reduced alike."""
    way, value = way_of(leaf), leaf.result
    for _ in range(MOST_NODES):
        if len(value.users) != 1:
            return None
        (node,) = value.users
        if not is_compute(node) or len(node.results) != 1:
            return None
        made = _Sum(node, [], [])
        for places in carriers(node, way.reduce):
            if len(places) > 1 and all(_collect(node, place, way, made) for place in places):
                return made if len(made.leaves) > 1 else None
        if not any(node.operands[places[0]] is value for places in carriers(node, way.reduce) if len(places) == 1):
            return None
        value = node.results[0]
    return None


def way_of(node: Node) -> Way:
    """How an AllReduce does it."""
    return Way(collective_axes(node), node.attributes["reduce"])  # type: ignore[arg-type]


def _collect(node: Node, place: int, way: Way, made: _Sum) -> bool:
    """Add what gives an operand to a sum; False where that is not reduced in the same way, or others read it."""
    value = node.operands[place]
    maker = None if value is None else value.node
    if value is None or maker is None or maker.graph is not node.graph or set(value.users) != {node}:
        return False
    if is_collective(maker):
        if maker.op_type != "AllReduce" or way_of(maker) != way:
            return False
        if maker not in made.leaves:
            made.leaves.append(maker)
        return True
    if len(made.inner) > MOST_NODES or len(maker.results) != 1:
        return False
    for places in carriers(maker, way.reduce):
        leaves, inner = list(made.leaves), list(made.inner)
        if all(_collect(maker, other, way, made) for other in places):
            made.inner.append(maker)
            return True
        made.leaves, made.inner = leaves, inner
    return False


def _is_cheaper(made: _Sum, mesh: Mesh) -> bool:
    """Whether one reduction of the sum sends no more than those of what is added."""
    first = made.leaves[0]
    value, operand = made.node.results[0], first.inputs[0]
    if not value.is_static or not operand.is_static or not all(node.results[0].is_static for node in made.inner):
        return False
    sent = sum(sent_bytes(leaf, mesh) for leaf in made.leaves)
    whole = sent_bytes(first, mesh)
    size = math.prod(operand.shape) * operand.dtype.bits
    return bool(whole * math.prod(value.shape) * value.dtype.bits <= sent * size)


def _rewrite(module: Module, made: _Sum, mesh: Mesh) -> tuple[dict[str, str], Value]:
    """Add the parts, and reduce the sum.

    Returns:
        For each value that is gone the one that is read instead, and the reduced sum.
    """
    names: dict[str, str] = {}
    first = made.leaves[0]
    way = way_of(first)
    for leaf in made.leaves:
        result, parts = leaf.result, leaf.inputs[0]
        result.replace_uses(parts)
        names[result.name] = parts.name
    for node in (*made.inner, made.node):
        _make_partial(module, node, way, mesh)
    value = made.node.results[0]
    uses = value.uses
    assert made.node.graph is not None
    builder = Builder(made.node.graph, module.opsets, before=made.node.next, like=made.node)
    attributes = {"axes": [str(axis) for axis in way.axes], "reduce": way.reduce, "id": first.attributes["id"]}
    result = builder.op("AllReduce", [value], attributes, type=value.type, domain=DOMAIN, name=value.name)
    if value.sharding is not None:
        result.sharding = value.sharding.reduced(way.axes)
        result.global_shape = value.global_shape
    result.source = value.source
    assert result.node is not None
    result.node.doc = few_texts(leaf.doc for leaf in made.leaves)
    value.replace_uses(result, only=uses)
    if value.name in module.annotated:
        _keep_name(module, value, result)
        return _leaves_gone(made, names), result
    cut = cutting_names(result.sharding)
    for axis in cut:
        module.decide(result.name, Decision(f"AllReduce of %{value.name}", value.name, (axis,)))
    if not cut:
        module.decide(result.name, Decision(f"AllReduce of %{value.name}", value.name))
    return _leaves_gone(made, names), result


def _leaves_gone(made: _Sum, names: dict[str, str]) -> dict[str, str]:
    for leaf in made.leaves:
        leaf.erase()
    return names


def _keep_name(module: Module, parts: Value, result: Value) -> None:
    """Let an annotated sum that is reduced have its name and the reasons for how it lies; its parts get others."""
    log = RedistributionLog(module)
    log.held(parts, result)
    log.finish()


def _make_partial(module: Module, node: Node, way: Way, mesh: Mesh) -> None:
    """Let the result of a node be parts; what local programs compute on their way says of no sharding."""
    value = node.results[0]
    if value.sharding is None:
        return
    partial_inputs = (
        other for other in node.inputs if other.sharding is not None and set(way.axes) & set(other.sharding.partial)
    )
    parts = next(partial_inputs, node.inputs[0])
    value.sharding = value.sharding.with_partial((*value.sharding.partial, *way.axes), way.reduce)
    for axis in dict.fromkeys(axis.name for axis in way.axes if mesh.axes[axis.name] > 1):
        why = f"{node.title} adds parts: their sum is reduced once"
        module.decide(value.name, Decision(why, parts.name, (axis,)))
