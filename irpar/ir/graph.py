"""The graph: nodes in a linked list over values in SSA form; insertion, erasure and replacement are O(1) per use."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .attributes import Attribute, Graphs, attributes
from .state import State
from .tensor import Tensor
from .types import UNKNOWN, Type
from .value import Names, Value, refuse_uses

if TYPE_CHECKING:
    import networkx as nx

    from .function import Function
    from .strategy import NodeStrategy

DOMAIN = "irpar"
"""The domain of irpar's own operators: collectives, and Return, which every graph ends with."""
Phase = Literal["forward", "backward", "optimizer"]
Place = Literal["device", "host"]


class Node:
    """One operation.

    Attributes:
        domain: operator domain; "" is ai.onnx, `DOMAIN` irpar's own.
        op_type: operator name.
        version: the opset version of the domain that the node follows.
        attributes: name to value; change them through `set_attribute` where nested graphs are involved.
        results: the values it defines.
        callee: for a call, the function.
        phase, stage, place: facts that passes set; None where not decided.
        strategy: how it is to run, where someone said so.
        name: the node's own name, as in ONNX.
        source, scope: node name and scope in the imported model, through every rewrite.
    """

    __slots__ = (
        "_inputs",
        "_next",
        "_operands",
        "_order",
        "_previous",
        "_read",
        "attributes",
        "callee",
        "doc",
        "domain",
        "graph",
        "metadata",
        "name",
        "op_type",
        "phase",
        "place",
        "results",
        "scope",
        "source",
        "stage",
        "strategy",
        "version",
    )

    def __init__(
        self,
        op_type: str,
        operands: Sequence[Value | None] = (),
        attributes_: Mapping[str, Any] | None = None,
        *,
        results: int | Sequence[Value] = 1,
        domain: str = "",
        version: int = 0,
        name: str = "",
        source: str | None = None,
        scope: str | None = None,
    ) -> None:
        self.op_type = op_type
        self.domain = domain
        self.version = version
        self.name = name
        self.source = source
        self.scope = scope
        self.callee: Function | None = None
        self.phase: Phase | None = None
        self.stage: int | None = None
        self.place: Place | None = None
        self.strategy: NodeStrategy | None = None
        self.doc = ""
        self.metadata: dict[str, str] | None = None
        self.graph: Graph | None = None
        self._previous: Node | None = None
        self._next: Node | None = None
        self._order = 0
        self._operands = list(operands)
        self._read: tuple[Value | None, ...] | None = None
        self._inputs: tuple[Value, ...] | None = None
        for index, operand in enumerate(operands):
            if operand is not None:
                operand._uses[self, index] = None
        self.results: tuple[Value, ...] = (
            tuple(Value() for _ in range(results)) if isinstance(results, int) else tuple(results)
        )
        for index, value in enumerate(self.results):
            value.node = self
            value.index = index
        self.attributes: dict[str, Attribute] = attributes(attributes_) if attributes_ else {}
        if self.attributes:
            for nested in self.nested_graphs():
                nested.parent = self

    @classmethod
    def stand_in(
        cls,
        op_type: str,
        operands: Sequence[Value | None],
        attributes_: Mapping[str, Any],
        results: Sequence[Value],
        **facts: Any,
    ) -> "Node":
        """A node for who runs a graph in place of nodes of it: neither operands nor results know of it."""
        made = cls(op_type, (), attributes_, results=0, **facts)
        made._operands = list(operands)
        made.results = tuple(results)
        return made

    def stand_for(self, values: Mapping[Value, Value]) -> None:
        """Read and give others in place of values, which do not know of it; in graphs that it holds, too."""
        self._operands = [None if value is None else values.get(value, value) for value in self._operands]
        self._read = self._inputs = None
        self.results = tuple(values.get(value, value) for value in self.results)
        for nested in self.nested_graphs():
            for node in (*nested, nested.return_node):
                node.stand_for(values)

    @property
    def operands(self) -> tuple[Value | None, ...]:
        """What the node reads; None for an optional operand that is left out."""
        if self._read is None:  # Kept until an operand is set: passes ask far more often than they set.
            self._read = tuple(self._operands)
        return self._read

    def operand(self, index: int) -> Value | None:
        """One of these: O(1)."""
        return self._operands[index]

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The operands that are there."""
        if self._inputs is None:
            self._inputs = tuple([operand for operand in self._operands if operand is not None])
        return self._inputs

    @property
    def result(self) -> Value:
        """The only result.

        Raises:
            ValueError: the node has none or several.
        """
        (value,) = self.results
        return value

    @property
    def is_return(self) -> bool:
        """True for the node that holds a graph's results."""
        return self.op_type == "Return" and self.domain == DOMAIN

    @property
    def identity(self) -> tuple[str, str]:
        """(domain, op type)."""
        return self.domain, self.op_type

    @property
    def operator(self) -> str:
        """The operator as messages name it: its domain, unless that is ONNX's own, and its type."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    @property
    def previous(self) -> "Node | None":
        """The node before this one in its graph."""
        return self._previous

    @property
    def next(self) -> "Node | None":
        """The node after this one in its graph."""
        return self._next

    @property
    def label(self) -> str:
        """What messages call the node: its source or own name, else its op type and first result."""
        if self.is_return:
            return "the next run"
        return self.source or self.name or f"{self.op_type} of %{self.results[0].name if self.results else ''}"

    @property
    def title(self) -> str:
        """What explanations call the node: op type and label."""
        return f"{self.op_type} {self.label}" if self.source or self.name else self.label

    def set_operand(self, index: int, value: Value | None) -> None:
        """Read `value` at an operand place: O(1)."""
        old = self._operands[index]
        if old is not None:
            del old._uses[self, index]
        self._operands[index] = value
        self._read = self._inputs = None
        if value is not None:
            value._uses[self, index] = None

    def set_operands(self, values: Sequence[Value | None]) -> None:
        """Read other operands altogether."""
        for index, old in enumerate(self._operands):
            if old is not None:
                del old._uses[self, index]
        self._operands = list(values)
        self._read = self._inputs = None
        for index, value in enumerate(values):
            if value is not None:
                value._uses[self, index] = None

    def add_result(self, value: Value) -> Value:
        """Give the node one more result."""
        value.node = self
        value.index = len(self.results)
        self.results = (*self.results, value)
        if self.graph is not None:
            self.graph.names.claim(value)
        return value

    def set_results(self, values: Sequence[Value]) -> None:
        """Keep only `values` as results: some of the present ones, in their order; the others must have no uses."""
        for value in self.results:
            if value not in values:
                refuse_uses(value)
                if self.graph is not None:
                    self.graph.names.release(value)
                value.node = None
        self.results = tuple(values)
        for index, value in enumerate(self.results):
            value.index = index

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute; None removes it."""
        self.attributes.pop(name, None)
        self.attributes.update(attributes({name: value}))
        for nested in self.nested_graphs():
            nested.parent = self
        if self.graph is not None:
            self.graph.names.changes += 1  # the values of nested graphs come and go with them

    @property
    def holds_graphs(self) -> bool:
        """Whether there are graphs among the attributes: of most nodes there are none."""
        if self.attributes:
            # A loop takes half the time of sets of types, and all passes ask this of all nodes.
            for value in self.attributes.values():
                if type(value) in _GRAPHS:
                    return True
        return False

    def nested_graphs(self) -> Iterator["Graph"]:
        """The graphs among the attributes (If, Loop, Scan bodies)."""
        found: list[Graph] = []
        for value in self.attributes.values():
            if isinstance(value, Graph):
                found.append(value)
            elif isinstance(value, Graphs):
                found.extend(value)
        return iter(found)

    def detach(self) -> "Node":
        """Take the node out of its graph, with operands and results as they are, to be inserted elsewhere: O(1)."""
        if self.graph is not None:
            self.graph._unlink(self)
        return self

    def erase(self) -> None:
        """Delete the node and what is nested in it: O(operands).

        Raises:
            ValueError: a result is still used.
        """
        for value in self.results:
            refuse_uses(value)
        self.erase_forced()

    def erase_forced(self) -> None:
        """Delete the node whatever still reads its results (which then must be rewired or deleted too)."""
        self.set_operands(())
        for nested in self.nested_graphs():
            for inner in reversed(tuple(nested)):
                inner.erase_forced()
            nested.return_node.set_operands(())
            for value in (*nested.inputs, *nested.constants):
                nested.names.release(value)
        self.detach()

    def replace(self, values: Sequence[Value]) -> None:
        """Make all uses of the results read `values`, which take over sources and shardings; then erase."""
        for old, new in zip(self.results, values, strict=True):
            old.replace_uses(new)
            if new.source is None:
                new.source = old.source
            if new.sharding is None:
                new.sharding = old.sharding
        self.erase()

    def __repr__(self) -> str:
        results = ", ".join(f"%{value.name}" for value in self.results)
        operands = ", ".join("_" if value is None else f"%{value.name}" for value in self._operands)
        return f"{results} = {self.op_type}({operands})"


class Graph:
    """Nodes in order, with inputs, constants and results.

    Attributes:
        name: its name.
        inputs: the input values; change through `add_input` and `remove_input`.
        constants: the constant values, in order (a dict used as an ordered set).
        output_names: what the results are called outside, whatever values they become.
        names: the name table, shared with graphs nested in this one.
        parent: the node that holds this graph, for nested graphs.
        view: "global" (whole-tensor shapes) or "local" (per-device shapes).
        ranks: for a local graph, the ranks that run it.
        states: the inputs that are state, in order of inputs.
        doc, metadata: as in ONNX.
    """

    __slots__ = (
        "_count",
        "_first",
        "_last",
        "_order_is_valid",
        "constants",
        "doc",
        "inputs",
        "metadata",
        "name",
        "names",
        "output_names",
        "parent",
        "ranks",
        "return_node",
        "states",
        "view",
    )

    def __init__(self, name: str = "main", *, names: Names | None = None) -> None:
        self.name = name
        self.names = names if names is not None else Names()
        self.inputs: list[Value] = []
        self.states: dict[Value, State] = {}
        self.constants: dict[Value, None] = {}
        self.output_names: list[str] = []
        self.parent: Node | None = None
        self.view: Literal["global", "local"] = "global"
        self.ranks: tuple[int, ...] = ()
        self.doc = ""
        self.metadata: dict[str, str] | None = None
        self.return_node = Node("Return", domain=DOMAIN, results=0)
        self.return_node.graph = self
        self._first: Node | None = None
        self._last: Node | None = None
        self._count = 0
        self._order_is_valid = False

    # -- inputs, constants, results -----------------------------------------------------------------------------

    def add_input(self, name: str = "", type: Type = UNKNOWN, source: str | None = None) -> Value:
        """Append an input."""
        return self.adopt_input(Value(name, type, source))

    def adopt_input(self, value: Value) -> Value:
        """Append a value that belongs to nothing yet as an input."""
        value.graph = self
        value.index = len(self.inputs)
        self.inputs.append(value)
        self.names.claim(value)
        return value

    def remove_input(self, value: Value) -> None:
        """Drop an input that nothing reads.

        Raises:
            ValueError: something reads it.
        """
        refuse_uses(value)
        self.states.pop(value, None)
        self._drop_input(value)
        self.names.release(value)
        value.graph = None

    def _drop_input(self, value: Value) -> None:
        """Take an input off the list: O(1) for the last one."""
        del self.inputs[value.index]
        for index in range(value.index, len(self.inputs)):
            self.inputs[index].index = index

    def add_constant(self, data: Tensor, name: str = "", source: str | None = None) -> Value:
        """Append a constant."""
        value = Value(name, data.type, source)
        value.data = data
        return self.adopt_constant(value)

    def adopt_constant(self, value: Value) -> Value:
        """Append a value with numbers that belongs to nothing yet as a constant."""
        value.graph = self
        self.constants[value] = None
        self.names.claim(value)
        return value

    def remove_constant(self, value: Value) -> None:
        """Drop a constant that nothing reads: O(1).

        Raises:
            ValueError: something reads it.
        """
        refuse_uses(value)
        del self.constants[value]
        self.names.release(value)
        value.graph = None

    def constant_to_input(self, value: Value) -> None:
        """Make a constant the last input: its numbers are given from outside."""
        del self.constants[value]
        value.data = None
        value.index = len(self.inputs)
        self.inputs.append(value)
        self.names.changes += 1

    def inputs_to_constants(self, data: Mapping[Value, Tensor]) -> None:
        """Make inputs constants, in that order: the other way round."""
        self.inputs = [value for value in self.inputs if value not in data]
        for index, value in enumerate(self.inputs):
            value.index = index
        for value, numbers in data.items():
            value.index = 0
            value.data = numbers
            self.constants[value] = None
        self.names.changes += 1

    def lift_constant(self, value: Value) -> None:
        """Take over a constant of a graph that is nested in this one, where its readers see it as well: O(1)."""
        assert value.graph is not None
        del value.graph.constants[value]
        self.constants[value] = None
        value.graph = self
        self.names.changes += 1

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The results of the graph."""
        return self.return_node.inputs

    @property
    def output_count(self) -> int:
        """How many results there are: O(1)."""
        return len(self.return_node._operands)

    def output(self, index: int) -> Value:
        """One result of the graph: O(1)."""
        value = self.return_node.operand(index)
        assert value is not None
        return value

    def set_outputs(self, values: Sequence[Value], names: Sequence[str] | None = None) -> None:
        """Return `values`; their names outside are `names`, else those of before, else those of the values."""
        self.return_node.set_operands(values)
        if names is not None:
            self.output_names = list(names)
        elif len(self.output_names) != len(values):
            self.output_names = [value.name for value in values]

    # -- nodes --------------------------------------------------------------------------------------------------

    def append(self, node: Node) -> Node:
        """Insert a node last: O(1)."""
        return self._link(node, self._last, None)

    def insert_before(self, anchor: Node, node: Node) -> Node:
        """Insert a node before another: O(1). The return node as anchor means last."""
        if anchor is self.return_node:
            return self.append(node)
        return self._link(node, anchor._previous, anchor)

    def insert_after(self, anchor: Node, node: Node) -> Node:
        """Insert a node after another: O(1)."""
        return self._link(node, anchor, anchor._next)

    def absorb(self, body: "Graph", before: Node) -> tuple[Value, ...]:
        """Move the constants and nodes of a graph that shares the name table in front of a node; it is empty then.

        Returns:
            What the graph returned.
        """
        for value in body.constants:
            value.graph = self
            self.constants[value] = None
        body.constants.clear()
        for node in tuple(body):
            self.insert_before(before, node.detach())
        results = body.outputs
        body.return_node.set_operands(())
        return results

    def _link(self, node: Node, previous: Node | None, following: Node | None) -> Node:
        if node.graph is not None:
            raise ValueError(f"{node!r} is in a graph already")
        node.graph = self
        node._previous = previous
        node._next = following
        if previous is None:
            self._first = node
        else:
            previous._next = node
        if following is None:
            node._order = previous._order + 1 if previous is not None else 0
            self._last = node
        else:
            following._previous = node
            self._order_is_valid = False
        self._count += 1
        for value in node.results:
            self.names.claim(value)
        return node

    def _unlink(self, node: Node) -> None:
        if node._previous is None:
            self._first = node._next
        else:
            node._previous._next = node._next
        if node._next is None:
            self._last = node._previous
        else:
            node._next._previous = node._previous
        node._previous = node._next = None
        node.graph = None
        self._count -= 1
        for value in node.results:
            self.names.release(value)

    def is_before(self, first: Node, second: Node) -> bool:
        """True where `first` stands before `second` in this graph; amortised O(1) between insertions."""
        if first is self.return_node or second is self.return_node:
            return second is self.return_node and first is not self.return_node
        if not self._order_is_valid:
            for number, node in enumerate(self):
                node._order = number
            self._order_is_valid = True
        return first._order < second._order

    @property
    def first(self) -> Node | None:
        """The first node."""
        return self._first

    @property
    def last(self) -> Node | None:
        """The last node."""
        return self._last

    def __iter__(self) -> Iterator[Node]:
        """The nodes in order; the one in hand may be erased, and nodes inserted after it are met."""
        node = self._first
        while node is not None:
            following = node._next
            yield node
            # The next node is looked up again, unless this one was erased meanwhile.
            node = node._next if node.graph is self else following

    def __reversed__(self) -> Iterator[Node]:
        node = self._last
        while node is not None:
            previous = node._previous
            yield node
            node = node._previous if node.graph is self else previous

    def __len__(self) -> int:
        return self._count

    def walk(self) -> Iterator[Node]:
        """The nodes of this graph and of the graphs nested in it, each holder before what it holds."""
        for node in self:
            yield node
            if node.attributes and node.holds_graphs:
                for nested in node.nested_graphs():
                    yield from nested.walk()

    def graphs(self) -> Iterator["Graph"]:
        """This graph and all graphs nested in it."""
        yield self
        for node in self:
            if node.attributes and node.holds_graphs:
                for nested in node.nested_graphs():
                    yield from nested.graphs()

    def values(self) -> Iterator[Value]:
        """Inputs, constants and results of all nodes, not of nested graphs."""
        yield from self.inputs
        yield from self.constants
        for node in self:
            yield from node.results

    def value(self, name: str) -> Value:
        """The value of that name, in this graph or one nested in it.

        Raises:
            KeyError: there is none.
        """
        return self.names.table[name]

    # -- order --------------------------------------------------------------------------------------------------

    def to_networkx(self) -> "nx.DiGraph":
        """Nodes as vertices in order; an edge for each value that flows between them, `values` listing the values.

        What a nested graph reads counts as read by the node that holds it. The return node is left out.
        """
        import networkx as nx

        result = nx.DiGraph()
        result.add_nodes_from(self)
        for node in self:
            for value in captured_or_read(node):
                producer = value.node
                if producer is None or producer.graph is not self:
                    continue
                if result.has_edge(producer, node):
                    result.edges[producer, node]["values"].append(value)
                else:
                    result.add_edge(producer, node, values=[value])
        return result

    def sort(self) -> None:
        """Put the nodes in a topological order, stable: no node moves before one that it need not.

        Raises:
            ValueError: the nodes form a cycle; the message names it.
        """
        import networkx as nx

        place = {node: number for number, node in enumerate(self)}
        graph = self.to_networkx()
        try:
            order = list(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
        except nx.NetworkXUnfeasible:
            cycle = [edge[0].label for edge in nx.find_cycle(graph)]
            raise ValueError(f"cycle of nodes: {' -> '.join([*cycle, cycle[0]])}") from None
        self.reorder(order)

    def reorder(self, order: Sequence[Node]) -> None:
        """Put the nodes in that order, which must have each of them once."""
        previous = None
        for node in order:
            node._previous = previous
            if previous is None:
                self._first = node
            else:
                previous._next = node
            previous = node
        if previous is not None:
            previous._next = None
        self._last = previous
        self._order_is_valid = False

    def __repr__(self) -> str:
        return f"<graph @{self.name}: {self._count} nodes>"


_GRAPHS = frozenset({Graph, Graphs})
"""Attributes that are or hold graphs."""


def captured_or_read(node: Node) -> tuple[Value, ...]:
    """The values that a node reads, those that its nested graphs read from outside them included."""
    if not node.attributes or not node.holds_graphs:
        return node.inputs
    return (*node.inputs, *(value for nested in node.nested_graphs() for value in _captured(nested)))


def _captured(nested: Graph) -> Iterator[Value]:
    """What a graph and those in it read from outside it, once for each time."""
    graphs = list(nested.graphs())
    inside = set(graphs)
    for graph in graphs:
        for inner in itertools.chain(graph, (graph.return_node,)):
            for value in inner.inputs:
                if value.owner not in inside:
                    yield value


def holder_in(node: Node, graph: Graph | None) -> Node:
    """The node of a graph that another one is, or is nested in."""
    while node.graph is not graph and node.graph is not None and node.graph.parent is not None:
        node = node.graph.parent
    return node
