"""Which of the ways to run a node costs least, among values that lie in given ways."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from irpar.analysis import redistribution
from irpar.analysis.cost.model import IMPOSSIBLE, Cost, CostModel, Price
from irpar.analysis.cost.network import BYTES, Network
from irpar.analysis.cost.node import Work, node_flops, whole_work
from irpar.ir import Node, Value
from irpar.ops.local_programs.program import Sent
from irpar.sharding import Mesh, Sharding, ceil_shape

from .placement import NOTHING, Axes, Carried, Placement
from .rule_view import RuleView, suggested

MOST_COMBINATIONS = 256
"""Above this many ways to shard a node by one of its rules, the factors are decided one after the other."""


def runs_free(view: RuleView | None, network: Network) -> bool:
    """Whether a node costs nothing but its moves, however it runs: nothing else has a price, and it sends nothing."""
    return network.device is None and network.memory is None and (view is None or not view.has_programs)


def running_cost(node: Node, view: RuleView | None, placement: Placement, network: Network) -> Cost:
    """What a node costs but for its moves, its collectives included.

    That is what its local program sends, what it computes where a device is known, and what it holds beyond what a
    device may, where that is known.

    Args:
        node: the node.
        view: its rule; None where it must run replicated.
        placement: how it runs.
        network: what that costs.
    """
    if runs_free(view, network):
        return 0, 0
    cost = CostModel(network)
    if view is None:
        return cost.node(node, whole_work(node)), 0
    sent = _sent(view.way_of(placement), placement)
    key = cost.redistribution(((each.kind, axes, each.bytes) for each, axes in sent), view.mesh)
    total = key[0] + (cost.node(node, local_work(node, placement, view.mesh)) if cost.has_computation else 0)
    if network.memory is not None:
        total += cost.excess(_held_bytes(node, placement) + sum(sorted(each.bytes for each, _ in sent)[-2:]))
    return total, len(sent)


def local_work(node: Node, placement: Placement, mesh: Mesh) -> Work:
    """What the device that has most does for a node, on its blocks of what is read and given."""
    held = [
        [
            0 if value is None else redistribution.bytes_held(value, lies)
            for value, lies in zip(values, shardings, strict=True)
        ]
        for values, shardings in ((node.operands, placement.operands), (node.results, placement.results))
    ]
    operands = [size for value, size in zip(node.operands, held[0], strict=True) if value is not None]
    return Work(node_flops(node) * placement.largest_share(mesh), operands, held[1])


def _sent(view: RuleView, placement: Placement) -> list[tuple[Sent, Axes]]:
    """The collectives of the local program of a node, and the axes that each runs over."""
    along, program, node = view.program_axes(placement.factors), view.program, view.node
    if not along or program is None:
        return []
    blocks = [
        None if value is None or needed is None else ceil_shape(needed, value.shape)
        for value, needed in zip(node.operands, placement.operands, strict=True)
    ]
    lies = placement.operands[program.operand_of(node)]
    assert lies is not None
    cut = {dim: lies.axes[dim] for dim in program.dims(node) or () if lies.axes[dim]}
    sent = program.sends(node, blocks, {dim: view.mesh.group_size(axes) for dim, axes in cut.items()})
    return [(each, along if each.dim is None else cut[each.dim]) for each in sent]


def _held_bytes(node: Node, placement: Placement) -> int:
    """Bytes of a device's blocks of what a node reads and gives."""
    pairs = zip((*node.operands, *node.results), (*placement.operands, *placement.results), strict=True)
    held = {(value, lies): value.dtype for value, lies in pairs if value is not None and lies is not None}
    return sum(redistribution.block_bytes(lies, value.shape, dtype.bits) for (value, lies), dtype in held.items())


def costs_nothing(value: Value | None, lies: Sharding | None, is_pinned: Callable[[Value], bool]) -> bool:
    """Whether any block of a value costs nothing: a constant that is whole or not pinned is written as it is needed.

    Args:
        value: None where a node leaves it out.
        lies: how it is sharded.
        is_pinned: whether someone said how it is sharded.
    """
    if value is None or not value.is_constant:
        return False
    return (lies is not None and lies.is_replicated) or not is_pinned(value)


@dataclass(frozen=True)
class Situation:
    """A node among values that lie in given ways.

    Attributes:
        view: of the node.
        lies: per operand and result how it is sharded, or should lie; None where it is left out or no tensor.
        free: which of them cost nothing to bring anywhere.
        network: what communication costs.
        times: how often each of them is moved, where that differs: what a body reads from outside of its loop is moved
            once, what is made in it at each trip.
    """

    view: RuleView
    lies: Sequence[Sharding | None]
    free: Sequence[bool]
    network: Network = BYTES
    times: Sequence[int] | None = None

    def choose(self) -> Placement:
        """The way to run the node.

        Where the values agree, as they lie. Where they do not, the way that costs least: to bring the operands there,
        and the results to where they are wanted; among equals the one that shards the work most.
        """
        return self._agreed() or self._least()[1]

    def least(self) -> Price:
        """What that way costs."""
        agreed = self._agreed()
        return self._least()[0] if agreed is None else self.price(agreed)

    def _agreed(self) -> Placement | None:
        if len(self.view.carriable(self.lies)) > 1:
            return None
        agreed = self.view.agreed(tuple(None if lie is None else lie.axes for lie in self.lies))
        return agreed if agreed is not None and runs_as_said(self.view.node, agreed) else None

    def _least(self) -> tuple[Price, Placement]:
        carriable = self.view.carriable(self.lies)
        found = [self._cheapest(way, carried) for way in self.view.ways for carried in carriable]
        # Where it cannot run as was said, whoever runs it refuses it.
        as_said = [each for each in found if runs_as_said(self.view.node, each[1])]
        return min(self._most_split(as_said or found), key=_price)

    def price(self, placement: Placement) -> Price:
        """What it costs to bring the operands to where a node needs them, and its results to where they are wanted."""
        view, lies, network = self.view, self.lies, self.network
        times = self.times or (1,) * len(lies)
        total = launches = 0
        for place, shape, bits in view.operand_sizes:
            needed, lie = placement.operands[place], lies[place]
            if needed is None or lie is None or needed is lie or self.free[place]:
                continue
            moved = redistribution.price(lie, needed, shape, bits, network)
            total, launches = total + times[place] * moved[0], launches + moved[-1]
        for place, shape, bits in view.result_sizes:
            given, lie = placement.results[place - view.operand_count], lies[place]
            if given is None or given is lie:
                continue
            wanted = lie or given.with_partial(())
            if not set(wanted.partial) <= set(given.partial):
                return IMPOSSIBLE
            moved = redistribution.price(given, wanted, shape, bits, network)
            total, launches = total + times[place] * moved[0], launches + moved[-1]
        ways = placement.ways(view.mesh)
        if runs_free(view, network):
            return total, -ways, launches
        spent, collectives = running_cost(view.node, view, placement, network)
        if view.has_programs:
            ways //= view.mesh.group_size(view.way_of(placement).program_axes(placement.factors))
        return total + times[-1] * spent, -ways, launches + collectives

    def placements(self, view: RuleView, carried: Carried = NOTHING) -> Iterator[Placement]:
        """The ways to shard the node that its values suggest: all of them, or where these are too many, the best first.

        Args:
            view: one of the rules of the node.
            carried: which operands stay partial.
        """
        known = [None if lie is None else lie.axes for lie in self.lies]
        options = _with_moves(view, known, list(map(list, suggested(view, known))))
        options = _with_strategy(view, options)
        if math.prod(map(len, options)) <= MOST_COMBINATIONS:
            found = (view.placement(factors, carried) for factors in itertools.product(*options))
            yield from (placement for placement in found if placement is not None)
        else:
            yield from self._one_after_the_other(view, options, carried)

    def _cheapest(self, view: RuleView, carried: Carried) -> tuple[Price, Placement]:
        """By one of the rules of the node."""
        priced = [(self.price(placement), placement) for placement in self.placements(view, carried)]
        as_said = [each for each in priced if runs_as_said(view.node, each[1])]
        if not priced:  # Of cuts that exclude each other, what was said leaves no choice.
            placement = view.placement(tuple(() for _ in view.rule.sizes))
            assert placement is not None
            priced = [(self.price(placement), placement)]
        return min(self._most_split(as_said or priced), key=_price)  # To cut nothing is always possible.

    def _most_split(self, priced: list[tuple[Price, Placement]]) -> list[tuple[Price, Placement]]:
        """Of products of a backward pass the ways that repeat no work, where computation has no price.

        There a gradient may be larger than what it is made of, and it would send less to compute it everywhere.
        """
        if self.network.device is not None or self.view.node.phase != "backward" or not self.view.sums_products:
            return priced
        possible = [each for each in priced if each[0] < IMPOSSIBLE]
        most = min((price[1] for price, _ in possible), default=0)
        return [each for each in possible if each[0][1] == most] or priced

    def _one_after_the_other(self, view: RuleView, options: list[list[Axes]], carried: Carried) -> list[Placement]:
        """Fix each factor at its best option while the later ones are not cut: where that leads, and what is tried."""
        chosen: list[Axes] = [()] * len(options)
        best: Placement | None = None
        tried: dict[Placement, None] = {}
        for factor, choices in enumerate(options):
            ways = [(*chosen[:factor], choice, *chosen[factor + 1 :]) for choice in choices]
            priced = [found for way in ways if (found := view.placement(way, carried)) is not None]
            if not priced:
                continue
            tried.update(dict.fromkeys(priced))
            best = min(priced, key=self.price)
            chosen[factor] = best.factors[factor]
        return list(dict.fromkeys([*([best] if best else []), *tried]))


def _price(priced: tuple[Price, Placement]) -> Price:
    return priced[0]


def runs_as_said(node: Node, placement: Placement) -> bool:
    """Whether a way to run a node is what its strategy says, if it has one."""
    strategy = node.strategy
    if strategy is None:
        return True
    if strategy.is_of_operands:
        pairs = zip(strategy.operands, placement.operands, strict=False)
        return all(said is None or (needed is not None and said.allows(needed)) for said, needed in pairs)
    pairs = zip(strategy.results, placement.results, strict=False)
    return all(said is None or (given is not None and _becomes(given, said)) for said, given in pairs)


def _becomes(given: Sharding, said: Sharding) -> bool:
    """Whether a result is sharded as was said, at the latest when its parts are reduced."""
    if not given.partial:
        return said.allows(given)
    pending = set(given.canonical.partial)
    pairs = zip(given.canonical.axes, said.canonical.axes, strict=True)
    return all(
        wanted[: len(cut)] == cut and (pending.issuperset(wanted[len(cut) :]) or said.dims[dim].is_open)
        for dim, (cut, wanted) in enumerate(pairs)
    )


def _with_strategy(view: RuleView, options: list[list[Axes]]) -> list[list[Axes]]:
    """The same, of factors of which the strategy of the node speaks only what it says."""
    strategy = view.node.strategy
    if strategy is None or len(view.values) != len(view.node.operands) + len(view.node.results):
        return options
    said = strategy.operands
    if not strategy.is_of_operands:
        said = (*[None] * view.operand_count, *strategy.results)
    for tensor, sharding in enumerate(said):
        if sharding is None or sharding.rank != len(view.tensors[tensor]):
            continue
        is_result = tensor >= view.operand_count
        cut = view.project(tensor, sharding.axes)
        for dim, parts in zip(sharding.dims, view.tensors[tensor], strict=True):
            for factor in parts:
                wanted = cut.get(factor, ())
                if dim.is_open or is_result:
                    options[factor] = list(dict.fromkeys([wanted, *options[factor]]))
                else:
                    options[factor] = [wanted]
    return options


def _with_moves(
    view: RuleView, known: Sequence[tuple[Axes, ...] | None], options: list[list[Axes]]
) -> list[list[Axes]]:
    """The same, and for factors to which axes may move from others: what cuts these in some value."""
    for source, target in view.moves:
        for tensor, dim, index in view.rule.places[source]:
            dims = known[tensor]
            axes = () if dims is None or index else view.fitting(target, dims[dim])
            if axes not in options[target]:
                options[target].insert(-1, axes)
    return options
