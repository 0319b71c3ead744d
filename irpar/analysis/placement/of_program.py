"""The placement graph of a program."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from networkx.utils import UnionFind

from irpar.analysis.cost.device import node_seconds, tells_a_place
from irpar.analysis.cost.model import CostOf, in_femtoseconds
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.node import Work, node_flops
from irpar.analysis.engines import is_known
from irpar.analysis.memory.liveness import Uses, nested_bytes, uses_of, value_bytes
from irpar.analysis.memory.replaced import held_for
from irpar.analysis.memory.sums import sums_of
from irpar.analysis.newest import view_roots
from irpar.ir import Graph, Node, TensorType, Value, captured_or_read
from irpar.ops import holds_collectives, traits
from irpar.ops.coords import COORDS
from irpar.ops.effects import draws_random_numbers, goes_to_group
from irpar.ops.memory_copies import can_be_copied
from irpar.ops.updates import is_for_plans

from .graph import BEFORE, PlacedValue, PlacementGraph, Unit


@dataclass(frozen=True)
class PlaceableProgram:
    """A program as a placement graph.

    Attributes:
        source: the program.
        graph: what placement is decided on.
        unit_of: node that is no view to the number of its unit; input, constant or state to that of where it lies, but
            for constants that are only sizes of views.
        views: values that are views, and whose bytes they are; one is made on each side that reads it.
        refusals: number of a unit to why it cannot be on the host.
    """

    source: Graph
    graph: PlacementGraph
    unit_of: dict[Node | Value, int]
    views: dict[Value, Value]
    refusals: dict[int, str]

    def names(self) -> dict[str, list[int]]:
        """What units are known by: scopes and names in the model of nodes, names of values; and the units.

        Of views there are none: these are where they are read.
        """
        views = (value.node for value in self.views)
        found: dict[str, dict[int, None]] = {name: {} for node in views if node is not None for name in names_of(node)}
        for thing, unit in self.unit_of.items():
            for name in names_of(thing):
                found.setdefault(name, {})[unit] = None
        return {name: list(units) for name, units in found.items()}

    def of_clone(self, graph: Graph) -> "PlaceableProgram":
        """The same of a clone of the program."""
        things: dict[Node | Value, Node | Value] = {}
        for old, new in zip(self.source, graph, strict=True):
            things[old] = new
            things.update(zip(old.results, new.results, strict=True))
        things.update(zip(self.source.inputs, graph.inputs, strict=True))
        things.update(zip(self.source.constants, graph.constants, strict=True))
        values = {old: new for old, new in things.items() if isinstance(old, Value) and isinstance(new, Value)}
        return replace(
            self,
            source=graph,
            unit_of={things[thing]: unit for thing, unit in self.unit_of.items()},
            views={values[view]: values[root] for view, root in self.views.items()},
        )


def names_of(thing: Node | Value) -> Iterator[str]:
    """The names by which a node, or what no node makes, is asked for."""
    if isinstance(thing, Value):
        yield thing.source_name
        return
    known = (thing.scope, thing.source, thing.name, *(value.source_name for value in thing.results))
    yield from (name for name in known if name)


def of_program(graph: Graph, device_cost: CostOf, network: Network) -> PlaceableProgram:
    """The placement graph of a program.

    Each node of the outermost graph is a unit, with all that its bodies hold; views are none: they are made where what
    they are views of is read. What an optimizer does with the elements of one tensor is one unit, that costs what one
    pass over its operands and results does: so it is meant, and so fused kernels run. State lies where the node runs
    that replaces it, and is written there; inputs, weights and other state are units of their own.

    What keeps a node on the device: communication, and what is in flight; chance, whose numbers engines draw each in
    their own way; calls of functions; what no engine of the host knows; and values that are no tensors of known sizes.

    Args:
        graph: a local program.
        device_cost: what a node costs on the device, in femtoseconds.
        network: what knows of the host and of the link to it.
    """
    return _Reader(graph, device_cost, network).read()


@dataclass
class _Read:
    """What is to become a placed value."""

    value: Value
    made: int
    until: int = BEFORE
    shares: bool = False
    reads: dict[tuple[int, Node], None] = field(default_factory=dict)


class _Reader:
    def __init__(self, graph: Graph, device_cost: CostOf, network: Network) -> None:
        assert network.host is not None
        assert network.host_link is not None
        self.graph = graph
        self.device_cost = device_cost
        self.host = network.host
        self.device = network.device
        self.network = network
        self.uses: Uses = uses_of(graph)
        self.views = view_roots(graph, of_known_sizes=True)
        self.viewing = {value.node for value in self.views}
        self.nodes = [node for node in graph if node not in self.viewing]
        self.times = {node: time for time, node in enumerate(graph)}
        self.times[graph.return_node] = len(self.times)
        self.found: dict[Value, _Read] = {}
        self.together: UnionFind[Node | Value] = UnionFind()

    def read(self) -> PlaceableProgram:
        self._find_values()
        self._find_reads()
        self._join()
        numbers: dict[Node | Value, int] = {}
        things: list[Node | Value] = [*self.nodes, *(value for value in self.found if value.node is None)]
        members: dict[int, list[Node | Value]] = {}
        for thing in things:
            number = numbers.setdefault(self.together[thing], len(numbers))
            members.setdefault(number, []).append(thing)
        unit_of: dict[Node | Value, int] = {thing: number for number, each in members.items() for thing in each}
        refusals: dict[int, str] = {}
        units = []
        for number, each in members.items():
            nodes = [thing for thing in each if isinstance(thing, Node)]
            units.append(self._unit(number, each, nodes, refusals))
        values = [*self._values(unit_of), *self._held_inside(unit_of)]
        sizes = sum(value_bytes(value) for value in self.graph.constants if value not in self.found)
        if sizes:
            # They are on the device unless all of their views are on the host.
            values.append(PlacedValue("sizes of views", sizes, len(units), until=self.times[self.graph.return_node]))
            units.append(Unit("sizes of views", None, 0))
        graph = PlacementGraph(tuple(units), tuple(values), len(self.times) - 1)
        return PlaceableProgram(self.graph, graph, unit_of, self.views, refusals)

    # -- values ----------------------------------------------------------------------------------------------------

    def _find_values(self) -> None:
        end = self.times[self.graph.return_node]
        last = self.uses.last
        for value in self.graph.inputs:
            until = self.times[last[value]] if value in self.graph.states and value in last else BEFORE
            self.found[value] = _Read(value, BEFORE, until)
        for value in self.graph.constants:
            if not value.has_uses or any(node not in self.viewing or not index for node, index in value.uses):
                self.found[value] = _Read(value, BEFORE, end)
        for node in self.nodes:
            for value in node.results:
                written = value in self.uses.roots and not traits(node).view
                self.found[value] = _Read(value, self.times[node], self.times[node], written)
        for value in self.graph.outputs:
            self.found[self.views.get(value, value)].until = end

    def _find_reads(self) -> None:
        for node in self.nodes:
            if traits(node).reads_sizes:
                continue
            for value in held_for(node):
                root = self.views.get(value, value)
                if root in self.found:
                    self.found[root].reads[self.times[node], node] = None

    def _values(self, unit_of: dict[Node | Value, int]) -> Iterator[PlacedValue]:
        for value, read in self.found.items():
            nbytes = value_bytes(value)
            cost = in_femtoseconds(self.network.copy_seconds("host", "device", nbytes) or 0)
            yield PlacedValue(
                value.name,
                nbytes,
                unit_of[value if value.node is None else value.node],
                read.made,
                tuple(dict.fromkeys((time, unit_of[node]) for time, node in read.reads)),
                read.until,
                # The numbers of a constant are there on both sides from the start, where both read it.
                0 if value.is_constant else cost,
                cost,
                read.shares,
            )

    def _held_inside(self, unit_of: dict[Node | Value, int]) -> Iterator[PlacedValue]:
        """What bodies hold, while their holder runs; constants in them from the start to the end."""
        for node in self.nodes:
            held = nested_bytes(node) if node.attributes or node.callee is not None else 0
            if held:
                yield PlacedValue(f"in {node.label}", held, unit_of[node], self.times[node])
            for body in node.nested_graphs():
                for value in (value for graph in body.graphs() for value in graph.constants):
                    yield PlacedValue(
                        value.name, value_bytes(value), unit_of[node], until=self.times[self.graph.return_node]
                    )

    # -- units -----------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Unite what is updated together, and state with what replaces it."""
        for node in self.nodes:
            if _updates(node):
                for value in node.inputs:
                    maker = value.node
                    if maker is not None and maker.graph is self.graph and _updates(maker) and _is_alike(value, node):
                        self.together.union(node, maker)
        # What a sum of a loop begins as takes no memory beside its loop, and all of it elsewhere.
        starts = ((node, each.start) for node in self.nodes if node.attributes for each in sums_of(node))
        for node, start in starts:
            if start is not None and start.node in self.times and start.node not in self.viewing:
                self.together.union(node, start.node)
        for value, state in self.graph.states.items():
            if state.output is not None:
                new = self.graph.output(state.output)
                new = self.views.get(new, new)
                self.together.union(value, new if new.node is None else new.node)

    def _unit(self, number: int, things: list[Node | Value], nodes: list[Node], refusals: dict[int, str]) -> Unit:
        first = nodes[0] if nodes else things[0]
        label = first.label if isinstance(first, Node) else first.source_name
        device = self._cost(nodes, is_host=False)
        refusals_of_nodes = (f"{node.title} {why}" for node in nodes if (why := host_refusal(node)) is not None)
        values = (thing for thing in things if isinstance(thing, Value))
        refused = next(chain(refusals_of_nodes, filter(None, map(_input_refusal, values))), None)
        if refused is not None:
            refusals[number] = refused
            return Unit(label, None, device)
        where = self._where_said(things)
        host = self._cost(nodes, is_host=True)
        return Unit(label, None if where == "device" else host, None if where == "host" else device)

    @staticmethod
    def _where_said(things: list[Node | Value]) -> str | None:
        """Where the program has something already, if it says so."""
        for thing in things:
            said = thing.place if isinstance(thing, Node) else thing.memory if thing.memory != "device" else None
            if said is not None:
                return said
        return None

    def _cost(self, nodes: list[Node], *, is_host: bool) -> int:
        counted = [node for node in nodes if node not in self._tell_places]
        if len(counted) > 1 and all(map(_updates, counted)):
            device = self.host if is_host else self.device
            if device is not None:
                work = self._one_pass(counted)
                return in_femtoseconds(node_seconds(counted[0], device, work))
        if is_host:
            return sum(in_femtoseconds(node_seconds(node, self.host)) for node in counted)
        return sum(map(self.device_cost, counted))

    def _one_pass(self, nodes: list[Node]) -> Work:
        """The work of nodes as one that keeps for itself what only they read."""
        inside = set(nodes)
        made = {value for node in nodes for value in node.results}
        read = dict.fromkeys(value for node in nodes for value in node.inputs if value not in made)
        given = [value for value in made if any(user not in inside for user in value.users)]
        return Work(sum(map(node_flops, nodes)), list(map(value_bytes, read)), list(map(value_bytes, given)))

    @cached_property
    def _tell_places(self) -> set[Node]:
        """Nodes that compute where the device is alone."""
        places = {value for value in self.graph.inputs if value.name == COORDS}
        found = set()
        for node in self.graph:
            if tells_a_place(node, places):
                places.update(node.results)
                found.add(node)
        return found


def host_refusal(node: Node) -> str | None:
    """Why a node cannot be on the host; None where it can."""
    if goes_to_group(node) or holds_collectives(node):
        return "communicates, and its operands are on the device"
    if node.callee is not None:
        return "calls a function, which is where its caller is: run inline-functions"
    if draws_random_numbers(node):
        return "draws random numbers, each engine its own"
    if not is_known(node) or is_for_plans(node):
        return "is nothing that an engine of the host knows"
    values = (*captured_or_read(node), *node.results)
    if not all(isinstance(value.type, TensorType) and value.type.is_static for value in values):
        return "has an operand or a result of no static size"
    if not all(can_be_copied(value.type) for value in values):
        return "reads or gives strings, which are not copied between memories"
    return None


def _input_refusal(value: Value) -> str | None:
    """Why an input or a constant cannot be on the host; None where it can."""
    if can_be_copied(value.type) and value.is_static:
        return None
    return f"%{value.source_name} is {value.type}; only tensors of numbers and of static sizes are copied"


def _updates(node: Node) -> bool:
    """Whether a node is a part of an update, element by element."""
    return node.phase == "optimizer" and traits(node).is_elementwise and not traits(node).view


def _is_alike(value: Value, node: Node) -> bool:
    """Whether a value has an element for each of a node's results, and more than one."""
    shape = value.type.static_shape if isinstance(value.type, TensorType) and value.type.is_static else ()
    return bool(shape) and all(
        isinstance(made.type, TensorType) and made.type.is_static and made.type.static_shape == shape
        for made in node.results
    )
