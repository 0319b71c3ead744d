"""What the choice found out of a node, for all that are alike: layers, and the variants of a graph that are tried."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from irpar.analysis.completion.placement import FactorAxes, Placement, RuleView
from irpar.analysis.cost.model import Price
from irpar.analysis.cost.network import Network
from irpar.ops.linear import carriers
from irpar.sharding import Mesh, Sharding

Followed = dict[tuple[tuple[int, ...], Sharding], tuple[Placement, ...]]
"""Ways to run a node, by the places among its values at which one stands, and the alternative of that."""


@dataclass(frozen=True, eq=False)
class AlikeNodes:
    """Of nodes that cost the same where their values lie alike.

    Attributes:
        prices: by how the values lie.
        joined: the factor axes of one value and what fits beside them, by its number and how all lie.
        followed: how the node may run where one value has an alternative, by how all lie and which are pinned.
        tables: costs in all alternatives of the values, by all that they depend on beside.
    """

    prices: dict[Hashable, Price] = field(default_factory=dict)
    joined: dict[Hashable, FactorAxes] = field(default_factory=dict)
    followed: dict[Hashable, Followed] = field(default_factory=dict)
    tables: dict[Hashable, np.ndarray] = field(default_factory=dict)


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
    runs = None if times is None else tuple(times), view.flops, carriers(node, "sum")
    return _alike(
        view.mesh, network, (node.identity, view.rule, ways, values, tuple(is_free), runs, node.strategy, program)
    )


@lru_cache(maxsize=1024)
def _alike(mesh: Mesh, network: Network, key: Hashable) -> AlikeNodes:
    return AlikeNodes()
