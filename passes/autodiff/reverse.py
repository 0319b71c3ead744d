"""Reverse mode: from the gradients of some values of a graph to those of others, in one walk over its nodes.

y = MatMul(x, w); z = Relu(y), seed dz      walked backwards: dy = Where(y > 0, dz, 0); dw = MatMul(Transpose(x), dy)

Griewank and Walther, Evaluating Derivatives (2008), section 3.2. Linear in nodes: each gets at most one gradient.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from irpar.analysis.types.inference import Inference
from irpar.ir import Graph, Node, Value
from irpar.ops import definition
from irpar.ops.facts import CannotTellError
from irpar.ops.gradients.writer import GradientWriter, NoGradientError

from .bodies import OF_BODIES
from .decomposition import why_not
from .dependence import dependents
from .refusals import missing

GRAD = "grad."
"""Before the name of a value: the name of its gradient."""
Gradients = dict[Value, Value]
"""Value to its gradient, of the same type."""


_UNNAMED = re.compile(r"backward(_\d+)?")


class Reverse:
    """The backward pass of one graph, written behind its nodes.

    Args:
        graph: the graph.
        opsets: domain to version for the new nodes.
        wanted: the values whose gradients are asked for; of this graph, or of one around it.
        straight_through: whether rounding counts as the identity.

    Attributes:
        gradients: value to gradient, of all values that have one so far.
        depends: the values that depend on wanted ones.
    """

    def __init__(
        self,
        graph: Graph,
        opsets: Mapping[str, int],
        wanted: Iterable[Value],
        inference: Inference | None = None,
        *,
        straight_through: bool = False,
    ) -> None:
        self.graph = graph
        self.opsets = opsets
        self.inference = inference or Inference()
        self.wanted = tuple(wanted)
        self.nodes = tuple(graph)
        self.straight_through = straight_through
        self.depends = dependents(self.nodes, self.wanted, straight_through=straight_through)
        self.gradients: Gradients = {}
        self.seeds: tuple[Value, ...] = ()

    def run(self, seeds: Sequence[tuple[Value, Value]]) -> Gradients:
        """Write it.

        Args:
            seeds: values and the gradients that they have from outside; a value may be there twice.

        Returns:
            The gradients of those wanted values that the seeded ones depend on.

        Raises:
            GradientError: an operator on the way has no gradient.
        """
        self.seeds = tuple(value for value, _ in seeds)
        writer = self.writer()
        for value, gradient in seeds:
            self.collect(value, gradient, writer)
        for node in reversed(self.nodes):
            self._node(node)
        found = {value: self.gradients[value] for value in self.wanted if value in self.gradients}
        _sweep(self.graph, self.nodes[-1] if self.nodes else None, set(found.values()))
        return found

    def collect(self, value: Value, gradient: Value, writer: GradientWriter) -> None:
        """Add to a value's gradient: what comes later is added to the sum of what was there."""
        if value not in self.depends:
            return
        known = self.gradients.get(value)
        self.gradients[value] = gradient if known is None else writer.add(known, gradient)

    def inner(self, graph: Graph, wanted: Iterable[Value]) -> "Reverse":
        """The backward pass of a graph that a node of this one holds."""
        return Reverse(graph, self.opsets, wanted, self.inference, straight_through=self.straight_through)

    def writer(self, like: Node | None = None, needs: Sequence[bool] | None = None) -> GradientWriter:
        """Writes behind the graph."""
        infer = self.inference.result_types
        return GradientWriter(self.graph, self.opsets, like=like, needs=needs, infer=infer)

    def sweep_all(self, kept: Iterable[Value]) -> None:
        """Erase what no gradient reads, of the forward too: of a graph that is there for the gradients alone."""
        _sweep(self.graph, None, set(kept))

    def _node(self, node: Node) -> None:
        of_results = [self.gradients.get(value) for value in node.results]
        if all(gradient is None for gradient in of_results):
            return
        for value, gradient in zip(node.results, of_results, strict=True):
            if gradient is not None:
                name_gradient(gradient, value)
        needs = [value is not None and value in self.depends for value in node.operands]
        writer = self.writer(node, needs)
        for value, gradient in self._of(node, of_results, writer):
            if gradient is not None:
                self.collect(value, gradient, writer)

    def _of(
        self, node: Node, of_results: Sequence[Value | None], writer: GradientWriter
    ) -> Iterator[tuple[Value, Value | None]]:
        """What flows back through one node: values that it reads, with their gradients."""
        holder = OF_BODIES.get(node.identity)
        try:
            if holder is not None:
                yield from holder(self, node, of_results, writer)
                return
            found = definition(node)
            if found is not None and found.gradient is None and found.decompose is not None:
                raise NoGradientError(why_not(node, self.opsets, self.inference.result_types))
            if found is None or found.gradient is None:
                raise NoGradientError("irpar knows no gradient of it")
            made = found.gradient(node, of_results, writer)
        except NoGradientError as error:
            raise missing(self, node, str(error)) from None
        except CannotTellError as error:
            raise missing(self, node, f"its gradient takes what is not known of it: {error}") from None
        for value, needed, gradient in zip(node.operands, writer.needs, made, strict=True):
            if value is not None and needed:
                yield value, gradient


def name_gradient(gradient: Value, of: Value) -> None:
    """Call a gradient that has no name of its own after what it is the gradient of."""
    if gradient.node is not None and _UNNAMED.fullmatch(gradient.name):
        gradient.rename(GRAD + of.source_name)


def _sweep(graph: Graph, after: Node | None, kept: Container[Value]) -> None:
    """Erase the nodes behind one that nothing reads, and constants that only they read."""
    node = graph.last
    while node is not None and node is not after:
        previous = node.previous
        if not any(value.has_uses or value in kept for value in node.results):
            node.erase()
        node = previous
    for value in [value for value in graph.constants if not value.has_uses]:
        if value.source is None:
            graph.remove_constant(value)
