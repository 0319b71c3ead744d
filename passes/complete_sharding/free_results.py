"""Results of the graph that are sums and that nobody annotated: each device keeps its share of them.

a : [8, 256@tp], w2 : [256@tp, 64]    p = MatMul(a, w2) is partial over tp, y = Add(p, b2) is a result that is free
p and y become [8@tp, 64]             a reduce-scatter sends half of what an all-reduce sends
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from irpar.analysis import redistribution
from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.moves import is_block
from irpar.analysis.completion.placement import Placement
from irpar.analysis.completion.rule_view import RuleView
from irpar.analysis.completion.situation import Situation, costs_nothing, runs_as_said
from irpar.analysis.cost.network import Network
from irpar.ir import Node, Value
from irpar.ops.effects import is_compute
from irpar.sharding import Sharding

from .rounds import passes_all_on

MOST_NODES = 32
"""Between a result and the sums that it is made of."""


def shares_of_results(flow: Flow, pinned: Collection[Value], network: Network) -> dict[Value, Sharding]:
    """How free results of the graph, and what leads from sums to them alone, are sharded as shares.

    What is sharded already stays cut so, and nodes run as before, on smaller blocks.

    Args:
        flow: every tensor has a sharding.
        pinned: values that stay as they are.
        network: what communication costs.
    """
    found: dict[Value, Sharding] = {}
    for value in flow.results():
        if flow.graph.return_node in value.users:
            found.update(_Tail(flow, pinned, network).shares(value))
    return found


@dataclass
class _Tail:
    """One result, and the nodes before it that hand all dims on.

    Attributes:
        sums: the values in it that are given partial, and how they are given.
        nodes: those behind them.
    """

    flow: Flow
    pinned: Collection[Value]
    network: Network
    sums: dict[Value, Placement] = field(default_factory=dict)
    nodes: dict[Node, RuleView] = field(default_factory=dict)

    def shares(self, result: Value) -> dict[Value, Sharding]:
        """The shardings that change; empty where there is nothing to share."""
        self._find(result, self.flow.graph.return_node)
        partial = {self._given(value).partial for value in self.sums}
        if len(partial) != 1 or result.sharding is None:
            return {}
        for share in result.sharding.cut_further(partial.pop(), result.shape):
            changes: dict[Value, Sharding] = {}
            if self._spread(result, share, changes) and self.sums.keys() <= changes.keys():
                return changes
        return {}

    def _given(self, value: Value) -> Sharding:
        given = self.sums[value].results[value.index]
        assert given is not None
        return given

    def _find(self, value: Value, reader: Node) -> None:
        """Collect the sums that lead to a value, and the nodes between them."""
        node = value.node
        view = self.flow.rule(node) if node is not None and node.graph is self.flow.graph else None
        if view is None or not self._may_change(value, reader) or len(self.nodes) == MOST_NODES:
            return
        node = view.node
        placement = self.flow.place(node, self.pinned.__contains__, self.network)
        given = placement.results[value.index]
        if given is not None and given.partial:
            if value.sharding == given.with_partial(()) and len(node.results) == 1:
                self.sums[value] = placement
        elif passes_all_on(view.rule) and len(node.results) == 1 and node not in self.nodes:
            self.nodes[node] = view
            for operand in node.inputs:
                self._find(operand, node)

    def _may_change(self, value: Value, reader: Node) -> bool:
        """Whether only one node reads a value, which nobody annotated."""
        is_plain = value.node is not None and is_compute(value.node) and value.node not in self.flow.ties
        is_plain = is_plain and value.is_static and value.sharding is not None and not value.sharding.partial
        return is_plain and value not in self.pinned and set(value.users) == {reader}

    def _spread(self, value: Value, share: Sharding, changes: dict[Value, Sharding]) -> bool:
        """Let a value be sharded so, and what it is made of as that needs it; False where that is not free."""
        changes[value] = share
        if value in self.sums:
            return self._is_less(value, share)
        node = value.node
        assert node is not None
        view = self.nodes.get(node)
        placement = None if view is None else self._placement(view, share)
        if placement is None:
            return False
        return all(
            operand is None or needed is None or self._leads(operand, needed, changes)
            for operand, needed in zip(node.operands, placement.operands, strict=True)
        )

    def _leads(self, operand: Value, needed: Sharding, changes: dict[Value, Sharding]) -> bool:
        if operand in self.sums or operand.node in self.nodes:
            return self._spread(operand, needed, changes)
        lies = operand.sharding
        if costs_nothing(operand, lies, self.pinned.__contains__):
            return True
        return lies is not None and not lies.partial and is_block(lies, needed)

    def _placement(self, view: RuleView, share: Sharding) -> Placement | None:
        """How a node hands shares on."""
        cut = view.project(view.operand_count, share.axes)
        factors = tuple(cut.get(factor, ()) for factor in range(len(view.rule.sizes)))
        placement = view.placement(factors)
        if placement is None or placement.results != (share,) or view.program_axes(factors):
            return None
        if not runs_as_said(view.node, placement):
            return None
        return placement

    def _is_less(self, value: Value, share: Sharding) -> bool:
        """Whether the share of a sum costs less than all of it, and its node runs as it would."""
        now, given, is_pinned = self.sums[value], self._given(value), self.pinned.__contains__
        assert value.node is not None
        assert value.sharding is not None
        view = self.flow.rule(value.node)
        assert view is not None
        lies = [each.sharding if each is not None else None for each in view.values[: view.operand_count]]
        free = [costs_nothing(each, None if each is None else each.sharding, is_pinned) for each in view.values]
        situation = Situation(view, [*lies, share], free, self.network, self.flow.times(view))
        if situation.choose() != now:
            return False
        shape, bits = value.shape, value.dtype.bits
        whole = redistribution.price(given, value.sharding, shape, bits, self.network)
        return redistribution.price(given, share, shape, bits, self.network) < whole


def leading_operands(shares: Mapping[Value, Sharding]) -> Iterator[tuple[Value, Value]]:
    """Those of the values that hand shares on, each with the operand that brings them."""
    for value in shares:
        assert value.node is not None
        operand = next((operand for operand in value.node.inputs if operand in shares), None)
        if operand is not None:
            yield value, operand
