"""What completion leaves open, chosen to send least: alternatives for values around conflicts, and the best of them.

x : [8, 64@tp, 32] annotated, w : [32, 128@tp] annotated      h = MatMul(x, w) cannot be both [8, 64@tp, 128] and
                                                              [8, 64, 128@tp]; either way something is moved
Propagation takes the first that comes. Here both are tried, for h and for all that follows from it, and the sum of all
moves decides (compare Alpa's intra-operator pass, Zheng et al., OSDI 2022, section 4).
"""

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from irpar.analysis import redistribution
from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.placement import NOTHING, Axes, Carried, FactorAxes, Placement
from irpar.analysis.completion.rule_view import RuleView
from irpar.analysis.completion.situation import Situation, costs_nothing
from irpar.analysis.cost.model import IMPOSSIBLE, CostModel, Price
from irpar.analysis.cost.network import BYTES, Network
from irpar.ir import Node, Value
from irpar.ops import Kind, traits
from irpar.ops.effects import is_compute
from irpar.ops.linear import carriers
from irpar.sharding import Axis, Reduction, Sharding, are_disjoint

from .choice_memory import AlikeNodes, Followed, Offers, alike_nodes, offers_of
from .elimination import Elimination

MOST_STATES = 6
"""Alternatives that one value may have."""
MOST_COMBINATIONS = 256
"""Of the alternatives of the values of one node."""
MOST_PRICED = 20_000
"""Combinations of all nodes together, to which each node adds a few."""
_NEVER = math.inf
_AS_IT_WAS = np.array([0.0] + [1e-9] * (MOST_STATES - 1))
"""What tells equals apart: the first alternative of a value is how it lies."""


@dataclass(frozen=True)
class Choice:
    """The best of the alternatives.

    Attributes:
        shardings: the values that should be sharded otherwise than propagation left them.
        before, after: what the alternatives cost (`CostModel.scalar`).
        values: how many values had alternatives.
    """

    shardings: Mapping[Value, Sharding]
    before: float
    after: float
    values: int


def improve(
    flow: Flow,
    pinned: Iterable[Value],
    network: Network = BYTES,
    kept: Mapping[Value, Sequence[Axes]] | None = None,
) -> tuple[Choice, ...]:
    """Look for a cheaper way for values that are not pinned.

    Args:
        flow: every tensor has a sharding. What passes the boundary of a body stays as it is.
        pinned: values that stay as they are.
        network: what communication costs, and computation, if it knows devices.
        kept: values that keep these axes of their dims, and may only get others beside them.

    Returns:
        The best of the alternatives; then, if there are such, the best where more results may stay in parts: those of
        sums over a dim that is sharded in an alternative only, such as the inner dim of experts that are annotated
        along experts.
    """
    chooser = Chooser(flow, set(pinned), network, kept or {})
    first, further = chooser.run(), chooser.run_further()
    return (first,) if further is None else (first, further)


class Chooser:
    """One run.

    Args:
        flow, pinned, network, kept: as for `improve`.

    Attributes:
        states: per value its alternatives, the first as it is.
        free: per view which of its values cost nothing to bring anywhere.
        standing: per value the views of the nodes that make and read it, and the places at which it stands there.
        offered: per value the alternatives that were considered already, by their ids.
        followed: per view what the node offers its values where one has an alternative.
    """

    def __init__(self, flow: Flow, pinned: set[Value], network: Network, kept: Mapping[Value, Sequence[Axes]]) -> None:
        self.network = network
        self.cost = CostModel(network)
        self.flow = flow
        self.mesh = flow.mesh
        self.views: dict[Node, RuleView] = {}
        for node in flow.nodes:
            if node not in flow.ties and not node.is_return:
                self.views.update((node, view) for view in flow.views(node))
        self.boundary = {value for node, ties in flow.ties.items() for value in node.results} | {
            value for ties in (*flow.ties.values(), flow.states) for tie in ties for value in tie.inputs
        }
        self.pinned = pinned
        self.kept = kept
        self.states: dict[Value, list[Sharding]] = {}
        self.standing: dict[Value, list[tuple[RuleView, tuple[int, ...]]]] = {}
        self.waiting: deque[tuple[RuleView, tuple[int, ...], Value, Sharding]] = deque()
        self.outputs = {value for graph in flow.trips for value in graph.outputs}
        self.kinds: dict[Node, AlikeNodes] = {}
        self.movable: dict[Value, bool] = {}
        self.free: dict[RuleView, tuple[bool, ...]] = {}
        self.offered: defaultdict[Value, dict[int, Sharding]] = defaultdict(dict)
        self.carried_on: dict[tuple[Value, Reduction], bool] = {}
        self.less: dict[tuple[Value, Reduction], bool] = {}
        self.followed: dict[RuleView, Followed] = {}
        self.work = 1.0
        self.parts: set[Value] = set()

    def run(self) -> Choice:
        self._find_parts()
        self._begin()
        self._follow()
        return self._best()

    def run_further(self) -> Choice | None:
        """Once more, with results in parts of sums that are cut by an alternative only; None if there are no such."""
        if not self._find_more_parts():
            return None
        for value, states in list(self.states.items()):
            self.waiting.extend((view, at, value, state) for state in states[1:] for view, at in self._standing(value))
        self._follow()
        return self._best()

    def _best(self) -> Choice:
        """The best of the alternatives that there are, which stay as they are."""
        found = self.states
        self.states = {value: list(states) for value, states in found.items()}
        for node in self.flow.nodes:
            self._bound(node)
        self._bound_all()
        variables = [value for value, states in self.states.items() if len(states) > 1]
        best = self._solve(variables) if variables else Choice({}, 0, 0, 0)
        self.states = found
        return best

    def _begin(self) -> None:
        """Suggest ways to run nodes, from which alternatives of other values follow."""
        for node, view in self.views.items():
            if self._is_torn(node, view):
                self._suggest(view, offers_of(view, self._situation(view, self._lies(view)).placements(view)))

    def _follow(self) -> None:
        """Suggest what follows from alternatives that are new."""
        while self.waiting:
            view, places, value, state = self.waiting.popleft()
            self._suggest(view, self._followed(view, places, value, state))

    # -- how values lie -------------------------------------------------------------------------------------------

    def _free(self, view: RuleView) -> tuple[bool, ...]:
        """Which values of a node cost nothing to bring anywhere."""
        found = self.free.get(view)
        if found is None:
            is_pinned = self.pinned.__contains__
            lies = ((value, None if value is None else value.sharding) for value in view.values)
            found = self.free[view] = tuple([costs_nothing(value, lie, is_pinned) for value, lie in lies])
        return found

    def _lies(self, view: RuleView, instead: Mapping[Value, Sharding] | None = None) -> list[Sharding | None]:
        pairs = zip(view.values, self._free(view), strict=True)
        if not instead:
            return [None if value is None or is_free else value.sharding for value, is_free in pairs]
        return [None if value is None or is_free else instead.get(value, value.sharding) for value, is_free in pairs]

    def _may_change(self, value: Value) -> bool:
        known = self.movable.get(value)
        if known is None:
            known = self.movable[value] = self._is_movable(value)
        return known

    def _is_movable(self, value: Value) -> bool:
        if value in self.pinned or value in self.boundary or value.is_constant or value.sharding is None:
            return False
        nodes = value.users if value.node is None else (value.node, *value.users)
        return all(is_compute(node) or node.is_return for node in nodes)

    def _find_parts(self) -> None:
        """Collect the values that could be partial: results of cut sums, and what carries them on."""
        for node, view in self.views.items():
            wanted = {
                factor
                for tensor, lie in enumerate(self._lies(view)[: view.operand_count])
                if lie is not None
                for factor in view.project(tensor, lie.axes)
            }
            if any(view.rule.kinds[factor] is Kind.REDUCE for factor in wanted):
                self._add_parts(node)
            else:
                self._carry_parts(node, view)
        self._find_less()

    def _find_more_parts(self) -> bool:
        """Add the results of sums that are cut where operands have an alternative; whether there are such."""
        known = len(self.parts)
        for node, view in self.views.items():
            if self._may_cut_sum(view):
                self._add_parts(node)
            elif len(self.parts) > known:
                self._carry_parts(node, view)
        if len(self.parts) == known:
            return False
        self.carried_on.clear()
        self.less.clear()
        self._find_less()
        return True

    def _may_cut_sum(self, view: RuleView) -> bool:
        """Whether an alternative of an operand cuts a dim that the node sums over."""
        return any(
            state.axes[dim]
            for factor, kind in enumerate(view.rule.kinds)
            if kind is Kind.REDUCE
            for tensor, dim, _ in view.rule.places[factor]
            if tensor < view.operand_count and (value := view.values[tensor]) is not None
            for state in self.states.get(value, ())[1:]
        )

    def _carry_parts(self, node: Node, view: RuleView) -> None:
        if any(self._could_be_parts(node, operands) for operands in carriers(node, view.rule.reduce)):
            self._add_parts(node)

    def _add_parts(self, node: Node) -> None:
        self.parts.update(value for value in node.results if self._may_change(value))

    def _find_less(self) -> None:
        """Tell of all parts whether less is made of them: readers first, so that long chains are not gone along."""
        reductions = {view.rule.reduce for node, view in self.views.items() if not self.parts.isdisjoint(node.results)}
        for node in reversed(self.views):
            for value, reduce in itertools.product(node.results, reductions):
                self._becomes_less(value, reduce)

    def _could_be_parts(self, node: Node, operands: Iterable[int]) -> bool:
        """Whether operands could be partial together, what is added to others at any time."""
        are_parts = {index: node.operands[index] in self.parts for index in operands}
        addends = self.views[node].addends
        return any(are_parts.values()) and all(part or addends[index] for index, part in are_parts.items())

    # -- alternatives ---------------------------------------------------------------------------------------------

    def _is_torn(self, node: Node, view: RuleView) -> bool:
        """Whether the values of a node want to shard it in ways that exclude each other, or parts could stay parts."""
        lies = self._lies(view)
        wanted: dict[int, Axes] = {}
        for tensor, lie in enumerate(lies):
            if lie is None:
                continue
            for factor, axes in view.project(tensor, lie.axes).items():
                if wanted.setdefault(factor, axes) != axes:
                    return True
        flat = [axis for axes in wanted.values() for axis in axes]
        if not are_disjoint(self.mesh, flat) or self._must_move(view, lies):
            return True
        reduced = view.partial_axes([wanted.get(factor, ()) for factor in range(len(view.rule.sizes))])
        return bool(reduced) and any(self._is_carried_on(value, view.rule.reduce) for value in node.results)

    @staticmethod
    def _must_move(view: RuleView, lies: Sequence[Sharding | None]) -> bool:
        """Whether a node needs a sharded dim whole, sums over it or moves it, and may have another sharded instead."""
        kinds = view.rule.kinds
        said = {before for before, _ in view.rule.moves if kinds[before] is Kind.PERMUTE}
        return any(
            (lie := lies[tensor]) is not None and bool(lie.axes[dim])
            for source in dict.fromkeys(before for before, _ in view.moves)
            if source in said or view.needs_whole(source) or kinds[source] is Kind.REDUCE
            for tensor, dim, _ in view.rule.places[source]
        )

    def _is_carried_on(self, value: Value, reduce: Reduction) -> bool:
        """Whether a reader of a value takes parts of it, and lays them out anew or makes less of them in the end."""
        known = self.carried_on.get((value, reduce))
        if known is None:
            takers = self._takers(value, reduce)
            known = any(
                traits(node).moves_elements or self._is_less(node, operands, reduce) for node, operands in takers
            )
            self.carried_on[value, reduce] = known
        return known

    def _takers(self, value: Value, reduce: Reduction) -> Iterator[tuple[Node, tuple[int, ...]]]:
        """The readers that take parts of a value, with all operands that are in parts then."""
        if self._may_change(value) and value not in self.outputs and value in self.parts:
            for node, index in value.uses:
                for operands in carriers(node, reduce) if node in self.views else ():
                    if index in operands and self._could_be_parts(node, operands):
                        yield node, operands

    def _is_less(self, node: Node, operands: Sequence[int], reduce: Reduction) -> bool:
        """Whether a node adds several parts or makes less of them, or what follows does."""
        parts = [value for index in operands if (value := node.operands[index]) in self.parts]
        size = math.prod(parts[0].shape)
        return len(parts) > 1 or any(
            math.prod(value.shape) < size or self._becomes_less(value, reduce) for value in node.results
        )

    def _becomes_less(self, value: Value, reduce: Reduction) -> bool:
        known = self.less.get((value, reduce))
        if known is None:
            known = any(self._is_less(node, operands, reduce) for node, operands in self._takers(value, reduce))
            self.less[value, reduce] = known
        return known

    def _suggest(self, view: RuleView, offers: Offers) -> None:
        """Let the values of a node be sharded as ways to run it want them; said again it changes nothing."""
        values = view.values
        for place, state, is_part in offers:
            value = values[place]
            if value is None:
                continue
            known = self.offered[value]
            if id(state) in known or (is_part and not self._is_carried_on(value, state.reduce)):
                continue
            known[id(state)] = state
            self._add(value, state)

    def _add(self, value: Value, state: Sharding) -> None:
        if state.partial and value in self.outputs:
            return
        states = self.states.get(value)
        if states is None:
            if not self._may_change(value):
                return
            assert value.sharding is not None
            states = self.states[value] = [value.sharding]
        if state in states or len(states) == MOST_STATES or not self._keeps(value, state):
            return
        states.append(state)
        self.waiting.extend((view, places, value, state) for view, places in self._standing(value))

    def _standing(self, value: Value) -> list[tuple[RuleView, tuple[int, ...]]]:
        """Where a value stands in the views of the nodes that make and read it."""
        known = self.standing.get(value)
        if known is None:
            nodes = value.users if value.node is None else (value.node, *value.users)
            views = [self.views[node] for node in nodes if node in self.views]
            known = self.standing[value] = [
                (view, tuple([place for place, other in enumerate(view.values) if other is value])) for view in views
            ]
        return known

    def _keeps(self, value: Value, state: Sharding) -> bool:
        """Whether an alternative of a value leaves what is to be kept."""
        kept = self.kept.get(value, ())
        return all(axes[: len(old)] == old for axes, old in zip(state.axes, kept, strict=bool(kept)))

    def _followed(self, view: RuleView, places: tuple[int, ...], value: Value, state: Sharding) -> Offers:
        """What a node offers its values where one, at these places, has an alternative, the others lying as they do."""
        known = self.followed.get(view)
        if known is None:
            known = self.followed[view] = self._followed_alike(view)
        # What is carried on depends on the states that others have by then.
        beside = self._parts_beside(view, state) if state.partial and places[0] < view.operand_count else ()
        found = known.get((places, state, beside))
        if found is None:
            found = offers_of(view, self._ways_around(view, value, state, places))
            known[places, state, beside] = found
        return found

    def _parts_beside(self, view: RuleView, state: Sharding) -> tuple[bool, ...]:
        """Which operands of a node can be partial in the same way."""
        return tuple([self._may_be(value, state) for value in view.values[: view.operand_count]])

    def _followed_alike(self, view: RuleView) -> Followed:
        """What was found of nodes that are alike and lie alike."""
        lies = tuple(self._lies(view))
        pinned = tuple([value in self.pinned for value in view.values])
        return self._kind(view).followed.setdefault((lies, pinned), {})

    def _ways_around(self, view: RuleView, value: Value, state: Sharding, places: Iterable[int]) -> Iterator[Placement]:
        """The ways to run a node of which a value, which stands at some places, has an alternative."""
        lies = self._lies(view, {value: state})
        pinned = [lie if v in self.pinned else None for v, lie in zip(view.values, lies, strict=True)]
        for place in places:
            yield from self._ways_with(view, place, state, lies, pinned)

    def _ways_with(
        self,
        view: RuleView,
        tensor: int,
        state: Sharding,
        lies: Sequence[Sharding | None],
        pinned: Sequence[Sharding | None],
    ) -> Iterator[Placement]:
        for factors in dict.fromkeys(self._joined(view, tensor, state, others) for others in (lies, pinned)):
            for carried in self._carried(view, tensor, state):
                placement = view.placement(factors, carried)
                if placement is not None:
                    yield placement

    def _joined(self, view: RuleView, tensor: int, state: Sharding, lies: Sequence[Sharding | None]) -> FactorAxes:
        """Factor axes of one value, and of the others what fits beside them."""
        joined = self._kind(view).joined
        key = tensor, state, tuple(lies)
        if key not in joined:
            mine = view.project(tensor, state.axes)
            factors = [mine.get(factor, ()) for factor in range(len(view.rule.sizes))]
            taken: list[Axis] = [axis for axes in factors for axis in axes]
            for other, lie in enumerate(lies):
                for factor, axes in view.project(other, lie.axes).items() if lie is not None else ():
                    if not factors[factor] and are_disjoint(self.mesh, [*taken, *axes]):
                        factors[factor] = axes
                        taken.extend(axes)
            joined[key] = tuple(factors)
        return joined[key]

    def _carried(self, view: RuleView, tensor: int, state: Sharding) -> Iterator[Carried]:
        """The ways in which a partial operand stays partial, those beside it being so in one of their states."""
        yield NOTHING
        if not state.partial or tensor >= view.operand_count:
            return
        for operands in carriers(view.node, state.reduce):
            if tensor in operands and all(
                index == tensor or view.addends[index] or self._may_be(view.values[index], state) for index in operands
            ):
                yield Carried(operands, state.partial, state.reduce)

    def _may_be(self, value: Value | None, state: Sharding) -> bool:
        """Whether a value can be partial in the same way."""
        return value is not None and any(
            other.partial == state.partial and other.reduce == state.reduce for other in self.states.get(value, ())
        )

    def _bound(self, node: Node) -> None:
        """Leave the values of a node as they are as far as it would have too many combinations of states."""
        if node not in self.views:
            return  # It prices its values one by one.
        combinations = 1
        for value in dict.fromkeys((*node.inputs, *node.results)):
            count = len(self.states.get(value, ()))
            if count > 1:
                if combinations * count > MOST_COMBINATIONS:
                    del self.states[value][1:]
                else:
                    combinations *= count

    def _bound_all(self) -> None:
        """Keep fewer alternatives of each value where all nodes together would have too many combinations."""
        layers = {node: self._layers_of(view) for node, view in self.views.items()}
        most = MOST_PRICED + 10 * sum(layers.values())
        sizes = [(times, found) for node, times in layers.items() if (found := self._alternatives(node))]
        for count in range(MOST_STATES - 1, 0, -1):
            if sum(times * (math.prod(of_node) - 1) for times, of_node in sizes) <= most:
                return
            sizes = [(times, [min(size, count) for size in of_node]) for times, of_node in sizes]
            for states in self.states.values():
                del states[count:]

    def _alternatives(self, node: Node) -> list[int]:
        """How many states each value of a node has that has several."""
        values = dict.fromkeys((*node.inputs, *node.results))
        return [len(states) for value in values if (states := self.states.get(value)) is not None and len(states) > 1]

    # -- the best -------------------------------------------------------------------------------------------------

    def _solve(self, variables: Sequence[Value]) -> Choice:
        number = {value: index for index, value in enumerate(variables)}
        self.work = max(1.0, float(sum(view.flops * self._layers_of(view) for view in self.views.values())))
        problem = Elimination([len(self.states[value]) for value in variables])
        tables: list[tuple[list[int], np.ndarray]] = []
        for node in self.flow.nodes:
            for table in self._tables(node, number):
                tables.append(table)
        tables += [([number[value]], costs) for value in variables if (costs := self._brought(value)) is not None]
        for table in tables:
            problem.add(*table)
        for value in variables:
            # Among equals as it was.
            problem.add([number[value]], _AS_IT_WAS[: len(self.states[value])])
        start = [0] * len(variables)
        chosen = problem.solve(start)
        before, after = (
            sum(float(table[tuple(states[n] for n in scope)]) for scope, table in tables) for states in (start, chosen)
        )
        if after >= before:
            return Choice({}, before, before, len(variables))
        picked = {value: self.states[value][chosen[number[value]]] for value in variables}
        changed = {value: state for value, state in picked.items() if state != value.sharding}
        changed = {value: state for value, state in changed.items() if value not in self.pinned}
        return Choice(changed, before, after, len(variables))

    def _layers_of(self, view: RuleView) -> int:
        """How many layers have a node."""
        return self.flow.layers_of(view.node.results[0]) if self.flow.repeats else 1

    def _brought(self, value: Value) -> np.ndarray | None:
        """What it costs to bring a value to each of its alternatives, before any node reads it; None: nothing."""
        return None

    def _tables(self, node: Node, number: Mapping[Value, int]) -> Iterator[tuple[list[int], np.ndarray]]:
        """What a node costs in all states of its values."""
        values = list(dict.fromkeys(value for value in (*node.inputs, *node.results) if value in number))
        view = self.views.get(node)
        if view is None:
            for value in values:
                yield [number[value]], np.array([self._whole(node, value, state) for state in self.states[value]])
        elif values:
            lies = self._lies(view)
            places = tuple(
                values.index(value) if value is not None and value in number else -1 for value in view.values
            )
            tables = self._kind(view).tables
            key = self.work, places, tuple(lies), tuple(tuple(self.states[value]) for value in values)
            if key not in tables:
                tables[key] = self._table(view, values, lies)
            yield [number[value] for value in values], tables[key]

    def _table(self, view: RuleView, values: Sequence[Value], lies: Sequence[Sharding | None]) -> np.ndarray:
        """What a node costs in all states of some of its values."""
        costs = np.empty([len(self.states[value]) for value in values])
        least = -self._price(view, lies)[1] if view.flops else 0
        for indices in np.ndindex(*costs.shape):
            states = {value: self.states[value][index] for value, index in zip(values, indices, strict=True)}
            costs[indices] = self._cut(view, states, least)
        return costs

    def _whole(self, node: Node, value: Value, state: Sharding) -> float:
        """What one value costs at a node that needs its operands whole, or as they are sharded beyond a boundary."""
        if value.node is node:
            return _NEVER if state.partial else 0.0
        cost = 0.0
        for target in dict.fromkeys(self._needs(node, value)):
            if target is not None:
                sent = redistribution.price(state, target, value.shape, value.dtype.bits, self.network)
                cost += self.cost.scalar((sent[0], -1, int(state != target)), 0)
        return cost * self.flow.usual_trips(value)

    def _needs(self, node: Node, value: Value) -> list[Sharding | None]:
        """How a node without a rule needs a value, for each time that it reads it."""
        if node.is_return:
            return [self.flow.needed_at_end(node, index) for user, index in value.uses if user is node]
        if node in self.flow.ties:
            operands = self.flow.place(node, self.pinned.__contains__, self.network).operands
            return [needed for needed, operand in zip(operands, node.operands, strict=True) if operand is value]
        return [Sharding.replicated(self.mesh, len(value.shape))]

    def _cut(self, view: RuleView, states: Mapping[Value, Sharding], least: int) -> float:
        """What a node costs; where computation has no price, never sharded less than propagation would shard it."""
        price = self._price(view, self._lies(view, states))
        if price[0] >= IMPOSSIBLE[0] or (-price[1] < least and not self.cost.has_computation):
            return _NEVER
        return self.cost.scalar(price, view.flops / self.work)

    def _price(self, view: RuleView, lies: Sequence[Sharding | None]) -> Price:
        """What a node costs; nodes that are alike ask only once."""
        prices = self._kind(view).prices
        key = tuple(lies)
        if key not in prices:
            prices[key] = self._situation(view, lies).least()
        return prices[key]

    def _situation(self, view: RuleView, lies: Sequence[Sharding | None]) -> Situation:
        return Situation(view, lies, self._free(view), self.network, self.flow.times(view))

    def _kind(self, view: RuleView) -> AlikeNodes:
        """What is known of all nodes that cost the same where their values lie alike."""
        known = self.kinds.get(view.node)
        if known is None:
            free, times = self._free(view), self.flow.times(view)
            known = self.kinds[view.node] = view.of_kind(
                ("alike", self.network, free, times), lambda: alike_nodes(view, free, times, self.network)
            )
        return known
