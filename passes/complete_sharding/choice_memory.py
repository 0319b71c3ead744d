"""What the choice found out of a node, for all that are alike: layers, and the variants of a graph that are tried."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from irpar.analysis.completion.placement import FactorAxes, Placement
from irpar.analysis.completion.rule_view import RuleView
from irpar.analysis.cost.model import Price
from irpar.analysis.cost.network import Network
from irpar.ops.linear import carriers
from irpar.sharding import Mesh, Sharding

Offers = tuple[tuple[int, Sharding, bool], ...]
"""The number of a value, how it may lie, and whether that is a result in parts, which somebody has to carry on."""
Followed = dict[tuple[tuple[int, ...], Sharding, tuple[bool, ...]], Offers]
"""What a node offers, by the places among its values at which one stands, the alternative of that, and which operands
may be in parts like it."""


@dataclass(frozen=True, eq=False)
class AlikeNodes:
    """Of nodes that cost the same where their values lie alike.

    Attributes:
        prices: by how the values lie.
        joined: the factor axes of one value and what fits beside them, by its number and how all lie.
        followed: what the node offers where one value has an alternative, by how all lie and which are pinned.
        tables: costs in all alternatives of the values, by all that they depend on beside.
    """

    prices: dict[Hashable, Price] = field(default_factory=dict)
    joined: dict[Hashable, FactorAxes] = field(default_factory=dict)
    followed: dict[Hashable, Followed] = field(default_factory=dict)
    tables: dict[Hashable, np.ndarray] = field(default_factory=dict)


def offers_of(view: RuleView, placements: Iterable[Placement]) -> Offers:
    """How the values of a node lie in some ways to run it, each once."""
    count = view.operand_count
    found: dict[tuple[int, Sharding, bool], None] = {}
    for placement in placements:
        for place, needed in enumerate(placement.operands):
            if needed is not None:
                found[place, needed, False] = None
        for place, given in enumerate(placement.results, count):
            if given is not None:
                found[place, given.with_partial(()), False] = None
                if given.partial:
                    found[place, given, True] = None
    return tuple(found)


def alike_nodes(view: RuleView, is_free: Sequence[bool], times: Sequence[int] | None, network: Network) -> AlikeNodes:
    """What is known of nodes like this one.

    Args:
        view: the rule of the node.
        is_free: which of its values cost nothing to bring anywhere.
        times: as `Situation` takes them.
        network: what communication costs.
    """
    node, program = view.node, view.program_kind
    if program is node:  # Its costs depend on elements that it alone reads.
        return AlikeNodes()
    values = tuple(
        None if value is None else (value.shape, value.dtype.bits, value.is_constant) for value in view.values
    )
    ways = tuple(way.rule for way in view.ways)
    runs = None if times is None else tuple(times), view.flops, carriers(node, "sum"), view.addends
    return _alike(
        view.mesh, network, (node.identity, view.rule, ways, values, tuple(is_free), runs, node.strategy, program)
    )


@lru_cache(maxsize=1024)
def _alike(mesh: Mesh, network: Network, key: Hashable) -> AlikeNodes:
    return AlikeNodes()
