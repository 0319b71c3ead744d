"""extract-layers: what a model repeats, layers up to their weights, becomes a function called once for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from irpar.analysis.layers import LAYER_DOMAIN, Layers, find_layers
from irpar.globs import matching_names
from irpar.ir import Graph, Module
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import IrparError

from .calls import put_calls

__all__ = ["ExtractLayers", "LayersError"]

_SHOWN = 4
"""Layers that an error names."""


class LayersError(IrparError):
    """Options of extract-layers that cannot be, or a graph in which it cannot look for layers."""


@dataclass(frozen=True)
class ExtractLayers(Pass):
    """Make equal repeated subgraphs (transformer layers, blocks of a ResNet) one function each, with a call for each.

    Before: global view. After: the same values. What a layer reads from outside, its weights too, are operands of its
    call. `inline-functions` gives the graph back as it was, names, sources and order included.

    Attributes:
        min_size: nodes of the smallest subgraph that counts as a layer.
        min_count: how often it must be there.
        match: only layers with a node whose name, source or scope matches one of these names or globs; default: all.
    """

    name: ClassVar[str] = "extract-layers"
    min_size: int = 4
    min_count: int = 2
    match: tuple[str, ...] = ()

    def run(self, module: Module) -> PassResult:
        """Find them, and put calls in their place.

        Raises:
            LayersError: an option is out of range, or `match` fits no layer; the module is in local view.
        """
        self._check(module)
        if any(node.domain == LAYER_DOMAIN for node in module.graph):
            return PassResult(False, ("layers are functions already",), {"layers": 0, "calls": 0, "nodes": 0})
        found = self._chosen(module.graph)
        put_calls(module, found)
        statistics: dict[str, int | float] = {
            "layers": len(found),
            "calls": sum(layers.count for layers in found),
            "nodes": sum(layers.count * layers.size for layers in found),
        }
        return PassResult(bool(found), statistics=statistics)

    def _check(self, module: Module) -> None:
        for option, value in (("min-size", self.min_size), ("min-count", self.min_count)):
            if value < 2:
                raise LayersError(
                    f"{option} of extract-layers is {value}",
                    do=f"give 2 or more: extract-layers{{{option}=2}}; what is there once, or is one node, is no layer",
                )
        if module.is_local:
            raise LayersError(
                "the module is in local view, where layers are no longer alike", do="run extract-layers before localize"
            )

    def _chosen(self, graph: Graph) -> list[Layers]:
        found = [layers for layers in find_layers(graph, self.min_size) if layers.count >= self.min_count]
        for pattern in self.match:
            if not any(_matches(layers, [pattern]) for layers in found):
                raise LayersError(
                    f'"{pattern}" matches no layer',
                    notes=tuple(map(_said, found[:_SHOWN])),
                    do="name a node of a layer that is found" if found else "the model repeats nothing of that size",
                )
        return [layers for layers in found if not self.match or _matches(layers, self.match)]


def _said(layers: Layers) -> str:
    return f"found: {layers.count} layers of {layers.size} nodes, the first from {layers.members[0][0].label}"


def _matches(layers: Layers, patterns: Sequence[str]) -> bool:
    names = {
        name
        for nodes in layers.members
        for node in nodes
        for name in (node.name, node.source, node.scope)
        if name
    }  # fmt: skip
    return any(matching_names(pattern, names) for pattern in patterns)
