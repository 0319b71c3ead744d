"""A program without what recompute repeats: what it would hold if it held its results."""

from collections.abc import Collection

from irpar.analysis.equal_nodes import equal_nodes
from irpar.ir import Graph, Node
from irpar.ir.clone import clone_graph, clone_value
from irpar.ops import traits
from irpar.ops.recomputed import is_recomputed, unmark_recomputed


def without_repetitions(graph: Graph) -> tuple[Graph, int]:
    """A copy in which results that are computed again are held, and how many nodes fewer it has.

        a = f(x); b = g(a); a.again = f(x); d = h(b, a.again)     a = f(x); b = g(a); d = h(b, a)

    What passes after recompute merged with other communication stays.

    Args:
        graph: a local graph.
    """
    made = clone_graph(graph)
    repeated = dict.fromkeys(node for node in made.walk() if is_recomputed(node))
    for node in repeated:
        unmark_recomputed(node)
    counts = {node: len(node.results) for node in repeated}
    _complete(repeated)

    def may_merge(node: Node) -> bool:
        return node in repeated or traits(node).view

    count = 0
    for node, first in equal_nodes(made, may_merge, without=frozenset({"id"}), phase_of=lambda node: None):
        node.replace(first.results)
        if node in repeated:
            del repeated[node]
            count += 1
    for node in repeated:
        read = [place for place, value in enumerate(node.results, 1) if value.uses]
        node.set_results(node.results[: max(counts[node], *read, 0)])
    return made, count


def _complete(nodes: Collection[Node]) -> None:
    """Give what runs again as many results each time: at first, optional ones that nobody read any more went."""
    most: dict[tuple[str | None, tuple[str, str]], Node] = {}
    for node in nodes:
        known = most.setdefault((node.source, node.identity), node)
        if len(node.results) > len(known.results):
            most[node.source, node.identity] = node
    for node in nodes:
        for value in most[node.source, node.identity].results[len(node.results) :]:
            node.add_result(clone_value(value))
