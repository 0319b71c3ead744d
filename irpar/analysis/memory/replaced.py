"""What becomes of the state before a training step: let go once the loss is known, or written over."""

from collections.abc import Iterable, Mapping, Sequence

from irpar.analysis.engines import gives_new_arrays, writes_out
from irpar.ir import DOMAIN, DType, Graph, Node, Value, captured_or_read, holder_in, tensor_type
from irpar.ir.state import LOSS
from irpar.ops import traits
from irpar.ops.memory_copies import node_place
from irpar.ops.updates import is_for_plans

_WRITTEN = (DType.F32, DType.F64)
"""Of smaller floats kernels compute wider ones, but for Cast; and what is counted is small."""
_NARROWED = (DType.F16, DType.BF16)


def update_of(graph: Graph) -> Node | None:
    """The first node of the update of a training step: from there on nobody asks for the state before the step.

    What replaces state may count from then on, for the loss is known; where it is not finite a run keeps the old state
    beside the new one to the end. None where the graph has no state, no loss, or no update that comes after it.
    """
    if not graph.states or LOSS not in graph.output_names:
        return None
    loss = graph.output(graph.output_names.index(LOSS))
    node = graph.first if loss.node is None else loss.node.next
    while node is not None and node.phase != "optimizer":
        node = node.next
    return node


def let_go(graph: Graph, kept: Iterable[Value] = ()) -> dict[Value, Value]:
    """States whose old value nothing needs after its last reader, and what replaces them.

    Args:
        graph: it.
        kept: values that are to outlive a run besides its results.
    """
    stays = {*graph.outputs, *kept}
    return {
        value: graph.output(state.output)
        for value, state in graph.states.items()
        if state.output is not None and value not in stays
    }


def _in_flight(node: Node) -> tuple[Value, ...]:
    """What the collective or copy took whose result a node waits for."""
    if node.domain != DOMAIN or node.is_return or not traits(node).waits:
        return ()
    start = node.inputs[0].node
    return () if start is None else start.inputs


def held_for(node: Node) -> tuple[Value, ...]:
    """What is held until a node has run: what it reads, and what the collective or copy took that it waits for."""
    read = captured_or_read(node)
    taken = _in_flight(node)
    return (*read, *taken) if taken else read


Reads = Mapping[Node, tuple[Value, ...]]
"""What is held for each node of a graph, its end included."""


def reads_of(graph: Graph) -> Reads:
    """What is held for each node; in which order they run does not change it."""
    return {node: held_for(node) for node in (*graph, graph.return_node)}


def written_over(graph: Graph, kept: Sequence[Value] = ()) -> dict[Value, Value]:
    """The results that are written where the state lies that they replace, and that state.

    w' = Sub(w, change): f32[8, 8]      over w, if neither w nor what may be a view of it is read later

    The node that makes such a result writes into memory that it is given, whether it reads the state or not, and
    nothing that outlives the run is a view of either. On the host ONNX Runtime computes, which writes over nothing.

    Args:
        graph: it, in global or local view.
        kept: values that are to outlive a run besides its results.
    """
    if update_of(graph) is None:
        return {}
    readers = _Readers(graph, {*graph.outputs, *kept})
    states = let_go(graph, kept).items()
    return {new: old for old, new in states if _can_write(new, old) and readers.allow(new, old)}


def _can_write(new: Value, old: Value) -> bool:
    """Whether the node of a result could write it over a state."""
    node, type_ = new.node, tensor_type(old.type)
    if (
        node is None
        or node_place(node) == "host"
        or node.phase != "optimizer"
        or len(node.results) != 1
        or sum(user.is_return for user, _ in new.uses) > 1
    ):
        return False
    written = _NARROWED + _WRITTEN if (node.domain, node.op_type) == ("", "Cast") else _WRITTEN
    if (
        type_ is None
        or new.type != type_
        or new.memory != old.memory
        or not type_.is_static
        or type_.dtype not in written
    ):
        return False
    is_written_over = traits(node).is_elementwise and writes_out(node)
    return is_written_over or (is_for_plans(node) and old in node.inputs)


class _Readers:
    """Who reads values of a graph, and what may be views of them.

    Args:
        graph: it.
        kept: what outlives a run.
    """

    def __init__(self, graph: Graph, kept: set[Value]) -> None:
        self._graph = graph
        self._kept = kept
        self._given: dict[Node, set[Value]] = {}

    def allow(self, new: Value, old: Value) -> bool:
        """Whether a result may be written over a state."""
        maker, is_before = new.node, self._graph.is_before
        assert maker is not None
        if any(is_before(maker, reader) for reader in self._of(old)):
            return False
        views = self._views(old)
        if any(not is_before(reader, maker) for view in views for reader in self._of(view)):
            return False
        return self._kept.isdisjoint(views | self._views(new))

    def _of(self, value: Value) -> list[Node]:
        """The nodes that read a value, or wait for what took it; not the end of the graph.

        Where a call of a function began that, what is in flight counts as a view of the value.
        """
        found = []
        for user in value.users:
            node = user if user.graph is self._graph else holder_in(user, self._graph)
            if node.is_return or node.graph is not self._graph:
                continue
            found.append(node)
            if node is user and node.domain == DOMAIN and traits(node).starts:
                found += [wait for wait in node.result.users if traits(wait).waits]
        return found

    def _views(self, value: Value) -> set[Value]:
        """What may be views of a value, and of these."""
        found = set[Value]()
        left = [value]
        while left:
            source = left.pop()
            for node in self._of(source):
                if not gives_new_arrays(node) and (not node.holds_graphs or source in self._given_on(node)):
                    more = [each for each in node.results if each not in found and _may_share(each, value)]
                    found.update(more)
                    left += more
        return found

    def _given_on(self, node: Node) -> set[Value]:
        """What results of a node with graphs may be views of: its operands, and what its graphs give on from outside.

        A loop over micro-batches reads all weights, and what it gives is computed.
        """
        known = self._given.get(node)
        if known is None:
            known = self._given[node] = self._find_given_on(node)
        return known

    def _find_given_on(self, node: Node) -> set[Value]:
        inside = {graph for nested in node.nested_graphs() for graph in nested.graphs()}
        given = {value for graph in node.nested_graphs() for value in graph.outputs}
        left = list(given)
        while left:
            value = left.pop()
            if value.node is None or value.node.graph not in inside or gives_new_arrays(value.node):
                continue
            inner = (result for graph in value.node.nested_graphs() for result in graph.outputs)
            more = {*value.node.inputs, *inner} - given
            given |= more
            left += more
        return given.union(node.inputs)


def _may_share(value: Value, source: Value) -> bool:
    """Whether dtypes allow that a value is a view of another."""
    types = tensor_type(value.type), tensor_type(source.type)
    return types[0] is None or types[1] is None or types[0].dtype is types[1].dtype
