"""Gradients of nodes that hold graphs: an If gets an If of its branches' gradients, Loop and Scan a Scan backwards.

s, ys = Scan(s0, xs) {s, x -> Tanh(s + x), y}    saves y of each step; its gradient is a Scan from the last step to the
                                                 first over dys and the saved y, which carries ds and collects dxs
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from irpar.analysis.looping import Looping
from irpar.ir import Graph, Node, Value, clone_graph
from irpar.ops.effects import draws_random_numbers
from irpar.ops.gradients.writer import GradientWriter, NoGradientError

from .backward_scan import BackwardScan

if TYPE_CHECKING:
    from .reverse import Reverse

OfBodies = Callable[["Reverse", Node, Sequence[Value | None], GradientWriter], Iterator[tuple[Value, Value | None]]]
"""(the pass over the graph around it, the node, gradients of its results, writer) to values and their gradients."""


def of_if(
    reverse: "Reverse", node: Node, of_results: Sequence[Value | None], writer: GradientWriter
) -> Iterator[tuple[Value, Value | None]]:
    """An If with the same condition, whose branches compute the branches of the forward again and go back from there.

    What a branch does not read gets zeros there.
    """
    if any(draws_random_numbers(inner) for branch in node.nested_graphs() for inner in branch):
        raise NoGradientError("a branch draws random numbers, which would be others when it is computed again")
    captured = captured_of(reverse, node)
    branches = {}
    for name in ("then_branch", "else_branch"):
        branch = node.attributes[name]
        assert isinstance(branch, Graph)
        lift_constants(branch, reverse.graph)
        branches[name] = _branch(reverse, branch, captured, of_results)
    results = [Value("", value.type) for value in captured]
    if results:
        writer.node("If", node.operands, branches, results=results)
    yield from zip(captured, results, strict=True)


def captured_of(reverse: "Reverse", node: Node) -> list[Value]:
    """The values whose gradients are asked for that graphs in a node read from outside, each once."""
    found: dict[Value, None] = {}
    for nested in node.nested_graphs():
        graphs = list(nested.graphs())
        inside = set(graphs)
        for graph in graphs:
            for inner in (*graph, graph.return_node):
                read = (value for value in inner.inputs if value.owner not in inside and value in reverse.depends)
                found.update(dict.fromkeys(read))
    return list(found)


def lift_constants(body: Graph, around: Graph) -> None:
    """Give the constants of a body to the graph around it, where a second body may read them too."""
    for value in tuple(body.constants):
        around.lift_constant(value)


def _branch(reverse: "Reverse", branch: Graph, captured: Sequence[Value], of_results: Sequence[Value | None]) -> Graph:
    made = clone_graph(branch, names=reverse.graph.names)
    inner = reverse.inner(made, captured)
    seeds = [(value, of) for value, of in zip(made.outputs, of_results, strict=True) if of is not None]
    found = inner.run(seeds)
    writer = GradientWriter(made, reverse.opsets)
    gradients = [found.get(value) or writer.zeros(value) for value in captured]
    # A branch gives nothing that it does not compute itself.
    own = [value if value.owner is made else writer.op("Identity", [value]) for value in gradients]
    made.set_outputs(own, [value.name for value in own])
    inner.sweep_all(own)
    for node in made.walk():
        node.phase = "backward"
    return made


def of_scan(
    reverse: "Reverse", node: Node, of_results: Sequence[Value | None], writer: GradientWriter
) -> Iterator[tuple[Value, Value | None]]:
    """A Scan from the last step to the first."""
    body = node.attributes["body"]
    assert isinstance(body, Graph)
    captured = captured_of(reverse, node)
    lift_constants(body, reverse.graph)
    return BackwardScan(reverse, Looping.of_scan(node), captured, of_results, writer).write()


def of_loop(
    reverse: "Reverse", node: Node, of_results: Sequence[Value | None], writer: GradientWriter
) -> Iterator[tuple[Value, Value | None]]:
    """A Scan over what each trip saved, from the last to the first: as many trips as there were."""
    body = node.attributes["body"]
    assert isinstance(body, Graph)
    captured = captured_of(reverse, node)
    lift_constants(body, reverse.graph)
    return BackwardScan(reverse, Looping.of_loop(node), captured, of_results, writer).write()


OF_BODIES: dict[tuple[str, str], OfBodies] = {("", "If"): of_if, ("", "Loop"): of_loop, ("", "Scan"): of_scan}
