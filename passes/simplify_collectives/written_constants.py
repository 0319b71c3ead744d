"""In which ways a constant is written that its readers need in several: what a device holds more is bounded.

w : f32[16@x, 4] is read as it lies by one node, and as [16, 4@x] by another: both are written, so that nothing is sent.
"""

import math
from collections.abc import Collection, Iterable, Mapping

from irpar.analysis.cost.network import Network
from irpar.analysis.explanation.origins import cutting_names
from irpar.analysis.redistribution.routes import routes
from irpar.analysis.redistribution.trees import Tree
from irpar.ir import Graph, Value
from irpar.ir.repeats import layers_of, only_with_all_layers
from irpar.sharding import Sharding, ceil_shape

MOST_MORE = 1 / 8
"""What a device may hold more for all ways together, by all constants that it holds."""
SMALL_SHARE, SMALL_BYTES = 1 / 64, 64 << 10
"""What it may hold more for ways of one constant that are larger blocks, by the same, and in bytes: whole vectors."""


class ConstantWays:
    """Decides for one constant after the other, in program order.

    A way that takes no more than the constant as it lies, cut by the axes that it was cut by, takes its place where
    nobody needs it as it lies. Further such ways are written, and any other, whole ones too, where that takes at most
    SMALL_SHARE and SMALL_BYTES more; of either only as long as all constants together take at most MOST_MORE more.
    A device never holds more of an annotated constant.

    Args:
        graph: the outermost, in global view.
        network: what communication costs.
        annotated: names of constants of which someone said what a device holds.
        repeats: as of the module.

    Raises:
        IrparError: of a module with a few layers for all: not all ways of all layers may be written.
    """

    def __init__(
        self,
        graph: Graph,
        network: Network,
        annotated: Collection[str] = (),
        repeats: Mapping[str, int] | None = None,
    ) -> None:
        self.network = network
        self.annotated = annotated
        self.repeats = repeats or {}
        values = (value for each in graph.graphs() for value in each.constants if value.is_static)
        held = sum(layers_of(value, self.repeats) * _bytes(value.sharding, value) for value in values)
        self.left = held * MOST_MORE
        self.small = min(held * SMALL_SHARE, SMALL_BYTES)

    def choose(self, tree: Tree) -> tuple[Sharding, ...]:
        """The shardings, other than its own, in which the root of a tree is written; none for what is no constant."""
        root = tree.root
        if not root.is_constant or tree.lies.partial:
            return ()
        wanted = [lies for lies in tree.read if lies != tree.lies and not lies.partial]
        if len(wanted) == len(tree.read) and self._fits(tree, wanted):
            return self._take(tree, wanted)
        saved = {lies: routes(tree.lies, [lies], root.shape, root.dtype.bits, self.network).key for lies in wanted}
        # Blocks of what is held anyway are free: they are taken where they are read.
        costly = (lies for lies in wanted if any(saved[lies]))
        chosen: list[Sharding] = []
        for lies in sorted(costly, key=lambda lies: saved[lies], reverse=True):
            if self._fits(tree, [*chosen, lies]):
                chosen.append(lies)
        return self._take(tree, chosen)

    def _more(self, tree: Tree, ways: Iterable[Sharding]) -> float:
        """What a device holds more with these ways; the constant as it is sharded counts where it is still needed."""
        ways = set(ways)
        stays = {tree.lies} if ways < set(tree.read) else set()
        return sum(_bytes(lies, tree.root) for lies in ways | stays) - _bytes(tree.lies, tree.root)

    def _fits(self, tree: Tree, ways: Iterable[Sharding]) -> bool:
        ways, had, own = set(ways), set(cutting_names(tree.lies)), _bytes(tree.lies, tree.root)
        is_no_larger = all(_bytes(lies, tree.root) <= own and set(cutting_names(lies)) >= had for lies in ways)
        more = self._more(tree, ways)
        if tree.root.name in self.annotated:
            return more <= 0
        if more <= 0 or not (is_no_larger or more <= self.small):
            return more <= 0
        if self.repeats and more * layers_of(tree.root, self.repeats) > self.left:
            raise only_with_all_layers("what constants are written in several ways")
        return more <= self.left

    def _take(self, tree: Tree, ways: Iterable[Sharding]) -> tuple[Sharding, ...]:
        ways = tuple(ways)
        if ways:
            self.left -= max(self._more(tree, ways), 0) * layers_of(tree.root, self.repeats)
        return ways


def _bytes(lies: Sharding | None, value: Value) -> float:
    """Of the largest block."""
    bits: int = value.dtype.bits
    return math.prod(value.shape if lies is None else ceil_shape(lies, value.shape)) * bits / 8
