"""Which nodes of a stretch of compute become one kernel.

A node joins what computes its operands, where shapes allow: all elementwise nodes of one shape, and around reductions
of rows those of the whole shape and those of a number for each row. No path may leave a group and come back to it.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from irpar.analysis.engines import writes_out
from irpar.ir import Node, Value, captured_or_read, tensor_type
from irpar.kernels.expression import Expression, Number, Step

from .drafts import Given, Lowered, Ref
from .lowering import lowered

Shape = tuple[int, ...]
Use = tuple[Node, int]

MOST_OPERANDS = 16
MOST_RESULTS = 8
MOST_STEPS = 96
MOST_DIMS = 8
LONGEST_ROW = 1 << 16
"""Elements of a row where rows are few: longer ones are reduced by many blocks."""
FEWEST_COLUMNS = 32
"""That are summed up: sums of fewer are reductions."""
FEW_ROWS = 64
SMALL = 64
"""Elements of tensors that engines with a device compute on the host, where all that they are made of lies there."""


@dataclass(frozen=True)
class Stretch:
    """Nodes between two of communication.

    Attributes:
        nodes: in order.
        kept: their results that are read behind them.
        over: results that are written over a state, and the state: nothing reads it behind them.
        taken: nodes that join no group.
        copies: for a node the nodes that its group computes too.
        passed: for a node the operands that its group does without.
        read_again: what groups read of what others compute, beside what their nodes read.
    """

    nodes: Sequence[Node]
    kept: Set[Value]
    over: Mapping[Value, Value] = field(default_factory=dict)
    taken: Set[Node] = frozenset()
    copies: dict[Node, set[Node]] = field(default_factory=dict)
    passed: dict[Node, set[Value]] = field(default_factory=dict)
    read_again: set[Value] = field(default_factory=set)

    @cached_property
    def places(self) -> dict[Node, int]:
        """The place of each node."""
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def before(self) -> dict[Node, tuple[Node, ...]]:
        """For each node those that it must follow: what it reads comes of them, or they read what it writes over."""
        found = {node: self._producers(node) for node in self.nodes}
        for value, state in self.over.items():
            node = value.node
            if node is not None:
                readers = (reader for reader in self._readers(state) if reader is not node)
                found[node] = tuple(dict.fromkeys((*found[node], *readers)))
        return found

    def is_read(self, use: Use) -> bool:
        """Whether a node of the stretch does read what it is said to: none of its group's kernel makes up for it."""
        user, index = use
        value = user.operand(index)
        if user not in self.places or value is None or value in self.passed.get(user, ()):
            return False
        return value.node not in self.copies.get(user, ())

    def drop_unread(self, groups: "Sequence[Group]") -> set[Node]:
        """The nodes whose results nothing reads any more, of which nothing else is read then."""
        group_of = {node: group for group in groups for node in group.members}
        found: set[Node] = set()
        for node in reversed(self.nodes):
            group = group_of.get(node)
            if group is None:
                uses = [use for value in node.results for use in value.uses]
                is_kept = not self.kept.isdisjoint(node.results) or not self.read_again.isdisjoint(node.results)
                is_read = not uses or is_kept or any(map(self._is_use, uses))
            else:
                is_read = node is not group.last or bool(group.results())
            if not is_read:
                gone = (node,) if group is None else tuple(group.members)
                found.update(gone)
                self.passed.update((one, {*captured_or_read(one)}) for one in gone)
        return found

    def _is_use(self, use: Use) -> bool:
        """Whether a use counts: of a node in a body nobody knows."""
        return use[0] not in self.places or self.is_read(use)

    def _producers(self, node: Node) -> tuple[Node, ...]:
        found = (value.node for value in captured_or_read(node))
        return tuple(dict.fromkeys(one for one in found if one is not None and one in self.places))

    def _readers(self, state: Value) -> list[Node]:
        """The nodes that read a value, or what may be a view of it."""
        seen = {state}
        found: list[Node] = []
        for node in self.nodes:
            if not seen.isdisjoint(captured_or_read(node)):
                found.append(node)
                if not writes_out(node):
                    seen.update(node.results)
        return found


class Group:
    """Nodes that one kernel computes.

    Args:
        stretch: in which they are.
        members: the nodes, as steps.
        space, reduced: over which shape, of which so many dims at the end are reduced.
        outer: how many dims at its beginning are summed up; what is made of the sums is among the members.

    Attributes:
        copied: nodes of other groups that it computes too, rather than read what they make.
    """

    def __init__(
        self, stretch: Stretch, members: Mapping[Node, Lowered], space: Shape, reduced: int, outer: int = 0
    ) -> None:
        self.stretch = stretch
        self.members = {node: members[node] for node in sorted(members, key=stretch.places.__getitem__)}
        self.space = space
        self.reduced = reduced
        self.outer = outer
        self.copied: dict[Node, Lowered] = {}

    def copy(self, nodes: Mapping[Node, Lowered]) -> bool:
        """Compute nodes of another group too, if there is room."""
        before, self.copied = self.copied, {**self.copied, **nodes}
        if not self.fits():
            self.copied = before
            return False
        for node in self.members:
            self.stretch.copies.setdefault(node, set()).update(nodes)
        return True

    def computed(self) -> dict[Node, Lowered]:
        """All nodes that it computes, in order of the graph."""
        if not self.copied:
            return self.members
        both = {**self.copied, **self.members}
        return {node: both[node] for node in sorted(both, key=self.stretch.places.__getitem__)}

    @property
    def last(self) -> Node:
        """The last of them."""
        return next(reversed(self.members))

    @property
    def row_shape(self) -> Shape:
        """The shape of a number for each row."""
        return (*self.space[: len(self.space) - self.reduced], *(1 for _ in range(self.reduced)))

    def with_other(self, other: "Group") -> "Group | None":
        """Both in one, where one kernel can compute their shapes and is not too large for it."""
        first, second = self.last, other.last
        if (first.phase, first.stage, first.place) != (second.phase, second.stage, second.place):
            return None
        members = {**self.members, **other.members}
        if self.outer or other.outer:
            made = self._with_columns(other, members)
        elif self.space == other.space:
            if self.reduced and other.reduced and self.reduced != other.reduced:
                return None
            made = Group(self.stretch, members, self.space, self.reduced or other.reduced)
        else:
            rows, plain = (self, other) if self.reduced else (other, self)
            if not rows.reduced or plain.reduced or plain.space != rows.row_shape:
                return None
            made = Group(self.stretch, members, rows.space, rows.reduced)
        return made if made is not None and made.fits() else None

    def _with_columns(self, other: "Group", members: Mapping[Node, Lowered]) -> "Group | None":
        """Both in one, where one of them sums up columns: the other sums up such too, or computes on sums."""
        columns, plain = (self, other) if self.outer else (other, self)
        if plain.outer:
            is_fit = (plain.space, plain.outer) == (columns.space, columns.outer)
        else:
            whole = columns.space[columns.outer :]
            is_fit = not plain.reduced and plain.space in (whole, (*(1 for _ in range(columns.outer)), *whole))
        return Group(self.stretch, members, columns.space, 0, columns.outer) if is_fit else None

    def operands(self) -> tuple[Value, ...]:
        """What the nodes read from outside, in order of first use."""
        computed = self.computed()
        read = (value for one in computed.values() for value in one.values())
        return tuple(dict.fromkeys(value for value in read if value.node not in computed))

    def results(self) -> tuple[Value, ...]:
        """What others read of them."""
        made = (value for one in self.members.values() for value in one.results)
        needed = self.stretch.kept | self.stretch.read_again
        return tuple(value for value in made if value in needed or any(map(self._gives, value.uses)))

    def _gives(self, use: Use) -> bool:
        """Whether a use of a result is one by another node."""
        return use[0] not in self.members and self.stretch.is_read(use)

    def expression(self) -> Expression:
        """What it computes: operands and results by their places, other steps by their numbers."""
        names: dict[Value, str] = {value: f"x{place}" for place, value in enumerate(self.operands())}
        chosen = {value: f"y{place}" for place, value in enumerate(self.results())}
        steps: list[Step] = []
        for one in self.computed().values():
            own: list[str] = [""] * len(one.steps)
            for value, ref in one.results.items():
                own[ref.place] = chosen.get(value, "")
            for place, draft in enumerate(one.steps):
                own[place] = own[place] or f"t{len(steps)}"
                steps.append(Step(own[place], draft.op_type, _named(draft.operands, own, names), draft.attributes))
            names.update((value, own[ref.place]) for value, ref in one.results.items())
        return Expression(tuple(steps))

    def fits(self) -> bool:
        """Whether one kernel is not too large for this."""
        computed = self.computed()
        drafts = [step for one in computed.values() for step in one.steps]
        kinds = {step.op_type for step in drafts} & {"IsIndex", "RotateHalf"}
        if kinds and (self.reduced or self.outer or len(kinds) > 1):
            return False
        squeezed = {
            value
            for one in computed.values()
            for value, ref in one.results.items()
            if one.steps[ref.place].op_type == "Squeeze"
        }
        if not self.outer and any(not squeezed.isdisjoint(one.values()) for one in computed.values()):
            return False  # A kernel writes what lost its reduced dims, and has no place in its rows to read it at.
        rotated = [step.operands[0] for step in drafts if step.op_type == "RotateHalf"]
        if any(isinstance(x, Value) and x.node in computed for x in rotated):
            return False
        steps = sum(len(one.steps) for one in computed.values())
        return len(self.operands()) <= MOST_OPERANDS and len(self.results()) <= MOST_RESULTS and steps <= MOST_STEPS


def _named(given: tuple[Given, ...], own: list[str], names: dict[Value, str]) -> tuple[str | Number, ...]:
    """Operands of a step by their names."""
    return tuple(
        operand if isinstance(operand, Number) else own[operand.place] if isinstance(operand, Ref) else names[operand]
        for operand in given
    )


class Unit(Protocol):
    """What one node takes the place of."""

    @property
    def members(self) -> Collection[Node]:
        """The nodes."""


class Grouping:
    """Which nodes of a stretch become one.

    Args:
        stretch: it.

    Attributes:
        unit: what nodes are part of.
    """

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch
        self.group: dict[Node, Group] = {}
        self.unit: dict[Node, Unit] = {}
        self._begins = np.arange(len(stretch.nodes))
        """For each place where the first unit begins that has nodes both before it and from it on; it, if none has."""

    def assign(self, unit: Unit) -> None:
        """Let nodes be part of a unit."""
        self.unit.update(dict.fromkeys(unit.members, unit))
        places = [self.stretch.places[node] for node in unit.members]
        first, last = min(places), max(places)
        begins = self._begins[first : last + 1]
        np.minimum(begins, first, out=begins)

    def groups(self) -> list[Group]:
        """The groups in the stretch, in the order of their last nodes."""
        nodes, places = self.stretch.nodes, self.stretch.places
        read = {value for node in nodes for value in captured_or_read(node)} | self.stretch.kept
        others = _on_host(nodes) | self.stretch.taken
        for node in nodes:
            one = lowered(node, read) if node not in others else None
            if one is None or not _is_for_kernel(one):
                continue
            own = Group(self.stretch, {node: one}, one.space, one.reduced, one.outer)
            if not own.fits():
                continue
            self.group[node] = self.unit[node] = own
            for producer in reversed(self.stretch.before[node]):
                self._try_join(producer, node)
        self._join_columns()
        found = sorted(filter(_is_worth_it, dict.fromkeys(self.group.values())), key=lambda group: places[group.last])
        for group in found:
            for node, one in group.members.items():
                self.stretch.passed[node] = {*node.inputs} - {*one.values()}
        return found

    def _try_join(self, producer: Node, node: Node) -> None:
        first, second = self.group.get(producer), self.group[node]
        if first is None or first is second:
            return
        made = first.with_other(second)
        if made is not None and self.is_convex(made.members):
            self.group.update(dict.fromkeys(made.members, made))
            self.assign(made)

    def _join_columns(self) -> None:
        """Let sums of columns of what one group makes be one group too."""
        known: dict[tuple[object, ...], Group] = {}
        for group in dict.fromkeys(self.group.values()):
            if not group.outer:
                continue
            makers = (self.unit.get(value.node) for value in group.operands() if value.node is not None)
            key = (group.space, group.outer, next((unit for unit in makers if unit is not None), group))
            other = known.setdefault(key, group)
            made = other.with_other(group) if other is not group else None
            if made is not None and self.is_convex(made.members):
                known[key] = made
                self.group.update(dict.fromkeys(made.members, made))
                self.assign(made)

    def is_convex(self, members: Collection[Node]) -> bool:
        """Whether no path leaves some nodes and comes back, where other units are one node each."""
        places, before = self.stretch.places, self.stretch.before
        least = self._apart(min(map(places.__getitem__, members)))
        seen: set[Node] = set()
        waiting = [producer for node in members for producer in before[node] if producer not in members]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            known = self.unit.get(node)
            unit: Iterable[Node] = known.members if known is not None else (node,)
            seen.update(unit)
            if max(map(places.__getitem__, unit)) < least:
                continue
            for inner in unit:
                if any(producer in members for producer in before[inner]):
                    return False
                waiting += before[inner]
        return True

    def _apart(self, place: int) -> int:
        """The last place up to one that no unit lies on both sides of: nothing before it waits for what comes later."""
        while self._begins[place] < place:
            place = int(self._begins[place])
        return place


def _is_for_kernel(one: Lowered) -> bool:
    """Whether a node alone can be a kernel: rows of it are many, or short enough."""
    if len(one.space) > MOST_DIMS:
        return False
    if one.outer:
        return math.prod(one.space[: one.outer]) > 1 and math.prod(one.space[one.outer :]) >= FEWEST_COLUMNS
    if not one.reduced:
        return True
    cut = len(one.space) - one.reduced
    rows, length = math.prod(one.space[:cut]), math.prod(one.space[cut:])
    return rows >= FEW_ROWS or length <= LONGEST_ROW


def _is_worth_it(group: Group) -> bool:
    """Whether a kernel of the group is better than its nodes: several of them, or one of floats."""
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
