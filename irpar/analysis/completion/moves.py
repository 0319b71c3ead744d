"""Which values insert-redistribution moves, and what that costs, without inserting anything."""

from collections.abc import Callable, Collection, Mapping

from irpar.analysis.cost.model import Cost
from irpar.analysis.cost.network import Network
from irpar.analysis.explanation.origins import why_given_up
from irpar.analysis.redistribution.routes import Routes, routes
from irpar.ir import Node, Use, Value
from irpar.ops.effects import is_compute
from irpar.sharding import IrparError, Sharding

from .flow import Flow
from .placement import Placement
from .situation import costs_nothing, running_cost, runs_as_said, runs_free


def placements_of(flow: Flow, network: Network) -> dict[Node, Placement]:
    """How each node runs, of which every tensor has a sharding. Collectives stay as they are.

    The ends of bodies are among them: their operands are what passes the boundary.

    Raises:
        IrparError: a node cannot run as its strategy says.
    """
    placements = {node: _as_it_is(node) or flow.place(node, lambda _: True, network) for node in flow.nodes}
    for node, placement in placements.items():
        if not runs_as_said(node, placement):
            raise _not_as_said(flow, node, placement)
    return placements


def _not_as_said(flow: Flow, node: Node, placement: Placement) -> IrparError:
    """What in the strategy of a node cannot be."""
    strategy = node.strategy
    assert strategy is not None
    values, shardings = (*node.operands, *node.results), (*placement.operands, *placement.results)
    said = strategy.operands if strategy.is_of_operands else (*[None] * len(node.operands), *strategy.results)
    notes = []
    for tensor, (value, wanted, lies) in enumerate(zip(values, said, shardings, strict=False)):
        if value is None or wanted is None or (lies is not None and wanted.allows(lies)):
            continue
        why = ""
        if lies is not None and value in node.operands:
            why = why_given_up(node, flow.rule(node), placement, tensor, wanted.closed(), lies)
        notes.append(f"%{value.name} {value.type} as {wanted}: {why or f'it could be {lies} beside the others'}")
    return IrparError(
        f"{node.title} cannot run {strategy.annotation.said}",
        where=strategy.annotation.where,
        notes=tuple(notes),
        do="shard what it can be sharded along, "
        'or annotate its tensors under "tensors", where they may be moved for it',
    )


def _as_it_is(node: Node) -> Placement | None:
    if is_compute(node) or node.is_return:
        return None
    lies = [tuple(value.sharding if value else None for value in values) for values in (node.operands, node.results)]
    return Placement(lies[0], lies[1], None, ())


def captured(node: Node) -> list[tuple[Value, Use]]:
    """What the bodies of a node read from the graphs around them."""
    bodies = [body for nested in node.nested_graphs() for body in nested.graphs()]
    inside = set(bodies)
    return [
        (value, (inner, index))
        for body in bodies
        for inner in (*body, body.return_node)
        for index, value in enumerate(inner.operands)
        if value is not None and value.owner not in inside
    ]


def captured_whole(flow: Flow, node: Node) -> list[tuple[Value, Use]]:
    """What a node reads inside bodies that run replicated."""
    return [] if node in flow.ties or not node.attributes else captured(node)


def wanted_shardings(flow: Flow, placements: Mapping[Node, Placement]) -> dict[Value, set[Sharding]]:
    """The shardings that the readers of each value need, results of the graph included (`Flow.free_results`)."""
    wanted: dict[Value, set[Sharding]] = {}
    for node, placement in placements.items():
        for value, needed in zip(node.operands, placement.operands, strict=True):
            if value is not None and needed is not None:
                wanted.setdefault(value, set()).add(needed)
        for value, _ in captured_whole(flow, node):
            if value.sharding is not None:
                wanted.setdefault(value, set()).add(Sharding.replicated(flow.mesh, value.sharding.rank))
    for value in flow.results():
        if value.sharding is not None:
            wanted.setdefault(value, set()).add(leaving(flow, placements, value, value.sharding))
    return wanted


def leaving(flow: Flow, placements: Mapping[Node, Placement], value: Value, completed: Sharding) -> Sharding:
    """How a result of the graph leaves it, which completion left so."""
    given = None
    if value in flow.free_results and value.node is not None:
        given = placements[value.node].results[value.index]
    return completed if given is None else as_result(given, completed)


def as_result(given: Sharding, completed: Sharding) -> Sharding:
    """How a free result leaves the graph: nothing is sent for it but sums.

    Args:
        given: how its node produces it.
        completed: how completion left it: where that is a block of what is given, it is cut out.
    """
    return completed if given.partial or is_block(given, completed) else given


def is_block(lies: Sharding, needed: Sharding) -> bool:
    """Whether every device holds what it needs, but for sums: each dim is sharded as it was, or further."""
    return all(new[: len(old)] == old for old, new in zip(lies.axes, needed.axes, strict=True))


def first_target(value: Value, wanted: set[Sharding], *, is_held: bool) -> Sharding:
    """Where a result goes from how its node gives it: to how it should lie.

    If nobody reads it so, and all readers want the same, then there in one step, unless it is annotated (`is_held`).
    """
    assert value.sharding is not None
    if len(wanted) == 1 and value.sharding not in wanted and not is_held:
        return next(iter(wanted))
    return value.sharding


def cost_of_moves(flow: Flow, network: Network, is_pinned: Callable[[Value], bool], held: Collection[str] = ()) -> Cost:
    """What all nodes and moves cost one device in each step: what plan.json then predicts.

    A value goes once to each sharding that its readers need, by steps that these share, as insert-redistribution and
    simplify-collectives make them. What is done in a loop counts as often as the loop usually runs; of an If, both
    branches count.

    Args:
        flow: every tensor has a sharding.
        network: what communication costs.
        is_pinned: whether someone said how a value is sharded.
        held: names of values that are brought to how they were annotated before anybody reads them.
    """
    return cost_of_placements(flow, placements_of(flow, network), network, is_pinned, held)


def cost_of_placements(
    flow: Flow,
    placements: Mapping[Node, Placement],
    network: Network,
    is_pinned: Callable[[Value], bool],
    held: Collection[str] = (),
    among: Collection[Node] | None = None,
    wanted: Mapping[Value, set[Sharding]] | None = None,
) -> Cost:
    """As `cost_of_moves`, with the nodes run in these ways.

    With `among`, only these nodes and the moves of their values count. `wanted`: `wanted_shardings`, if it is known.
    """
    given = {
        value: lies
        for node, placement in placements.items()
        for value, lies in zip(node.results, placement.results, strict=True)
        if lies is not None
    }
    total = launches = 0
    around = None if among is None else {value for node in among for value in (*node.inputs, *node.results)}
    for value, needed in (wanted or wanted_shardings(flow, placements)).items():
        if around is not None and value not in around:
            continue
        times = flow.usual_trips(value) * flow.layers_of(value)
        lies = value.sharding
        if lies is None or not value.is_static or costs_nothing(value, lies, is_pinned):
            continue
        sent, count = cost_of_value(
            value, given.get(value, lies), lies if value.name in held else None, needed, network
        )
        total += sent * times
        launches += count * times
    for node in placements if among is None else among:
        placement = placements[node]
        if not is_compute(node) or placement.is_boundary or runs_free(flow.rule(node), network):
            continue
        if _is_static(node):
            times = flow.usual_trips_of(node.graph) * max(map(flow.layers_of, node.results), default=1)
            spent, collectives = running_cost(node, flow.rule(node), placement, network)
            total += spent * times
            launches += collectives * times
    return total, launches


def _is_static(node: Node) -> bool:
    return all(value.is_static for value in (*node.inputs, *node.results))


def cost_of_value(
    value: Value,
    lies: Sharding,
    held: Sharding | None,
    wanted: set[Sharding],
    network: Network,
    *,
    are_slices_free: bool = False,
) -> Cost:
    """What all moves of one value cost, each time that it is made; what its readers have in common is sent once.

    Args:
        value: with static shape.
        lies: how its node gives it.
        held: how it is annotated, where it is brought to that before anybody reads it.
        wanted: how its readers need it.
        network: what communication costs.
        are_slices_free: blocks that devices cut out of what they hold only tell equals apart (`cost_of_slices`).
    """
    if held is None or held == lies:
        if all(needed is lies or needed == lies for needed in wanted):
            return 0, 0
        ways = [(lies, wanted)]
    else:
        ways = [(lies, {held}), (held, wanted)]
    amount = launches = 0
    for start, targets in ways:
        found = routes(start, targets, value.shape, value.dtype.bits, network)
        amount += found.key[0] + cost_of_slices(value, found, are_free=are_slices_free)
        launches += found.key[-1]
    return amount, launches


def cost_of_slices(value: Value, found: Routes, *, are_free: bool) -> int:
    """What it costs a device to cut blocks out of what it holds of a value; of a weight they are written so.

    Where one slice leads to two readers costs less than two, but before it comes to that it may cost more: a search
    that is to find the way there prices each as a femtosecond (`are_free`).
    """
    if value.is_constant:
        return 0
    return min(found.slices, found.slicing) if are_free else found.slicing
