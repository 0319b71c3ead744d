"""The graph that recompute is decided on, and its JSON form."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from irpar.errors import IrparError


class RecomputeError(IrparError):
    """A graph, a schedule or a budget that does not fit."""


@dataclass(frozen=True, slots=True)
class TrainingNode:
    """What runs as one.

    Attributes:
        name: for people.
        cost: of running it, in any unit.
        mem: bytes of its result.
        bwd: whether it belongs to the backward pass.
        layer: which layer it belongs to, for people.
        keep: whether its result is held to the end, from when it is there.
        norec: whether it may run only once.
        work: bytes that are held while it runs only.
        joined: whether it is a further result of the node before it: it runs whenever that does, right after it.
    """

    name: str
    cost: int
    mem: int = 0
    bwd: bool = False
    layer: int = 0
    keep: bool = False
    norec: bool = False
    work: int = 0
    joined: bool = False


@dataclass(frozen=True)
class TrainingGraph:
    """Nodes in the order in which they run, and who reads whose result.

    Attributes:
        nodes: in that order.
        edges: (u, v), u < v: v reads the result of u.
        fixed_mem: bytes that are held throughout.
        name: for people.
    """

    nodes: tuple[TrainingNode, ...]
    edges: tuple[tuple[int, int], ...]
    fixed_mem: int = 0
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for u, v in self.edges:
            if not 0 <= u < v < len(self.nodes):
                raise RecomputeError(f"no edge leads from node {u} to node {v}", do="number nodes in their order")
        if self.nodes and self.nodes[0].joined:
            raise RecomputeError("the first node is joined to one before it", do="let it stand for itself")

    @cached_property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        """Whose results each node reads, each once."""
        return self._sides(1)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Who reads the result of each node, each once, in order."""
        return self._sides(0)

    def _sides(self, side: int) -> tuple[tuple[int, ...], ...]:
        found: list[dict[int, None]] = [{} for _ in self.nodes]
        for edge in sorted(self.edges):
            found[edge[side]][edge[1 - side]] = None
        return tuple(map(tuple, found))

    @cached_property
    def backward(self) -> int:
        """The first node of the backward pass; the number of nodes where there is none."""
        return next((place for place, node in enumerate(self.nodes) if node.bwd), len(self.nodes))

    @cached_property
    def cost(self) -> int:
        """Of running every node once."""
        return sum(node.cost for node in self.nodes)

    @cached_property
    def together(self) -> tuple[range, ...]:
        """Of each node the nodes that run as one with it, itself included: more than one where a node has results."""
        starts = [place for place, node in enumerate(self.nodes) if not node.joined]
        groups = map(range, starts, (*starts[1:], len(self.nodes)))
        return tuple(group for group in groups for _ in group)

    def may_repeat(self, place: int) -> bool:
        """Whether a node may run again, with those that run as one with it."""
        return not any(self.nodes[one].norec or self.nodes[one].keep for one in self.together[place])

    def part(self, places: Sequence[int]) -> "TrainingGraph":
        """Some of the nodes, which must be in order, and the edges among them."""
        number = {place: index for index, place in enumerate(places)}
        edges = tuple((number[u], number[v]) for v in places for u in self.operands[v] if u in number)
        nodes = [
            replace(node, joined=False) if node.joined and place - 1 not in number else node
            for place, node in ((place, self.nodes[place]) for place in places)
        ]
        return TrainingGraph(tuple(nodes), edges, name=self.name)


_FIELDS = {each.name: each for each in fields(TrainingNode)}


def read_graph(path: str | Path) -> TrainingGraph:
    """Read the JSON form: nodes (name, cost, mem, bwd, layer, keep, norec, work, joined), edges [u, v], fixed_mem.

    Raises:
        RecomputeError: it is not that.
    """
    try:
        found = json.loads(Path(path).read_text())
        nodes = tuple(TrainingNode(**{key: each[key] for key in each if key in _FIELDS}) for each in found["nodes"])
        edges = tuple((int(u), int(v)) for u, v in found["edges"])
        return TrainingGraph(nodes, edges, found.get("fixed_mem", 0), found.get("name", ""))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecomputeError(
            "the file holds no training graph",
            where=str(path),
            notes=(f"{type(error).__name__}: {error}",),
            do='write {"nodes": [{"name": "f0", "cost": 1, "mem": 1}], "edges": [], "fixed_mem": 0}',
        ) from error


def write_graph(graph: TrainingGraph, path: str | Path) -> None:
    """Write the JSON form, which `read_graph` reads; what is not said of a node is as it is by default."""
    nodes = [
        {name: value for name in _FIELDS if (value := getattr(node, name)) != _FIELDS[name].default}
        for node in graph.nodes
    ]
    written: dict[str, Any] = {"name": graph.name, "fixed_mem": graph.fixed_mem, "nodes": nodes, "edges": graph.edges}
    Path(path).write_text(json.dumps(written))
