"""What a node does beyond its results: chance, communication, training state."""

from functools import cache

import onnx

from irpar.ir import Function, Node
from irpar.ops.collectives import KINDS

COLLECTIVES = frozenset(KINDS)
"""Collectives that all members of a group take part in."""

_ANYWHERE_PURE = frozenset({"AllSlice", "Return"})

# ONNX counts these among the non-deterministic, though they are as deterministic as what they hold or read.
_DETERMINISTIC = frozenset({"If", "Loop", "Scan", "SequenceMap", "AffineGrid"})


@cache
def schema_of(domain: str, op_type: str, version: int) -> "onnx.defs.OpSchema | None":
    """ONNX's schema of an operator, or None; version 0 (not known) means the newest."""
    if domain == "irpar":
        return None
    try:
        if version:
            return onnx.defs.get_schema(op_type, version, domain)
        return onnx.defs.get_schema(op_type, domain)
    except onnx.defs.SchemaError:
        return None


def is_deterministic(node: Node) -> bool:
    """True where equal operands always give equal results; False for ops that draw random numbers, and where unknown.

    A node that holds graphs or calls a function is judged by the nodes in there.
    """
    if node.callee is not None:
        return all(map(is_deterministic, node.callee.graph))
    if node.attributes and not all(is_deterministic(inner) for nested in node.nested_graphs() for inner in nested):
        return False
    if node.domain == "irpar":
        return True
    if node.identity == ("", "Dropout"):
        return not _may_train(node)
    return _is_deterministic_op(node.domain, node.op_type, node.version)


@cache
def _is_deterministic_op(domain: str, op_type: str, version: int) -> bool:
    schema = schema_of(domain, op_type, version)
    if schema is None:
        return False
    random = schema.node_determinism == onnx.defs.OpSchema.NodeDeterminism.NonDeterministic
    return not random or (domain == "" and op_type in _DETERMINISTIC)


def draws_random_numbers(node: Node) -> bool:
    """True where ONNX says that equal operands need not give equal results; bodies and callees are looked into."""
    if node.callee is not None:
        return any(map(draws_random_numbers, node.callee.graph))
    if any(True for _ in node.nested_graphs()):
        return any(draws_random_numbers(inner) for nested in node.nested_graphs() for inner in nested)
    return schema_of(node.domain, node.op_type, node.version) is not None and not is_deterministic(node)


def _may_train(node: Node) -> bool:
    """True for a Dropout whose operand `training_mode` is there and not known to be false."""
    mode = node.operands[2] if len(node.operands) > 2 else None
    return mode is not None and (mode.data is None or bool(mode.data.numpy().any()))


def is_communication(node: Node) -> bool:
    """True for ops of irpar that other ranks take part in: collectives, Send and Recv, started forms, Wait."""
    return node.domain == "irpar" and node.op_type not in _ANYWHERE_PURE


def is_point_to_point(node: Node) -> bool:
    """True for communication that must stay even where its result is not used, since another rank waits for it."""
    return is_communication(node) and node.op_type not in COLLECTIVES


def communicates(node: Node) -> bool:
    """True where the node, a graph that it holds or a function that it calls has communication."""
    if node.domain == "irpar":
        return is_communication(node)
    if node.callee is not None:
        return _function_communicates(node.callee)
    return bool(node.attributes) and any(communicates(inner) for nested in node.nested_graphs() for inner in nested)


def _function_communicates(function: Function) -> bool:
    return any(map(communicates, function.graph))
