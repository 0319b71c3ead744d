"""Loop and Scan seen alike: what is carried from trip to trip, what each trip reads of a tensor, what it collects."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from irpar.analysis.types.control_flow import scan_axes, trip_count
from irpar.ir import Dim, Graph, Ints, Node, TensorType, Value, tensor_type
from irpar.ops.linear import scaled_operand


@dataclass(frozen=True)
class Slices:
    """A tensor of which each trip reads or gives a slice.

    Attributes:
        outside: the tensor; None: one that nothing holds yet.
        inside: the slice, in the body.
        axis: along which it is sliced.
        backwards: whether the first trip has the last slice.
    """

    outside: Value
    inside: Value
    axis: int = 0
    backwards: bool = False


@dataclass(frozen=True)
class Looping:
    """A Loop or a Scan.

    Attributes:
        node, body: the node and its body.
        carried: for each carried value its start (outside), and in the body what comes in and what goes out.
        finals: the results that the carried values end as.
        read: what is sliced for the body.
        collected: what the body's slices are put together to.
        number: the trip number, which a Loop's body has.
    """

    node: Node
    body: Graph
    carried: tuple[tuple[Value | None, Value, Value], ...]
    finals: tuple[Value, ...]
    read: tuple[Slices, ...]
    collected: tuple[Slices, ...]
    number: Value | None = None

    @classmethod
    def of_scan(cls, node: Node) -> Self:
        """Read a Scan of opset 9 or newer."""
        body = node.attributes["body"]
        scanned = node.attributes["num_scan_inputs"]
        assert isinstance(body, Graph)
        assert isinstance(scanned, int)
        states = len(node.operands) - scanned
        collected = len(node.results) - states
        starts = node.operands
        carried = zip(starts[:states], body.inputs[:states], body.outputs[:states], strict=True)
        return cls(
            node,
            body,
            tuple(carried),
            node.results[:states],
            _slices(node, "scan_input", [*node.inputs[-scanned:]], body.inputs[states:], scanned),
            _slices(node, "scan_output", [*node.results[states:]], [*body.outputs[states:]], collected),
        )

    @classmethod
    def of_loop(cls, node: Node) -> Self:
        """Read a Loop."""
        body = node.attributes["body"]
        assert isinstance(body, Graph)
        count = len(body.inputs) - 2
        starts = (*node.operands[2:], *[None] * count)[:count]
        carried = tuple(zip(starts, body.inputs[2:], body.outputs[1 : 1 + count], strict=True))
        pairs = zip(node.results[count:], body.outputs[1 + count :], strict=True)
        collected = tuple(Slices(outside, inside) for outside, inside in pairs)
        return cls(node, body, carried, node.results[:count], (), collected, body.inputs[0])

    @property
    def trips(self) -> Dim:
        """How many there are, as types tell."""
        known = trip_count(self.node)
        if known is not None:
            return known
        for slices in (*self.read, *self.collected):
            found = tensor_type(slices.outside.type)
            if found is not None and found.shape is not None and found.shape[slices.axis] is not None:
                return found.shape[slices.axis]
        return None

    def place(self, number: int) -> int:
        """Which operand of the node a carried value begins as."""
        return number if self.number is None else number + 2

    def addition(self, number: int) -> tuple[Node, int] | None:
        """What each trip adds to a carried value that nothing else in the body reads; None where there is no such sum.

        Returns:
            The Add, and which operand of it is added.
        """
        _, before, after = self.carried[number]
        add = after.node
        is_alone = before.use_count == after.use_count == 1
        if add is None or add.graph is not self.body or add.identity != ("", "Add") or not is_alone:
            return None
        return (add, 1 - add.operands.index(before)) if before.users == (add,) else None

    def summed(self) -> Iterator[Value]:
        """The values that a body computes only to add them to what it carries: their sum may be moved instead."""
        for number in range(len(self.carried)):
            found = self.addition(number)
            value = None if found is None else found[0].operands[found[1]]
            while value is not None and value.use_count == 1 and value.node is not None:
                if value.node.graph is not self.body:
                    break
                yield value
                place = scaled_operand(value.node)
                value = None if place is None else value.node.operands[place]

    @property
    def may_be_empty(self) -> bool:
        """Whether there may be no trip at all: only a Loop then runs."""
        return self.number is not None and (not isinstance(self.trips, int) or self.trips == 0)

    def collect(self, value: Value) -> Slices:
        """Let the body give a value of each trip; a new result of the node holds them all, the first trip first."""
        for slices in self.collected:
            if slices.inside is value:
                return slices
        if value in self.body.inputs or value in self.body.outputs:
            copy = Node("Identity", [value], results=[Value("", value.type)], version=self.node.version)
            copy.phase = "forward"
            value = self.body.append(copy).result
        found = tensor_type(value.type)
        shape = None if found is None or found.shape is None else (self.trips, *found.shape)
        type_ = value.type if found is None else TensorType(found.dtype, shape)
        self.body.set_outputs(
            [*self.body.outputs, value], [*self.body.output_names, f"{value.name}_{len(self.body.outputs)}"]
        )
        outside = self.node.add_result(Value(f"{value.name}_saved", type_))
        for name in ("scan_output_axes", "scan_output_directions"):
            known = self.node.attributes.get(name)
            if isinstance(known, Ints):
                self.node.set_attribute(name, Ints((*known, 0)))
        return Slices(outside, value)


LOOPS: Mapping[tuple[str, str], Callable[[Node], Looping]] = {
    ("", "Loop"): Looping.of_loop,
    ("", "Scan"): Looping.of_scan,
}
"""How each kind of loop is read; a Scan of opset 9 or newer."""


def runs_alike(node: Node, around: Graph) -> bool:
    """Whether a Loop in a body has the same number of trips each time that this body runs.

    Its limit and its condition come from outside, and its own body goes on as it began.
    """
    if trip_count(node) is not None:
        return True
    limit, flag = (*node.operands, None, None)[:2]
    (body,) = node.nested_graphs()
    goes_on = _copied(body.outputs[0])
    is_kept = goes_on is body.inputs[1] or goes_on.owner not in (body, around)
    return is_kept and _is_same(limit, around) and _is_same(flag, around)


def _is_same(value: Value | None, around: Graph) -> bool:
    """Whether a value is the same each time that a body runs; the condition of its Loop is true whenever it does."""
    if value is None:
        return True
    source = _copied(value)
    is_condition = around.parent is not None and around.parent.op_type == "Loop" and source is around.inputs[1]
    return is_condition or source.owner is not around


def _copied(value: Value) -> Value:
    """What a value is a copy of."""
    while value.node is not None and value.node.identity == ("", "Identity"):
        value = value.node.inputs[0]
    return value


def _slices(node: Node, prefix: str, outside: list[Value], inside: list[Value], count: int) -> tuple[Slices, ...]:
    axes = scan_axes(node, f"{prefix}_axes", count)
    directions = scan_axes(node, f"{prefix}_directions", count)
    return tuple(
        Slices(whole, part, axis, bool(direction))
        for whole, part, axis, direction in zip(outside, inside, axes, directions, strict=True)
    )
