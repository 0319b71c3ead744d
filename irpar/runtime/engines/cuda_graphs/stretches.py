"""Which nodes of a segment are captured together, and which split it because no CUDA graph can hold them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from irpar.ir import Node, Value, captured_or_read, tensor_type
from irpar.runtime.engines.bodies import Instruction
from irpar.runtime.engines.control_flow import CONTROL_FLOW
from irpar.runtime.engines.device_arrays import Communicating, PlacedKernel
from irpar.runtime.engines.host_values import kernel_of, read_on_host

LEAST_NODES = 2
"""Stretches of fewer nodes on the device are not captured: launching a graph costs as much as launching a kernel."""


@dataclass(frozen=True, eq=False)
class Stretch:
    """Nodes that run one after the other.

    Attributes:
        instructions: the nodes, ready to run.
        is_captured: whether a CUDA graph may hold them.
        reads: values from before that they read or write over, but for constants.
        makes: their results that something later reads.
        frees: what of `reads` nothing later reads.
    """

    instructions: tuple[Instruction, ...]
    is_captured: bool
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    frees: tuple[Value, ...]


def stretches(
    instructions: Iterable[Instruction],
    apart: Collection[Node],
    on_host: Collection[Value],
    over: Mapping[Value, Value],
) -> tuple[Stretch, ...]:
    """A segment's nodes, cut where one of `apart` is; what lies in between is captured if that is worth it.

    Args:
        instructions: the nodes.
        apart: nodes that no CUDA graph can hold.
        on_host: values that lie on the host.
        over: results that are written over a state, and that state.
    """
    alternating = [tuple(found) for _, found in groupby(instructions, lambda one: one.node in apart)]
    runs = [(found, found[0].node not in apart and _launches(found, on_host) >= LEAST_NODES) for found in alternating]
    joined = [
        (tuple(one for found, _ in same for one in found), is_captured)
        for is_captured, same in groupby(runs, lambda run: run[1])
    ]
    return tuple(_stretch(found, is_captured, over) for found, is_captured in joined)


def reasons_apart(instructions: Iterable[Instruction], on_host: Collection[Value]) -> dict[Node, str]:
    """The nodes of which it is known beforehand that no CUDA graph can hold them, and why."""
    found = {one.node: _reason(one, on_host) for one in instructions}
    return {node: reason for node, reason in found.items() if reason}


def following(instructions: Iterable[Instruction], value: Value, on_host: Collection[Value]) -> Iterator[Node]:
    """The nodes for which the host needs the numbers of a value there, or what follows from them."""
    changing = {value}
    for one in instructions:
        kernel = kernel_of(one.node)
        if kernel is None:
            reads: Iterable[Value] = captured_or_read(one.node)
        elif all(result in on_host for result in one.results):
            reads = (operand for operand in one.inputs if operand is not None)
        else:
            reads = read_on_host(one.node, kernel)
        if not changing.isdisjoint(reads):
            changing.update(result for result in one.results if result in on_host)
            yield one.node


def _launches(instructions: Sequence[Instruction], on_host: Collection[Value]) -> int:
    """How many nodes compute on the device."""
    return sum(any(result not in on_host for result in one.results) for one in instructions)


def _stretch(instructions: tuple[Instruction, ...], is_captured: bool, over: Mapping[Value, Value]) -> Stretch:
    made: dict[Value, None] = {}
    reads: dict[Value, None] = {}
    for one in instructions:
        from_before = (value for value in captured_or_read(one.node) if not value.is_constant and value not in made)
        reads |= dict.fromkeys(from_before)
        reads |= dict.fromkeys(over[value] for value in one.results if value in over)
        made |= dict.fromkeys(one.results)
    freed = {value for one in instructions for value in one.frees}
    return Stretch(
        instructions,
        is_captured,
        tuple(reads),
        tuple(value for value in made if value not in freed),
        tuple(value for value in reads if value in freed),
    )


def _reason(one: Instruction, on_host: Collection[Value]) -> str:
    """Why no CUDA graph can hold a node, as far as that is known beforehand; else empty."""
    node = one.node
    if isinstance(one.operation, Communicating):
        return ""
    if any(tensor_type(value.type) is None for value in (*node.inputs, *node.results)):
        return "sequences lie on the host"
    if node.domain == "" and node.op_type in _PLANNED:
        return "cuFFT's plans, and the memory that they work in, come and go"
    if isinstance(one.operation, PlacedKernel):
        kernel = kernel_of(node)
        assert kernel is not None
        return one.operation.lacking or _late(read_on_host(node, kernel), on_host)
    if node.domain == "" and node.op_type in CONTROL_FLOW:
        return _late((value for value in node.operands[: _DECIDING.get(node.op_type, 0)] if value), on_host)
    return "" if node.callee is not None else "the host computes it"


_PLANNED = frozenset({"DFT", "STFT"})
_DECIDING: Mapping[str, int] = {"If": 1, "Loop": 2}
"""How many of its first operands tell a node what to run."""


def _late(values: Iterable[Value], on_host: Collection[Value]) -> str:
    """That a node reads values on the host that the device computes; empty if it does not."""
    for value in values:
        if not value.is_constant and value not in on_host:
            return f"it reads %{value.name} on the host, which the device computes"
    return ""
