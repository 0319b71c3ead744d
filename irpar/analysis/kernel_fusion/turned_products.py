"""Products that are read transposed: the operands change places instead, and the result lies as it is read.

%p = MatMul(%a, %b)                         %ta = Transpose(%a) {perm=[1, 0]}
%y = Transpose(%p) {perm=[1, 0]}     ->     %tb = Transpose(%b) {perm=[1, 0]}
                                            %y = MatMul(%tb, %ta)
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from irpar.ir import Node, Value

from .attention_values import permutation
from .attention_writing import Make, Writer


@dataclass(frozen=True, eq=False)
class TurnedProduct:
    """A product and what transposes it.

    Attributes:
        members: a MatMul and a Transpose.
    """

    members: tuple[Node, Node]

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        return self.members[0].inputs

    def written(self, make: Make) -> list[Node]:
        """Nodes that take its place, in order."""
        product, turn = self.members
        w = Writer(make, turn.version, turn.result.name)
        turned = [
            w.op("Transpose", [value], value.tensor_type.with_shape(value.shape[::-1]), perm=(1, 0))
            for value in reversed(product.inputs)
        ]
        w.node("MatMul", turned, {}, [turn.result], version=product.version)
        return w.nodes


def turned_products(nodes: Sequence[Node], kept: Set[Value], taken: Set[Node]) -> list[TurnedProduct]:
    """The products of two matrices among nodes that are read transposed alone.

    Args:
        nodes: in order.
        kept: their results that are read behind them.
        taken: nodes that belong to others.
    """
    inside = set(nodes) - taken
    found: list[TurnedProduct] = []
    for node in nodes:
        if node.identity != ("", "Transpose") or node not in inside or permutation(node) != (1, 0):
            continue
        value = node.operand(0)
        product = None if value is None else value.node
        if product is None or product.identity != ("", "MatMul") or product not in inside:
            continue
        is_alone = product.result not in kept and len(product.result.users) == 1
        is_alike = (product.phase, product.stage, product.place) == (node.phase, node.stage, node.place)
        if is_alone and is_alike and all(one.is_static and len(one.shape) == 2 for one in product.inputs):
            found.append(TurnedProduct((product, node)))
    return found
