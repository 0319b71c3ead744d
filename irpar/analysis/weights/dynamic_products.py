"""Products that quantise their data as they run become two nodes, of which each can be sharded.

y = DynamicQuantizeMatMul(x, w, ws, wz, b)
becomes  q, s, z = DynamicQuantizeLinear(x)    y = MatMulIntegerToFloat(q, w, s, ws, z, wz, b)
"""

from irpar.ir import DType, Graph, Module, Node, TensorType, Value
from irpar.ops.microsoft import DOMAIN

from .writer import NodeWriter


def take_products_apart(module: Module, graph: Graph) -> int:
    """Take such products of a graph apart; returns how many."""
    found = [node for node in graph if node.identity == (DOMAIN, "DynamicQuantizeMatMul") and _is_free(node)]
    for node in found:
        _take_apart(module, node)
    return len(found)


def _is_free(node: Node) -> bool:
    x = node.operands[0]
    is_static = all(value.is_static for value in (*node.inputs, *node.results))
    return is_static and node.strategy is None and x is not None and x.dtype is DType.F32


def _take_apart(module: Module, node: Node) -> None:
    w = NodeWriter(module, node)
    x, weight, scale, point, bias, *_ = (*node.operands, None, None, None)
    assert x is not None
    codes, number = TensorType(DType.U8, x.shape), TensorType(DType.F32, ())
    types = [codes, number, TensorType(DType.U8, ())]
    results = [Value(f"{x.name}_{name}", type_) for name, type_ in zip(("codes", "scale", "point"), types, strict=True)]
    q, s, z = w.builder.node("DynamicQuantizeLinear", [x], results=results).results
    operands = [q, weight, s, scale, z, point, bias]
    while operands[-1] is None:
        operands.pop()
    y = w.builder.op("MatMulIntegerToFloat", operands, type=node.result.type, domain=DOMAIN, name=node.result.name)
    w.take_place([y])
