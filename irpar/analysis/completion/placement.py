"""How one node runs on a mesh: from the shardings of its values and its factor rule to what it needs and what it gives.

h = MatMul(x : [8@dp, 64], w : [64, 256@tp])      rule ([i,j],[j,k])->([i,k]) reduce(j) sum
factors: i over dp, k over tp                      needs x [@dp, _], w [_, @tp]; gives h [@dp, @tp]
"""

import math
from dataclasses import dataclass
from functools import cached_property

from irpar.ops import FactorRule
from irpar.sharding import Axis, Mesh, Reduction, Sharding, ceil_div, filled_blocks

Axes = tuple[Axis, ...]
FactorAxes = tuple[Axes, ...]
"""The mesh axes that cut each factor of a rule."""
Suggested = tuple[tuple[Axes, ...], ...]
"""Per factor of a rule the axes that might cut it, the last of which are none."""


@dataclass(frozen=True)
class Carried:
    """Operands that stay partial, and with them the results.

    Attributes:
        operands: which ones.
        axes, reduce: in what way.
    """

    operands: tuple[int, ...]
    axes: Axes
    reduce: Reduction

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.operands, self.axes, self.reduce))


NOTHING = Carried((), (), "sum")


@dataclass(frozen=True)
class Placement:
    """How a node runs.

    Attributes:
        operands: the sharding that each operand must have; None for left-out operands and for values without one.
        results: the sharding that each result then has, partial axes included; None where it is not a tensor.
        rule: the rule that it follows; None: the node runs replicated on every device.
        factors: what cuts each factor of the rule.
        carried: operands that it takes as partial values.
        is_boundary: it holds bodies, or ends one: its values are whole, or lie as on the other side of the boundary.
    """

    operands: tuple[Sharding | None, ...]
    results: tuple[Sharding | None, ...]
    rule: FactorRule | None
    factors: FactorAxes
    carried: Carried = NOTHING
    is_boundary: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.operands, self.results, self.carried))

    def ways(self, mesh: Mesh) -> int:
        """The number of devices that share the work: those that hold elements of every factor."""
        found = self._ways.get(mesh)
        if found is None:
            sizes = zip(self.rule.sizes, self.factors, strict=True) if self.rule is not None else ()
            parts = (filled_blocks(size, mesh.group_size(axes)) for size, axes in sizes if axes)
            found = self._ways[mesh] = math.prod(parts)
        return found

    def largest_share(self, mesh: Mesh) -> float:
        """The part of the work that the device with the largest blocks does: of 5 rows cut into 4, two fifths."""
        sizes = zip(self.rule.sizes, self.factors, strict=True) if self.rule is not None else ()
        return math.prod(ceil_div(size, mesh.group_size(axes)) / size for size, axes in sizes if axes)

    @cached_property
    def _ways(self) -> dict[Mesh, int]:
        return {}
