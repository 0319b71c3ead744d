"""Refinement of variants of one graph, such as the cuts that are tried of a model: each begins with what is known.

Two variants lie alike but for a few values. What the more similar one came to is good wherever nothing around it is
other; only the rest is searched.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.placement import Placement
from irpar.analysis.completion.refinement import LOOK_AROUND, beside, refine
from irpar.analysis.cost.network import Network
from irpar.ir import Node


@dataclass(frozen=True)
class _Variant:
    """What was found of one, by the number of each node.

    Attributes:
        looks: how it runs by itself, and how its values lie.
        refined: how it runs in the end.
    """

    looks: Sequence[Hashable]
    refined: Sequence[Placement]


class RefinedVariants:
    """Refines variants of one graph: copies with the same nodes in the same order, whose values lie otherwise."""

    def __init__(self) -> None:
        self._known: list[_Variant] = []

    def refine(
        self, flow: Flow, placements: Mapping[Node, Placement], network: Network, pinned: Collection[str]
    ) -> dict[Node, Placement]:
        """As `refinement.refine`; what is found may differ from it, and be better or worse, where variants do."""
        nodes = list(placements)
        looks = [_look(node, placements[node], pinned) for node in nodes]
        near = max(self._known, key=lambda one: _alike(one.looks, looks), default=None)
        if near is None:
            found = refine(flow, placements, network, pinned)
        else:
            other = [node for node, look, was in zip(nodes, looks, near.looks, strict=True) if look != was]
            start = dict(zip(nodes, near.refined, strict=True)) | {node: placements[node] for node in other}
            found = refine(flow, start, network, pinned, _around(other, placements))
        self._known.append(_Variant(looks, [found[node] for node in nodes]))
        return found


def _look(node: Node, placement: Placement, pinned: Collection[str]) -> Hashable:
    """What decides about a node. How it runs does not change with whether a constant that lies so is annotated."""
    values = (*node.operands, *node.results)
    return placement, tuple(
        None if value is None else (value.sharding, not value.is_constant and value.name in pinned) for value in values
    )


def _alike(some: Sequence[Hashable], others: Sequence[Hashable]) -> int:
    return sum(one == other for one, other in zip(some, others, strict=True))


def _around(nodes: Collection[Node], among: Collection[Node]) -> set[Node]:
    """Some nodes, and those up to `LOOK_AROUND` steps from one of them."""
    found = new = set(nodes)
    for _ in range(LOOK_AROUND):
        new = {other for node in new for other in beside(node, among)} - found
        found = found | new
    return found
