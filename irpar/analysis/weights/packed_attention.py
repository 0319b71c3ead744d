"""Attention whose q, k and v stand side by side in one operand, or in one weight, gets three operands.

p = MatMul(x, w : [64, 256])    a = GroupQueryAttention(p, -, -, ..) of 8 heads, and 4 of keys and values
becomes  q, k, v = Split(p)     a = GroupQueryAttention(q, k, v, ..)    w is then taken apart, as any behind a Split

a = Attention(x, w, b)          becomes  q, k, v = Split(Add(MatMul(x, w), b))    a = MultiHeadAttention(q, k, v)
"""

from collections.abc import Sequence

from irpar.ir import Graph, Module, Node, TensorType, Value
from irpar.ops.facts import CannotTellError, int_attribute, ints_attribute

from .fused_weights import is_product
from .writer import NodeWriter

_DOMAIN = "com.microsoft"
_KEPT = frozenset({"num_heads", "mask_filter_value", "scale", "unidirectional"})
"""Attributes of Attention that MultiHeadAttention has too."""
_MASK, _PAST, _BIAS = 3, 4, 5
"""Operands of Attention."""


def take_packed_apart(module: Module, graph: Graph) -> int:
    """Give attention q, k and v one by one, where a product with a weight makes them together; returns how often.

    What is annotated, or read by another node too, stays as it is.
    """
    return sum(_is_taken_apart(module, node) for node in list(graph) if node.domain == _DOMAIN)


def _is_taken_apart(module: Module, node: Node) -> bool:
    apart = {"GroupQueryAttention": _grouped, "Attention": _projected}.get(node.op_type)
    if apart is None or node.strategy is not None:
        return False
    try:
        return apart(module, node)
    except CannotTellError:
        return False


# -- GroupQueryAttention --------------------------------------------------------------------------------------------


def _grouped(module: Module, node: Node) -> bool:
    packed = node.operands[0]
    if any(node.operands[1:3]) or packed is None or not packed.is_static or len(packed.uses) > 1:
        return False
    heads, key_heads = int_attribute(node, "num_heads"), int_attribute(node, "kv_num_heads")
    size, rest = divmod(packed.shape[-1], max(heads + 2 * key_heads, 1))
    is_free = packed.sharding is None and packed.name not in module.annotated
    if not is_free or rest or not _is_made_by_product(packed):
        return False
    parts = NodeWriter(module, node).split(packed, [heads * size, key_heads * size, key_heads * size])
    node.set_operands([*parts, *node.operands[3:]])
    return True


def _is_made_by_product(value: Value) -> bool:
    """Whether a value is what a product gives, with a bias or in another type."""
    node = value.node
    if node is None:
        return False
    is_step = not node.domain and node.op_type in ("Add", "Cast")
    return is_product(node) or (is_step and any(map(_is_made_by_product, node.inputs)))


# -- Attention: with its projection ---------------------------------------------------------------------------------


def _projected(module: Module, node: Node) -> bool:
    operands = dict(enumerate(node.operands))
    x, weight, mask = operands.get(0), operands.get(1), operands.get(_MASK)
    if x is None or weight is None or not weight.is_constant or any(map(operands.get, range(_BIAS + 1, len(operands)))):
        return False
    if not all(value.is_static for value in (*node.inputs, *node.results)) or len(x.shape) != 3:
        return False
    if any(int_attribute(node, name, 0) for name in ("do_rotary", "past_present_share_buffer")):
        return False
    if mask is not None and (len(mask.shape) > 3 or mask.shape[0] != x.shape[0]):
        return False  # Starts and ends of rows, and Megatron's mask of all places.
    sizes = ints_attribute(node, "qkv_hidden_sizes") or (weight.shape[1] // 3,) * 3
    if sizes[0] != sizes[1] or sum(sizes) != weight.shape[1]:
        return False
    _write_projected(NodeWriter(module, node), node, sizes)
    return True


def _write_projected(w: NodeWriter, node: Node, sizes: Sequence[int]) -> None:
    every = [*node.operands, *[None] * (_BIAS + 1 - len(node.operands))]
    x, weight, bias, mask, past, added = every[: _BIAS + 1]
    assert x is not None
    assert weight is not None
    wide = TensorType(x.dtype, (*x.shape[:-1], sum(sizes)))
    product = w.op("MatMul", [x, weight], wide, f"{node.results[0].name}_qkv")
    product = product if bias is None else w.op("Add", [product, bias], wide, product.name)
    caches: list[Value | None] = [None, None]
    if past is not None:
        caches = [w.squeeze(part) for part in w.split(past, [1, 1], 0)]
    operands = [*w.split(product, sizes), None, mask, added, *caches]
    attributes = {name: value for name, value in node.attributes.items() if name in _KEPT}
    types = [node.results[0].tensor_type]
    if len(node.results) > 1:
        present = node.results[1].tensor_type
        types += [present.with_shape(node.results[1].shape[1:])] * 2
    results = [Value(f"{node.results[0].name}_{number}", type_) for number, type_ in enumerate(types)]
    w.builder.node("MultiHeadAttention", operands, attributes, domain=_DOMAIN, results=results)
    given = [results[0]]
    if len(node.results) > 1:
        both = [w.unsqueeze(value) for value in results[1:]]
        given.append(w.op("Concat", both, node.results[1].tensor_type, "present", {"axis": 0}))
    w.take_place(given)
