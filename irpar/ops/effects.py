"""What a node does beyond its results: chance and communication."""

from functools import cache

import onnx

from irpar.ir import Node

from .bodies import reached, waits_for_copy
from .op_def import definition, traits


@cache
def schema_of(domain: str, op_type: str, version: int) -> "onnx.defs.OpSchema | None":
    """ONNX's schema of an operator, or None; version 0 (not known) means the newest."""
    try:
        if version:
            return onnx.defs.get_schema(op_type, version, domain)
        return onnx.defs.get_schema(op_type, domain)
    except onnx.defs.SchemaError:
        return None


def has_fixed_dtype(node: Node, index: int) -> bool:
    """Whether an operand can be of one dtype alone: a setting of the operator, such as the scales of a Resize."""
    schema = schema_of(node.domain, node.op_type, node.version)
    if schema is None or not schema.inputs:
        return False
    return len(schema.inputs[min(index, len(schema.inputs) - 1)].types) == 1


def is_deterministic(node: Node) -> bool:
    """True where equal operands always give equal results; False for ops that draw random numbers, and where unknown.

    A node that holds graphs or calls a function is judged by the nodes in there.
    """
    if node.callee is None and not node.holds_graphs:
        return _is_deterministic_alone(node)
    return all(map(_is_deterministic_alone, reached(node)))


def _is_deterministic_alone(node: Node) -> bool:
    """The same, without what the node holds or calls; False for an operator that nobody knows."""
    return node.callee is not None or node.is_return or _is_random(node) is False


def _is_random(node: Node) -> bool | None:
    """By its definition, else as ONNX says; None where neither knows. What holds graphs is as these are."""
    found = definition(node)
    if found is not None:
        return found.random if isinstance(found.random, bool) else found.random(node)
    schema = schema_of(node.domain, node.op_type, node.version)
    if schema is None:
        return None
    draws = schema.node_determinism == onnx.defs.OpSchema.NodeDeterminism.NonDeterministic
    return draws and not any(True for _ in node.nested_graphs())


def draws_random_numbers(node: Node) -> bool:
    """True where equal operands need not give equal results; bodies and callees are looked into."""
    return any(inner.callee is None and not inner.is_return and _is_random(inner) for inner in reached(node))


def is_compute(node: Node) -> bool:
    """True for what computes: no collective, no copy, nothing that other ranks take part in, no Return."""
    return not node.is_return and traits(node).is_compute


def goes_to_group(node: Node) -> bool:
    """True for what a process group executes, or begins, or waits for; not for a node that an engine alone knows."""
    known = traits(node)
    return bool(known.name) and (known.collective or known.communicates) and not waits_for_copy(node)


def is_collective(node: Node) -> bool:
    """True for collectives, those that send nothing among them; not for their started forms."""
    return traits(node).collective


def redistributes(node: Node) -> bool:
    """True for a collective that changes how its operand is sharded, and so, in global view, none of its numbers.

    One that leaves the sharding as it is, such as a permutation of blocks for a halo, gives other numbers.
    """
    if not traits(node).collective:
        return False
    before, after = node.inputs[0].sharding, node.result.sharding
    return before is None or before != after


def is_communication(node: Node) -> bool:
    """True for ops that other ranks take part in: collectives that send, their started forms, waits, Send, Recv."""
    return traits(node).communicates and not waits_for_copy(node)


def communicates(node: Node) -> bool:
    """True where the node, a graph that it holds or a function that it calls has communication."""
    if node.callee is None and not node.holds_graphs:
        return is_communication(node)
    return any(map(is_communication, reached(node)))
