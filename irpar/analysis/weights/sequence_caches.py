"""Attention of ONNX Runtime's own forms over a cache that is sharded along its sequence becomes ONNX's operators.

a, pk, pv = GroupQueryAttention(q, k, v, past_k : [1, 8, 4096@sp, 64], past_v, ..) needs the cache whole. As Where,
products and a Softmax each device puts new keys into its block, scores its own, and reduces the greatest and the sums
"""

from irpar.ir import Graph, Module, Node, Value
from irpar.ops.facts import operand
from irpar.ops.gradients.decomposed import has_parts, take_apart
from irpar.ops.gradients.writer import OLDEST_OPSET
from irpar.ops.microsoft import DOMAIN

_PASTS = {"GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7)}
"""The operands that are caches; those that go on are the results behind the first."""
_SEQUENCE = 2
"""The dim of places in caches."""


def open_sequence_caches(module: Module, graph: Graph) -> int:
    """Take such nodes apart, in a module of opset 18 or later; returns how many."""
    return sum(bool(take_apart(node, module.opsets)) for node in sequence_caches(graph))


def sequence_caches(graph: Graph) -> list[Node]:
    """The nodes of such attention. What is annotated to run in some way is none."""
    return [node for node in graph if node.domain == DOMAIN and node.strategy is None and _has_sharded_cache(node)]


def can_be_opened(module: Module, node: Node) -> bool:
    """Whether such a node can be taken apart, in opset 18 or later."""
    newest = max(module.opsets.get("", 0), OLDEST_OPSET)
    return has_parts(node, {**module.opsets, "": newest})


def _has_sharded_cache(node: Node) -> bool:
    if node.op_type not in _PASTS:
        return False
    pasts = (operand(node, place) for place in _PASTS[node.op_type])
    return any(value is not None and _is_sharded(value) for value in (*pasts, *node.results[1:3]))


def _is_sharded(value: Value) -> bool:
    lies = value.sharding
    return lies is not None and lies.rank > _SEQUENCE and lies.dim_parts(_SEQUENCE) > 1
