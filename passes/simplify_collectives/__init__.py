"""simplify-collectives: fewer and cheaper collectives that say the same."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

from irpar.analysis.cost.network import Network
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.equal_nodes import MAX_ELEMENTS, equal_constants, equal_nodes, merge_constants
from irpar.analysis.explanation.gone_values import follow_instead
from irpar.analysis.explanation.joined_reasons import joined_texts
from irpar.analysis.memory.liveness import peak_bytes
from irpar.analysis.redistribution.held import is_held
from irpar.analysis.redistribution.rewriting import TreeWriter
from irpar.analysis.redistribution.routes import routes
from irpar.analysis.redistribution.trees import trees
from irpar.ir import Graph, Module, Node, Value
from irpar.ops import traits
from irpar.ops.collectives import number_alike, number_collectives, sends
from irpar.ops.effects import is_collective, is_communication
from irpar.ops.facts import int_attribute
from irpar.pass_manager import PassResult, PassWithinLimit

from .loop_invariants import leave_loops
from .mixed_sums import add_alike_first
from .reduced_sums import reduce_sums_once
from .sums_of_trips import move_sums_once
from .trips import sums_leave
from .written_constants import ConstantWays

LOOK_BACK = 3
"""Nodes before a collective that are compared before all are."""
_VIEW = ("", "Identity")

Pairs = frozenset[tuple[int, int]]
"""Ids of collectives: one, and an earlier one that gives the same."""


@dataclass(frozen=True)
class SimplifyCollectives(PassWithinLimit):
    """Do what the collectives do with cheaper ones, by the network of the module.

    Before: global view, after insert-redistribution; or local view.
    After: the same values, in fewer or cheaper collectives, numbered in program order; on all ranks the same.

    In global view all collectives between a value and its readers are planned together: from how the value lies to all
    the ways in which it is read. So duplicates merge, all_reduce and slice become reduce_scatter, all_gather and slice
    all_to_all or slice, permutes compose, reduce_scatter and all_gather become all_reduce where that is cheaper, and
    what two readers need goes the same way as far as it can. A constant is written in each of the ways in which its
    readers need it, as far as devices then hold little more of it (`written_constants`). In both views a
    collective on what a Loop or Scan reads from outside stands before it, and a sum (or difference, or maximum) of
    reduced values is reduced once. What trips of a loop add up is reduced behind it; where ranks hold more for that, as
    the module says (`irpar.analysis.trips`) or, where it says nothing, if they have the memory. In local view equal
    computations with equal collectives in them merge, in all programs alike: what a backward pass would send again it
    keeps from the forward pass.
    """

    name = "simplify-collectives"

    def most_held(self, module: Module) -> int:
        """See `PassWithinLimit.most_held`."""
        return peak_bytes(module)

    def run(self, module: Module) -> PassResult:
        """Rewrite all graphs."""
        leave, notes = sums_leave(module, _rewrite)
        statistics = _rewrite(module, leave)
        changed = any(statistics.values())
        if changed and module.is_local:
            number_alike(module.graphs)
        elif changed:
            number_collectives(module.graph)
        return PassResult(changed or bool(notes), notes, statistics)


def _rewrite(module: Module, sums_may_hold_more: bool) -> dict[str, int | float]:
    """Rewrite all graphs; what was done, and how often.

    Args:
        module: it.
        sums_may_hold_more: whether sums leave loops of which ranks then hold more.
    """
    moved = leave_loops(module)
    apart = 0 if module.is_local else add_alike_first(module)
    sums = reduce_sums_once(module)
    trips = move_sums_once(module, may_hold_more=sums_may_hold_more)
    if module.is_local:
        merged, rewritten = _merge(module), 0
    else:
        merged, rewritten = 0, _replan(module, network_of(module.network))
    return {
        "out of loops": moved,
        "sums added in two steps": apart,
        "sums reduced once": sums,
        "sums moved behind loops": trips,
        "merged nodes": merged,
        "planned anew": rewritten,
    }


# -- global view --------------------------------------------------------------------------------------------------


def _replan(module: Module, network: Network) -> int:
    """Plan the moves of each value together; returns for how many values that is better."""
    count = 0
    ways = ConstantWays(module.graph, network, module.annotated, module.repeats)
    for graph in list(module.graph.graphs()):
        writer = None
        for tree in trees(graph, partial(is_held, module)):
            if not tree.root.is_static:
                continue
            written = ways.choose(tree)
            moved = [lies for lies in tree.read if lies not in written]
            better = routes(tree.lies, moved, tree.root.shape, tree.root.dtype.bits, network)
            if not written and better.rank >= (tree.key(network), len(tree.moves)):
                continue
            writer = writer or TreeWriter(module, graph)
            writer.write(tree, better.edges, written)
            count += 1
        if writer is not None:
            writer.finish()
    return count


# -- local view ---------------------------------------------------------------------------------------------------


def _merge(module: Module) -> int:
    """Merge equal nodes where collectives among them are equal in all programs; returns how many are gone."""
    if not _may_repeat(module.graph):
        return 0
    graphs = [_Equal(graph) for graph in module.graphs]
    while True:
        pairs = [graph.pairs() for graph in graphs]
        agreed = frozenset.intersection(*pairs)
        if all(each == agreed for each in pairs):
            break
        for graph in graphs:
            graph.allowed = frozenset(first for first, _ in agreed)
    if not agreed:
        return 0
    names: dict[str, str] = {}
    for graph in graphs:
        names.update(graph.merge())
    follow_instead(module, names)
    return len(names)


def _may_repeat(graph: Graph) -> bool:
    """Whether two collectives look alike, with what is just before them; all equal ones do."""
    nodes = [node for node in graph.walk() if sends(node)]
    return len({(node.op_type, _look(node.inputs[0], LOOK_BACK)) for node in nodes}) < len(nodes)


def _look(value: Value, steps: int) -> Hashable:
    """What is equal for equal values: numbers by their type, weights and inputs themselves, results by their nodes.

    Of what a loop gives not what it reads: that is as long for each of its results.
    """
    if value.node is None:
        is_number = value.is_constant and value.is_static and math.prod(value.shape) <= MAX_ELEMENTS
        return value.type if is_number else value
    if not steps:
        return value.node.op_type
    if value.node.holds_graphs:
        return value.node.op_type, value.index
    return value.node.op_type, value.index, *(_look(operand, steps - 1) for operand in value.node.inputs)


def _phase(node: Node) -> Hashable:
    """What was sent in the forward pass is kept for the backward pass; what is computed again there is.

    So is what a view says that each pass reads for itself: an Identity, as `zero` puts before what is gathered again.
    """
    moves = traits(node).moves_elements and node.identity != _VIEW
    feeds = moves and all(sends(user) for value in node.results for user in value.users)
    return "either" if node.phase in ("forward", "backward") and (feeds or sends(node)) else node.phase


class _Equal:
    """The equal nodes of one local graph.

    Attributes:
        allowed: ids of the collectives that may merge; None: all.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.constants = equal_constants(graph)
        self.allowed: frozenset[int] | None = None
        self.nodes: list[tuple[Node, Node]] = []

    def pairs(self) -> Pairs:
        """The collectives that merge with earlier ones."""
        same = dict(self.constants)
        self.nodes = equal_nodes(self.graph, self._may_merge, same=same, without=frozenset({"id"}), phase_of=_phase)
        return frozenset(
            (int_attribute(node, "id"), int_attribute(known, "id"))
            for node, known in self.nodes
            if is_communication(node)
        )

    def _may_merge(self, node: Node) -> bool:
        if sends(node):
            return self.allowed is None or int_attribute(node, "id") in self.allowed
        return not is_communication(node)

    def merge(self) -> dict[str, str]:
        """Returns for each value that is gone the one that is read instead."""
        names = {old.name: new.name for old, new in self.constants}
        merge_constants(self.constants)
        docs: dict[Node, list[str]] = {}
        for node, known in self.nodes:
            docs.setdefault(known, [known.doc]).append(node.doc)
            names.update((old.name, new.name) for old, new in zip(node.results, known.results, strict=True))
            node.replace(known.results)
        for known, told in docs.items():
            if is_collective(known):
                known.doc = joined_texts(told)
        return names
