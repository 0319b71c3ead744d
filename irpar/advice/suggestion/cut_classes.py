"""Dims that lie alike: what the factor rules of a graph link, and what it costs to shard all of it over some axes.

x : [b, s, d]   h = MatMul(x, w1 : [d, f])   a = Relu(h)   y = MatMul(a, w2 : [f, d])
classes         {x.0, h.0, a.0, y.0}  {x.1, h.1, a.1, y.1}  {x.2, w1.0}  {w1.1, h.2, a.2, w2.0}  {w2.1, y.2}

Cutting the fourth divides both products and sends the sums y; it excludes the third and the fifth, which hold another
dim of the same weights. A factor that the axes do not fit links nothing: where it stands, the class is needed whole.
What passes the boundary of a body of If, Loop or Scan lies alike on both sides of it, so that classes go through.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from irpar.analysis.completion.flow import USUAL_TRIPS, Flow
from irpar.analysis.completion.moves import captured_whole
from irpar.analysis.completion.rule_view import RuleView
from irpar.analysis.cost.figures import worth
from irpar.analysis.cost.node import node_flops
from irpar.analysis.memory.liveness import value_bytes
from irpar.analysis.types.control_flow import trip_count
from irpar.analysis.weights.fused_weights import fused_weights, weights_taken_apart
from irpar.ir import Graph, Node, Value
from irpar.ops import Kind
from irpar.sharding import Axis, Mesh, ceil_div

_FEW = 2
"""Numbers that a node may send in each step for what is sharded as it is."""
_MANY_TIMES = 16
"""What it reads has at least so many times the numbers that it sends."""

Place = tuple[Value, int]
"""A dim of a value."""


@dataclass(frozen=True)
class Cut:
    """A factor of a node that the axes may cut.

    Attributes:
        node: the node.
        factor: its number in the node's rule.
        kind: PASS, or REDUCE where the results are then partial.
        size: of the factor.
        places: the dims that it stands in.
    """

    node: Node
    factor: int
    kind: Kind
    size: int
    places: tuple[Place, ...]


@dataclass(eq=False)
class CutClass:
    """Dims that lie alike, and what cutting them means. Costs are of one device, each step.

    Attributes:
        number: tells classes apart; that of the same class is the same in every run.
        weights: the constants that have a dim in it.
        inputs: the graph inputs that have one.
        cuts: the factors that link them.
        flops: that one device no longer computes.
        weight_bytes: that one device no longer holds.
        gathered: values that lie in parts, but are needed whole by some reader.
        gathered_bytes, summed_bytes: what a device sends for these, and for the partial sums of the REDUCE factors.
        sums_weights: whether some node sums products with a constant over it.
        twice: a value of which two dims are in it, so that it cannot be sharded.
    """

    number: int
    weights: dict[Value, int] = field(default_factory=dict)
    inputs: dict[Value, int] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)
    flops: float = 0
    weight_bytes: float = 0
    gathered: dict[Value, None] = field(default_factory=dict)
    gathered_bytes: float = 0
    summed_bytes: float = 0
    sums_weights: bool = False
    twice: Value | None = None

    @cached_property
    def has_channels(self) -> bool:
        """Whether a convolution is among its nodes."""
        return any(cut.node.op_type.startswith("Conv") for cut in self.cuts)

    @property
    def sent_bytes(self) -> float:
        """What a device sends more."""
        return self.gathered_bytes + self.summed_bytes

    @property
    def gain(self) -> float:
        """What cutting it is worth; see `worth`."""
        return worth(self.flops, self.weight_bytes, self.sent_bytes)

    @property
    def collectives(self) -> int:
        """How many it makes necessary."""
        return len(self.gathered) + sum(cut.kind is Kind.REDUCE for cut in self.cuts)


class Shares:
    """Which share of its values and nodes one device has already, by axes that were decided before.

    What a body does counts for each trip, so far as that is known or usual; of an If each branch as if it were taken.
    """

    def __init__(self) -> None:
        self.values: dict[Value, float] = {}
        self.nodes: dict[Node, float] = {}
        self._times: dict[Graph, int] = {}

    def bytes_of(self, value: Value) -> float:
        """Bytes of a device's part, each time that it is made."""
        return value_bytes(value) * self.values.get(value, 1.0) * self.times(value.owner)

    def flops_of(self, node: Node) -> float:
        """FLOPs of a device's part, each time that it runs."""
        return node_flops(node) * self.nodes.get(node, 1.0) * self.times(node.graph)

    def times(self, graph: Graph | None) -> int:
        """How often a graph runs in a step."""
        if graph is None or graph.parent is None:
            return 1
        if graph not in self._times:
            each = 1 if graph.parent.op_type == "If" else trip_count(graph.parent)
            self._times[graph] = (USUAL_TRIPS if each is None else max(1, each)) * self.times(graph.parent.graph)
        return self._times[graph]


class CutClasses:
    """The classes of a graph in global view with static types, for one list of axes.

    Args:
        graph: after the normalising passes.
        mesh, axes: what would cut, major first; their product is `parts`.
        shares: what other axes cut.
        flow: of the graph over the mesh, where it is there already.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        axes: tuple[Axis, ...],
        shares: Shares | None = None,
        flow: Flow | None = None,
    ) -> None:
        self.graph = graph
        self.mesh = mesh
        self.axes = axes
        self.parts = mesh.group_size(axes)
        self.shares = shares or Shares()
        self.flow = flow or Flow(graph, mesh)
        self.cuts: dict[Node, list[Cut]] = {}
        self.fitting: dict[Place, int] = {}
        """Dims that all axes together cannot cut, and how many parts they could be sharded into."""
        self._first: dict[Value, int] = {}
        self._dims: list[Place] = []
        self._parent: list[int] = []
        self._needed: dict[int, Node] = {}
        self._given: set[int] = set()
        for value in self.flow.values():
            self._add(value)
        self.apart: set[Value] = set()
        self._apart = dict(self._taken_apart())
        for node in self.flow.nodes:
            if not node.is_return:  # What a body gives is sharded as its holder does.
                self._visit(node)
        self.classes = self._collect()

    # -- what is linked -----------------------------------------------------------------------------------------

    def _add(self, value: Value) -> None:
        if value.is_static and not is_shared_vector(value):
            self._first[value] = len(self._dims)
            self._dims.extend((value, dim) for dim in range(len(value.shape)))
            self._parent.extend(range(len(self._parent), len(self._dims)))

    def _element(self, place: Place) -> int:
        return self._first[place[0]] + place[1]

    def _root(self, element: int) -> int:
        parent = self._parent
        while parent[element] != element:
            parent[element] = parent[parent[element]]
            element = parent[element]
        return element

    def _link(self, elements: list[int]) -> None:
        """The root is the earliest element, so that numbers do not depend on the order of links."""
        roots = [self._root(element) for element in elements]
        least = min(roots)
        for root in roots:
            self._parent[root] = least

    def _visit(self, node: Node) -> None:
        cuts = [cut for view in self.flow.views(node) for cut in self._cuts_of(node, view)]
        if node in self._apart:
            cuts.append(self._apart[node])
        covered: set[int] = set()
        for cut in cuts:
            elements = [self._element(place) for place in cut.places]
            covered.update(elements)
            self._link(elements)
        self.cuts[node] = cuts
        for value in self._read(node):
            for element in self._elements(value):
                if element not in covered:
                    self._needed.setdefault(element, node)
        for value in self._given_by(node):
            self._given.update(element for element in self._elements(value) if element in covered)

    def _taken_apart(self) -> Iterator[tuple[Node, Cut]]:
        """What takes sections of the columns of a weight, which the axes cut one by one: split-weights makes a weight
        of each. Such weights are in `apart`."""
        for graph in self.flow.trips:
            for fused in (*weights_taken_apart(graph), *fused_weights(graph)):
                if any((stop - start) % self.parts for start, stop in fused.sections):
                    continue
                self.apart.add(fused.weight)
                for node in dict.fromkeys(picked.node for picked in fused.picked):
                    of = node.inputs[0]
                    values = [value for value in (of, *node.results) if len(value.shape) == len(of.shape)]
                    if of.shape[fused.place] == fused.sections[-1][1]:
                        places = tuple((value, fused.place) for value in values if value in self._first)
                        yield node, Cut(node, -1, Kind.PASS, of.shape[fused.place], places)

    def _read(self, node: Node) -> Iterator[Value]:
        """What a node reads, what bodies that run whole read of the graphs around them, and what open ones give."""
        yield from node.inputs
        yield from (value for value, _ in captured_whole(self.flow, node))
        if node in self.flow.ties:
            yield from (value for body in node.nested_graphs() for value in body.outputs)

    def _given_by(self, node: Node) -> Iterator[Value]:
        """What a node gives, to its bodies too."""
        yield from node.results
        if node in self.flow.ties:
            yield from (value for body in node.nested_graphs() for value in body.inputs)

    def _elements(self, value: Value) -> range:
        first = self._first.get(value)
        return range(0) if first is None else range(first, first + len(value.shape))

    def _cuts_of(self, node: Node, view: RuleView) -> Iterator[Cut]:
        for factor, (size, kind) in enumerate(zip(view.rule.sizes, view.rule.kinds, strict=True)):
            if kind not in (Kind.PASS, Kind.REDUCE):
                if factor not in view.program_factors or not self._sends_little(view):
                    continue
                kind = Kind.PASS
            known = [
                ((value, dim), index)
                for tensor, dim, index in view.rule.places[factor]
                if (value := view.values[tensor]) is not None and value in self._first
            ]
            if not known:
                continue
            if any(index for _, index in known):  # Inside a larger factor: cut only where that one is cut down to 1.
                continue
            places = tuple(place for place, _ in known)
            if view.fills(factor, self.axes):
                yield Cut(node, factor, kind, size, places)
            elif math.gcd(size, self.parts) > 1:
                self.fitting.update(dict.fromkeys(places, math.gcd(size, self.parts)))

    def _sends_little(self, view: RuleView) -> bool:
        """Whether the local program of a node sends nothing, or few numbers however large its tensors are.

        What it works along is then sharded as what passes. A DynamicQuantizeLinear sends the greatest and the least.
        """
        if view.program is None or not view.node.inputs:
            return False
        blocks = [None if value is None else value.shape for value in view.node.operands]
        cuts = dict.fromkeys(view.program.dims(view.node) or (), self.parts)
        sent = sum(each.elements for each in view.program.sends(view.node, blocks, cuts))
        return sent <= _FEW and sent * _MANY_TIMES <= math.prod(view.node.inputs[0].shape)

    # -- what it costs ------------------------------------------------------------------------------------------

    def _collect(self) -> dict[int, CutClass]:
        found: dict[int, CutClass] = {}

        def of(element: int) -> CutClass:
            root = self._root(element)
            return found.setdefault(root, CutClass(root))

        for node, cuts in self.cuts.items():
            flops = self._flops(node) if cuts else 0
            for cut in cuts:
                self._count(of(self._element(cut.places[0])), cut, flops)
        given = set(self.graph.inputs)
        for value in self._first:
            roots = Counter(self._root(element) for element in self._elements(value))
            for dim, element in enumerate(self._elements(value)):
                held = found.get(self._root(element))
                if held is None:
                    continue
                if roots[held.number] > 1:
                    held.twice = held.twice or value
                if value.is_constant:
                    held.weights[value] = dim
                    held.weight_bytes += self._saved(value_bytes(value), value.shape[dim])
                    continue
                if value in given:
                    held.inputs[value] = dim
                if element in self._needed and (element in self._given or value in given):
                    held.gathered[value] = None
                    held.gathered_bytes += self.gather_bytes(value)
        return found

    def _count(self, held: CutClass, cut: Cut, flops: float) -> None:
        if not any(cut.node is other.node for other in held.cuts[-1:]):
            held.flops += self._saved(flops, cut.size)
        held.cuts.append(cut)
        if cut.kind is Kind.REDUCE:
            held.summed_bytes += self.sum_bytes(cut)
            held.sums_weights = held.sums_weights or any(value.is_constant for value, _ in cut.places)

    def _saved(self, amount: float, size: int) -> float:
        """What the device with the largest block has less."""
        return amount * (1 - ceil_div(size, self.parts) / size) if size else 0.0

    def saved_flops(self, cut: Cut) -> float:
        """FLOPs of its node that one device no longer computes."""
        return self._saved(self._flops(cut.node), cut.size)

    def _flops(self, node: Node) -> float:
        """Of a node itself; what is in its open bodies counts there."""
        return 0 if node in self.flow.ties else self.shares.flops_of(node)

    def saved_bytes(self, value: Value, dim: int) -> float:
        """Bytes of a constant that one device no longer holds."""
        return self._saved(value_bytes(value), value.shape[dim])

    def gather_bytes(self, value: Value) -> float:
        """What a device sends to have a value whole on all."""
        return self.shares.bytes_of(value) * (self.parts - 1) / self.parts

    def sum_bytes(self, cut: Cut) -> float:
        """What a device sends to add up the partial results of a node: those in which the factor does not stand."""
        sharded = {value for value, _ in cut.places}
        return 2 * sum(self.gather_bytes(value) for value in cut.node.results if value not in sharded)

    # -- questions ----------------------------------------------------------------------------------------------

    def class_of(self, value: Value, dim: int) -> CutClass | None:
        """The class of a dim; None where nothing could shard it."""
        first = self._first.get(value)
        return None if first is None else self.classes.get(self._root(first + dim))

    def needed_by(self, value: Value, dim: int) -> Node | None:
        """The first node that needs a dim whole."""
        first = self._first.get(value)
        return None if first is None else self._needed.get(first + dim)

    def parts_that_fit(self, value: Value) -> int:
        """Into how many parts a dim could be sharded that all axes together cannot cut; 1 where there is none."""
        return max((self.fitting.get((value, dim), 1) for dim in range(len(value.shape))), default=1)

    def conflicts(self, numbers: Iterable[int]) -> dict[int, dict[int, Value]]:
        """For each of these classes the others that hold another dim of one tensor, and such a tensor: no tensor can
        be sharded twice by one axis."""
        wanted = set(numbers)
        found: dict[int, dict[int, Value]] = {number: {} for number in numbers}
        for value in self._first:
            elements = self._elements(value)
            if len(elements) < 2:
                continue
            roots = [root for root in dict.fromkeys(map(self._root, elements)) if root in wanted]
            for root in roots:
                for other in roots:
                    if root != other and (other not in found[root] or value.is_constant):
                        known = found[root].get(other)
                        if known is None or not known.is_constant:
                            found[root][other] = value
        return found

    def cut_places(self, chosen: Mapping[int, CutClass]) -> Iterator[tuple[Value, int]]:
        """The dims that are in the chosen classes."""
        for element, place in enumerate(self._dims):
            if self._root(element) in chosen:
                yield place

    def shares_of(self, chosen: Mapping[int, CutClass]) -> Shares:
        """What one device has when these classes are sharded."""
        shares = Shares()
        shares.values.update(self.shares.values)
        shares.nodes.update(self.shares.nodes)
        for value, _ in self.cut_places(chosen):
            shares.values[value] = self.shares.values.get(value, 1.0) / self.parts
        for node, cuts in self.cuts.items():
            if any(self._root(self._element(cut.places[0])) in chosen for cut in cuts):
                shares.nodes[node] = self.shares.nodes.get(node, 1.0) / self.parts
        return shares


def is_shared_vector(value: Value) -> bool:
    """True for a list of numbers that several nodes read: each may have a copy that is sharded as it needs it."""
    return value.is_constant and len(value.uses) > 1 and value.is_static and len(value.shape) < 2
