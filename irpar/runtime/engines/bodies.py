"""Segments, nested graphs and functions as lists of instructions: what the engines `numpy` and `cupy` run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from irpar.analysis.memory.sums import Sum, sums_in
from irpar.ir import (
    Attribute,
    Graph,
    Node,
    OptionalType,
    RefAttribute,
    SequenceType,
    Value,
    captured_or_read,
    plain_attribute,
)
from irpar.kernels import lookup
from irpar.ops.effects import goes_to_group
from irpar.runtime.errors import EngineError, NodeError, RunError
from irpar.sharding import option

from .arena import with_states
from .arrays import Arrays, Reads
from .control_flow import CONTROL_FLOW, call
from .opened import opened
from .operation import Environment, Operation
from .sequences import SEQUENCE_OPS


@dataclass(frozen=True, eq=False)
class Instruction:
    """One node, ready to run: what it reads, computes and defines, and what nobody reads after it."""

    node: Node
    operation: Operation
    inputs: tuple[Value | None, ...]
    results: tuple[Value, ...]
    frees: tuple[Value, ...]

    def run(self, environment: Environment) -> None:
        """Run in an environment that holds all that is read."""
        inputs = [None if value is None else environment[value] for value in self.inputs]
        results = self.operation(inputs, environment)
        environment.update(zip(self.results, results, strict=True))
        for value in self.frees:
            del environment[value]


class Scope:
    """Where a body is compiled: where its arrays lie, and what attribute references mean there.

    Attributes:
        arrays: where arrays lie.
        on_host: values of which it is known that they lie on the host, though the engine has a device.
    """

    def __init__(self, arrays: Arrays, given: Mapping[str, Attribute] | None = None) -> None:
        self.arrays = arrays
        self.on_host: set[Value] = set()
        self._given = given

    def inside(self, given: Mapping[str, Attribute]) -> "Scope":
        """The scope of a function's body, called with these attributes."""
        return Scope(self.arrays, given)

    def place(self, inputs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Value] | None) -> None:
        """Decide for all values of a body whether they lie on the host; `outputs`: as `Arrays.on_host` takes them."""
        self.on_host.update(self.arrays.on_host(inputs, nodes, outputs, self.on_host))

    def body(self, graph: Graph) -> "Body":
        """Compile a nested graph or a function's body."""
        nodes, inputs = self.arrays.nodes(graph), tuple(graph.inputs)
        self.place(inputs, nodes, graph.outputs)
        return Body(nodes, inputs, graph.outputs, graph.constants, self, sums_in(graph))

    def resolve(self, value: Attribute, node: Node) -> Attribute | None:
        """An attribute's value; for a reference the caller's, or None where the caller gives none."""
        if not isinstance(value, RefAttribute):
            return value
        if self._given is None:
            raise EngineError(f"attribute reference {value.name!r} outside a function", where=node.label)
        return self._given.get(value.name)

    def attributes(self, node: Node) -> dict[str, Any]:
        """The attributes of a node as the kernels take them: numbers, strings, tuples of these, arrays."""
        resolved = {name: self.resolve(value, node) for name, value in node.attributes.items()}
        return {name: plain_attribute(value) for name, value in resolved.items() if value is not None}


class Body:
    """Compiled nodes with inputs and outputs: a segment, a nested graph, or a function's body.

    Sums of a loop of which it is the body are written over what a trip finds, where that has its memory to itself; or
    copied there, where a kernel may not write over what it reads.

    Attributes:
        instructions: the nodes, ready to run.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        constants: Iterable[Value],
        scope: Scope,
        sums: Sequence[Sum] = (),
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        arrays = self._arrays = scope.arrays
        self._constants = {
            value: arrays.constant(value.data.numpy(), reads_of(value)) for value in constants if value.data is not None
        }
        self._sums = {each.after: each.before for each in sums}
        self._adding = [
            node for node in nodes if not self._sums.keys().isdisjoint(node.results) and arrays.may_add_over(node)
        ]
        own, kept = {*inputs, *(value for node in nodes for value in node.results)}, set(outputs)
        self._making = [node for node in nodes if not kept.isdisjoint(node.results)]
        self._left = tuple({*inputs, *(own & kept), *self._constants})
        self.instructions = _instructions(nodes, own, kept, scope)

    def call(self, arguments: Sequence[Any], environment: Environment, rooms: Sequence[Any] = ()) -> list[Any]:
        """Run with values for the inputs; `environment` holds what the nodes read from outside, as it does after it.

        Args:
            arguments: the values.
            environment: that.
            rooms: where outputs are to lie, None for those that may lie anywhere; empty: all may.
        """
        results = self.take([*arguments], environment, rooms)
        for value in self._left:
            environment.pop(value, None)
        return results

    def take(self, arguments: list[Any], environment: Environment, rooms: Sequence[Any] = ()) -> list[Any]:
        """Run in an environment of its own. The list of arguments is emptied: what nothing reads any more is freed."""
        environment.update(self._constants)
        environment.update(zip(self.inputs, arguments, strict=True))
        arguments.clear()
        into = environment.into
        blocks = {value: environment[before] for value, before in self._sums.items()}
        blocks = {value: block for value, block in blocks.items() if self._arrays.is_own(block)}
        if blocks:
            environment.into = with_states(into, self._adding, blocks)
        if rooms:
            given = zip(self.outputs, rooms, strict=True)
            places = {value: room for value, room in given if room is not None and value not in blocks}
            environment.into = with_states(environment.into, self._making, places)
            blocks |= places
        run(self.instructions, environment, self._arrays)
        environment.into = into
        bring(environment, blocks, self._arrays)
        return [environment[value] for value in self.outputs]


def run(instructions: Iterable[Instruction], environment: Environment, arrays: Arrays) -> None:
    """Run nodes in an environment that holds all that is read; `arrays`: where arrays lie.

    Raises:
        NodeError: naming the node that failed.
    """
    for instruction in instructions:
        try:
            instruction.run(environment)
        except (NodeError, RunError):
            raise
        except Exception as error:
            raise arrays.failure(instruction.node, error) from error


def bring(environment: Environment, blocks: Mapping[Value, Any], arrays: Arrays) -> None:
    """Let results lie in blocks, also those of nodes that write no given array."""
    for value, block in blocks.items():
        environment[value] = arrays.brought(environment[value], block)


def reads_of(value: Value) -> Reads:
    """Where a constant is read, nested graphs included."""
    on_host = on_device = False
    for node, place in value.uses:
        kernel = lookup(node.domain, node.op_type, node.version)
        is_host = kernel is not None and place in kernel.signature.host
        on_host, on_device = on_host or is_host, on_device or not is_host
    return Reads(on_host, on_device)


def _instructions(nodes: Sequence[Node], own: set[Value], kept: set[Value], scope: Scope) -> tuple[Instruction, ...]:
    """The nodes with what can be freed after each: values of this body (`own`) that nothing later reads."""
    later = set(kept)
    made: list[Instruction] = []
    for node in reversed(nodes):
        touched = dict.fromkeys((*captured_or_read(node), *node.results))
        frees = tuple(value for value in touched if value in own and value not in later)
        later.update(touched)
        made.append(Instruction(node, _operation(node, scope), node.operands, node.results, frees))
    made.reverse()
    return tuple(made)


def _operation(node: Node, scope: Scope) -> Operation:
    """What computes a node.

    Raises:
        EngineError: nothing does.
    """
    if node.callee is not None:
        return call(node, scope)
    if goes_to_group(node):
        return scope.arrays.communication(node)
    if node.domain == "" and node.op_type in CONTROL_FLOW:
        return CONTROL_FLOW[node.op_type](node, scope)
    if node.domain == "" and node.op_type in SEQUENCE_OPS and _is_for_sequences(node):
        return _sequence_operation(node, scope)
    return _kernel_operation(node, scope)


def _is_for_sequences(node: Node) -> bool:
    """Identity of tensors has a kernel; that of sequences and optionals has none."""
    return node.op_type != "Identity" or any(isinstance(v.type, SequenceType | OptionalType) for v in node.inputs)


def _sequence_operation(node: Node, scope: Scope) -> Operation:
    compute, arrays = SEQUENCE_OPS[node.op_type], scope.arrays
    attributes = scope.attributes(node)

    def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
        return (compute(arrays, inputs, attributes),)

    return run


def _kernel_operation(node: Node, scope: Scope) -> Operation:
    kernel = lookup(node.domain, node.op_type, node.version)
    if kernel is None:
        found = opened(node, scope) if scope.arrays.opens else None
        return found or scope.arrays.without_kernel(node)
    try:
        attributes = scope.attributes(node)
    except TypeError as error:  # a graph, or a reference
        raise EngineError(
            f"the {scope.arrays.name} engine cannot run {node.operator}: {error}",
            where=f"node {node.label}",
            do=f"use {option('engine', 'ort')}",
        ) from error
    return scope.arrays.kernel(node, kernel, attributes, scope.on_host.issuperset(node.results))
