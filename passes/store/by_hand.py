"""What moves by hand: all of a kind, so many steps before it is read."""

from irpar.analysis.recompute.costs import Costs
from irpar.analysis.storage.bodies import let_bodies_make, loop_bodies, places_of, without_bodies
from irpar.analysis.storage.items import MovableValue, items_of
from irpar.analysis.storage.moves import Wish, moves_by_hand, pinned_by_hand
from irpar.analysis.storage.rewriting import write_moves
from irpar.analysis.storage.steps import steps_of_layers
from irpar.analysis.storage.timeline import Rates, seconds_of_steps, timeline
from irpar.analysis.storage.written import Written, with_bodies
from irpar.analysis.types.control_flow import assumed_trips
from irpar.ir import Graph, Memory, holder_in

from .asked import Asked


def write_by_hand(graph: Graph, asked: Asked, prefetch: int, pinned_bytes: int, costs: Costs, rates: Rates) -> Written:
    """Let things lie where it is said, and come `prefetch` steps before they are read.

    Args:
        graph: a program.
        asked: what lies where.
        prefetch: steps.
        pinned_bytes: of weights that stay on the device.
        costs: of nodes.
        rates: of copies.

    Raises:
        StoreError: there is no room for them.
    """
    memory: dict[str, Memory] = {kind: where for kind, where in asked.memory.items() if where != "auto"}
    wish = Wish(memory, prefetch, pinned_bytes)
    items = items_of(graph, asked.least)
    pinned = pinned_by_hand(items, steps_of_layers(graph, items), wish, lambda item: _trips_of(item, graph))
    wanted = [item.value for item in items if item.made is None and wish.moves(item) and item.value not in pinned]
    if let_bodies_make(graph, wanted):
        items = items_of(graph, asked.least)
    steps = steps_of_layers(graph, items)
    bodies = list(loop_bodies(graph, items, asked.least, by_layers=True))
    inside = [body.timed(body.moves_by_hand(wish, pinned), costs.of_node, rates) for body in bodies]
    items = without_bodies(items, graph, inside)
    steps = steps.with_loops(places_of(graph, inside))
    moves = tuple(moves_by_hand(items, steps, wish, pinned))
    taken = timeline(moves, steps, seconds_of_steps(graph, steps, costs.of_node), rates)
    written = Written(moves, with_bodies(taken, inside), tuple(inside))
    asked.check_room(written)
    for each in inside:
        each.body.write(each.moves)
    if moves:
        write_moves(graph, steps, moves)
    return written


def _trips_of(item: MovableValue, graph: Graph) -> int:
    """How often bodies would bring an item."""
    holders = {holder_in(user, graph) for user in item.value.users}
    return sum(assumed_trips(holder) for holder in holders if holder.holds_graphs and item.value not in holder.inputs)
