"""Graphs and kernels as text, and the numbers of a graph."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from irpar.ir import Module, Node, plain_attribute
from irpar.kernels import lookup


def graph(*lines: str, takes: str = "%x: f32[64, 8], %b: f32[8]", gives: str = "%y") -> str:
    return "\n".join((f"graph @g({takes}) -> ({gives}) opset 21 {{", *(f"  {line}" for line in lines), "}", ""))


def fused(results: str, operands: str, *steps: str, types: str = "f32[64, 8]") -> str:
    listed = ", ".join(f'"{step}"' for step in steps)
    return f"{results} = irpar.Fused({operands}) {{expression=[{listed}]}} : {types}"


def computed(module: Module, inputs: list[np.ndarray], nodes: Iterable[Node] | None = None) -> list[np.ndarray]:
    """Node by node, with irpar's kernels."""
    values: dict[Any, Any] = dict(zip(module.graph.inputs, inputs, strict=True))
    for value in module.graph.constants:
        assert value.data is not None
        values[value] = value.data.numpy()
    for node in module.graph if nodes is None else nodes:
        kernel = lookup(node.domain, node.op_type, node.version)
        assert kernel is not None, node
        attributes = {name: plain_attribute(value) for name, value in node.attributes.items()}
        operands = [None if operand is None else values[operand] for operand in node.operands]
        values.update(zip(node.results, kernel(np, operands, attributes, len(node.results)), strict=True))
    return [values[value] for value in module.graph.outputs]
