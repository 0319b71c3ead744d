"""Products by heads are products of matrices, device by device: of a block of heads the columns lie side by side.

What tells of the Einsum that such a product was planned as tells of the product that it is.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from irpar.analysis.weights.by_heads import ByHeads, by_heads
from irpar.ir import Builder, Module, Node, TensorType, Value

_TITLE = re.compile(r"Einsum (?:of %)?[^\s(),;]*[^\s(),;:.]")


def write_matrices(module: Module) -> int:
    """Write the products by heads of a local module as products of matrices, and tell of them as such.

    Returns:
        How many there were.
    """
    titles: dict[str, str] = {}
    count = 0
    for body in (body for graph in module.graphs for body in graph.graphs()):
        for node in list(body):
            product = by_heads(node)
            if product is not None and all(value.is_static for value in (*node.inputs, *node.results)):
                titles[node.title] = node.title.replace("Einsum", _write(node, product), 1)
                count += 1
    if titles:
        _tell(module, titles)
    return count


def _tell(module: Module, titles: Mapping[str, str]) -> None:
    """Let reasons name the products that there are now."""

    def told(text: str) -> str:
        return _TITLE.sub(lambda found: titles.get(found[0], found[0]), text) if "Einsum" in text else text

    for node in (node for graph in module.graphs for node in graph.walk() if node.doc):
        node.doc = told(node.doc)
    for known in module.decisions.values():
        known[:] = [each if "Einsum" not in each.why else replace(each, why=told(each.why)) for each in known]
    for name, conflict in module.conflicts.items():
        words = {field: told(text) for field, text in vars(conflict).items() if isinstance(text, str)}
        module.conflicts[name] = replace(conflict, **words)  # type: ignore[arg-type]


def _write(node: Node, product: ByHeads) -> str:
    """Write one, and give what its operator is now."""
    assert node.graph is not None
    builder = Builder(node.graph, {"": node.version}, before=node, like=node)
    data, weight = node.inputs
    result = node.result
    heads = result.shape if product.are_columns else data.shape
    leading, size = heads[:-2], prod(heads[-2:])
    other = data.shape[-1] if product.are_columns else result.shape[-1]
    is_column_first = product.is_turned == product.are_columns
    matrix = _under(weight, (size, other) if is_column_first else (other, size), builder)
    if not product.are_columns:
        data = _under(data, (*leading, size), builder)
    shape = (*leading, size) if product.are_columns else result.shape
    made = _product([data, matrix], TensorType(result.dtype, shape), builder, result.name, is_turned=product.is_turned)
    assert made.node is not None
    made.node.doc, operator = node.doc, made.node.op_type
    if product.are_columns:
        made = _under(made, result.shape, builder)
    made.sharding, made.global_shape, made.memory = result.sharding, result.global_shape, result.memory
    made.doc = result.doc
    name = result.name
    node.replace([made])
    made.rename(name)
    return operator


def _product(operands: list[Value], type_: TensorType, builder: Builder, name: str, *, is_turned: bool) -> Value:
    data, matrix = operands
    if not is_turned:
        return builder.op("MatMul", [data, matrix], type=type_, name=name)
    if len(data.shape) == 2:
        return builder.op("Gemm", [data, matrix], {"transB": 1}, type=type_, name=name)
    turned = TensorType(matrix.dtype, matrix.shape[::-1])
    matrix = builder.op("Transpose", [matrix], {"perm": [1, 0]}, type=turned, name=matrix.name)
    return builder.op("MatMul", [data, matrix], type=type_, name=name)


def _under(value: Value, shape: tuple[int, ...], builder: Builder) -> Value:
    """A value under another shape."""
    target = builder.constant(list(shape), "shape")
    type_ = TensorType(value.dtype, shape)
    return builder.op("Reshape", [value, target], type=type_, name=value.name)
