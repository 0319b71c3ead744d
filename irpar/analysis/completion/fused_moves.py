"""What is left of the moves of a graph once fuse-communication has sent together what can be.

q, k, v = three MatMuls that read x     three AllReduces that wait for the same, so that one launch is enough
w1, w2 = weights that are gathered      they wait for nothing, wherever they are read: one launch for all of them

So the price of a collective depends on what else is sent. Of a whole graph `saved_together` says what is saved; where
one node is looked at, `cost_beside_others` says what a value costs beside others that are sent in any case.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from irpar.analysis.cost.model import Cost, CostModel, in_femtoseconds
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.together import Packed, Together, packed
from irpar.analysis.redistribution import Step, block_bytes, operand_bytes
from irpar.analysis.redistribution.routes import routes
from irpar.ir import Graph, Node, Value
from irpar.ops.collectives import FREE, KINDS
from irpar.ops.effects import is_compute
from irpar.sharding import Axis, Reduction, Sharding

from .flow import Flow
from .moves import captured, cost_of_slices, wanted_shardings
from .placement import Placement
from .situation import costs_nothing, running_cost


@dataclass(frozen=True)
class _Alike:
    """What collectives have in common that can be sent together."""

    graph: Graph | None
    kind: str
    axes: tuple[Axis, ...]
    reduce: Reduction | None
    dtype: str
    where: tuple[object, ...]
    level: int


_Sent = tuple[Packed, int]
"""A collective, and how many layers have it (`Flow.layers_of`)."""
_PRICED = ("all_reduce", "all_gather", "reduce_scatter")
"""Kinds of which several are priced as one."""


def saved_together(
    flow: Flow,
    placements: Mapping[Node, Placement],
    network: Network,
    annotated: Collection[str],
    wanted: Mapping[Value, set[Sharding]] | None = None,
) -> Cost:
    """Femtoseconds and launches that fuse-communication saves of `cost_of_placements`.

    Collectives that local programs send are left alone.

    Args:
        flow: every tensor has a sharding.
        placements: how each node runs.
        network: what communication costs.
        annotated: names of values that are brought to how they were annotated, whoever reads them.
        wanted: `wanted_shardings`, if it is known.
    """
    if not network.knows_seconds:
        return 0, 0
    seconds = launches = 0
    wanted = wanted or wanted_shardings(flow, placements)
    for alike, each in _Levels(flow, placements, network, annotated, wanted).sent.items():
        if len(each) < 2:
            continue
        together = Together(network, flow.mesh, alike.kind, alike.axes)
        times = flow.usual_trips_of(alike.graph)
        for count, some in _as_all_layers(each):
            saved, fewer = _saved(together, some)
            seconds += times * count * saved
            launches += times * count * fewer
    return seconds, launches


def _saved(together: Together, each: Sequence[Packed]) -> Cost:
    """What is saved where some collectives that could be sent at once are."""
    seconds = launches = 0
    for bucket in together.buckets(each):
        if len(bucket) < 2:
            continue
        held = Packed()
        for number in bucket:
            held = held.with_(each[number])
            seconds += in_femtoseconds(together.seconds(each[number]))
        seconds -= in_femtoseconds(together.seconds(held))
        launches += len(bucket) - 1
    return seconds, launches


def _as_all_layers(each: Sequence[_Sent]) -> Iterator[tuple[int, list[Packed]]]:
    """What could be sent at once with all layers for which a module has a few: how often, and what.

    Where the layers beside the one that stands for others have theirs on the same level, so have those. Else each layer
    is on a level of its own, of which one is that of what stands elsewhere.
    """
    every = [sent for sent, _ in each]
    counts = Counter(layers for _, layers in each if layers > 1)
    if len(every) - counts.total() < 2 * counts.total():
        for layers in counts:
            yield layers - 1, [sent for sent, its in each if its == layers]
        yield 1, every
    else:
        runs = itertools.groupby(each, key=itemgetter(1))
        yield 1, [sent for layers, run in runs for sent in [sent for sent, _ in run] * layers]


class _Levels:
    """The collectives of all moves by what they have in common, each graph by itself.

    A collective is on the level that says how many others follow one another up to it: those of one level wait for the
    same, or for less.

    Attributes:
        sent: in the order of the nodes that first need them, and how many layers have such a one.
    """

    def __init__(
        self,
        flow: Flow,
        placements: Mapping[Node, Placement],
        network: Network,
        annotated: Collection[str],
        wanted: Mapping[Value, set[Sharding]],
    ) -> None:
        self.flow = flow
        self.network = network
        self.annotated = annotated
        self.sent: dict[_Alike, list[_Sent]] = {}
        self.given = {
            value: lies
            for node, placement in placements.items()
            for value, lies in zip(node.results, placement.results, strict=True)
            if lies is not None
        }
        self.levels: dict[Value, int] = {}
        self.reached: dict[Value, dict[Sharding, int]] = {}
        self.wanted = wanted
        self.moved = {value for value, needed in self.wanted.items() if self._is_moved(value, needed)}
        for node, placement in placements.items():
            self._visit(node, placement)
        for value in flow.graph.outputs:
            self._reach(value, flow.graph.return_node)

    def _is_moved(self, value: Value, wanted: set[Sharding]) -> bool:
        """Whether anything is done to bring a value to its readers."""
        lies = value.sharding
        if lies is None or not value.is_static or costs_nothing(value, lies, self._is_annotated):
            return False
        given = self.given.get(value, lies)
        return any(needed != given for needed in wanted) or self._is_held(value)

    def _is_annotated(self, value: Value) -> bool:
        return value.name in self.annotated

    def _is_held(self, value: Value) -> bool:
        """Whether a value is brought from how its node gives it to how it is annotated."""
        return self._is_annotated(value) and self.given.get(value, value.sharding) != value.sharding

    def _visit(self, node: Node, placement: Placement) -> None:
        """Put the results of a node on a level, and the moves of what it reads."""
        level = 0
        for value, needed in zip(node.operands, placement.operands, strict=True):
            if value in self.moved or value in self.levels:
                assert value is not None
                level = max(level, self._level_at(node, value, needed))
        view = self.flow.rule(node)
        if view is None or node in self.flow.ties:
            for value, _ in captured(node):
                level = max(level, self._level_at(node, value, None))
            # Of what bodies send, 1 stands for all.
            level += node in self.flow.ties or not (node.is_return or is_compute(node))
        elif view.has_programs and not placement.is_boundary:
            level += running_cost(node, view, placement, self.network)[1]
        if level:
            self.levels.update(dict.fromkeys(node.results, level))

    def _level_at(self, node: Node, value: Value, needed: Sharding | None) -> int:
        """The level of a value as a node reads it."""
        reached = self._reach(value, node)
        if value.owner is not node.graph:
            return 0
        return self.levels.get(value, 0) + (reached.get(needed, 0) if needed is not None else 0)

    def _reach(self, value: Value, reader: Node) -> dict[Sharding, int]:
        """How many collectives lead to each sharding that the readers of a value need."""
        known = self.reached.get(value)
        if known is None:
            known = self.reached[value] = {}
            if value in self.moved:
                lies = value.sharding
                assert lies is not None
                given, wanted = self.given.get(value, lies), self.wanted[value]
                known[given] = 0
                if self._is_held(value):
                    self._follow(value, given, {lies}, reader)
                    self._follow(value, lies, wanted, reader)
                else:
                    self._follow(value, given, wanted, reader)
        return known

    def _follow(self, value: Value, start: Sharding, targets: set[Sharding], reader: Node) -> None:
        """Take the moves of a value from one sharding to others."""
        like = value.node or reader
        reached = self.reached[value]
        for before, step in routes(start, targets, value.shape, value.dtype.bits, self.network).edges:
            at = reached.get(before, 0)
            reached.setdefault(step.after, at + (step.op not in FREE))
            sent = _packed(value, before, step)
            if sent is not None:
                where = like.phase, like.stage, like.place
                reduce = before.reduce if before.partial else None
                level = self.levels.get(value, 0) + at
                alike = _Alike(value.owner, KINDS[step.op], step.axes, reduce, value.dtype.text, where, level)
                self.sent.setdefault(alike, []).append((sent, self.flow.layers_of(value)))


def _packed(value: Value, before: Sharding, step: Step) -> Packed | None:
    """A step on the way of a value, where it can be sent with others: its blocks are all alike."""
    if step.op in FREE or KINDS[step.op] not in _PRICED or 0 in value.shape:
        return None
    dim = step.dims[0] if step.dims else 0
    if step.dims:
        cut = before.axes[dim] if step.op == "AllGather" else step.after.axes[dim]
        if value.shape[dim] % before.mesh.group_size(cut):
            return None
    operand = operand_bytes(step, before, value.shape, value.dtype.bits)
    ends = {"AllGather": (None, dim), "ReduceScatter": (dim, None)}.get(step.op, (None, None))
    return packed(*ends, operand, block_bytes(step.after, value.shape, value.dtype.bits))


def cost_beside_others(
    value: Value, lies: Sharding, wanted: set[Sharding], network: Network, *, are_slices_free: bool = False
) -> Cost:
    """What all moves of a value cost beside others of their kind that are sent in any case.

    Args:
        value: with static shape, that waits for nothing: an input or a weight.
        lies: how it is sharded.
        wanted: how its readers need it.
        network: that knows seconds.
        are_slices_free: as for `cost_of_value`.
    """
    way = routes(lies, wanted, value.shape, value.dtype.bits, network)
    cost, launches = CostModel(network), 0
    total = cost_of_slices(value, way, are_free=are_slices_free)
    for before, step in way.edges:
        if step.op in FREE:
            continue
        kind = KINDS[step.op]
        sent = _packed(value, before, step)
        if sent is None:
            size = operand_bytes(step, before, value.shape, value.dtype.bits)
            total += cost.collective(kind, step.axes, size, lies.mesh)[0]
            launches += 1
        else:
            total += in_femtoseconds(Together(network, lies.mesh, kind, step.axes).seconds_more(sent))
    return total, launches
