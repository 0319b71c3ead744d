"""Operators whose derivative is zero wherever they have one: nothing flows back through them."""

from collections.abc import Sequence

from irpar.ir import Node, Value

from .writer import GradientWriter, Of


def zero(node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
    """No operand gets a gradient."""
    return [None] * len(node.operands)
