"""Indices of a whole dim, as a device's block of it sees them: which it has, and where.

x : [10@tp, 4], indices [0, 7, -1] over tp=4     the third device holds rows 6, 7, 8: of these indices 7 is its row 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.ir import Builder, DType, Node, TensorType, Value

from .coords import start_of_block
from .facts import axis_attribute, needed, origin_of
from .neutral import neutral

Sizes = int | Sequence[int]
"""Of one dim; or of several, whose indices stand side by side in the last dim of a tensor."""


def from_start(index: Value, size: Sizes, builder: Builder) -> Value:
    """Indices as int64, negative ones counted from the start."""
    of = TensorType(DType.I64, index.shape)
    if index.dtype is not DType.I64:
        index = builder.op("Cast", [index], {"to": DType.I64.value}, type=of)
    negative = builder.op("Less", [index, number(builder, 0)], type=TensorType(DType.BOOL, index.shape))
    from_end = builder.op("Add", [index, number(builder, size)], type=of)
    return builder.op("Where", [negative, from_end, index], type=of)


def is_within(index: Value, size: Sizes, builder: Builder) -> Value:
    """Where 0 <= index < size."""
    flag = TensorType(DType.BOOL, index.shape)
    above = builder.op("GreaterOrEqual", [index, number(builder, 0)], type=flag)
    below = builder.op("Less", [index, number(builder, size)], type=flag)
    return builder.op("And", [above, below], type=flag)


def relative_or(index: Value, start: Value, rows: Sizes, outside: int, builder: Builder) -> tuple[Value, Value]:
    """Indices relative to a block of rows, and a number for those of other blocks; and whether they are inside."""
    of = TensorType(DType.I64, index.shape)
    relative = builder.op("Sub", [index, start], type=of)
    inside = is_within(relative, rows, builder)
    return builder.op("Where", [inside, relative, number(builder, outside)], type=of), inside


def nothing_or_nan(known: Value, dtype: DType, builder: Builder) -> Value:
    """What stands for elements of other blocks: -0.0, which changes no sum; NaN where no block has the index.

    ONNX Runtime refuses such an index.

    Args:
        known: bool, whether some block has it.
        dtype: one of f16, f32 and f64.
        builder: inserts.
    """
    numbers = {"nothing": neutral("sum", dtype), "nan": np.full((), np.nan, dtype.numpy)}
    values = [builder.constant(each, name) for name, each in numbers.items()]
    return builder.op("Where", [known, *values], type=TensorType(dtype, known.shape))


def number(builder: Builder, value: Sizes) -> Value:
    """An int64 scalar, or a list."""
    array = np.asarray(value, np.int64)
    return builder.constant(array, f"number_{value}" if isinstance(value, int) else "numbers")


@dataclass(frozen=True)
class Tuples:
    """Indices of several dims, side by side in the last dim of a tensor, beside a device's block of these dims.

    Attributes:
        index: in the whole, counted from the start.
        relative: in the block.
        sizes: of the whole, by dim.
        rows: of the block.
    """

    index: Value
    relative: Value
    sizes: tuple[int, ...]
    rows: tuple[int, ...]

    def inside(self, builder: Builder, *, keepdims: bool) -> Value:
        """Whether the block has what each tuple names."""
        return _all_within(self.relative, self.rows, builder, keepdims=keepdims)

    def known(self, builder: Builder) -> Value:
        """Whether some block has it."""
        return _all_within(self.index, self.sizes, builder, keepdims=False)


def tuples_in_block(whole_node: Node, local: Node, first: int, builder: Builder) -> Tuples | None:
    """The indices (operand 1) of the dims of the data (operand 0) from `first` on; None where none of these is cut."""
    data, index = needed(whole_node, 0), needed(local, 1)
    dims = range(first, first + index.shape[-1])
    starts = [start_of_block(data.sharding, dim, data.shape[dim], builder) for dim in dims]
    if not any(start is not None for start in starts):
        return None
    one = TensorType(DType.I64, (1,))
    columns = [
        number(builder, [0]) if start is None else builder.op("Reshape", [start, number(builder, [1])], type=one)
        for start in starts
    ]
    side_by_side = TensorType(DType.I64, (len(columns),))
    start = columns[0] if len(columns) == 1 else builder.op("Concat", columns, {"axis": 0}, type=side_by_side)
    sizes, rows = (tuple(value.shape[dim] for dim in dims) for value in (data, needed(local, 0)))
    index = from_start(index, sizes, builder)
    return Tuples(index, builder.op("Sub", [index, start], type=index.type), sizes, rows)


def _all_within(index: Value, sizes: Sequence[int], builder: Builder, *, keepdims: bool) -> Value:
    """Where 0 <= index < sizes holds in all places of the last dim."""
    inside = is_within(index, sizes, builder)
    misses = builder.op("Where", [inside, number(builder, 0), number(builder, 1)], type=index.type)
    shape = (*index.shape[:-1], *[1] * keepdims)
    operands = [misses, number(builder, [len(index.shape) - 1])]
    count = builder.op("ReduceSum", operands, {"keepdims": int(keepdims)}, type=TensorType(DType.I64, shape))
    return builder.op("Equal", [count, number(builder, 0)], type=TensorType(DType.BOOL, shape))


# -- indices that count ---------------------------------------------------------------------------------------------

_MOST_COUNTED = 1 << 18
"""Elements of indices that are looked at."""


def counted_dims(index: Value, sizes: Sequence[int], batch_dims: int = 0) -> int:
    """How many of the first indices of tuples name their own place: row i of the tuples is about row i of the data.

    Args:
        index: tuples side by side in the last dim: constants, or a Concat of columns of which some are.
        sizes: of the data.
        batch_dims: dims that data and tuples have in common, of which these say nothing.
    """
    shape, dim = index.shape, batch_dims
    most = min(batch_dims + shape[-1], len(shape) - 1, len(sizes))
    while dim < most and sizes[dim] == shape[dim] and _counts(index, dim - batch_dims, dim):
        dim += 1
    return dim - batch_dims


def without_columns(index: Value, count: int, builder: Builder) -> Value:
    """Tuples without the first of their indices, which `counted_dims` found; at least one is left."""
    shape = (*index.shape[:-1], index.shape[-1] - count)
    if _columns(index) is None:
        return builder.constant(_expanded(index)[..., count:], index.name)
    left: list[Value] = []
    for part in _columns(index) or ():
        dropped = min(count, part.shape[-1])
        count -= dropped
        if not dropped:
            left.append(part)
        elif dropped < part.shape[-1]:
            left.append(builder.constant(_expanded(part)[..., dropped:], part.name))
    if len(left) == 1:
        return left[0]
    return builder.op("Concat", left, {"axis": -1}, type=TensorType(index.dtype, shape), name=index.name)


def _counts(index: Value, column: int, dim: int) -> bool:
    """Whether an index is the place along a dim of the tuples."""
    found = _column(index, column)
    if found is None:
        return False
    places = np.arange(index.shape[dim]).reshape([-1 if at == dim else 1 for at in range(len(index.shape) - 1)])
    return bool((found == places).all())


def _column(index: Value, column: int) -> "np.ndarray[Any, Any] | None":
    """The numbers of one index of all tuples, or None where they are not known."""
    for part in _columns(index) or (index,):
        width = part.shape[-1]
        if column < width:
            found = _numbers(part)
            return None if found is None else found[..., column]
        column -= width
    return None


def _columns(index: Value) -> tuple[Value, ...] | None:
    """What is joined to tuples; None where they are not joined."""
    node = origin_of(index).node
    if node is None or node.identity != ("", "Concat"):
        return None
    return node.inputs if axis_attribute(node, len(index.shape)) == len(index.shape) - 1 else None


def _expanded(value: Value) -> "np.ndarray[Any, Any]":
    """All numbers of tuples that are known."""
    found = _numbers(value)
    assert found is not None, "only what is known counts"
    return np.ascontiguousarray(np.broadcast_to(found, value.shape))


def _numbers(value: Value) -> "np.ndarray[Any, Any] | None":
    """Those of a constant, also of one that is expanded: in its other dims these may have size 1."""
    origin = origin_of(value)
    if origin.node is not None and origin.node.identity == ("", "Expand"):
        origin = origin_of(origin.node.inputs[0])
    if origin.data is None or origin.data.size > _MOST_COUNTED or len(origin.shape) != len(value.shape):
        return None
    found = origin.data.numpy()
    return np.broadcast_to(found, (*found.shape[:-1], value.shape[-1]))
