"""What only moves elements, and stands before a loop for it alone: it may stand in the body, to be there for a while.

t = Transpose(w); Scan(x) { MatMul(x, t) }      t, as large as w, is there all the time
Scan(x) { t = Transpose(w); MatMul(x, t) }
"""

from collections.abc import Collection, Sequence

from irpar.analysis.looping import LOOPS
from irpar.ir import Graph, Node, Value, holder_in
from irpar.ops import traits
from irpar.ops.bodies import has_open_bodies
from irpar.ops.memory_copies import node_place


def is_loop(node: Node) -> bool:
    """Whether a node is a loop on the device, into whose body nodes may be put."""
    return node.identity in LOOPS and has_open_bodies(node) and node_place(node) == "device"


def only_rearranges(node: Node) -> bool:
    """Whether a node gives the elements of its first operand, in another order or shape that is known."""
    known = traits(node)
    moves = (known.view or known.moves_elements) and len(node.results) == 1 and bool(node.inputs)
    return moves and all(value.is_constant for value in node.inputs[1:])


def layouts_for_loops(graph: Graph) -> list[Node]:
    """The nodes of a graph that rearrange what is there while its loops run: constants, inputs, and what they read.

    Of views, which take no memory, only those of what else is rearranged.
    """
    loops = [node for node in graph if node.attributes and is_loop(node)]
    if not loops:
        return []
    there: dict[Value, bool] = dict.fromkeys((*graph.inputs, *graph.constants), False)
    there.update((value, False) for node in graph for value in node.results if _is_read_in(loops, value, graph))
    found = []
    for node in graph:
        if only_rearranges(node) and node.inputs[0] in there and node.result.is_static:
            there[node.result] = there[node.inputs[0]] or not traits(node).view
            if there[node.result]:
                found.append(node)
    return found


def _is_read_in(loops: Sequence[Node], value: Value, graph: Graph) -> bool:
    holders = {user if user.graph is graph else holder_in(user, graph) for user in value.users}
    return any(loop in holders for loop in loops)


def move_into_loops(graph: Graph, nodes: Sequence[Node]) -> bool:
    """Move nodes of a graph, given in its order, into the loop whose body alone reads what they give.

    Returns:
        Whether one moved.
    """
    moved: dict[Graph, _Moved] = {}
    for node in reversed(nodes):
        holders = {holder_in(user, graph) for user in node.result.users}
        holder = holders.pop() if len(holders) == 1 else None
        if holder is None or not is_loop(holder) or node.result in holder.inputs:
            continue
        (body,) = holder.nested_graphs()
        readers = {holder_in(user, body) for user in node.result.users}
        if body.return_node not in readers:
            if body not in moved:
                moved[body] = _Moved(body)
            moved[body].add(node, readers)
    return bool(moved)


class _Moved:
    """Nodes that are moved into a body, each right before the first that reads it."""

    def __init__(self, body: Graph) -> None:
        self._body = body
        self._nodes = list(body)
        self._place = {node: place for place, node in enumerate(self._nodes)}

    def add(self, node: Node, readers: Collection[Node | None]) -> None:
        """Move one that these nodes of the body read."""
        place = min(self._place[reader] for reader in readers if reader is not None)
        # What was moved before the node there has its place.
        first = here = self._nodes[place]
        while here.previous is not None and self._place[here.previous] == place:
            here = here.previous
            first = here if here in readers else first
        self._body.insert_before(first, node.detach())
        self._place[node] = place
