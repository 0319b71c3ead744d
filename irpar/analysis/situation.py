"""Which of the ways to run a node costs least, among values that lie in given ways."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from irpar.ir import Node, Value
from irpar.ops import definition
from irpar.sharding import Sharding, ceil_shape

from . import redistribution
from .device import node_seconds
from .network import BYTES, Network
from .placement import Axes, Carried, FactorAxes, Placement, RuleView, suggested

MOST_COMBINATIONS = 256
"""Above this many ways to cut a node whose values disagree, the factors are decided one after the other."""

Price = tuple[int, int, int]
"""(what it costs, minus the number of ways the work is cut but for local programs, collectives).

The cost is in the first unit of the network's keys: sent bytes, or femtoseconds, computation included. What a local
program saves in work is little beside its launches, so that it does not decide between equals.
"""

IMPOSSIBLE: Price = (1 << 200, 0, 0)
"""Of results that should be partial over axes that they are not."""

_FEMTO = 1e15


def computation(node: Node, ways: int, network: Network) -> int:
    """Femtoseconds that a device computes a node that is cut in a number of ways; 0 where no device is known."""
    return 0 if network.device is None else round(node_seconds(node, network.device) * _FEMTO / ways)


def program_cost(view: RuleView | None, placement: Placement, network: Network) -> tuple[int, int]:
    """What the local program of a node sends, in the first unit of the network's keys, and its collectives."""
    axes = () if view is None else view.program_axes(placement.factors)
    if view is None or not axes:
        return 0, 0
    node, mesh = view.node, view.mesh
    found = definition(node)
    assert found is not None
    assert found.local_program is not None
    blocks = [
        None if value is None or needed is None else ceil_shape(needed, value.shape)
        for value, needed in zip(node.operands, placement.operands, strict=True)
    ]
    lies = placement.operands[found.local_program.operand]
    assert lies is not None
    cut = {dim: lies.axes[dim] for dim in found.local_program.dims(node) or () if lies.axes[dim]}
    sent = found.local_program.sends(node, blocks, {dim: mesh.group_size(axes) for dim, axes in cut.items()})
    keys = (network.key(each.kind, axes if each.dim is None else cut[each.dim], each.bytes, mesh) for each in sent)
    return sum(key[0] for key in keys), len(sent)


def is_cut_when_written(value: Value, lies: Sharding) -> bool:
    """True where any block of a value costs nothing: a constant that is whole is written as its readers need it."""
    return value.is_constant and lies.is_replicated


@dataclass(frozen=True)
class Situation:
    """A node among values that lie in given ways.

    Attributes:
        view: of the node.
        lies: per operand and result how it lies, or should lie; None where it is left out or no tensor.
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
        and the results to where they are wanted; among equals the one that cuts the work most.
        """
        view = self.view
        known = [None if lie is None else lie.axes for lie in self.lies]
        carriable = view.carriable(self.lies)
        agreed = view.agreed(tuple(known)) if len(carriable) == 1 else None
        if agreed is not None:
            return agreed
        options = _with_moves(view, known, suggested(view, known))
        return min((self._cheapest(options, carried) for carried in carriable), key=self.price)

    def price(self, placement: Placement) -> Price:
        """What it costs to bring the operands to where a node needs them, and its results to where they are wanted."""
        view, count = self.view, self.view.operand_count
        total = launches = 0
        times = self.times or [1] * len(view.values)
        operands = zip(
            view.values[:count], placement.operands, self.lies[:count], self.free[:count], times[:count], strict=True
        )
        for value, needed, lie, is_free, often in operands:
            if value is None or needed is None or lie is None or is_free or is_cut_when_written(value, lie):
                continue
            moved = redistribution.price(lie, needed, value.shape, value.dtype.bits, self.network)
            total, launches = total + often * moved[0], launches + moved[-1]
        results = zip(view.values[count:], placement.results, self.lies[count:], times[count:], strict=True)
        for value, given, lie, often in results:
            if value is None or given is None:
                continue
            wanted = lie or given.with_partial(())
            if not set(wanted.partial) <= set(given.partial):
                return IMPOSSIBLE
            moved = redistribution.price(given, wanted, value.shape, value.dtype.bits, self.network)
            total, launches = total + often * moved[0], launches + moved[-1]
        spent, collectives = program_cost(view, placement, self.network)
        total += times[-1] * spent
        launches += collectives
        ways = placement.ways(view.mesh)
        total += times[-1] * computation(view.node, ways, self.network)
        return total, -ways // view.mesh.group_size(view.program_axes(placement.factors)), launches

    def _cheapest(self, options: list[list[Axes]], carried: Carried) -> Placement:
        if math.prod(map(len, options)) <= MOST_COMBINATIONS:
            candidates: Iterator[FactorAxes] = itertools.product(*options)
        else:
            candidates = self._one_after_the_other(options, carried)
        best: tuple[Price, Placement] | None = None
        for factors in candidates:
            placement = self.view.placement(factors, carried)
            if placement is None:
                continue
            key = self.price(placement)
            if best is None or key < best[0]:
                best = key, placement
        assert best is not None, "cutting nothing is always possible"
        return best[1]

    def _one_after_the_other(self, options: list[list[Axes]], carried: Carried) -> Iterator[FactorAxes]:
        """Fix each factor at its best option while the later ones are not cut."""
        chosen: list[Axes] = [()] * len(options)
        for factor, choices in enumerate(options):
            priced = []
            for choice in choices:
                chosen[factor] = choice
                placement = self.view.placement(tuple(chosen), carried)
                if placement is not None:
                    priced.append((self.price(placement), choice))
            chosen[factor] = min(priced, key=lambda pair: pair[0])[1]
        yield tuple(chosen)


def _with_moves(
    view: RuleView, known: Sequence[tuple[Axes, ...] | None], options: list[list[Axes]]
) -> list[list[Axes]]:
    """The same, and for factors to which axes may move from others: what cuts these in some value."""
    for source, target in view.rule.moves:
        for tensor, dim, index in view.rule.places[source]:
            dims = known[tensor]
            axes = () if dims is None or index else view.fitting(target, dims[dim])
            if axes not in options[target]:
                options[target].insert(-1, axes)
    return options


def place(
    view: RuleView,
    is_pinned: Callable[[Value], bool],
    network: Network = BYTES,
    times: Sequence[int] | None = None,
) -> Placement:
    """Decide how a node runs, given the completed shardings of its values; see `Situation.choose`.

    Constants that nobody pinned cost nothing: they are written as they are needed.
    """
    lies = [None if value is None else value.sharding for value in view.values]
    free = [value is not None and value.is_constant and not is_pinned(value) for value in view.values]
    return Situation(view, lies, free, network, times).choose()
