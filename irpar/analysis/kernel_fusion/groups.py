"""Which nodes of a stretch of compute become one kernel.

A node joins what computes its operands, where shapes allow: all elementwise nodes of one shape, and around reductions of
rows those of the whole shape and those of a number for each row. No path may leave a group and come back to it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from irpar.ir import Node, Value, captured_or_read, tensor_type

from .lowering import Lowered, lowered

MOST_OPERANDS = 16
MOST_RESULTS = 8
MOST_STEPS = 96
MOST_DIMS = 8
LONGEST_ROW = 1 << 16
"""Elements of a row where rows are few: longer ones are reduced by many blocks."""
FEW_ROWS = 64
SMALL = 64
"""Elements of tensors that engines with a device compute on the host, where all that they are made of lies there."""


class Group:
    """Nodes that one kernel computes.

    Attributes:
        members: the nodes, in order of the graph.
        space, reduced: over which shape, of which so many dims at the end are reduced.
    """

    def __init__(self, one: Lowered) -> None:
        self.members: dict[Node, Lowered] = {one.node: one}
        self.space = one.space
        self.reduced = one.reduced

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a number for each row."""
        return (*self.space[: len(self.space) - self.reduced], *(1 for _ in range(self.reduced)))

    def takes(self, other: "Group") -> bool:
        """Whether the shapes of both can be computed by one kernel."""
        if self.space == other.space:
            return not self.reduced or not other.reduced or self.reduced == other.reduced
        return bool(self.reduced) and not other.reduced and other.space == self.row_shape

    def join(self, other: "Group", places: Mapping[Node, int]) -> None:
        """Take over the nodes of another."""
        both = {**self.members, **other.members}
        self.members = {node: both[node] for node in sorted(both, key=places.__getitem__)}
        if self.space == other.space:
            self.reduced = self.reduced or other.reduced
        elif other.reduced:
            self.space, self.reduced = other.space, other.reduced

    def operands(self) -> tuple[Value, ...]:
        """What the nodes read from outside, in order of first use."""
        read = (value for one in self.members.values() for value in one.values())
        return tuple(dict.fromkeys(value for value in read if value.node not in self.members))

    def results(self) -> tuple[Value, ...]:
        """What others read of them."""
        made = (value for node in self.members for value in node.results)
        return tuple(value for value in made if any(user not in self.members for user in value.users))

    def fits(self) -> bool:
        """Whether one kernel is not too large for this."""
        steps = sum(len(one.steps) for one in self.members.values())
        return len(self.operands()) <= MOST_OPERANDS and len(self.results()) <= MOST_RESULTS and steps <= MOST_STEPS


def groups_of(nodes: Sequence[Node]) -> list[Group]:
    """The groups in a stretch of compute, in the order of their last nodes."""
    return _Grouping(nodes).groups()


class _Grouping:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.places = {node: place for place, node in enumerate(nodes)}
        self.producers = {node: self._producers(node) for node in nodes}
        self.group: dict[Node, Group] = {}

    def _producers(self, node: Node) -> tuple[Node, ...]:
        found = (value.node for value in captured_or_read(node))
        return tuple(dict.fromkeys(one for one in found if one is not None and one in self.places))

    def groups(self) -> list[Group]:
        """See `groups_of`."""
        on_host = _on_host(self.nodes)
        for node in self.nodes:
            one = lowered(node) if node not in on_host else None
            if one is None or not _is_for_kernel(one):
                continue
            own = self.group[node] = Group(one)
            if not own.fits():
                del self.group[node]
                continue
            for producer in reversed(self.producers[node]):
                self._try_join(producer, node)
        found = dict.fromkeys(self.group.values())
        worth = [group for group in found if _is_worth_it(group)]
        return sorted(worth, key=lambda group: self.places[next(reversed(group.members))])

    def _try_join(self, producer: Node, node: Node) -> None:
        first, second = self.group.get(producer), self.group[node]
        if first is None or first is second or not (first.takes(second) or second.takes(first)):
            return
        if (producer.phase, producer.stage, producer.place) != (node.phase, node.stage, node.place):
            return
        members = {**first.members, **second.members}
        made = Group(next(iter(first.members.values())))
        made.members, made.space, made.reduced = dict(first.members), first.space, first.reduced
        made.join(second, self.places)
        if made.fits() and self._is_convex(members):
            self.group.update(dict.fromkeys(made.members, made))

    def _is_convex(self, members: Mapping[Node, Lowered]) -> bool:
        """Whether no path leaves some nodes and comes back, where other groups are one node each."""
        least = min(map(self.places.__getitem__, members))
        seen: set[Node] = set()
        waiting = [producer for node in members for producer in self.producers[node] if producer not in members]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            group = self.group.get(node)
            unit: Iterable[Node] = group.members if group is not None else (node,)
            seen.update(unit)
            if max(map(self.places.__getitem__, unit)) < least:
                continue
            for inner in unit:
                for producer in self.producers[inner]:
                    if producer in members:
                        return False
                    if producer not in seen:
                        waiting.append(producer)
        return True


def _is_for_kernel(one: Lowered) -> bool:
    """Whether a node alone can be a kernel: rows of it are many, or short enough."""
    if len(one.space) > MOST_DIMS:
        return False
    if not one.reduced:
        return True
    cut = len(one.space) - one.reduced
    rows, length = math.prod(one.space[:cut]), math.prod(one.space[cut:])
    return rows >= FEW_ROWS or length <= LONGEST_ROW


def _is_worth_it(group: Group) -> bool:
    """Whether a kernel of the group is better than its nodes: several of them, or one of floats, whose kernel is ours."""
    if len(group.members) > 1:
        return True
    (one,) = group.members.values()
    values = (*one.node.inputs, *one.node.results)
    return any(type_.dtype.is_float for value in values if (type_ := tensor_type(value.type)) is not None)


def _on_host(nodes: Sequence[Node]) -> set[Node]:
    """Nodes that make small tensors of constants, shapes and small integers: devices leave them to the host."""
    found: set[Node] = set()
    for node in nodes:
        if all(map(_is_small, node.results)) and all(_stays(value, found) for value in node.inputs):
            found.add(node)
    return found


def _stays(value: Value, found: set[Node]) -> bool:
    if value.node is not None and value.node in found:
        return True
    type_ = tensor_type(value.type)
    is_index = type_ is not None and not type_.dtype.is_float
    if value.node is not None and value.node.op_type in ("Shape", "Size"):
        return True
    return _is_small(value) and (value.is_constant or (is_index and value.node is None))


def _is_small(value: Value) -> bool:
    type_ = tensor_type(value.type)
    return type_ is not None and type_.is_static and math.prod(type_.static_shape) <= SMALL
