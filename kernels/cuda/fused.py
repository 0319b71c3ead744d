"""irpar.Fused on a device: the kernel that is generated for its expression and for how its operands lie."""

from collections.abc import Sequence
from typing import Any

from ..expression import ExpressionError, Operand
from ..expression_reading import parse
from ..registry import Array
from .generator import generate
from .gpu import Gpu
from .layouts import Layout
from .programs import Program
from .registry import cuda_kernel


@cuda_kernel("Fused", since=1, domain="irpar")
def fused(
    gpu: Gpu, *operands: Array, expression: tuple[str, ...], outs: Sequence[Array | None] = ()
) -> tuple[Array, ...] | None:
    """The results of an expression, by one launch."""
    lines = tuple(expression)
    try:
        made = parse(lines)
        types = made.types([Operand(tuple(operand.shape), operand.dtype) for operand in operands])
    except ExpressionError:
        return None
    given = (*outs, *(None for _ in made.results[len(outs) :]))
    results = [
        gpu.empty(types[name].shape, types[name].dtype) if out is None else out
        for name, out in zip(made.results, given, strict=True)
    ]
    is_by_rows = any(step.operator.kind in ("reduction", "rotation") for step in made.steps)
    written = [
        gpu.empty(result.shape, result.dtype) if _is_in_the_way(result, operands, is_by_rows) else result
        for result in results
    ]
    layouts = tuple(map(_layout, operands))
    launch = generate(lines, layouts, tuple(map(_layout, written)), gpu.multiprocessors)
    if launch is None:
        return None
    arguments = (*operands, *written, *launch.numbers)
    gpu.launch(Program(launch.source), "fused", launch.grid, launch.block, arguments)
    for result, source in zip(results, written, strict=True):
        if source is not result:
            result[...] = source
    return tuple(results)


def _layout(array: Array) -> Layout:
    item = array.dtype.itemsize
    address = int(array.data.ptr)
    alignment = min(16, address & -address) if address else 16
    return Layout(tuple(array.shape), array.dtype, tuple(stride // item for stride in array.strides), alignment)


def _is_in_the_way(result: Array, operands: Sequence[Any], is_by_rows: bool) -> bool:
    """Whether a result would be written over elements of an operand that other threads still read."""
    for operand in operands:
        is_same = operand.data.ptr == result.data.ptr and operand.shape == result.shape
        is_alike = is_same and operand.strides == result.strides and operand.dtype == result.dtype
        if not (is_alike and not is_by_rows) and _overlap(operand, result):
            return True
    return False


def _overlap(a: Array, b: Array) -> bool:
    (first, end), (other, other_end) = _range(a), _range(b)
    return first < other_end and other < end


def _range(array: Array) -> tuple[int, int]:
    """The bytes among which the elements of an array are."""
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True) if size]
    start = int(array.data.ptr)
    low, high = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    return start + low, start + high + (array.dtype.itemsize if array.size else 0)
