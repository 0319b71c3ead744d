"""What becomes of the state before a training step: let go once the loss is known, or written over."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from irpar.analysis.engines import writes_out
from irpar.ir import DOMAIN, DType, Graph, Node, Value, captured_or_read, tensor_type
from irpar.ir.state import LOSS
from irpar.ops import traits
from irpar.ops.bodies import waits_for_copy
from irpar.ops.memory_copies import is_copy, node_place
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
    is_known = loss.node is None
    for node in graph:
        if is_known and node.phase == "optimizer":
            return node
        is_known = is_known or node is loss.node
    return None


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


def written_over(graph: Graph, kept: Sequence[Value] = (), reads: Reads | None = None) -> dict[Value, Value]:
    """The results that are written where the state lies that they replace, and that state.

    w' = Sub(w, change): f32[8, 8]      over w, if neither w nor what may be a view of it is read later

    The node that makes such a result writes into memory that it is given, whether it reads the state or not, and
    nothing that outlives the run is a view of either. On the host ONNX Runtime computes, which writes over nothing.

    Args:
        graph: it, in global or local view.
        kept: values that are to outlive a run besides its results.
        reads: from `reads_of`; None: it is found.
    """
    if update_of(graph) is None:
        return {}
    candidates = {new: old for old, new in let_go(graph, kept).items() if _can_write(new, old)}
    if not candidates:
        return {}
    watched = _Watched(graph, {*candidates, *candidates.values()}, reads_of(graph) if reads is None else reads)
    watched.keep(graph.outputs)
    watched.keep(kept)
    return {new: old for new, old in candidates.items() if watched.allow(new, old)}


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


@dataclass
class _Read:
    """Where a value is read.

    Attributes:
        last: place of the last reader of it or of what may be a view of it.
        last_view: of the last reader of what may be a view of it.
    """

    last: int = -1
    last_view: int = -1


class _Watched:
    """Where some values and their views are read.

    Args:
        graph: it.
        watched: those values.
        reads: from `reads_of`.
    """

    def __init__(self, graph: Graph, watched: set[Value], reads: Reads) -> None:
        self._reads = {value: _Read() for value in watched}
        self._views: dict[Value, tuple[Value, ...]] = {value: (value,) for value in watched}
        """Values, and of which watched ones they may be views."""
        self._kept: set[Value] = set()
        self._made: dict[Value, int] = {}
        self._writes: dict[tuple[str, str, int, int], bool] = {}
        views = self._views
        seen, makers = views.keys(), {value.node for value in watched}
        for place, node in enumerate(graph):
            if not seen.isdisjoint(reads[node]):
                self._read(node, place, [value for value in reads[node] if value in views])
            if node in makers:
                self._made.update((value, place) for value in node.results)

    def _read(self, node: Node, place: int, known: Iterable[Value]) -> None:
        given = self._given_on(node) if node.holds_graphs else None
        seen: dict[Value, None] = {}
        for value in known:
            is_given = given is None or value in given
            for source in self._views[value]:
                if is_given:
                    seen[source] = None
                read = self._reads[source]
                read.last = place
                if source is not value:
                    read.last_view = place
        if not self._is_new(node):
            for value in node.results:
                sources = tuple(source for source in seen if _may_share(value, source))
                if sources:
                    self._views[value] = (*self._views.get(value, ()), *sources)

    def _given_on(self, node: Node) -> set[Value]:
        """What results of a node with graphs may be views of: its operands, and what its graphs give on from outside.

        A loop over micro-batches reads all weights, and what it gives is computed.
        """
        inside = {graph for nested in node.nested_graphs() for graph in nested.graphs()}
        given = {value for graph in node.nested_graphs() for value in graph.outputs}
        left = list(given)
        while left:
            value = left.pop()
            if value.node is None or value.node.graph not in inside or self._is_new(value.node):
                continue
            inner = (result for graph in value.node.nested_graphs() for result in graph.outputs)
            more = {*value.node.inputs, *inner} - given
            given |= more
            left += more
        return given.union(node.inputs)

    def _is_new(self, node: Node) -> bool:
        """Whether results are surely new arrays; others are taken for views."""
        return self._writes_out(node) or is_copy(node) or waits_for_copy(node)

    def _writes_out(self, node: Node) -> bool:
        """As the function of that name; of an operator the table of kernels is asked once."""
        if node.callee is not None:
            return False
        key = node.domain, node.op_type, node.version, len(node.results)
        known = self._writes.get(key)
        if known is None:
            known = self._writes[key] = writes_out(node)
        return known

    def keep(self, values: Iterable[Value]) -> None:
        """Let values outlive the run."""
        for value in values:
            self._kept.update(source for source in self._views.get(value, ()) if source is not value)

    def allow(self, new: Value, old: Value) -> bool:
        """Whether a result may be written over a state."""
        place, read = self._made[new], self._reads[old]
        return read.last <= place and read.last_view < place and self._kept.isdisjoint((new, old))


def _may_share(value: Value, source: Value) -> bool:
    """Whether dtypes allow that a value is a view of another."""
    types = tensor_type(value.type), tensor_type(source.type)
    return types[0] is None or types[1] is None or types[0].dtype is types[1].dtype
