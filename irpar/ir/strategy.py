"""Strategies: how an operator is to run, said by the cuts of what it reads and gives."""

from dataclasses import dataclass

from irpar.sharding import Sharding

from .annotation import Annotation


@dataclass(frozen=True)
class NodeStrategy:
    """How a node is to run.

    y = Relu(x) with the cuts ((1, 4),) on a=2,b=2      x is read as [_, @(a,b)], however it lies and y is needed

    Attributes:
        operands: the sharding that each must be read as; None where that is left free, or the operand is left out.
        results: of a node of which no operand is said, the sharding that each must be given as, or be reduced to.
        annotation: what said so.
    """

    operands: tuple[Sharding | None, ...]
    results: tuple[Sharding | None, ...]
    annotation: Annotation

    @property
    def is_of_operands(self) -> bool:
        """Whether the operands say how the node runs."""
        return any(said is not None for said in self.operands)

    def part(self, *operands: int | None, gives: bool) -> "NodeStrategy":
        """The strategy of a node that does some of the work.

        Args:
            operands: which operands it reads, in its order; None for one that the node does not read.
            gives: whether its results are those of the node.
        """
        said = (None if index is None or index >= len(self.operands) else self.operands[index] for index in operands)
        return NodeStrategy(tuple(said), self.results if gives else (), self.annotation)
