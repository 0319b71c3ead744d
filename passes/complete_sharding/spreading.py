"""Rows of products, cut by the axes of weights too: weights are brought together, activations stay where they are.

x : [8@dp, 1024, 768], w : [768, 3072@tp]   h = MatMul(x, w) is [8@dp, 1024, 3072@tp], and what is made of it is summed
                                            over tp; all devices of tp have the same 4 rows of x
x : [8@(dp,tp), 1024, 768], w in full       h is [8@(dp,tp), 1024, 3072]: each has a row of its own, multiplies as much
                                            as before, and sends of w alone

Worth it where parameters of a step of training are smaller than activations; other weights are what somebody wants
to be where they are. Propagation never cuts a dim further than someone said.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from irpar.analysis import redistribution
from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.placement import Axes, Placement
from irpar.analysis.completion.rule_view import RuleView
from irpar.analysis.cost.network import Network
from irpar.ir import Value
from irpar.ops import Kind
from irpar.sharding import Axis, are_disjoint

from .choice import Choice, Chooser
from .choice_memory import offers_of


def spread_rows(
    flow: Flow, pinned: Iterable[Value], network: Network, kept: Mapping[Value, Sequence[Axes]] | None = None
) -> Choice:
    """Look for values that are cheaper where rows of products are cut further.

    What weights are brought to is a choice of its own: several nodes may read it, and it is sent once.

    Args:
        flow, pinned, network, kept: as for `improve`.
    """
    return _Spreading(flow, set(pinned), network, kept or {}).run()


class _Spreading(Chooser):
    """One run."""

    def run(self) -> Choice:
        """Look only where there is such a product."""
        self._ways = [(view, placement) for view in self.views.values() for placement in self._spread(view)]
        return super().run() if self._ways else Choice({}, 0, 0, 0)

    def _begin(self) -> None:
        for view, placement in self._ways:
            self._suggest(view, offers_of(view, [placement]))
        self._follow()  # A value has few alternatives: those that belong together come first.
        super()._begin()

    def _is_movable(self, value: Value) -> bool:
        return self._is_shared(value) or super()._is_movable(value)

    def _is_shared(self, value: Value) -> bool:
        """Whether several nodes read a block of an input, which may be brought to all of them alike."""
        return value.node is None and not value.is_constant and self._is_cut(value) and len(set(value.users)) > 1

    def _is_cut(self, value: Value) -> bool:
        """Whether someone cut a value."""
        cut = value.sharding is not None and bool(value.sharding.all_axes)
        return cut and value in self.pinned and value.is_static

    def _is_weight(self, value: Value) -> bool:
        """Whether a value is a parameter of which ranks hold blocks: backward passes reduce what they make to these."""
        state = self.flow.graph.states.get(value)
        return state is not None and state.kind == "parameter" and self._is_cut(value)

    def _brought(self, value: Value) -> np.ndarray | None:
        if value not in self.pinned:
            return None
        lies, states = value.sharding, self.states[value]
        assert lies is not None
        sent = [redistribution.price(lies, state, value.shape, value.dtype.bits, self.network) for state in states]
        times = self.flow.usual_trips(value)
        return np.array([times * self.cost.scalar((price[0], -1, price[-1]), 0) for price in sent])

    def _spread(self, view: RuleView) -> Iterator[Placement]:
        """Ways to run a product with its rows cut by the axes that cut its weight, which is in full."""
        if not view.sums_products:
            return
        cuts: dict[int, Axes] = {}
        for tensor, lie in enumerate(self._lies(view)):
            if lie is not None:
                cuts = {**view.project(tensor, lie.axes), **cuts}
        for tensor, weight in enumerate(view.values[: view.operand_count]):
            if weight is None or not self._is_weight(weight):
                continue
            own = {factor for parts in view.tensors[tensor] for factor in parts}
            rows = {factor: axes for factor, axes in cuts.items() if factor not in own}
            for factor, axes in rows.items():
                if view.rule.kinds[factor] is Kind.PASS and self._is_smaller(weight, view.values[-1], axes):
                    yield from self._with_rows(view, rows, factor, self._further(weight, axes))

    def _with_rows(self, view: RuleView, rows: Mapping[int, Axes], factor: int, further: Axes) -> Iterator[Placement]:
        """The way to run a product with one of its rows cut further, and others as they are, where that can be."""
        if further == rows[factor] or view.fitting(factor, further) != further:
            return
        cuts = {other: axes for other, axes in rows.items() if are_disjoint(self.mesh, [*further, *axes])}
        cuts[factor] = further
        placement = view.placement(tuple(cuts.get(each, ()) for each in range(len(view.rule.sizes))))
        if placement is not None:
            yield placement

    def _further(self, weight: Value, axes: Axes) -> Axes:
        """The axes that cut rows, and behind them those of a weight that do not."""
        assert weight.sharding is not None
        found: list[Axis] = list(axes)
        for axis in weight.sharding.all_axes:
            if are_disjoint(self.mesh, [*found, axis]):
                found.append(axis)
        return tuple(found)

    def _is_smaller(self, weight: Value, made: Value | None, rows: Axes) -> bool:
        """Whether a weight has fewer bytes than what is made with it of rows that are cut so."""
        if made is None or not made.is_static:
            return False
        return weight.tensor_type.nbytes * self.mesh.group_size(rows) < made.tensor_type.nbytes
