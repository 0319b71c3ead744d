"""complete-sharding: from the annotated values to a sharding for every value."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from irpar.analysis.completion.flow import Flow, require_global
from irpar.analysis.completion.fused_refinement import refine_for_program
from irpar.analysis.completion.moves import cost_of_moves, cost_of_placements, placements_of
from irpar.analysis.completion.placement import Axes, FactorAxes, Placement
from irpar.analysis.completion.refinement import refine
from irpar.analysis.completion.rule_view import RuleView
from irpar.analysis.cost.model import Cost
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.types.symbols import require_static
from irpar.ir import UNKNOWN, Decision, Module, Node, Value, tensor_type
from irpar.ops import traits
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import Axis, IrparError, Sharding, are_disjoint

from .choice import improve
from .data_first import with_data_first
from .free_results import leading_operands, shares_of_results
from .lookups import shares_of_lookups
from .measures import Measured, measured
from .reasons import reasons
from .rounds import Rounds, passes_all_on
from .spreading import spread_rows

_WORTH_LAUNCHES = 0.8
"""Of what is sent and of what is computed: less than that is worth more collectives."""
_MANY_MORE = 1.4
"""Collectives of which no refinement makes fewer than there were."""


@dataclass(frozen=True)
class CompleteSharding(Pass):
    """Give every value a sharding, by carrying the axes of annotated values along the factor rules of the nodes.

    Before: a graph in global view with static types; some values annotated; the module has a mesh.
    After: every tensor value of the main graph, and of the bodies of If, Loop and Scan in it, has a closed sharding;
    annotated dims are as they were, open ones ("?") may have got more axes. What passes the boundary of a body lies
    alike on both sides as far as annotations allow; predicates and trip counts are whole. Running it again changes
    nothing. The numbers are the same whatever it decides: what does not fit is redistributed by insert-redistribution.

    Sweeps go forward and backward over the nodes whose values changed, until none does; every change adds axes, so the
    work is linear in nodes times mesh axes. Compare GSPMD, section 3.5 (Xu et al., 2021). There is a round for each
    priority of annotated dims; what one has decided stays (compare Shardy's propagation, OpenXLA, 2024). With
    `op-priorities`, each round goes through operators that pass all dims on before it goes through the others.

    With `strategy=cost` the values around conflicts are then chosen anew, a bounded amount of work for each node
    (`choice`), but never against what rounds before the last have decided; the choice is kept where the
    moves that would really be made cost less. Where weights or state are annotated over axes that data are sharded over
    too, all of this begins where data carry these axes first, if that costs less (`data_first`). With `share-results`
    each device keeps its share of sums that only free results of the graph are made of (`free_results`), and
    insert-redistribution sends nothing to bring a result to how it was completed: whoever wants it whole annotates it.
    """

    name = "complete-sharding"
    strategy: Literal["cost", "propagate"] = "cost"
    op_priorities: bool = False
    share_results: bool = True

    def flow_of(self, module: Module) -> Flow:
        """The flow of a module; who completes one graph again and again may know it already."""
        return Flow(module.graph, module.mesh, module.repeats)

    def run(self, module: Module) -> PassResult:
        """Complete the main graph and the bodies in it.

        Raises:
            UnboundSymbolError: a dim is still symbolic.
            IrparError: the module has no mesh, or is in local view already.
        """
        _require_types(module)
        flow = self.flow_of(module)
        completion = _Completion(module, flow, has_op_priorities=self.op_priorities)
        is_chosen = self.strategy == "cost"
        decided = completion.run(is_chosen=is_chosen, are_shared=is_chosen and self.share_results)
        return PassResult(bool(decided), statistics={"decided values": decided, "chosen values": completion.chosen})


def propagated(module: Module) -> dict[Value, Sharding]:
    """How the values of a module would lie by what annotations propagate to them; the module stays as it is.

    Raises:
        UnboundSymbolError: a dim is still symbolic.
        IrparError: the module has no mesh, or is in local view already.
    """
    _require_types(module)
    return _Completion(module, Flow(module.graph, module.mesh), has_op_priorities=False, is_trial=True).propagated()


def cost_of_completion(module: Module) -> Cost:
    """What a module would send once it is completed, as it is here, and its nodes run as is best.

    Raises:
        UnboundSymbolError: a dim is still symbolic.
        IrparError: the module has no mesh, or is in local view already.
    """
    _require_types(module)
    flow, network = Flow(module.graph, module.mesh, module.repeats), network_of(module.network)
    completion = _Completion(module, flow, has_op_priorities=False)
    completion.run(is_chosen=True, are_shared=True)
    placements = refine_for_program(flow, placements_of(flow, network), network, module.annotated)
    return cost_of_placements(flow, placements, network, completion.pinned.__contains__, module.annotated)


def _require_types(module: Module) -> None:
    """Refuse a module of which not all is known that completion reads.

    Raises:
        UnboundSymbolError: a dim is still symbolic.
        IrparError: it is in local view, or types are not known.
    """
    require_global(module, CompleteSharding.name)
    require_static(module)
    for node in module.graph:
        if not node.results or any(value.type is not UNKNOWN for value in node.results):
            continue
        strange = _unknown_before(node)
        if strange is node:
            continue
        if strange is not None:
            raise IrparError(
                f"irpar does not know the operator {strange.operator}, nor what type its results have, which "
                f"{node.title} and others need",
                where=f"node {strange.label}",
                do="give the model without it: as it was before a tool optimised it for one device "
                "(ONNX Runtime: graph_optimization_level BASIC, no NCHWc or NHWC)",
            )
        raise IrparError(
            f"the types of %{node.results[0].name} and others are not known yet",
            do="run infer-types (and fold-constants) before complete-sharding",
        )


def _unknown_before(node: Node) -> Node | None:
    """The nearest node up to one of unknown type of which nobody knows what types it gives; None: there is none."""
    waiting, seen = [node], {node}
    for each in waiting:
        if traits(each).infer is None:
            return each
        makers = [value.node for value in each.inputs if value.type is UNKNOWN and value.node is not None]
        waiting += [maker for maker in dict.fromkeys(makers) if maker not in seen]
        seen.update(makers)
    return None


class _Completion:
    """One run over one graph and the bodies in it.

    x : [8@dp, 64], w : [64, 256@tp], h and a free
    forward   MatMul gives h [8@dp, 256@tp], Relu gives a the same
    backward  nothing new
    """

    def __init__(
        self,
        module: Module,
        flow: Flow,
        *,
        has_op_priorities: bool,
        is_trial: bool = False,
        later: Mapping[Value, Sharding] | None = None,
        more: Mapping[Value, Sharding] | None = None,
    ) -> None:
        self.module = module
        self.is_trial = is_trial
        self.flow = flow
        self.mesh = flow.mesh
        self.pinned: set[Value] = set()
        self.open: dict[Value, list[bool]] = {}
        self.axes: dict[Value, tuple[Axes, ...]] = {}
        self.views: dict[Node, tuple[RuleView, ...]] = {}
        self.dirty: set[Node] = set()
        self.rounds = Rounds()
        self.has_op_priorities = has_op_priorities
        self.later = later or {}
        self.more = more or {}
        self.chosen = 0
        self.network = network_of(module.network)

    def run(self, *, is_chosen: bool, are_shared: bool) -> int:
        """Returns how many values were decided.

        `is_chosen`: the cheapest way is chosen where values conflict; `are_shared`: free results of sums are.
        """
        self.flow.free_results = {value for value in self.flow.results() if are_shared and value.sharding is None}
        self.module.free_results.update(value.name for value in self.flow.free_results)
        data_first = self._data_first() if is_chosen else {}
        free = self._start()
        _shard_so(self._propagated())
        if not (is_chosen and free and self._choose(data_first, self._shared_lookups())):
            self._settle_constants()
        if are_shared and free:
            self._share_results()
        self._lift_constants()
        return free

    def propagated(self) -> dict[Value, Sharding]:
        """How values would lie where no choice is made; none is told so."""
        self._start()
        return self._propagated()

    def _data_first(self) -> Mapping[Value, Sharding]:
        """How values would lie if the axes of data were carried along before weights and state bring the same axes.

        Empty where these do not, or priorities are annotated.
        """
        later = with_data_first(self.module, self.flow)
        if not later:
            return {}
        return self._tried(later=later)

    def _shared_lookups(self) -> Mapping[Value, Sharding]:
        """How values would lie if devices kept shares of what they look up in sharded tables; empty without such."""
        self._settle_constants()
        shares = shares_of_lookups(self.flow, self.pinned, self.network)
        if not shares:
            return {}
        now = {value: value.sharding for value in self.axes if value not in self.pinned}
        _shard_so(dict.fromkeys(now))
        found = self._tried(more=shares)
        _shard_so(now)
        return {value: lies for value, lies in found.items() if value not in self.pinned}

    def _tried(
        self, *, later: Mapping[Value, Sharding] | None = None, more: Mapping[Value, Sharding] | None = None
    ) -> dict[Value, Sharding]:
        """How values would lie with some annotations `later`, or with `more` of them."""
        trial = _Completion(
            self.module, self.flow, has_op_priorities=self.has_op_priorities, is_trial=True, later=later, more=more
        )
        return trial.propagated()

    def _propagated(self) -> dict[Value, Sharding]:
        """How values lie once axes are carried along."""
        for node in self.flow.nodes:
            self.views[node] = self.flow.views(node)
            ruled = {value for view in self.views[node] for value in view.values}
            for value in node.results:
                if value not in ruled:
                    self.open.pop(value, None)
        self._propagate()
        said = ((value, value.sharding, axes) for value, axes in self.axes.items())
        return {
            value: lies if lies is not None and lies.is_settled else Sharding.of_axes(self.mesh, axes)
            for value, lies, axes in said
        }

    def _propagate(self) -> None:
        """Carry axes along, round by round."""
        ruled = {node for node, views in self.views.items() if views}
        phases = [ruled]
        if self.has_op_priorities:
            phases.insert(0, {node for node in ruled if all(passes_all_on(view.rule) for view in self.views[node])})
        self.dirty = set(ruled)
        for priority in self.rounds:
            for value, dim, said in self.rounds.begin(priority):
                before = self.axes[value]
                self.axes[value] = (*before[:dim], said.axes, *before[dim + 1 :])
                if value in self.open:  # The results of a node without a rule get nothing.
                    self.open[value][dim] = said.is_open
                self.dirty.update(ruled.intersection(self.flow.neighbours(value)))
            for nodes in phases:
                self._sweep(nodes)
            if not self.rounds.is_final:
                every = (view for views in self.views.values() for view in views)
                self.rounds.end({view: self._merged(view) for view in every}, self.axes)

    def _sweep(self, nodes: Set[Node]) -> None:
        """Visit some nodes, forward and backward, until their values change no more."""
        # A holder is visited before its bodies and after them: what goes round in a loop arrives in one sweep.
        order = [node for each in self.flow.nodes if (node := self.flow.holder(each) or each) in nodes]
        forward = True
        while not self.dirty.isdisjoint(nodes):
            for node in order if forward else reversed(order):
                if node in self.dirty:
                    self.dirty.discard(node)
                    self._visit(node)
            forward = not forward

    def _choose(self, data_first: Mapping[Value, Sharding], shared: Mapping[Value, Sharding]) -> bool:
        """Let values be sharded so that least is sent; False where nothing is better than it is.

        Args:
            data_first: how they would lie in another way, to begin with where that sends less.
            shared: how they would lie in a third way, which is taken where in the end it sends less.
        """
        start, cost = self._cheaper_start(data_first)
        near = {**start, **self._improved_from(start)}
        spread = spread_rows(self.flow, self.pinned, self.network, self.rounds.kept).shardings
        if shared := self._cheaper_start(shared)[0]:
            shared = {**shared, **self._improved_from(shared)}
        if not near and not spread and not shared:
            return False
        before = {value: value.sharding for value in (*near, *spread, *shared, *self._free_constants())}
        chosen: Mapping[Value, Sharding] = start
        # What was found prices every reader by itself.
        if near != start and (cost or self._cost_with({**before, **start})) > self._cost_with({**before, **near}):
            chosen = near
        if spread and self._refined_cost_with({**before, **chosen}) > self._refined_cost_with({**before, **spread}):
            chosen = spread
        if shared and self._is_better({**before, **shared}, {**before, **chosen}):
            chosen = shared
        self._shard({**before, **chosen})
        if not chosen:
            return False
        self.chosen = len(chosen)
        self._explain(chosen)
        return True

    def _explain(self, chosen: Mapping[Value, Sharding]) -> None:
        """Log what brought each axis to the values that were chosen to be sharded so."""
        for value in chosen:
            told = self.module.decisions.pop(value.name, ())
            why = [why for why in told if why.axes and self._is_kept(value, why.axes)]
            if why:
                self.module.decisions[value.name] = why
        ways = {
            (value, axis.name)
            for value, sharding in chosen.items()
            for axis in sharding.all_axes
            if not self._is_kept(value, [axis.name])
        }
        for value, reason in reasons(ways, self.flow, self.views, self.pinned):
            self.module.decide(value.name, reason)

    def _is_better(self, new: Mapping[Value, Sharding | None], old: Mapping[Value, Sharding | None]) -> bool:
        """Whether values that are sharded anew send less in the end, and devices hold no more of the constants.

        More collectives must send clearly less, and leave clearly less to compute.
        """
        was, then = self._measured_with(old), self._measured_with(new)
        if then.sent >= was.sent or then.held > was.held:
            return False
        is_less_work = then.work < _WORTH_LAUNCHES * was.work
        if then.sent[1] > _MANY_MORE * was.sent[1] and not is_less_work:
            return False  # To refine both takes as long as all the rest, and leaves more as well.
        (amount, launches), (before, fewer) = self._refined_cost_with(new), self._refined_cost_with(old)
        if launches <= fewer:
            return amount < before
        return is_less_work and amount < _WORTH_LAUNCHES * before

    def _measured_with(self, shardings: Mapping[Value, Sharding | None]) -> Measured:
        """What tells how values are sharded apart from other ways, with some values sharded so."""
        cost = self._cost_with(shardings)  # It leaves them sharded so.
        return measured(self.flow, self.network, cost)

    def _cheaper_start(self, other: Mapping[Value, Sharding]) -> tuple[dict[Value, Sharding], Cost | None]:
        """What is sharded otherwise in another way, where that costs less, else nothing; and the cost, if known."""
        changed = {value: lies for value, lies in other.items() if lies != value.sharding}
        if not changed:
            return {}, None
        now = {value: value.sharding for value in (*changed, *self._free_constants())}
        cost, with_changed = self._cost_with(now), self._cost_with({**now, **changed})
        _shard_so(now)
        return (changed, with_changed) if cost > with_changed else ({}, cost)

    def _improved_from(self, start: Mapping[Value, Sharding]) -> Mapping[Value, Sharding]:
        """What is better sharded otherwise where some values are sharded so; they stay as they are."""
        now = {value: value.sharding for value in start}
        _shard_so(start)
        best, *others = (each.shardings for each in improve(self.flow, self.pinned, self.network, self.rounds.kept))
        _shard_so(now)
        for other in others:
            if other != best and self._refines_better(start, other, best):
                best = other
        return best

    def _refines_better(self, start: Mapping[Value, Sharding], *two: Mapping[Value, Sharding]) -> bool:
        """Whether the first of two improvements of a start sends less in the end; values stay as they are."""
        now = {value: value.sharding for each in (start, *two) for value in each}
        now |= {value: value.sharding for value in self._free_constants()}
        new, old = (self._refined_cost_with({**now, **start, **each}) for each in two)
        _shard_so(now)
        return new < old

    def _cost_with(self, shardings: Mapping[Value, Sharding | None]) -> Cost:
        """What the moves would cost that insert-redistribution makes, with some values sharded so."""
        self._shard(shardings)
        return cost_of_moves(self.flow, self.network, self.pinned.__contains__, self.module.annotated)

    def _refined_cost_with(self, shardings: Mapping[Value, Sharding | None]) -> Cost:
        """The same where nodes run as is best with all readers of a value in view: what weights become is sent once."""
        self._shard(shardings)
        flow, annotated = self.flow, self.module.annotated
        placements = refine(flow, placements_of(flow, self.network), self.network, annotated)
        return cost_of_placements(flow, placements, self.network, self.pinned.__contains__, annotated)

    def _shard(self, shardings: Mapping[Value, Sharding | None]) -> None:
        """Let values be sharded so, and constants as that needs them."""
        _shard_so(shardings)
        self._settle_constants()

    def _share_results(self) -> None:
        """Let each device keep a share of the sums that nobody needs whole."""
        shares = shares_of_results(self.flow, self.pinned, self.network)
        _shard_so(shares)
        for value, operand in leading_operands(shares):
            assert value.node is not None
            names = tuple(dict.fromkeys(axis.name for axis in shares[value].all_axes))
            why = f"follows %{operand.name} through {value.node.title}, of which each device keeps a share"
            self.module.decide(value.name, Decision(why, operand.name, names))
        if shares:
            self.chosen += len(shares)
            self._settle_constants()

    def _is_kept(self, value: Value, names: Sequence[str]) -> bool:
        """Whether mesh axes cut a value because a round before the last has decided so."""
        return {axis.name for axes in self.rounds.kept.get(value, ()) for axis in axes}.issuperset(names)

    def _start(self) -> int:
        """Set up the axes and open dims of all values; returns how many have no sharding yet."""
        self._refuse_closed_bodies()
        free = 0
        for value in self.flow.values():
            type_ = tensor_type(value.type)
            if type_ is None or type_.shape is None:
                continue
            if value.sharding is None and value not in self.more:
                free += 1
                self.open[value] = [True] * len(type_.shape)
                self.axes[value] = ((),) * len(type_.shape)
                continue
            lies = value.sharding or self.more[value]
            if lies.all_axes and not type_.is_static:
                raise IrparError(
                    f"%{value.name} {type_} is annotated {lies}, but its size depends on data",
                    do="annotate tensors of fixed size; this one stays replicated on every device",
                )
            self.pinned.add(value)
            free += not lies.is_settled
            now = self.rounds.add(value, self.later.get(value, lies))
            self.open[value] = [dim.is_open for dim in now]
            self.axes[value] = tuple([dim.axes for dim in now])
        return free

    def _refuse_closed_bodies(self) -> None:
        for node in self.flow.nodes:
            if not node.holds_graphs or node in self.flow.ties:
                continue
            for body in node.nested_graphs():
                for value in (inner for graph in body.graphs() for inner in graph.values()):
                    if value.sharding is not None and value.sharding.all_axes:
                        raise IrparError(
                            f"%{value.name} is annotated {value.sharding}, "
                            f"but the body of {node.title} runs replicated",
                            do="annotate tensors outside of it; what passes into it is brought together before",
                        )

    def _visit(self, node: Node) -> None:
        for view in self.views[node]:
            factors = self._merged(view)
            if any(factors):
                for value, wanted in zip(view.values, view.all_expressible(factors), strict=True):
                    if value is not None and value in self.open and wanted != self.axes[value]:
                        self._extend(node, view, value, wanted)

    def _merged(self, view: RuleView) -> FactorAxes:
        """Per factor the axes on which the values agree; what earlier rounds have decided goes before them."""
        # What other readers want of a constant binds nobody: each may have its own copy.
        known = [
            None if value is None or (value.is_constant and value not in self.pinned) else self.axes.get(value)
            for value in view.values
        ]
        return view.merged(tuple(known), self.rounds.held.get(view))

    def _extend(self, node: Node, view: RuleView, value: Value, wanted: Sequence[Axes]) -> None:
        """Let open dims of a value take the axes that the node gives them."""
        current = list(self.axes[value])
        added: list[Axis] = []
        for dim, axes in enumerate(wanted):
            old = current[dim]
            if len(axes) <= len(old) or axes[: len(old)] != old or not self.open[value][dim]:
                continue
            others = [axis for other, cut in enumerate(current) if other != dim for axis in cut]
            others += self.rounds.waiting_axes(value)
            if are_disjoint(self.mesh, [*others, *axes]):
                current[dim] = axes
                added.extend(axes[len(old) :])
        if added:
            self.axes[value] = tuple(current)
            for name in () if self.is_trial else dict.fromkeys(axis.name for axis in added):
                self.module.decide(value.name, self._decision(node, view, value, name))
            neighbours = self.flow.neighbours(value)
            self.dirty.update(other for other in neighbours if other is not node and self.views.get(other))

    def _decision(self, node: Node, view: RuleView, value: Value, name: str) -> Decision:
        """Which other value of the node brought a mesh axis: one that it cuts along the same factor."""
        when = self.rounds.title
        mine = self._cut_by(view, value, name)
        for other in dict.fromkeys(view.values):
            if other is None or other is value or other not in self.axes:
                continue
            if not mine.isdisjoint(self._cut_by(view, other, name)):
                return Decision(f"follows %{other.name} through {node.title}{when}", other.name, (name,))
        return Decision(f"follows {node.title}{when}", axes=(name,))

    def _cut_by(self, view: RuleView, value: Value, name: str) -> set[int]:
        """The factors of a node that a mesh axis cuts in one of its values."""
        return {
            factor
            for tensor, other in enumerate(view.values)
            if other is value
            for factor, axes in view.project(tensor, self.axes[value]).items()
            if any(axis.name == name for axis in axes)
        }

    def _free_constants(self) -> list[Value]:
        return [value for graph in self.flow.trips for value in graph.constants if value not in self.pinned]

    def _settle_constants(self) -> None:
        """Write constants that nobody pinned as their only reader needs them, and whole where readers differ."""
        placements: dict[Node, Placement] = {}
        for value in self._free_constants():
            if value.sharding is None:
                continue
            needed: set[Sharding | None] = set()
            for node, index in value.uses:
                inside = node in self.views
                if inside and node not in placements:
                    placements[node] = self.flow.place(node, self.pinned.__contains__, self.network)
                needed.add(placements[node].operands[index] if inside else None)
                if len(needed) > 1:
                    break
            only = needed.pop() if len(needed) == 1 else None
            # What is added to parts becomes parts behind the constant.
            is_whole = only is None or bool(only.partial)
            value.sharding = Sharding.replicated(self.mesh, value.sharding.rank) if is_whole else only

    def _lift_constants(self) -> None:
        """Move sharded constants of bodies out to the outermost graph, which parts are written from."""
        for graph in self.flow.trips:
            for value in tuple(graph.constants) if graph is not self.flow.graph else ():
                if value.sharding is not None and not value.sharding.is_replicated:
                    self.flow.graph.lift_constant(value)


def _shard_so(shardings: Mapping[Value, Sharding | None]) -> None:
    for value, sharding in shardings.items():
        value.sharding = sharding
