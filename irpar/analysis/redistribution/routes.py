"""One value that is needed in several ways: the collectives to all of them, sharing what they have in common.

x : [8@x, 64@y] read as [8, 64@y] and as [8, 64]        AllGather(x, dim 0), and from there AllGather(y, dim 1)
p : [8, 64] partial(sum: x) read as [8@x, 64]           one ReduceScatter, whatever stood there before

A Steiner tree over shardings, found path by path (Takahashi & Matsuyama 1980), in every order of a few targets.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from irpar.analysis.cost.model import CostModel, Key
from irpar.analysis.cost.network import Network
from irpar.sharding import Sharding

from . import Step, block_bytes, redistribution, steps_key

MOST_ORDERED = 4
"""Of more targets, two orders are tried: the nearest first, and the farthest first."""


@dataclass(frozen=True)
class Routes:
    """Steps from one sharding to several.

    Attributes:
        edges: (sharding, step from it), each sharding before what starts there.
        key: what all of them cost by the network.
        slices: how often a device cuts a block out of what it holds, which sends nothing.
        slicing: femtoseconds that this takes.
    """

    edges: tuple[tuple[Sharding, Step], ...]
    key: Key
    slices: int = 0
    slicing: int = 0

    @property
    def rank(self) -> tuple[Key, int]:
        """Compared: what they cost, and how many steps there are, free ones included."""
        return self.key, len(self.edges)


def routes(
    source: Sharding, targets: Iterable[Sharding], shape: Sequence[int], itemsize_bits: int, network: Network
) -> Routes:
    """The cheapest known steps from a sharding to all of the targets.

    Args:
        source: where the tensor is.
        targets: where it is needed.
        shape: of the full tensor.
        itemsize_bits: of an element.
        network: what communication costs.
    """
    wanted = frozenset(target for target in targets if target != source)
    return _routes(source, wanted, tuple(shape), itemsize_bits, network)


@lru_cache(maxsize=16384)
def _routes(
    source: Sharding, targets: frozenset[Sharding], shape: tuple[int, ...], bits: int, network: Network
) -> Routes:
    if not targets:
        return Routes((), CostModel(network).nothing)
    near = sorted(targets, key=lambda to: (redistribution(source, to, shape, bits, network).key, str(to)))
    orders = itertools.permutations(near) if len(near) <= MOST_ORDERED else (tuple(near), tuple(reversed(near)))
    found = (_in_order(source, order, shape, bits, network) for order in orders)
    return min(found, key=lambda way: way.rank)


def _in_order(
    source: Sharding, targets: Sequence[Sharding], shape: tuple[int, ...], bits: int, network: Network
) -> Routes:
    reached: dict[Sharding, None] = {source: None}
    edges: list[tuple[Sharding, Step]] = []
    for target in targets:
        if target in reached:
            continue
        start = min(reached, key=lambda start: redistribution(start, target, shape, bits, network).key)
        at = start
        for step in redistribution(start, target, shape, bits, network).steps:
            if step.after not in reached:
                edges.append((at, step))
                reached[step.after] = None
            at = step.after
    cost = CostModel(network)
    blocks = [block_bytes(step.after, shape, bits) for _, step in edges if step.op == "AllSlice"]
    key = steps_key(edges, source.mesh, shape, bits, network)
    return Routes(tuple(edges), key, len(blocks), sum(map(cost.slice, blocks)))
