"""Why values were chosen to be sharded otherwise than propagation left them: what brought each axis to them."""

from collections.abc import Iterator, Mapping, Sequence, Set

from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.rule_view import RuleView
from irpar.ir import Decision, Node, Value
from irpar.ops import Kind

Way = tuple[Value, str]
"""A value, and a mesh axis that it is sharded over."""


def reasons(
    ways: Set[Way], flow: Flow, views: Mapping[Node, tuple[RuleView, ...]], pinned: Set[Value]
) -> Iterator[tuple[Value, Decision]]:
    """Which value brought each axis; none where nothing says it.

    Args:
        ways: values that were chosen, each with an axis. All others are explained already.
        flow: every tensor has a sharding.
        views: of its nodes.
        pinned: values that are annotated.
    """
    explained = _Reasons(flow, views, pinned)
    waiting, looked_at = set(ways), set(ways)
    while waiting:
        found = [(value, name, why) for value, name in looked_at if (why := explained.followed(value, name, waiting))]
        found = found or [(value, name, why) for value, name in waiting if (why := explained.spread(value, name))]
        if not found:
            return
        for value, name, why in sorted(found, key=lambda entry: (entry[0].name, entry[1])):
            yield value, why
            waiting.discard((value, name))
        # Others have a reason now only where one of these is beside them.
        looked_at = {(other, name) for value, name, _ in found for other in explained.beside(value)} & waiting


class _Reasons:
    def __init__(self, flow: Flow, views: Mapping[Node, tuple[RuleView, ...]], pinned: Set[Value]) -> None:
        self.flow = flow
        self.views = views
        self.pinned = pinned
        self.by_value: dict[Node, dict[Value, list[RuleView]]] = {}

    def beside(self, value: Value) -> Iterator[Value]:
        """The values of the nodes that make and read one."""
        for view in self._views_around(value):
            yield from (other for other in view.values if other is not None)

    def _views_around(self, value: Value) -> Iterator[RuleView]:
        """The rules by which nodes make and read a value."""
        for node in self.flow.neighbours(value):
            views = self.views.get(node, ())
            yield from views if len(views) < 2 else self._by_value(node, views).get(value, ())

    def _by_value(self, node: Node, views: Sequence[RuleView]) -> Mapping[Value, Sequence[RuleView]]:
        """Of a node with many rules, as a loop has for each value that passes its boundary, those of each value."""
        found = self.by_value.get(node)
        if found is None:
            found = self.by_value[node] = {}
            for view in views:
                for value in dict.fromkeys(value for value in view.values if value is not None):
                    found.setdefault(value, []).append(view)
        return found

    def followed(self, value: Value, name: str, waiting: Set[Way]) -> Decision | None:
        """Which value that is explained already brought a mesh axis to one."""
        for view in self._views_around(value):
            mine = _factors_with(view, value, name)
            for other in dict.fromkeys(view.values) if mine else ():
                if other is None or other is value or (other, name) in waiting:
                    continue
                if mine & _factors_with(view, other, name):
                    why = f"follows %{other.name} through {view.node.title}, which sends least"
                    return Decision(why, other.name, (name,))
        return None

    def spread(self, value: Value, name: str) -> Decision | None:
        """Which annotated value a mesh axis, that cuts another dim of it, was taken from to cut one by."""
        for node in self.flow.neighbours(value):
            for other in node.inputs if self.views.get(node) else ():
                if (
                    other in self.pinned
                    and other is not value
                    and name in (other.sharding.axis_names if other.sharding else ())
                ):
                    if self._is_summed(node, other, value, name):
                        what = f"what {node.title} sums over {name}"
                        why = f"is the share of a device of {what}, as that shards %{other.name}"
                    else:
                        gathered = "which is gathered there: that sends least"
                        why = f"takes {name} from %{other.name} at {node.title}, {gathered}"
                    return Decision(why, other.name, (name,))
        return None

    def _is_summed(self, node: Node, operand: Value, value: Value, name: str) -> bool:
        """Whether a node reduces what an axis cuts in an operand, and gives the value."""
        if value.node is not node:
            return False
        reduced = (
            view.rule.kinds[factor] is Kind.REDUCE
            for view in self.views[node]
            for factor in _factors_with(view, operand, name)
            if factor >= 0
        )
        return any(reduced)


def _factors_with(view: RuleView, value: Value, name: str) -> set[int]:
    """The factors of a node that an axis cuts in one of its values, reduced ones included."""
    if value.sharding is None or name not in value.sharding.axis_names:
        return set()
    found = {
        factor
        for tensor, other in enumerate(view.values)
        if other is value
        for factor, axes in view.project(tensor, value.sharding.axes).items()
        if any(axis.name == name for axis in axes)
    }
    if any(axis.name == name for axis in value.sharding.partial):
        found |= {factor for factor, kind in enumerate(view.rule.kinds) if kind is Kind.REDUCE} | {-1}
    return found
