"""Operators whose derivative is zero wherever they have one: nothing flows back through them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from irpar.ir import Node, Value

from .writer import GradientWriter, Of


def zero(node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
    """No operand gets a gradient."""
    return [None] * len(node.operands)


@dataclass(frozen=True)
class StraightThrough:
    """A gradient that is zero unless it is asked for as if nothing were rounded (`Autodiff.straight_through`).

    Bengio, Leonard and Courville, Estimating or Propagating Gradients Through Stochastic Neurons (2013), section 4.
    """

    gradient: Callable[[Node, Of, GradientWriter], Sequence[Value | None]]

    def __call__(self, node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
        """See `OpDef.gradient`."""
        return self.gradient(node, of, writer)
