"""split-bias: the bias of a Gemm is added behind it."""

from dataclasses import dataclass

import numpy as np

from irpar.ir import Builder, DType, Graph, Module, Node, Value, rewrite
from irpar.ops import has_open_bodies
from irpar.ops.facts import operand
from irpar.pass_manager import Pass, PassResult


@dataclass(frozen=True)
class SplitBias(Pass):
    """Turn `Gemm(a, b, c)` into `Add(Gemm(a, b), beta * c)`, so that the dim that is contracted may be sharded.

    Before: global view, types are inferred. After: no Gemm of the graph, or of the bodies of If, Loop and Scan in it,
    has a third operand, but those of integers whose beta is no integer. Partial sums are reduced before C is added,
    once.
    """

    name = "split-bias"

    def run(self, module: Module) -> PassResult:
        """Rewrite the graph and its open bodies."""
        if module.is_local:
            return PassResult(False)
        count = split_biases(module)
        return PassResult(count > 0, statistics={"biases": count})


def split_biases(module: Module) -> int:
    """As the pass; returns how many there were."""
    return sum(rewrite(graph, module.opsets, {"Gemm": bias_apart}) for graph in _open_graphs(module.graph))


def _open_graphs(graph: Graph) -> list[Graph]:
    found = [graph]
    for each in found:
        found.extend(body for node in each if has_open_bodies(node) for body in node.nested_graphs())
    return found


def bias_apart(node: Node, builder: Builder) -> Value | None:
    """A pattern that turns `Gemm(a, b, c)` into `Add(Gemm(a, b), beta * c)`; None for any other node.

    The contraction of a Gemm without C may be sharded: its partial sums are reduced before C is added, once.
    """
    bias = operand(node, 2)
    beta = node.attributes.get("beta", 1.0)
    if node.identity != ("", "Gemm") or bias is None or not isinstance(beta, float):
        return None
    result = node.result
    kept = {name: value for name, value in node.attributes.items() if name != "beta"}
    product = builder.op("Gemm", node.operands[:2], kept, type=result.type, name=f"{result.name}_product")
    assert product.node is not None
    if node.strategy is not None:
        product.node.strategy = node.strategy.part(0, 1, gives=beta == 0.0)
    if beta == 0.0:
        return product
    if beta != 1.0:
        dtype: DType = bias.dtype
        if not dtype.is_float and not beta.is_integer():
            return None
        factor = builder.constant(np.asarray(beta).astype(dtype.numpy), f"{result.name}_beta")
        bias = builder.op("Mul", [bias, factor], type=bias.type, name=f"{result.name}_bias")
    total = builder.op("Add", [product, bias], type=result.type)
    assert total.node is not None
    if node.strategy is not None:
        total.node.strategy = node.strategy.part(None, 2, gives=True)
    return total
