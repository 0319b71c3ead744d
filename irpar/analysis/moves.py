"""What insert-redistribution would send for shardings as they stand, without inserting anything."""

from irpar.ir import Graph, Node, Value
from irpar.sharding import Mesh, Sharding

from . import redistribution
from .network import Network
from .placement import computation, place


def cost_of_moves(graph: Graph, mesh: Mesh, network: Network) -> tuple[int, int]:
    """The cost of all moves, in the first unit of the network's keys, computation included; and their number.

    As insert-redistribution does it: a value goes once to each sharding that its readers need.

    Args:
        graph: every tensor has a sharding.
        mesh: of these.
        network: what communication costs.
    """
    nodes = [node for node in graph if node.domain != "irpar"]
    placements = {node: place(node, mesh, lambda _: True, network) for node in nodes}
    needs: dict[Value, set[Sharding]] = {}
    for node, placement in placements.items():
        for value, needed in zip(node.operands, placement.operands, strict=True):
            if value is not None and needed is not None:
                needs.setdefault(value, set()).add(needed)
    for value in graph.outputs:
        if value.sharding is not None:
            needs.setdefault(value, set()).add(value.sharding)
    for node in nodes:
        for value in _captured(node, graph):
            if value.sharding is not None:
                needs.setdefault(value, set()).add(Sharding.replicated(mesh, value.sharding.rank))
    given = {
        value: lies
        for node, placement in placements.items()
        for value, lies in zip(node.results, placement.results, strict=True)
        if lies is not None
    }
    total = launches = 0
    for value, wanted in needs.items():
        sent, count = _moves(value, given.get(value), wanted, network)
        total += sent
        launches += count
    total += sum(
        computation(node, mesh.group_size([axis for axes in placement.factors for axis in axes]), network)
        for node, placement in placements.items()
        if all(value.is_static for value in (*node.inputs, *node.results))
    )
    return total, launches


def _moves(value: Value, given: Sharding | None, wanted: set[Sharding], network: Network) -> tuple[int, int]:
    """The cost of all moves of one value, and their number."""
    lies = value.sharding
    if lies is None:
        return 0, 0
    moves: set[tuple[Sharding, Sharding]] = set()
    if given is not None and given != lies:
        if len(wanted) == 1 and lies not in wanted:
            (lies,) = wanted
        moves.add((given, lies))
    moves.update((lies, needed) for needed in wanted if needed != lies)
    costs = [
        redistribution.price(start, end, value.shape, value.dtype.bits, network)[0] for start, end in moves
    ]  # fmt: skip
    return sum(costs), len(moves)


def _captured(node: Node, graph: Graph) -> list[Value]:
    """What the bodies of a node read from the graph around them."""
    return [
        value
        for nested in node.nested_graphs()
        for inner in nested.graphs()
        for user in (*inner, inner.return_node)
        for value in user.inputs
        if value.owner is graph
    ]
