"""Attention whose q, k and v stand side by side in one operand gets three.

p = MatMul(x, w : [64, 256])    a = GroupQueryAttention(p, -, -, ..) of 8 heads, and 4 of keys and values
becomes  q, k, v = Split(p)     a = GroupQueryAttention(q, k, v, ..)    w is then taken apart, as any behind a Split
"""

from irpar.ir import Builder, Graph, Module, Node, TensorType, Value
from irpar.ops.facts import int_attribute

from .fused_weights import is_product


def take_packed_apart(module: Module, graph: Graph) -> int:
    """Split what products with weights give to grouped attention; returns how often.

    What is annotated, or read by another node too, stays as it is.
    """
    found = [node for node in graph if _packed(module, node) is not None]
    for node in found:
        _take_apart(module, node)
    return len(found)


def _packed(module: Module, node: Node) -> Value | None:
    """The operand that holds q, k and v; None for other nodes."""
    if node.identity != ("com.microsoft", "GroupQueryAttention") or any(node.operands[1:3]):
        return None
    value = node.operands[0]
    if value is None or not value.is_static or len(value.uses) > 1:
        return None
    heads = int_attribute(node, "num_heads") + 2 * int_attribute(node, "kv_num_heads")
    is_free = value.sharding is None and value.name not in module.annotated and node.strategy is None
    return value if is_free and heads > 0 and value.shape[-1] % heads == 0 and _is_made_by_product(value) else None


def _is_made_by_product(value: Value) -> bool:
    """Whether a value is what a product gives, with a bias or in another type."""
    node = value.node
    if node is None:
        return False
    steps = not node.domain and node.op_type in ("Add", "Cast")
    return is_product(node) or (steps and any(_is_made_by_product(operand) for operand in node.inputs))


def _take_apart(module: Module, node: Node) -> None:
    packed = node.operands[0]
    assert packed is not None
    assert node.graph is not None
    heads, key_heads = int_attribute(node, "num_heads"), int_attribute(node, "kv_num_heads")
    size = packed.shape[-1] // (heads + 2 * key_heads)
    counts = [heads * size, key_heads * size, key_heads * size]
    builder = Builder(node.graph, module.opsets, before=node, like=node)
    results = [
        Value(f"{packed.name}_{name}", TensorType(packed.dtype, (*packed.shape[:-1], count)))
        for name, count in zip("qkv", counts, strict=True)
    ]
    sizes = builder.constant(counts, "sizes")
    parts = builder.node("Split", [packed, sizes], {"axis": len(packed.shape) - 1}, results=results)
    node.set_operands([*parts.results, *node.operands[3:]])
