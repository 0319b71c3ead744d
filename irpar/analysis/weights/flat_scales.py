"""Scales of blocks of weights that lie in one dim get two: columns, and the blocks of each.

q : u8[256, 4, 8]    s : f32[1024] becomes f32[256, 4]    [_, @tp] cuts the blocks of q [_, @tp, _]; of 1024 none does
"""

from irpar.ir import Graph, Module, Tensor, Value
from irpar.ops.facts import int_attribute

from .writer import constant_like, stand_for

_PLACES = (2, 3)
"""Of the operands of MatMulNBits: scales and zero points."""


def unflatten_scales(module: Module, graph: Graph) -> int:
    """Let products of packed weights read their scales and zero points in two dims; returns how many.

    ONNX Runtime's quantizers write one dim, of which a block along the inner dim is no block. What is annotated, or no
    constant, stays as it is.
    """
    made: dict[tuple[Value, int], Value] = {}
    for node in graph:
        if node.identity != ("com.microsoft", "MatMulNBits"):
            continue
        columns = int_attribute(node, "N")
        for place in _PLACES:
            value = node.operands[place] if place < len(node.operands) else None
            if value is not None and _is_flat(module, value, columns):
                if (value, columns) not in made:
                    made[value, columns] = constant_like(value, _in_two_dims(value, columns))
                node.set_operand(place, made[value, columns])
    for (value, _), other in made.items():
        stand_for(value, other)
    return len(made)


def _is_flat(module: Module, value: Value, columns: int) -> bool:
    is_free = value.is_constant and value.sharding is None and value.name not in module.annotated
    return is_free and len(value.shape) == 1 and columns > 0 and value.shape[0] % columns == 0


def _in_two_dims(value: Value, columns: int) -> Tensor:
    assert value.data is not None
    (size,) = value.shape
    return value.data.reshaped((columns, size // columns))
