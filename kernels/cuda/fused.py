"""irpar.Fused and FusedEach on a device: kernels that are generated for the expression and for how operands lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..expression import ExpressionError, Operand
from ..expression_reading import parse
from ..registry import Array
from .copies import in_order
from .expression_each import THREADS, EachKernel, generate_each
from .expression_text import Launch
from .generator import generate
from .gpu import Gpu
from .layouts import Layout
from .programs import Program
from .registry import cuda_kernel

_LEAST_COPIED = 1 << 16
"""Elements of an operand for which another launch is worth its time."""
_PIECE_BYTES = 32
"""What is read of memory at least."""


@cuda_kernel("Fused", since=1, domain="irpar")
def fused(
    gpu: Gpu, *operands: Array, expression: tuple[str, ...], outs: Sequence[Array | None] = ()
) -> tuple[Array, ...] | None:
    """The results of an expression, by one launch."""
    made = _problem(gpu, tuple(_along_rows(gpu, x) for x in operands), tuple(expression), outs)
    launch = None if made is None else made.launch(gpu)
    if made is None or launch is None:
        return None
    beside: tuple[Array, ...] = ()
    if launch.parts:
        dtype = np.dtype(np.float64 if launch.kind == "double" else np.float32)
        beside = (gpu.empty((launch.parts,), dtype), gpu.counters())
    gpu.launch(Program(launch.source), "fused", launch.grid, launch.block, (*made.tensors, *beside, *launch.numbers))
    return made.given()


def _along_rows(gpu: Gpu, x: Array) -> Array:
    """An operand, or a copy in order of one whose elements lie side by side along another dim than the last.

    Threads would read a piece of memory for each element of it; a copy reads and writes along memory.
    """
    item = x.dtype.itemsize
    if x.size < _LEAST_COPIED or x.shape[-1] == 1 or abs(x.strides[-1]) < _PIECE_BYTES:
        return x
    lies_beside = any(
        stride == item and size * item >= _PIECE_BYTES for size, stride in zip(x.shape, x.strides, strict=True)
    )
    return in_order(gpu, x) if lies_beside else x


@cuda_kernel("FusedEach", since=1, domain="irpar")
def fused_each(
    gpu: Gpu, *operands: Array, expression: tuple[str, ...], times: int, outs: Sequence[Array | None] = ()
) -> tuple[Array, ...] | None:
    """The results of an expression for several lists of operands, by as few launches as tables of them take."""
    lines, count = tuple(expression), len(operands) // times
    problems: list[_Problem] = []
    for start in range(0, len(operands), count):
        into = outs[sum(len(made.results) for made in problems) :]
        made = _problem(gpu, operands[start : start + count], lines, into)
        if made is None:
            return None
        problems.append(made)
    shared: dict[EachKernel, list[_Problem]] = {}
    alone: dict[_Problem, Launch] = {}
    for made in problems:
        kernel, launch = made.kernel(gpu), None
        if kernel is not None:
            shared.setdefault(kernel, []).append(made)
        elif (launch := made.launch(gpu)) is not None:
            alone[made] = launch
        else:
            return None
    # Where one of them cannot be compiled none is launched: results may be written over operands.
    for source in (*(kernel.source for kernel in shared), *(launch.source for launch in alone.values())):
        gpu.function(Program(source), "fused")
    for kernel, found in shared.items():
        _launch_each(gpu, kernel, found)
    for made, launch in alone.items():
        gpu.launch(Program(launch.source), "fused", launch.grid, launch.block, (*made.tensors, *launch.numbers))
    return tuple(result for made in problems for result in made.given())


def _launch_each(gpu: Gpu, kernel: EachKernel, problems: Sequence["_Problem"]) -> None:
    for start in range(0, len(problems), kernel.lists):
        some = problems[start : start + kernel.lists]
        places = [[gpu.address(tensor) for tensor in made.tensors] for made in some]
        table, blocks = kernel.table(places, [made.count for made in some])
        gpu.launch(Program(kernel.source), "fused", blocks, THREADS, (table, np.int32(len(some))))


@dataclass(frozen=True, eq=False)
class _Problem:
    """An expression with its operands and results.

    Attributes:
        lines: the expression.
        operands, results: they.
        written: what a kernel writes in place of results that lie over what it reads.
    """

    lines: tuple[str, ...]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    written: tuple[Array, ...]

    @property
    def tensors(self) -> tuple[Array, ...]:
        """What a kernel is given."""
        return (*self.operands, *self.written)

    @property
    def count(self) -> int:
        """Elements of the largest result."""
        return max(int(result.size) for result in self.results)

    def launch(self, gpu: Gpu) -> Launch | None:
        """The kernel for these alone."""
        return generate(self.lines, *self._layouts(gpu), gpu.multiprocessors)

    def kernel(self, gpu: Gpu) -> EachKernel | None:
        """The kernel for these and others."""
        return generate_each(self.lines, *self._layouts(gpu))

    def _layouts(self, gpu: Gpu) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        operands, written = (tuple(_layout(gpu, one) for one in given) for given in (self.operands, self.written))
        return operands, written

    def given(self) -> tuple[Array, ...]:
        """The results, when the kernel has been launched."""
        for result, source in zip(self.results, self.written, strict=True):
            if source is not result:
                result[...] = source
        return self.results


def _problem(
    gpu: Gpu, operands: tuple[Array, ...], lines: tuple[str, ...], outs: Sequence[Array | None]
) -> _Problem | None:
    """An expression with places for its results: those that are given, as far as there are any."""
    try:
        made = parse(lines)
        types = made.types([Operand(tuple(operand.shape), operand.dtype) for operand in operands])
    except ExpressionError:
        return None
    given = (*outs[: len(made.results)], *(None for _ in made.results[len(outs) :]))
    results = [
        gpu.empty(types[name].shape, types[name].dtype) if out is None else out
        for name, out in zip(made.results, given, strict=True)
    ]
    is_by_rows = any(step.operator.kind in ("reduction", "rotation") for step in made.steps)
    written = [
        gpu.empty(result.shape, result.dtype) if _is_in_the_way(gpu, result, operands, is_by_rows) else result
        for result in results
    ]
    return _Problem(lines, operands, tuple(results), tuple(written))


def _layout(gpu: Gpu, array: Array) -> Layout:
    item, address = array.dtype.itemsize, gpu.address(array)
    alignment = min(16, address & -address) if address else 16
    return Layout(tuple(array.shape), array.dtype, tuple(stride // item for stride in array.strides), alignment)


def _is_in_the_way(gpu: Gpu, result: Array, operands: Sequence[Any], is_by_rows: bool) -> bool:
    """Whether a result would be written over elements of an operand that other threads still read."""
    for operand in operands:
        is_same = gpu.address(operand) == gpu.address(result) and operand.shape == result.shape
        is_alike = is_same and operand.strides == result.strides and operand.dtype == result.dtype
        if not (is_alike and not is_by_rows) and _overlap(_range(gpu, operand), _range(gpu, result)):
            return True
    return False


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _range(gpu: Gpu, array: Array) -> tuple[int, int]:
    """The bytes among which the elements of an array are."""
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True) if size]
    start = gpu.address(array)
    low, high = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    return start + low, start + high + (array.dtype.itemsize if array.size else 0)
