"""Plausible random inputs: floats from a normal distribution, integers that are valid where they index something."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.ir import DType, Graph, Node, Value, tensor_type
from irpar.sharding import IrparError

from .layout import Array, TensorSpec

FREE_INTEGERS = 2
"""Integers that index nothing are 0 or 1: many are masks, and models multiply those by large numbers."""

_DATA_MOVERS = frozenset(
    {
        *("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Expand", "Tile"),
        *("Concat", "Split", "Gather", "GatherND", "GatherElements", "Where", "Pad", "Max", "Min", "Trilu"),
    }
)
"""Ops whose results hold elements of their operands."""


@dataclass(frozen=True)
class Bounds:
    """What the uses of an integer input say.

    Attributes:
        low, high: valid values are low .. high - 1; high is None where nothing bounds them.
        is_mask: something reads it as a truth value or a number between 0 and 1.
    """

    low: int = 0
    high: int | None = None
    is_mask: bool = False

    def meet(self, other: "Bounds") -> "Bounds":
        """What satisfies both."""
        highs = [bound for bound in (self.high, other.high) if bound is not None]
        return Bounds(max(self.low, other.low), min(highs, default=None), self.is_mask or other.is_mask)


def random_inputs(specs: Sequence[TensorSpec], graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Random whole inputs for a program.

    Floats are standard normal, bools fair, strings "a" or "b". Integers that reach indices of Gather and its like in
    `graph` lie in the range that these allow; those that are read as masks are 0 or 1, the first of each row 1; others
    are small and not negative.

    Args:
        specs: what the program takes; shapes must be static.
        graph: the original graph in global view, with inputs of these names.
        seed: equal seeds give equal inputs.

    Raises:
        IrparError: an input is no tensor, or has a symbolic dim.
    """
    inputs = {value.source_name: value for value in graph.inputs}
    return {
        spec.name: _draw(spec, inputs.get(spec.name), np.random.default_rng([seed, index]))
        for index, spec in enumerate(specs)
    }


def _draw(spec: TensorSpec, value: Value | None, random: np.random.Generator) -> Array:
    if spec.dtype is None:
        raise IrparError(
            f"cannot make up input {spec}",
            do="verify it from Python: irpar.Partition.open(OUT) and then partition.verify({"
            + repr(spec.name)
            + ": ...})",
        )
    if spec.shape is None or not all(isinstance(dim, int) for dim in spec.shape):
        raise IrparError(f"cannot make up input {spec}", do="give inputs in a file, or bind all symbols")
    shape: tuple[int, ...] = spec.shape  # type: ignore[assignment]
    if spec.dtype is DType.STR:
        return np.asarray(random.choice(np.asarray(["a", "b"], object), shape), object).reshape(shape)
    if spec.dtype is DType.BOOL:
        return np.asarray(random.integers(0, 2, shape)).astype(np.bool_)
    if spec.dtype.is_integer:
        return _integers(index_bounds(value) if value is not None else Bounds(), shape, spec.dtype, random)
    numbers = np.asarray(random.standard_normal(shape))
    if spec.dtype in (DType.C64, DType.C128):
        numbers = numbers + 1j * random.standard_normal(shape)
    return np.asarray(numbers).astype(spec.dtype.numpy)


def _integers(bounds: Bounds, shape: tuple[int, ...], dtype: DType, random: np.random.Generator) -> Array:
    if bounds.high is None and bounds.is_mask:
        numbers = np.asarray(random.integers(0, 2, shape))
        if shape and shape[-1]:
            numbers[..., 0] = 1  # A row without anything unmasked would be all NaN after Softmax.
        return numbers.astype(dtype.numpy)
    low = max(bounds.low, 0)
    high = FREE_INTEGERS if bounds.high is None else bounds.high
    largest = (1 << (dtype.bits - (0 if dtype.text.startswith("u") else 1))) - 1
    high = max(min(high, largest + 1), low + 1)
    return np.asarray(random.integers(low, high, shape)).astype(dtype.numpy)


def index_bounds(value: Value) -> Bounds:
    """What the uses of an integer value say of its range, followed through ops that move or shift elements."""
    return _trace(value, set())


def _trace(value: Value, seen: set[Value]) -> Bounds:
    if value in seen:
        return Bounds()
    seen.add(value)
    found = Bounds()
    for node, index in value.uses:
        if not node.is_return:
            found = found.meet(_of_use(node, index, seen))
    return found


def _of_use(node: Node, index: int, seen: set[Value]) -> Bounds:
    if node.callee is not None:
        inputs = node.callee.graph.inputs
        return _trace(inputs[index], seen) if index < len(inputs) else Bounds()
    limit = _INDEXED.get((node.op_type, index)) if node.domain == "" else None
    if limit is not None:
        return Bounds(high=limit(node))
    if node.op_type == "Cast":
        target = node.results[0].type
        type_ = tensor_type(target)
        if type_ is not None and (type_.dtype is DType.BOOL or type_.dtype.is_float):
            return Bounds(is_mask=True)
    if node.op_type in ("Add", "Sub"):
        return _of_shift(node, index, seen)
    if node.op_type in _DATA_MOVERS:
        found = Bounds()
        for result in node.results:
            found = found.meet(_trace(result, seen))
        return found
    return Bounds()


def _of_shift(node: Node, index: int, seen: set[Value]) -> Bounds:
    """`x + c` and `x - c` with a constant c: the bounds of the result, shifted back."""
    other = node.operands[1 - index]
    bounds = _trace(node.results[0], seen)
    if other is None or other.data is None or bounds.high is None or (node.op_type == "Sub" and index == 1):
        return Bounds(is_mask=bounds.is_mask)
    shift = other.data.numpy().astype(np.int64)
    if not shift.size:
        return bounds
    shift = -shift if node.op_type == "Sub" else shift
    return Bounds(bounds.low - int(shift.min()), bounds.high - int(shift.max()), bounds.is_mask)


def _dim_of_data(node: Node) -> int | None:
    """Size of the indexed dim (attribute `axis`, default 0) of operand 0."""
    shape = _shape(node.operands[0])
    axis = node.attributes.get("axis", 0)
    if shape is None or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        return None
    return shape[axis]


def _smallest_dim(node: Node) -> int | None:
    """GatherND and ScatterND index several dims with one tensor: what all of these allow."""
    shape = _shape(node.operands[0])
    indices = _shape(node.operands[1])
    if shape is None or not indices or indices[-1] is None:
        return None
    first = node.attributes.get("batch_dims", 0)
    if not isinstance(first, int):
        return None
    sizes = shape[first : first + indices[-1]]
    return None if any(size is None for size in sizes) else min((s for s in sizes if s is not None), default=None)


def _depth(node: Node) -> int | None:
    depth = node.operands[1]
    return None if depth is None or depth.data is None else math.floor(depth.data.numpy().reshape(-1)[0])


def _shape(value: Value | None) -> tuple[int | None, ...] | None:
    type_ = None if value is None else tensor_type(value.type)
    if type_ is None or type_.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else None for dim in type_.shape)


_INDEXED: Mapping[tuple[str, int], Callable[[Node], Any]] = {
    ("Gather", 1): _dim_of_data,
    ("GatherElements", 1): _dim_of_data,
    ("ScatterElements", 1): _dim_of_data,
    ("Scatter", 1): _dim_of_data,
    ("GatherND", 1): _smallest_dim,
    ("ScatterND", 1): _smallest_dim,
    ("OneHot", 0): _depth,
}
"""(op, operand) that holds indices: how many values they may have."""
