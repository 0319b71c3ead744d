"""Ways to run nodes, chosen again where values are moved, with all readers of each value in view.

v : f32[8, 64@x]    w = Relu(v)    h = Cast(w) to f16    needed whole     a gather before Cast sends twice what one
                                                                          behind it sends, wherever Relu has it
Completion and placement look at one node among its values; here whole runs of nodes are tried, so that a redistribution
stands where the tensor is smallest: before a broadcast, behind a slice or a cast to a narrower type, and is shared.
"""

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from irpar.analysis.cost.model import Cost, CostModel
from irpar.analysis.cost.network import Network
from irpar.ir import Node, Value
from irpar.ir.repeats import only_with_all_layers
from irpar.ops.effects import is_compute
from irpar.ops.linear import carriers
from irpar.sharding import Axis, Sharding

from . import situation
from .flow import Flow
from .fused_moves import cost_beside_others
from .moves import as_result, captured_whole, cost_of_value, leaving
from .placement import Axes, Placement
from .rule_view import RuleView

Change = dict[Node, Placement]

MOST_WAYS = 48
"""Of one node, by each of its rules."""
MOST_LIES = 4
"""Of one value, as it is sharded and is needed."""
MOST_STARTS = 4
"""Ways of a node from which longer changes are tried."""
MOST_NODES = 12
"""Of one change."""
MOST_TRIED = 20_000
"""Changes, to which each node adds a few."""
LOOK_AROUND = 2
"""Steps around a node up to which others must be alike for what was found of one to hold for the other."""
MOST_BACK = 3
"""Nodes between a value and what it is made of."""
MOST_READERS = 64
"""Of a value, up to which each of them is looked at where nodes are compared."""
LIGHT_FLOPS = 10
"""For each element that a node reads or gives: up to there, to compute it on more devices is less than to send it."""


def refine(
    flow: Flow,
    placements: Mapping[Node, Placement],
    network: Network,
    pinned: Collection[str],
    begin: Collection[Node] | None = None,
) -> dict[Node, Placement]:
    """The placements of nodes, changed where that sends less.

    Args:
        flow: every tensor has a sharding, nothing is redistributed yet.
        placements: how each node runs.
        network: what communication costs.
        pinned: names of values that are brought to how they were annotated, whoever reads them.
        begin: nodes to begin with, and to go on from where one changes; None: wherever values are moved.
    """
    return Refinement(flow, placements, network, pinned).run(begin)


@dataclass(frozen=True)
class _Around:
    """A value of a node that is about to change.

    Attributes:
        value: it.
        cost: what its moves cost before.
        places: which of the operands and results of the node it is.
        known: what its moves cost, by how the node needs and gives it.
    """

    value: Value
    cost: Cost | None
    places: tuple[int, ...]
    known: dict[tuple[Sharding | None, ...], Cost | None]


def beside(node: Node, among: Collection[Node]) -> Iterator[Node]:
    """The node, and those of some nodes that make or read its values."""
    yield node
    for value in (*node.inputs, *node.results):
        if value.node is not None and value.node in among:
            yield value.node
        yield from (user for user in value.users if user in among)


class Refinement:
    """One run.

    Args:
        flow, placements, network, pinned: as for `refine`.

    Attributes:
        is_together: what waits for nothing is priced as one of many that are sent at once (`cost_beside_others`).
        are_slices_free: blocks that devices cut out of what they hold only tell equals apart.
        needs: per value and (node, operand number) the sharding that is read; graph results under the return node.
        given: per value how its node gives it, or how it is sharded.
        free: free results that completion has several times over, or would have moved. Others are needed as they are
            completed: to have one otherwise may save a little, but moves what it is made of, be it a matrix of weights.
        moving: per value what its moves cost as nodes run now, where that was asked.
        hopeless: what nodes look like that nothing is better for.
        left, tried: how many more changes may be tried; how many were, with all layers for which the module has a few.
    """

    def __init__(
        self, flow: Flow, placements: Mapping[Node, Placement], network: Network, pinned: Collection[str]
    ) -> None:
        self.flow = flow
        self.network = network
        self.is_together = self.are_slices_free = False
        self.pinned = pinned
        self.placements = dict(placements)
        self.needs: dict[Value, dict[tuple[Node, int], Sharding]] = {}
        self.given: dict[Value, Sharding] = {}
        self.costs: dict[tuple[Node, Placement], Cost] = {}
        self.moving: dict[Value, Cost | None] = {}
        self.looks: dict[Hashable, int] = {}
        self.hopeless: set[int] = set()
        self.known: dict[tuple[Node | None, int], int] = {}
        self.seen: dict[Value, int] = {}
        self.are_moved: dict[Value, bool] = {}
        self.light: dict[RuleView, bool] = {}
        self.order = {node: place for place, node in enumerate(placements)}
        self.left = self.tried = 0
        for node, placement in placements.items():
            self._take(node, placement)
            for value, _ in captured_whole(flow, node):
                if value.sharding is not None:
                    whole = Sharding.replicated(flow.mesh, value.sharding.rank)
                    self.needs.setdefault(value, {})[node, -1] = whole
        for value in flow.values():
            if value.name in pinned and value.sharding is not None and value.node is not None:
                self.needs.setdefault(value, {})[value.node, -1] = value.sharding
        self.free: set[Value] = set()
        for index, value in enumerate(flow.results()):
            lies = value.sharding
            if lies is not None:
                self.needs.setdefault(value, {})[flow.graph.return_node, index] = lies
                is_repeated = value in flow.free_results and flow.mesh.group_size(lies.all_axes) < flow.mesh.size
                if is_repeated or leaving(flow, placements, value, lies) != lies:
                    self.free.add(value)

    def run(self, begin: Collection[Node] | None = None) -> dict[Node, Placement]:
        """Change placements, from some nodes on (`refine`); returns all of them."""
        self.left, self.tried = MOST_TRIED + 4 * len(self.placements), 0
        moved = [value for value in self.needs if value.is_static and self._is_moved(value)]
        ends = (node for value in moved for node in (value.node, *value.users))
        able = (node for node in ends if node in self.placements and self._may_change(node))
        waiting = dict.fromkeys(node for node in able if begin is None or node in begin)
        while waiting and self.left > 0:
            node = next(iter(waiting))
            del waiting[node]
            if not self._is_moved_around(node):
                continue
            around = self._look(node, LOOK_AROUND)
            left = self.left
            change = None if around in self.hopeless else self._better(node)
            self.tried += (left - self.left) * (1 if change is None else self._layers_of(node))
            if change is None:
                self.hopeless.add(around)
            else:
                self.known.clear()
            for changed, placement in (change or {}).items():
                self._take(changed, placement)
                waiting.update(
                    dict.fromkeys(other for other in beside(changed, self.placements) if self._may_change(other))
                )
        self._check_tried()
        return dict(self.placements)

    def _check_tried(self) -> None:
        """With a few layers for all, as many changes must be left as all of them might try.

        Raises:
            IrparError: they are not.
        """
        if self.flow.repeats:
            nodes = sum(map(self._layers_of, self.placements))
            if self.tried > MOST_TRIED + 4 * nodes:
                raise only_with_all_layers("how many changes are tried")

    def _layers_of(self, node: Node) -> int:
        """How many layers have such a node."""
        return max(map(self.flow.layers_of, node.results), default=1) if self.flow.repeats else 1

    def run_together(self) -> dict[Node, Placement]:
        """Go on, with what waits for nothing priced as one of many; returns all placements."""
        self.is_together = True
        self._forget()
        return self.run()

    def run_with_free_slices(self) -> dict[Node, Placement]:
        """Go on where devices cut blocks out of what they hold, as if that cost nothing; returns all placements."""
        cut = [value for value in self.needs if value.is_static and not value.is_constant and self._is_cut(value)]
        ends = {node for value in cut for node in (value.node, *value.users) if node is not None}
        if ends:
            self.are_slices_free = True
            self._forget()
            self.run(ends)
        return dict(self.placements)

    def _is_cut(self, value: Value) -> bool:
        """Whether a device needs a smaller block of a value than it holds."""
        lies, parts = self._lies(value), self.flow.mesh.group_size
        if lies is None or lies.partial:
            return False
        wanted = (needed for needed in self._needed(value, lies) if needed is not lies)
        return any(parts(needed.all_axes) > parts(lies.all_axes) for needed in wanted)

    def _forget(self) -> None:
        """What moves cost is to be found anew."""
        self.moving.clear()
        self.hopeless.clear()

    def _take(self, node: Node, placement: Placement) -> None:
        self.placements[node] = placement
        for moved in (*node.inputs, *node.results):
            self.moving.pop(moved, None)
            self.seen.pop(moved, None)
            self.are_moved.pop(moved, None)
        for index, (value, needed) in enumerate(zip(node.operands, placement.operands, strict=True)):
            if value is not None and needed is not None:
                self.needs.setdefault(value, {})[node, index] = needed
        for value, given in zip(node.results, placement.results, strict=True):
            if given is not None:
                self.given[value] = given

    def _look(self, node: Node | None, steps: int) -> int:
        """A number for a node and those around it: equal for those that are alike and lie alike."""
        known = self.known.get((node, steps))
        if known is None:
            assert node is not None
            known = self.known[node, steps] = self.looks.setdefault(self._look_key(node, steps), len(self.looks))
        return known

    def _look_key(self, node: Node, steps: int) -> Hashable:
        if node.is_return or node.holds_graphs:
            return node.op_type  # It reads what thousands of others make, which says nothing about one of them.
        if steps:
            values = (*node.inputs, *node.results)
            near = (_beside(value) for value in values)
            beside = dict.fromkeys(other for others in near for other in others)
            looks = [self._look(other, steps - 1) for other in beside if other in self.placements]
            return self._look(node, 0), *looks
        view = self.flow.rule(node) if self._may_change(node) else None
        kind = node.op_type if view is None else view.rule, node.strategy
        values_look = tuple(self._look_of(value) for value in (*node.operands, *node.results))
        return kind, self.flow.usual_trips_of(node.graph), values_look

    def _look_of(self, value: Value | None) -> int | None:
        if value is None:
            return None
        known = self.seen.get(value)
        if known is None:
            needs = tuple(self.needs.get(value, {}).values())
            said = value.name in self.pinned, value in self.free
            look = value.type, value.is_constant, self._lies(value), needs, said
            known = self.seen[value] = self.looks.setdefault(look, len(self.looks))
        return known

    # -- what may change ------------------------------------------------------------------------------------------

    def _may_change(self, node: Node) -> bool:
        return is_compute(node) and not self.placements[node].is_boundary and self.flow.rule(node) is not None

    def _is_moved_around(self, node: Node) -> bool:
        values = (*node.inputs, *node.results)
        return any(value.is_static and self._is_moved(value) for value in values)

    def _is_moved(self, value: Value) -> bool:
        known = self.are_moved.get(value)
        if known is None:  # Once for all readers of a value: all layers may read it.
            lies = self._lies(value)
            known = lies is not None and any(needed != lies for needed in self._needed(value, lies))
            self.are_moved[value] = known
        return known

    def _needed(self, value: Value, lies: Sharding) -> Iterable[Sharding]:
        """How a value is needed that lies so."""
        return (self._need(value, lies, node, needed) for (node, _), needed in self.needs.get(value, {}).items())

    def _need(self, value: Value, lies: Sharding, reader: Node, needed: Sharding) -> Sharding:
        """How a reader needs a value that lies so; the end of the graph takes a free result in more than one way."""
        is_free = reader is self.flow.graph.return_node and value in self.free
        return as_result(lies, needed) if is_free else needed

    def _lies(self, value: Value) -> Sharding | None:
        return self.given.get(value, value.sharding)

    # -- what is better -------------------------------------------------------------------------------------------

    def _better(self, node: Node) -> Change | None:
        """A change of a node, or of a run of nodes that has it in it, that costs less."""
        tried: list[tuple[Cost, Change]] = []
        before = self._moving_around(node, {})
        for placement in self._ways(node, {}):
            cost = self._difference(before, {}, node, placement)
            if cost is not None:
                tried.append((cost, {node: placement}))
        tried.sort(key=lambda pair: pair[0])
        if tried and tried[0][0] < (0, 0):
            return tried[0][1]
        for start in tried[:MOST_STARTS]:
            for is_forward in (True, False):
                change = self._extended(*start, is_forward=is_forward)
                if change is not None:
                    return change
        return self._handed_on(node)

    def _handed_on(self, node: Node) -> Change | None:
        """A change of all that reads a sum: it stays in parts, as long as that costs less in the end."""
        for value in node.results:
            found = self._carried(value, (0, 0), {}) if self._is_partial(value) and self._is_moved(value) else None
            if found is not None and found[0] < (0, 0):
                return found[1]
        return next(self._handed_to_wholes(node), None)

    def _handed_to_wholes(self, node: Node) -> Iterator[Change]:
        """Such changes where a reader has another operand, cut over the same axis, that is made of one value alone.

        dy : partial(sum: tp)   x : [8@tp, 64]   y = LayerNorm(x) is needed in full   dscale = ReduceSum(Mul(dy, xhat))
        With x gathered instead of y, all that is made of x is there in full, and only vectors are reduced, not dy.
        """
        for value in node.results:
            if not self._is_partial(value) or not self._is_moved(value):
                continue
            lies = self._lies(value)
            assert lies is not None
            others = (other for reader in value.users for other in reader.inputs if other is not value)
            for other, axis in itertools.product(dict.fromkeys(others), lies.partial):
                # One that is whole, or a sum in parts too, is nothing that keeps its reader from taking parts.
                for source in self._sources(other, axis) if self._is_sharded_by(other, axis) else ():
                    found = self._in_full(source, axis)
                    found = None if found is None else self._carried(value, *found)
                    if found is not None and found[0] < (0, 0):
                        yield found[1]

    def _sources(self, value: Value, axis: Axis) -> list[Value]:
        """What a value that is cut by an axis is made of, a few nodes back, and is cut by it too; static values."""
        found: list[Value] = []
        waiting = [value]
        for _ in range(MOST_BACK):
            nodes = dict.fromkeys(each.node for each in waiting if each.node in self.placements)
            waiting = [
                each for node in nodes if node is not None for each in node.inputs if self._is_cut_by(each, axis)
            ]
            found += waiting
        return list(dict.fromkeys(found))

    def _is_cut_by(self, value: Value, axis: Axis) -> bool:
        lies = self._lies(value)
        return value.is_static and lies is not None and axis in lies.all_axes

    def _is_sharded_by(self, value: Value, axis: Axis) -> bool:
        lies = self._lies(value)
        return lies is not None and any(axis in part for part in lies.axes)

    def _in_full(self, source: Value, axis: Axis) -> tuple[Cost, Change] | None:
        """The change of all light nodes that a value alone goes into, which take it in full along an axis."""
        cost: Cost = 0, 0
        change: Change = {}
        for node in self._made_of(source, axis):
            able = [
                found
                for found in self._with(node, cost, change)
                if not any(lies is not None and axis in lies.all_axes for lies in found[1][node].results)
            ]
            if able:
                cost, change = min(able, key=lambda found: found[0])
        return (cost, change) if change else None

    def _made_of(self, source: Value, axis: Axis) -> list[Node]:
        """Nodes that read a value, or what they make of it, and nothing else that is cut by an axis; in order.

        They are light, or give what is needed in full.
        """
        found: dict[Node, None] = {}
        waiting, made = [source], {source}
        while waiting and len(found) < MOST_NODES:
            for node in dict.fromkeys(waiting.pop().users):
                if node in found or not self._may_join(node, {}):
                    continue
                view = self.flow.rule(node)
                assert view is not None
                is_able = self._is_light(view) or any(
                    value.is_static and self._is_moved(value) for value in node.results
                )
                if is_able and not any(self._is_cut_by(value, axis) for value in node.inputs if value not in made):
                    found[node] = None
                    made.update(node.results)
                    waiting += node.results
        return sorted(found, key=lambda node: self.order[node])

    def _carried(self, value: Value, cost: Cost, change: Change) -> tuple[Cost, Change] | None:
        """The change with all readers of a value taking it in parts; None where one cannot.

        dy : partial(sum: tp)    ReduceSum(dy), ReduceSum(Mul(dy, x))    two vectors are reduced, not dy
        """
        for reader in dict.fromkeys(value.users):
            if len(change) >= MOST_NODES or not self._may_join(reader, change):
                return None
            able = [found for found in self._with(reader, cost, change) if found[1][reader].carried.axes]
            if not able:
                return None
            cost, change = min(able, key=lambda found: found[0])
            for result in reader.results:
                further = self._carried(result, cost, change)
                if further is not None and further[0] < cost:
                    cost, change = further
        return cost, change

    def _extended(self, cost: Cost, change: Change, *, is_forward: bool) -> Change | None:
        """The change carried on to what reads the result, or to what gives an operand, until it costs less."""
        (node,) = change
        while len(change) < MOST_NODES:
            best: tuple[Cost, Change] | None = None
            for other in self._following(node, change) if is_forward else self._leading(node, change):
                longer = itertools.chain(
                    self._with(other, cost, change), self._with_sum(other, cost, change) if is_forward else ()
                )
                for found in longer:
                    if best is None or found[0] < best[0]:
                        best, node = found, other
            if best is None:
                return None
            cost, change = best
            if cost < (0, 0):
                return change
        return None

    def _with(self, node: Node, cost: Cost, change: Change) -> Iterator[tuple[Cost, Change]]:
        """The change with a node more, in each of its ways, and what it then costs."""
        before = self._moving_around(node, change)
        for placement in self._ways(node, change):
            more = self._difference(before, change, node, placement)
            if more is not None:
                yield (cost[0] + more[0], cost[1] + more[1]), {**change, node: placement}

    def _with_sum(self, node: Node, cost: Cost, change: Change) -> Iterator[tuple[Cost, Change]]:
        """The change with a node that adds what it gives, and what gives the other term: both are left in parts.

        dq : partial(sum: tp)    dk : partial(sum: tp)    Add(dq, dk) : one reduction instead of two
        """
        terms = {v: change[v.node].results[v.index] for v in node.inputs if v.node in change}
        partial = next((lies for lies in terms.values() if lies is not None and lies.partial), None)
        if partial is None or not self._may_carry_with_another(node, partial, terms):
            return
        for maker in self._makers(node, change):
            for spent, both in self._with(maker, cost, change):
                if partial in both[maker].results:
                    yield from (found for found in self._with(node, spent, both) if found[1][node].carried.axes)

    def _may_carry_with_another(self, node: Node, partial: Sharding, terms: Collection[Value]) -> bool:
        """Whether a node leaves what it adds in parts once one more operand is: not with two of a hundred."""
        groups = ([node.operands[place] for place in places] for places in carriers(node, partial.reduce))
        for group in (group for group in groups if len(group) > 1):
            makers = (v.node for v in group if v is not None and v not in terms and not self._has_parts(v, partial))
            first = next(makers, node)  # Itself: nothing lacks parts.
            if first is not None and all(maker is first for maker in makers):
                return True
        return False

    def _has_parts(self, value: Value, like: Sharding) -> bool:
        lies = self._lies(value)
        return lies is not None and lies.reduce == like.reduce and set(lies.partial).issuperset(like.partial)

    def _following(self, node: Node, change: Change) -> list[Node]:
        """The only reader of the only result of a node."""
        users = node.results[0].users if len(node.results) == 1 else ()
        return [user for user in users if len(users) == 1 and self._may_join(user, change)]

    def _leading(self, node: Node, change: Change) -> list[Node]:
        """The nodes whose only result only this node reads, otherwise than they give it; not those that give sums."""
        return [maker for maker in self._makers(node, change) if not any(map(self._is_partial, maker.results))]

    def _makers(self, node: Node, change: Change) -> list[Node]:
        """The nodes whose result only this node reads."""
        makers = (value.node for value in node.inputs if len(value.users) == 1)
        return [maker for maker in makers if maker is not None and self._may_join(maker, change)]

    def _is_partial(self, value: Value) -> bool:
        lies = self._lies(value)
        return lies is not None and bool(lies.partial)

    def _may_join(self, node: Node, change: Change) -> bool:
        return node not in change and node in self.placements and self._may_change(node)

    # -- ways -----------------------------------------------------------------------------------------------------

    def _ways(self, node: Node, change: Change) -> Iterator[Placement]:
        """Other ways to run a node, which cut much work no less where computation has no price."""
        view = self.flow.rule(node)
        assert view is not None
        now = self.placements[node]
        least = (
            now.ways(self.flow.mesh) if not CostModel(self.network).has_computation and not self._is_light(view) else 1
        )
        seen = {now}
        needs, given = self._around(change)
        lies = [self._of(value, needs, given) for value in view.values]
        # What reads sums may take blocks of them. What gives them stays as it is, but for gradients: those of weights
        # are large, and what they are made of may be small.
        count = len(view.values) if node.phase == "backward" else view.operand_count
        for place, value in enumerate(view.values[:count]):
            if value is not None and value.is_static:
                sums = self._read(value, given) if place < view.operand_count else self._lies(value)
                if sums is not None and sums.partial:
                    lies[place] += [further.axes for further in sums.cut_further(sums.partial, value.shape)]
        joined = tuple(map(tuple, lies))
        given_lies = [self._read(value, given) if value else None for value in view.values]
        in_runs = bool(now.carried.axes)  # Where parts go on by themselves, all that is behind them was in view.
        for way in view.ways:
            options = itertools.product(way.joined(joined), way.carriable(given_lies, in_runs=in_runs))
            placements = (way.placement(factors, carried) for factors, carried in options)
            others = (found for found in placements if found and found not in seen)
            others = (found for found in others if situation.runs_as_said(node, found))
            enough = others if least <= 1 else (found for found in others if found.ways(self.flow.mesh) >= least)
            for placement in itertools.islice(enough, MOST_WAYS):
                seen.add(placement)
                yield placement

    def _is_light(self, view: RuleView) -> bool:
        known = self.light.get(view)
        if known is None:
            known = self.light[view] = _is_light(view)
        return known

    def _read(self, value: Value, given: Mapping[Value, Sharding]) -> Sharding | None:
        """How readers meet a value that is given in these ways."""
        return value.sharding if self._is_held(value) else given.get(value, self._lies(value))

    def _around(self, change: Change) -> tuple[dict[Value, list[Sharding]], dict[Value, Sharding]]:
        """What the nodes of a change need and give."""
        needs: dict[Value, list[Sharding]] = {}
        given: dict[Value, Sharding] = {}
        for node, placement in change.items():
            for value, needed in zip(node.operands, placement.operands, strict=True):
                if value is not None and needed is not None:
                    needs.setdefault(value, []).append(needed)
            given.update((v, lies) for v, lies in zip(node.results, placement.results, strict=True) if lies is not None)
        return needs, given

    def _of(
        self, value: Value | None, needs: Mapping[Value, list[Sharding]], given: Mapping[Value, Sharding]
    ) -> list[tuple[Axes, ...]]:
        """How a value lies or is needed; what a change says of it first."""
        if value is None or not value.is_static or value.sharding is None:
            return []
        lies = given.get(value, self._lies(value))
        found = [*needs.get(value, ()), *([lies] if lies else []), *self.needs.get(value, {}).values(), value.sharding]
        return list(dict.fromkeys(sharding.axes for sharding in found))[:MOST_LIES]

    # -- costs ----------------------------------------------------------------------------------------------------

    def _difference(self, before: list["_Around"], change: Change, node: Node, placement: Placement) -> Cost | None:
        """What a change costs more with one node more; None where it cannot be.

        Args:
            before: what the values of that node cost without it; no other value is moved otherwise.
            change: without it.
            node: that one.
            placement: how it runs.
        """
        self.left -= 1
        if None in placement.results:
            return None
        lies = (*placement.operands, *placement.results)
        ran, runs = self._running(node, self.placements[node]), self._running(node, placement)
        total, launches = runs[0] - ran[0], runs[1] - ran[1]
        more: Change | None = None
        for around in before:
            if around.cost is None:
                return None
            key = tuple([lies[place] for place in around.places])
            if key in around.known:
                found = around.known[key]
            else:
                more = more or {**change, node: placement}
                found = around.known[key] = self._moved(around.value, more)
            if found is None:
                return None
            total += found[0] - around.cost[0]
            launches += found[1] - around.cost[1]
        return total, launches

    def _moving_around(self, node: Node, change: Change) -> list["_Around"]:
        """What all moves of the values of a node cost."""
        places: dict[Value, list[int]] = {}
        for place, value in enumerate((*node.operands, *node.results)):
            if value is not None and not self._is_still(value):
                places.setdefault(value, []).append(place)
        return [_Around(value, self._moving(value, change), tuple(found), {}) for value, found in places.items()]

    def _is_still(self, value: Value) -> bool:
        """Whether a value is one number that all devices have, and that many nodes read: it is never moved for one."""
        if value.use_count <= MOST_READERS or not value.is_static or value.shape:
            return False
        lies = self._lies(value)
        return lies is not None and not lies.partial

    def _moving(self, value: Value, change: Change) -> Cost | None:
        """What all moves of a value cost."""
        if change.keys().isdisjoint(self._around_value(value)):
            if value not in self.moving:
                self.moving[value] = self._moved(value, {})
            return self.moving[value]
        return self._moved(value, change)

    def _around_value(self, value: Value) -> Iterator[Node]:
        if value.node is not None:
            yield value.node
        yield from (node for node, _ in self.needs.get(value, ()))

    def _moved(self, value: Value, change: Change) -> Cost | None:
        lies = self._lies(value)
        if lies is None or not value.is_static:
            return None
        if value.node in change:
            lies = change[value.node].results[value.index]
            assert lies is not None
        if value.is_constant and situation.costs_nothing(value, lies, lambda value: value.name in self.pinned):
            return 0, 0
        first = value.sharding if self._is_held(value) else None
        targets = set()
        for (node, index), needed in self.needs.get(value, {}).items():
            needed = self._need(value, lies, node, needed)
            if node in change and index >= 0:
                changed = change[node].operands[index]
                assert changed is not None
                needed = changed
            if needed.partial and not set(needed.partial) <= set((first or lies).partial):
                return None
            if needed is not lies or first is not None:
                targets.add(needed)
        if not targets and first is None:
            return 0, 0
        if self.is_together and value.node is None:
            amount, launches = cost_beside_others(
                value, lies, targets, self.network, are_slices_free=self.are_slices_free
            )
        else:
            amount, launches = cost_of_value(
                value, lies, first, targets, self.network, are_slices_free=self.are_slices_free
            )
        times = self.flow.usual_trips(value)
        return amount * times, launches * times

    def _is_held(self, value: Value) -> bool:
        """Whether a value is brought to how it was annotated before anybody reads it."""
        return value.name in self.pinned and value.node is not None

    def _running(self, node: Node, placement: Placement) -> Cost:
        known = self.costs.get((node, placement))
        if known is None:
            times = self.flow.usual_trips_of(node.graph)
            spent, launches = situation.running_cost(node, self.flow.rule(node), placement, self.network)
            known = self.costs[node, placement] = spent * times, launches * times
        return known


def _beside(value: Value) -> Iterator[Node | None]:
    """What makes and reads a value; of many readers none tells how a node differs from others."""
    yield value.node
    yield from value.users if value.use_count <= MOST_READERS else ()


def _is_light(view: RuleView) -> bool:
    """Whether a node does little beside reading and writing its elements, and sums none of them.

    In a backward pass, sums no products: rows of a gradient are added to a table that each device writes anyway.
    """
    work = view.flops
    elements = sum(math.prod(value.shape) for value in view.values if value is not None)
    is_backward = view.node.phase == "backward"
    return not work or (work <= LIGHT_FLOPS * elements and not (view.sums_products if is_backward else _sums(view)))


def _sums(view: RuleView) -> bool:
    given = {factor for dims in view.rule.results for parts in dims for factor in parts}
    return not given.issuperset(range(len(view.rule.sizes)))
