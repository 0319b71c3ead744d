"""Products by heads are products of matrices, device by device: of a block of heads the columns lie side by side."""

from math import prod

from irpar.analysis.weights.by_heads import ByHeads, by_heads
from irpar.ir import Builder, Graph, Node, TensorType, Value


def write_matrices(graph: Graph) -> int:
    """Write the products by heads of a local graph, and of bodies in it, as products of matrices; returns how many."""
    found = [(node, made) for body in graph.graphs() for node in body if (made := by_heads(node)) is not None]
    static = [pair for pair in found if all(value.is_static for value in (*pair[0].inputs, *pair[0].results))]
    for node, product in static:
        _write(node, product)
    return len(static)


def _write(node: Node, product: ByHeads) -> None:
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
    made.node.doc = node.doc  # type: ignore[union-attr]
    if product.are_columns:
        made = _under(made, result.shape, builder)
    made.sharding, made.global_shape, made.memory = result.sharding, result.global_shape, result.memory
    made.doc = result.doc
    name = result.name
    node.replace([made])
    made.rename(name)


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
