"""What a node does beyond its results: chance, communication, training state."""

from collections.abc import Iterator
from functools import cache

import onnx

from irpar.ir import Function, Node

from .collectives import FREE, KINDS

COLLECTIVES = frozenset(KINDS)
"""Collectives that all members of a group take part in."""

_ANYWHERE_PURE = FREE | {"Return"}

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
    if node.callee is None and not node.attributes:
        return _is_deterministic_alone(node)
    return all(map(_is_deterministic_alone, _reached(node)))


def _reached(node: Node) -> Iterator[Node]:
    """A node and all in the graphs that it holds and the functions that it calls; each function once."""
    waiting = [node]
    met: set[Function] = set()
    while waiting:
        node = waiting.pop()
        yield node
        if node.callee is not None and node.callee not in met:
            met.add(node.callee)
            waiting.extend(node.callee.graph)
        if node.attributes:
            for nested in node.nested_graphs():
                waiting.extend(nested)


def _is_deterministic_alone(node: Node) -> bool:
    """The same, without what the node holds or calls."""
    if node.callee is not None or node.domain == "irpar":
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
    return any(
        schema_of(inner.domain, inner.op_type, inner.version) is not None and not _is_deterministic_alone(inner)
        for inner in _reached(node)
    )


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
    if node.callee is None and not node.attributes:
        return is_communication(node)
    return any(map(is_communication, _reached(node)))
