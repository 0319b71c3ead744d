"""Work that every device repeats though nothing forces it to: nodes that could be cut in more ways and send no more.

x : [8@x, 64] -> Softmax over the last dim -> y    run whole after an all-gather of x: unforced, y could be cut as x is
x : [8, 64@x] -> Softmax over the last dim -> y    forced: the rule needs the dim whole
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import irpar
from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.moves import cost_of_placements, placements_of
from irpar.analysis.completion.node_placement import rule_view
from irpar.analysis.completion.placement import Placement
from irpar.analysis.completion.rule_view import RuleView, suggested
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.network_file import find_network
from irpar.analysis.cost.network_lookup import network_of
from irpar.annotations.named import infer_undeclared_types
from irpar.ir import Module, Node, clone_module
from irpar.pass_manager import PassManager

from .random_programs import Program, loaded

MOST_WAYS = 64
MOST_COMPLETED = 4
"""Of the ways to shard a node more these many are looked at, those that cut it most first."""


@dataclass(frozen=True)
class Run:
    """How a node with a rule runs.

    Attributes:
        operator: of the node.
        ways: into how many pieces its work is sharded.
        could: the same if it were sharded wherever the rule allows what its operands and results suggest.
        unforced: what it could do instead at no higher cost; "" where it could not.
    """

    operator: str
    ways: int
    could: int
    unforced: str


def runs(program: Program, folder: Path) -> list[Run]:
    """How each node with a rule runs."""
    module = loaded(program, folder)
    module.network = find_network(program.network).text
    infer_undeclared_types(module)
    module.set_mesh(program.mesh)
    passes = PassManager.parse(program.pipeline).passes
    place = next(place for place, each in enumerate(passes) if each.name == "complete-sharding")
    PassManager(passes[:place]).run(module)
    before = clone_module(module)
    PassManager(passes[place : place + 1]).run(module)
    return _Look(program, module, before, str(passes[place])).runs()


class _Look:
    """One look at a completed module."""

    def __init__(self, program: Program, module: Module, before: Module, completion: str) -> None:
        self.program = program
        self.flow = Flow(module.graph, module.mesh)
        self.before = before
        self.completion = completion
        self.network: Network = network_of(module.network)
        self.mesh = module.mesh
        self.placements = placements_of(self.flow, self.network)
        self.held = module.annotated
        self.is_pinned = lambda value: value.name in self.held
        self.cost = cost_of_placements(self.flow, self.placements, self.network, self.is_pinned, self.held)[0]
        self.work = _work(self.mesh, self.placements)

    def runs(self) -> list[Run]:
        """How each node with a rule runs."""
        return [
            self._run(node, view, self.placements[node])
            for node in self.flow.graph
            if node.domain != "irpar" and (view := rule_view(node, self.mesh)) is not None
        ]

    def _run(self, node: Node, view: RuleView, placement: Placement) -> Run:
        ways = _ways(self.mesh, placement)
        others = sorted(
            (found for found in _alternatives(view) if _ways(self.mesh, found) > ways),
            key=lambda found: -_ways(self.mesh, found),
        )
        could = max((_ways(self.mesh, found) for found in others), default=ways)
        for other in others[:MOST_COMPLETED]:
            how = self._no_dearer(node, other)
            if how:
                return Run(node.operator, ways, could, f"{node!r} as {_text(other)}, {how}")
        return Run(node.operator, ways, could, "")

    def _no_dearer(self, node: Node, other: Placement) -> str:
        """What the program costs with this placement of a node, where that is no more; else ""."""
        alone = cost_of_placements(
            self.flow, {**self.placements, node: other}, self.network, self.is_pinned, self.held
        )[0]
        if alone <= self.cost:
            return f"for {alone} instead of {self.cost}"
        if self.program.strategy == "propagate":
            return ""
        cost, work = self._completed(node, other)
        return (
            f"for {cost} instead of {self.cost} with all that follows" if (cost, work) < (self.cost, self.work) else ""
        )

    def _completed(self, node: Node, other: Placement) -> tuple[int, float]:
        """What the program costs, and the work of a device, where completion starts with a node that is sharded so."""
        module = clone_module(self.before)
        values = {value.name: value for value in module.graph.values()}
        pairs = zip((*node.operands, *node.results), (*other.operands, *other.results), strict=True)
        for value, sharding in pairs:
            if value is None or sharding is None or value.is_constant:
                continue
            mine = values.get(value.name)
            if mine is not None and mine.sharding is None:
                mine.sharding = sharding.with_partial(())
        PassManager.parse(self.completion).run(module)
        flow = Flow(module.graph, self.mesh)
        placements = placements_of(flow, self.network)
        return cost_of_placements(flow, placements, self.network, self.is_pinned, self.held)[0], _work(
            self.mesh, placements
        )


def _alternatives(view: RuleView) -> Iterator[Placement]:
    """The ways to run a node that the shardings of its values suggest."""
    lies = [None if value is None else value.sharding for value in view.values]
    options = suggested(view, [None if lie is None else lie.axes for lie in lies])
    for factors in itertools.islice(itertools.product(*options), MOST_WAYS):
        for carried in view.carriable(lies):
            placement = view.placement(factors, carried)
            if placement is not None:
                yield placement


def _ways(mesh: irpar.Mesh, placement: Placement) -> int:
    """Into how many pieces the work is sharded."""
    return mesh.group_size([axis for axes in placement.factors for axis in axes])


def _work(mesh: irpar.Mesh, placements: Mapping[Node, Placement]) -> float:
    """Elements of results that a device computes."""
    return sum(
        sum(math.prod(value.shape) for value in node.results) / _ways(mesh, placement)
        for node, placement in placements.items()
        if placement.rule is not None
    )


def _text(placement: Placement) -> str:
    operands, results = (", ".join(map(str, found)) for found in (placement.operands, placement.results))
    return f"({operands}) -> ({results})"
