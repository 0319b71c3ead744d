"""Attention whose q, k and v stand side by side in one operand, or in one weight, gets three operands.

p = MatMul(x, w : [64, 256])    a = GroupQueryAttention(p, -, -, ..) of 8 heads, and 4 of keys and values
becomes  q, k, v = Split(p)     a = GroupQueryAttention(q, k, v, ..)    w is then taken apart, as any behind a Split

a = Attention(x, w, b)          becomes  q, k, v = Split(Add(MatMul(x, w), b))    a = MultiHeadAttention(q, k, v)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from irpar.ir import Graph, Module, Node, TensorType, Value
from irpar.ops.facts import CannotTellError, int_attribute, ints_attribute
from irpar.ops.microsoft import DOMAIN

from .fused_weights import is_product
from .writer import NodeWriter

_KEPT = frozenset({"num_heads", "mask_filter_value", "scale", "unidirectional"})
"""Attributes of Attention that MultiHeadAttention has too."""


def take_packed_apart(module: Module, graph: Graph) -> int:
    """Give attention q, k and v one by one, where a product with a weight makes them together; returns how often.

    What is annotated, or read by another node too, stays as it is.
    """
    return sum(_take_apart(module, node) for node in list(graph) if node.domain == DOMAIN)


def _take_apart(module: Module, node: Node) -> bool:
    apart = _WAYS.get(node.op_type)
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
    waiting, seen = [value.node], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if is_product(node):
            return True
        seen.add(node)
        if not node.domain and node.op_type in ("Add", "Cast"):
            waiting += [operand.node for operand in node.inputs]
    return False


# -- Attention, QAttention: with their projection -------------------------------------------------------------------


@dataclass(frozen=True)
class _Projection:
    """The operands of attention with its projection, by what they are."""

    x: Value
    weight: Value
    bias: Value | None
    mask: Value | None
    past: Value | None
    added: Value | None = None
    scales: tuple[Value | None, Value | None] = (None, None)
    points: tuple[Value | None, Value | None] = (None, None)

    def product(self, w: NodeWriter, type_: TensorType, name: str) -> Value:
        """q, k and v side by side."""
        if self.scales[0] is not None:
            (of_x, of_weight), (zero, zeros) = self.scales, self.points
            operands = [self.x, self.weight, of_x, of_weight, zero, zeros, self.bias]
            return w.op("MatMulIntegerToFloat", operands, type_, name, domain=DOMAIN)
        made = w.op("MatMul", [self.x, self.weight], type_, name)
        return made if self.bias is None else w.op("Add", [made, self.bias], type_, name)


def _attention(module: Module, node: Node) -> bool:
    operands = [*node.operands, *[None] * 6]
    x, weight, bias, mask, past, added = operands[:6]
    if x is None or weight is None or any(operands[6:]):
        return False
    return _project(module, node, _Projection(x, weight, bias, mask, past, added))


def _quantised(module: Module, node: Node) -> bool:
    operands = [*node.operands, *[None] * 9]
    x, weight, bias, of_x, of_weight, mask, zero, zeros, past = operands[:9]
    if x is None or weight is None:
        return False
    found = _Projection(x, weight, bias, mask, past, scales=(of_x, of_weight), points=(zero, zeros))
    return _project(module, node, found)


def _project(module: Module, node: Node, found: _Projection) -> bool:
    x, weight = found.x, found.weight
    if not weight.is_constant or not all(value.is_static for value in (*node.inputs, *node.results)):
        return False
    if len(x.shape) != 3 or any(int_attribute(node, name, 0) for name in ("do_rotary", "past_present_share_buffer")):
        return False
    if found.mask is not None:
        masks = _masks(x.shape[0], x.shape[1], 0 if found.past is None else found.past.shape[3])
        if found.mask.shape not in masks:
            return False  # Starts and ends of rows, and Megatron's mask of all places.
        if not masks[found.mask.shape]:
            found = replace(found, mask=None)
    sizes = ints_attribute(node, "qkv_hidden_sizes") or (weight.shape[1] // 3,) * 3
    if sizes[0] != sizes[1] or sum(sizes) != weight.shape[1]:
        return False
    _write_projected(NodeWriter(module, node), node, found, sizes)
    return True


def _masks(batch: int, steps: int, past: int) -> dict[tuple[int, ...], bool]:
    """The shapes of masks that MultiHeadAttention takes as Attention does, and whether they mask anything.

    Of one step for more, ONNX Runtime's Attention reads none.
    """
    keys = past + steps
    return {(batch, 1): keys == 1, (batch,): True, (batch, keys): True, (batch, steps, keys): True}


def _write_projected(w: NodeWriter, node: Node, found: _Projection, sizes: Sequence[int]) -> None:
    name = node.results[0].name
    wide = TensorType(node.results[0].dtype, (*found.x.shape[:-1], sum(sizes)))
    caches: list[Value | None] = [None, None]
    if found.past is not None:
        caches = [w.squeeze(part) for part in w.split(found.past, [1, 1], 0)]
    parts = w.split(found.product(w, wide, f"{name}_qkv"), sizes)
    operands = [*parts, None, found.mask, found.added, *caches]
    attributes = {name: value for name, value in node.attributes.items() if name in _KEPT}
    types = [node.results[0].tensor_type]
    if len(node.results) > 1:
        present = node.results[1].tensor_type
        types += [present.with_shape(present.static_shape[1:])] * 2
    results = [Value(f"{name}_{number}", type_) for number, type_ in enumerate(types)]
    w.builder.node("MultiHeadAttention", operands, attributes, domain=DOMAIN, results=results)
    given = [results[0]]
    if len(node.results) > 1:
        both = [w.unsqueeze(value) for value in results[1:]]
        given.append(w.op("Concat", both, node.results[1].tensor_type, "present", {"axis": 0}))
    w.take_place(given)


_WAYS: dict[str, Callable[[Module, Node], bool]] = {
    "GroupQueryAttention": _grouped,
    "Attention": _attention,
    "QAttention": _quantised,
}
