"""A graph with the bodies of If, Loop and Scan in it, as one flow: what lies alike on the two sides of a boundary.

y = Loop(n, go, h) { body(i, go, a) -> (go, b) }      h, a, b and y are one tensor on its way: they lie alike, and what
                                                      comes out of a trip otherwise is moved before the next one
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from irpar.analysis.cost.network import Network
from irpar.analysis.looping import LOOPS
from irpar.analysis.types.control_flow import runs, scan_axes
from irpar.ir import Graph, Module, Node, Value
from irpar.ir.repeats import layers_of
from irpar.ops import has_open_bodies
from irpar.ops.effects import is_compute
from irpar.ops.rule import FactorRule, RuleBuilder
from irpar.sharding import IrparError, Mesh, Sharding

from .node_placement import fits, has_rank, placement_as_it_lies, rule_view, whole_placement
from .placement import Placement
from .rule_view import RuleView
from .situation import Situation, costs_nothing, runs_free

T = TypeVar("T")

USUAL_TRIPS = 10
"""How often a loop is taken to run whose count nobody knows, where costs are compared."""


@dataclass(frozen=True)
class Tie:
    """A tensor on both sides of the boundary of a node that holds bodies.

    Attributes:
        operand, result: which of the holder it is; None where it is none of them.
        inputs: the inputs of bodies that it is.
        outputs: the results of bodies that it is: (body, index).
        scanned: the dim that operand and result have besides, with one element for each trip.
    """

    operand: int | None = None
    result: int | None = None
    inputs: tuple[Value, ...] = ()
    outputs: tuple[tuple[Graph, int], ...] = ()
    scanned: int | None = None


def _if_ties(node: Node) -> list[Tie]:
    branches = tuple(node.nested_graphs())
    return [Tie(result=n, outputs=tuple((branch, n) for branch in branches)) for n in range(len(node.results))]


def _loop_ties(node: Node) -> list[Tie]:
    (body,) = node.nested_graphs()
    carried = len(node.operands) - 2
    states = [Tie(2 + n, n, (body.inputs[2 + n],), ((body, 1 + n),)) for n in range(carried)]
    collected = range(carried, len(node.results))
    return [*states, *(Tie(result=n, outputs=((body, 1 + n),), scanned=0) for n in collected)]


def _scan_ties(node: Node) -> list[Tie]:
    (body,) = node.nested_graphs()
    scanned = node.attributes["num_scan_inputs"]
    assert isinstance(scanned, int)
    states = len(node.operands) - scanned
    found = [Tie(n, n, (body.inputs[n],), ((body, n),)) for n in range(states)]
    for n, axis in enumerate(scan_axes(node, "scan_input_axes", scanned)):
        found.append(Tie(states + n, None, (body.inputs[states + n],), scanned=axis))
    for n, axis in enumerate(scan_axes(node, "scan_output_axes", len(node.results) - states)):
        found.append(Tie(None, states + n, outputs=((body, states + n),), scanned=axis))
    return found


_TIES: dict[tuple[str, str], Callable[[Node], list[Tie]]] = {
    ("", "If"): _if_ties,
    ("", "Loop"): _loop_ties,
    ("", "Scan"): _scan_ties,
}


class Flow:
    """The nodes and values of a graph and of the bodies through whose boundaries shardings pass.

    Bodies of If, Loop and Scan are entered; those of other operators, and function bodies, run whole on every device.

    Attributes:
        graph: the outermost graph.
        mesh: of its shardings.
        ties: per node that holds such bodies, what passes its boundary.
        repeats: as of the module.
        trips: per body how often it runs, with all around it; None where that is not known, or it may not run at all.
        states: what the end of the graph hands to the next run.
        free_results: results of the graph of which nobody said how they leave it (`moves.as_result`).
        nodes: all nodes in order, holders before what they hold, each body's return node after its nodes; the graph's
            own return node last where there is state.
    """

    def __init__(self, graph: Graph, mesh: Mesh, repeats: Mapping[str, int] | None = None) -> None:
        self.graph = graph
        self.repeats = repeats or {}
        self.mesh = mesh
        self._changes = graph.names.changes
        self.ties: dict[Node, tuple[Tie, ...]] = {}
        self.states = tuple(
            Tie(inputs=(value,), outputs=((graph, state.output),))
            for value, state in graph.states.items()
            if state.output is not None
        )
        self.free_results: Collection[Value] = ()
        self.trips: dict[Graph, int | None] = {graph: 1}
        self._summed: dict[Value, Graph] = {}
        self.nodes: list[Node] = []
        self._views: dict[Tie, RuleView | None] = {}
        self._tie_views: dict[Node, tuple[RuleView, ...]] = {}
        self._reading: dict[Node, dict[Value, list[RuleView]]] = {}
        self._rules: dict[Node, RuleView | None] = {}
        self._end_ties: dict[Node, dict[int, Tie]] = {}
        self._placed: dict[Hashable, Placement] = {}
        self._enter(graph)
        self._views.update((tie, self._view(graph.return_node, tie)) for tie in self.states)

    def _enter(self, graph: Graph) -> None:
        for node in graph:
            self.nodes.append(node)
            if not has_open_bodies(node):
                continue
            self.ties[node] = tuple(_TIES[node.identity](node))
            self._views.update((tie, self._view(node, tie)) for tie in self.ties[node])
            if node.identity in LOOPS:
                self._summed.update(dict.fromkeys(LOOPS[node.identity](node).summed(), graph))
            for body in node.nested_graphs():
                self.trips[body] = runs(body)
                self._enter(body)
        if graph is not self.graph or self.states:
            self.nodes.append(graph.return_node)

    @property
    def is_current(self) -> bool:
        """Whether no value has come or gone, and none has moved to another graph, since the flow was made."""
        return self.graph.names.changes == self._changes

    # -- what there is --------------------------------------------------------------------------------------------

    def values(self) -> Iterator[Value]:
        """Inputs, constants and results of all nodes, body by body."""
        for graph in self.trips:
            yield from graph.values()

    def results(self) -> dict[Value, None]:
        """The results of the outermost graph that replace no state, in order."""
        replacing = {self.graph.output(index) for tie in self.states for _, index in tie.outputs}
        return {value: None for value in self.graph.outputs if value not in replacing}

    def holder(self, node: Node) -> Node | None:
        """The node whose body a node ends; None for other nodes, and for the end of the outermost graph."""
        return node.graph.parent if node.is_return and node.graph is not None and node.graph in self.trips else None

    def deciding(self, node: Node) -> list[Value]:
        """What says whether and how often the bodies of a holder run: operands that are nothing inside."""
        tied = {tie.operand for tie in self.ties.get(node, ())}
        return [value for n, value in enumerate(node.operands) if value is not None and n not in tied]

    def neighbours(self, value: Value) -> Iterator[Node]:
        """The nodes that make and read a value, and the holders of bodies through whose boundary it passes."""
        if value.node is not None:
            yield value.node
        elif value.is_input and value.graph is not self.graph and value.graph in self.trips:
            assert value.graph is not None
            assert value.graph.parent is not None
            yield value.graph.parent
        elif self.states and value in self.graph.states:
            yield self.graph.return_node
        for user in value.users:
            yield self.holder(user) or user

    def usual_trips(self, value: Value) -> int:
        """How often a value is made and moved, where costs are compared: of what trips add up the sum is moved once."""
        assert value.owner is not None
        return self.usual_trips_of(self._summed.get(value, value.owner))

    def usual_trips_of(self, graph: Graph | None) -> int:
        """How often a graph runs, where costs are compared."""
        trips = self.trips.get(graph, 1) if graph is not None else 1
        return USUAL_TRIPS if trips is None else max(1, trips)

    def layers_of(self, value: Value) -> int:
        """How many layers have what a value is, where a module with a few of them stands for one with all."""
        return layers_of(value, self.repeats) if self.repeats else 1

    # -- rules ----------------------------------------------------------------------------------------------------

    def views(self, node: Node) -> tuple[RuleView, ...]:
        """The rules that carry axes through a node: that of its operator, or one for each tie of a holder.

        The end of the graph has one for each state.
        """
        if self._has_ties(node):
            return self._of_ties(node)
        if node.is_return:
            return ()
        view = self.rule(node)
        return () if view is None else (view,)

    def views_reading(self, node: Node, value: Value) -> Sequence[RuleView]:
        """Those that carry the axes of an operand; of thousands of states, or sums of a loop, only its own."""
        if self._has_ties(node):
            return self._by_operand(node).get(value, ())
        return [view for view in self.views(node) if value in view.values[: view.operand_count]]

    def _has_ties(self, node: Node) -> bool:
        return node is self.graph.return_node or node in self.ties

    def _of_ties(self, node: Node) -> tuple[RuleView, ...]:
        found = self._tie_views.get(node)
        if found is None:
            ties = self.states if node is self.graph.return_node else self.ties[node]
            made = (self._views[tie] for tie in ties)
            found = self._tie_views[node] = tuple(view for view in made if view is not None)
        return found

    def _by_operand(self, node: Node) -> Mapping[Value, Sequence[RuleView]]:
        found = self._reading.get(node)
        if found is None:
            found = self._reading[node] = {}
            for view in self.views(node):
                for value in dict.fromkeys(view.values[: view.operand_count]):
                    if value is not None:
                        found.setdefault(value, []).append(view)
        return found

    def rule(self, node: Node) -> RuleView | None:
        """The rule of a node beside its shapes, made once; None where it must run replicated."""
        if node not in self._rules:
            self._rules[node] = rule_view(node, self.mesh)
        return self._rules[node]

    def _view(self, node: Node, tie: Tie) -> RuleView | None:
        """The rule by which all sides of a tie are sharded alike; None where they must be whole."""
        outer = [value for value in self._outer(node, tie) if value is not None]
        inner = [*tie.inputs, *(body.output(index) for body, index in tie.outputs)]
        if not all(value.is_static for value in (*outer, *inner)):
            return None
        shape = inner[0].shape
        if any(value.shape != shape for value in inner):
            return None
        rank = len(shape) if tie.scanned is None else len(shape) + 1
        if any(len(value.shape) != rank for value in outer):
            return None
        operand, result = self._outer(node, tie)
        operands: list[Value] = inner[len(tie.inputs) :]
        results: list[Value] = list(tie.inputs)
        sides = len(operands), len(results), operand is not None, result is not None
        if operand is not None:
            operands.insert(0, operand)
        if result is not None:
            results.append(result)
        return RuleView(node, _tie_rule(shape, tie.scanned, *sides), self.mesh, [*operands, *results])

    def _outer(self, node: Node, tie: Tie) -> tuple[Value | None, Value | None]:
        operand = None if tie.operand is None else node.operands[tie.operand]
        return operand, None if tie.result is None else node.results[tie.result]

    # -- placements -----------------------------------------------------------------------------------------------

    def place(self, node: Node, is_pinned: Callable[[Value], bool], network: Network) -> Placement:
        """How a node runs, given the completed shardings; what passes a boundary lies alike on both sides of it.

        See `Situation.choose`. Among values that are sharded as they were before it is known.
        """
        if node in self.ties:
            return self._holder_placement(node)
        if node.is_return:
            return self._end_placement(node)
        view = self.rule(node)
        if view is None:
            return whole_placement(node, self.mesh)
        lies = tuple([None if value is None else value.sharding for value in view.values])
        free, times = view.none_free, self.times(view)
        if view.reads_constants:  # No other value may cost nothing.
            free = tuple([costs_nothing(v, lie, is_pinned) for v, lie in zip(view.values, lies, strict=True)])
        known: dict[Hashable, Placement] = self._placed
        key: Hashable = node, network, lies, free
        if view.is_by_kind and runs_free(view, network):
            known, key = view.memo, ("placed", network, lies, times, node.phase)
        found = known.get(key)
        if found is None:
            found = known[key] = Situation(view, lies, free, network, times).choose()
        return found

    def times(self, view: RuleView) -> tuple[int, ...] | None:
        """How often each value of a node is moved, as `Situation` takes it; None where all are moved once."""
        if view.node.graph is self.graph:
            return None
        return tuple(1 if value is None else self.usual_trips(value) for value in view.values)

    def _holder_placement(self, node: Node) -> Placement:
        plain = whole_placement(node, self.mesh)
        operands, results = list(plain.operands), list(plain.results)
        for tie in self.ties[node]:
            lies = self._lies(node, tie)
            if lies is not None:
                around = Sharding.of_axes(self.mesh, _with_dim(lies.axes, tie.scanned))
                around = around.with_partial(lies.partial, lies.reduce)
                if tie.operand is not None:
                    operands[tie.operand] = around
                if tie.result is not None:
                    results[tie.result] = around
        return Placement(tuple(operands), tuple(results), None, (), is_boundary=True)

    def _end_placement(self, node: Node) -> Placement:
        """What the end of a body needs: its results as they lie on the other side.

        The end of the graph takes its results as they lie, but for what replaces state: that lies as the state.
        """
        needed = tuple(self.needed_at_end(node, index) for index in range(len(node.operands)))
        return Placement(needed, (), None, (), is_boundary=True)

    def needed_at_end(self, node: Node, index: int) -> Sharding | None:
        """The same of one result; None where it is taken as it lies."""
        holder = self.holder(node)
        if node not in self._end_ties:
            ties = self.states if holder is None else self.ties[holder]
            self._end_ties[node] = {place: tie for tie in ties for body, place in tie.outputs if body is node.graph}
        tie = self._end_ties[node].get(index)
        lies = None if tie is None else self._lies(holder or node, tie)
        if lies is not None or (tie is None and holder is None):
            return lies
        value = node.operands[index]
        rank = value.tensor_type.rank if value is not None and has_rank(value) else None
        return None if rank is None else Sharding.replicated(self.mesh, rank)

    def _lies(self, node: Node, tie: Tie) -> Sharding | None:
        """How a tie lies inside; None where it must be whole."""
        if self._views[tie] is None:
            return None
        if tie.inputs:
            found = tie.inputs[0].sharding
            # What trips add up may be partial until the loop ends: what begins it is, too.
            kept = found is not None and tie.result is not None
            return (
                None
                if found is None
                else Sharding.of_axes(self.mesh, found.axes).with_partial(found.partial if kept else (), found.reduce)
            )
        assert tie.result is not None
        found = node.results[tie.result].sharding
        if found is None:
            return None
        axes = found.axes
        return Sharding.of_axes(self.mesh, axes if tie.scanned is None else _without_dim(axes, tie.scanned))

    def runs_as_it_lies(self, node: Node) -> bool:
        """True where a node can run on blocks as its operands and results lie: nothing is to be moved around it."""
        if node in self.ties:
            return fits(node, self._holder_placement(node))
        if node.is_return:
            return fits(node, self._end_placement(node))
        # Collectives are what moves; the verifier checks them.
        return not is_compute(node) or self.placement_as_it_lies(node) is not None

    def placement_as_it_lies(self, node: Node) -> Placement | None:
        """How a node without bodies runs on blocks as its operands and results lie; None where it cannot."""
        return placement_as_it_lies(node, self.rule(node), self.mesh)


@lru_cache(maxsize=1024)
def _tie_rule(
    shape: tuple[int, ...], scanned: int | None, outputs: int, inputs: int, has_operand: bool, has_result: bool
) -> FactorRule:
    """The rule of a tie: of results and inputs of bodies, and of an operand and a result of their holder."""
    rule = RuleBuilder()
    inside = tuple(rule.dims(shape))
    outside = _with_dim(inside, scanned)
    return rule.done([outside] * has_operand + [inside] * outputs, [inside] * inputs + [outside] * has_result)


def require_global(module: Module, name: str) -> None:
    """Refuse a module of which localize has made programs already; `name` is the pass that needs the whole graph.

    Raises:
        IrparError: it is in local view.
    """
    if module.is_local:
        raise IrparError(
            f"{name} needs the global view, and the module is in local view already",
            do=f"leave {name} out of what follows localize",
        )


def completed_flow(module: Module, name: str) -> Flow:
    """The flow of a module in global view whose tensors all have shardings; `name` is the pass that needs them.

    Raises:
        IrparError: it is in local view, or a value has no sharding.
    """
    require_global(module, name)
    flow = Flow(module.graph, module.mesh, module.repeats)
    for value in flow.values():
        if value.sharding is None and value.has_uses and has_rank(value):
            raise IrparError(f"%{value.name} has no sharding yet", do=f"run complete-sharding before {name}")
    free = module.free_results - module.annotated.keys()
    flow.free_results = {value for value in flow.results() if value.name in free}
    return flow


def _with_dim(dims: Sequence[tuple[T, ...]], dim: int | None) -> tuple[tuple[T, ...], ...]:
    """Dims with one that nothing shards put in."""
    if dim is None:
        return tuple(dims)
    place = dim + len(dims) + 1 if dim < 0 else dim
    return (*dims[:place], (), *dims[place:])


def _without_dim(dims: Sequence[tuple[T, ...]], dim: int) -> tuple[tuple[T, ...], ...]:
    place = dim + len(dims) if dim < 0 else dim
    return (*dims[:place], *dims[place + 1 :])
