"""What the nodes of a model say of the numbers that an input may have."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.ir import DOMAIN, DType, Graph, Node, Value, dtype_of_onnx, tensor_type
from irpar.ops import traits

_JOINS = frozenset({"Concat", "Where", "Pad", "Max", "Min", "Trilu"})
"""Ops whose results hold elements of all their operands."""
_COMPARISONS = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_ARITHMETIC = frozenset(
    {
        *("Mul", "Div", "Mod", "Neg", "Abs", "Sign", "CumSum", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean"),
        *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "Sum", "Mean"),
    }
)
"""Ops of numbers: they take any, and give others."""
_ANY_NUMBERS = frozenset(
    {
        *("ArgMax", "ArgMin", "TopK", "NonZero", "MatMulInteger", "ConvInteger", "DequantizeLinear", "Sort", "Unique"),
        *("MatMul", "Gemm", "QLinearMatMul", "QLinearConv", "Shape", "Size", "IsNaN", "IsInf", "And", "Or", "Not"),
    }
)
"""Ops that take any numbers as their first operands, and give what says nothing of these."""
_DATA_PLACES = {"TopK": 1, "DequantizeLinear": 1}
"""How many of the first operands, where others are sizes or scales."""
_SIDE_PLACES = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Pad", "Squeeze", "Unsqueeze", "Split", "Trilu"), 1),
    **dict.fromkeys(("ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "CumSum"), 1),
}
"""From which operand on there are sizes, places and axes instead of data."""
_MOST_POINTS = 64
_WORD_ATTRIBUTES = ("keys_strings", "cats_strings", "classlabels_strings")
"""Of LabelEncoder and its like."""
TRIPS = (0, 1, 3)
_NOT_BELOW_ZERO = frozenset(
    {("", "Sqrt", 0), ("", "BatchNormalization", 4), (DOMAIN, "Adam", 3), (DOMAIN, "AdamW", 3)},
)
"""(domain, op, operand) of which a square root is taken: below 0 it is not a number."""
_SUMS = frozenset({"Add", "Sum", "Mean", "ReduceSum", "ReduceMean", "Concat", "Cast", "Max"})
"""Ops that give nothing below 0 where they read nothing below 0."""


@dataclass(frozen=True)
class Bounds:
    """What the uses of an integer input say.

    Attributes:
        low, high: valid values are low .. high - 1; high is None where nothing bounds them.
        is_mask: something reads it as a truth value or a number between 0 and 1.
        is_free: all that reads it takes any number.
        is_divisor: it must not be 0.
        points: values at which something turns: what it is compared with, numbers of trips.
    """

    low: int = 0
    high: int | None = None
    is_mask: bool = False
    is_free: bool = True
    is_divisor: bool = False
    points: tuple[int, ...] = ()

    def meet(self, other: "Bounds") -> "Bounds":
        """What satisfies both."""
        highs = [bound for bound in (self.high, other.high) if bound is not None]
        return Bounds(
            max(self.low, other.low),
            min(highs, default=None),
            self.is_mask or other.is_mask,
            self.is_free and other.is_free,
            self.is_divisor or other.is_divisor,
            tuple(sorted({*self.points, *other.points})[:_MOST_POINTS]),
        )


NARROW = Bounds(is_free=False)
"""Of a use that nobody knows to take any number."""


def index_bounds(value: Value) -> Bounds:
    """What the uses of an integer value say of its range, followed through ops that move or shift elements."""
    return _trace(value, set())


def is_square(value: Value) -> bool:
    """Whether a root is taken of a float value, or of a sum or a multiple of it: a variance, a mean of squares."""
    seen, waiting = {value}, [value]
    while waiting:
        for node, index in waiting.pop().uses:
            if node.is_return or node.callee is not None:
                continue
            if (node.domain, node.op_type, index) in _NOT_BELOW_ZERO:
                return True
            if _keeps_sign(node, index):
                waiting.extend(result for result in node.results if result not in seen)
                seen.update(node.results)
    return False


def _keeps_sign(node: Node, index: int) -> bool:
    """Whether an operand that is not below 0 is not made so; single numbers as factors are taken for positive."""
    if node.domain != "":
        return False
    if node.op_type in _SUMS or (index == 0 and traits(node).moves_elements):
        return True
    if node.op_type not in ("Mul", "Div") or (node.op_type == "Div" and index == 1):
        return False
    other = node.operands[1 - index]
    shape = None if other is None or other is node.operands[index] else _shape(other)
    return shape is not None and all(size == 1 for size in shape)


def thresholds(graph: Graph) -> tuple[float, ...]:
    """The single numbers that floats are compared with anywhere in a model."""
    found: dict[float, None] = {}
    for node in graph.walk():
        if node.domain == "" and node.op_type in _COMPARISONS:
            for operand in node.operands:
                if operand is not None and operand.data is not None and operand.data.size == 1:
                    number = operand.data.numpy().reshape(-1)[0]
                    if operand.data.dtype.is_float and np.isfinite(number):
                        found[float(number)] = None
    return tuple(found)[:_MOST_POINTS]


def words(graph: Graph) -> tuple[str, ...]:
    """The texts that a model compares texts with, or looks up."""
    found: dict[str, None] = {}
    for node in graph.walk():
        for operand in node.operands:
            if operand is not None and operand.data is not None and operand.data.dtype is DType.STR:
                found |= dict.fromkeys(map(str, operand.data.numpy().reshape(-1)[:_MOST_POINTS]))
        for name in _WORD_ATTRIBUTES:
            listed = node.attributes.get(name)
            if isinstance(listed, tuple):
                found |= dict.fromkeys(word for word in listed[:_MOST_POINTS] if isinstance(word, str))
    return tuple(found)[:_MOST_POINTS]


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
    limit = _INDEXED.get((node.domain, node.op_type, index))
    if limit is not None:
        return Bounds(high=limit(node), is_free=False)
    if node.domain != "":
        return NARROW
    return _of_onnx_use(node, index, seen)


def _of_onnx_use(node: Node, index: int, seen: set[Value]) -> Bounds:
    kind = node.op_type
    if kind in ("Loop", "Scan", "If"):
        return _of_control(node, index, seen)
    if kind == "Cast":
        return _of_cast(node, seen)
    if kind in ("Add", "Sub"):
        return _of_shift(node, index, seen)
    if kind in _COMPARISONS:
        return Bounds(points=_compared_with(node, index))
    if index >= _SIDE_PLACES.get(kind, len(node.operands)):
        return NARROW
    if kind == "Clip" and index > 0:
        return Bounds()
    if traits(node).moves_elements or kind == "Clip":
        return NARROW if index > 0 else _of_results(node, seen)
    if kind in _JOINS:
        return _of_results(node, seen)
    if kind in _ARITHMETIC:
        return _of_arithmetic(node, index, seen)
    is_data = kind in _ANY_NUMBERS and index < _DATA_PLACES.get(kind, len(node.operands))
    return Bounds() if is_data else NARROW


def _of_results(node: Node, seen: set[Value]) -> Bounds:
    found = Bounds()
    for result in node.results:
        found = found.meet(_trace(result, seen))
    return found


def _of_control(node: Node, index: int, seen: set[Value]) -> Bounds:
    if node.op_type == "Loop" and index == 0:
        return Bounds(is_free=False, points=TRIPS, high=TRIPS[-1] + 1)
    found = Bounds()
    for body in node.nested_graphs():
        if index < len(body.inputs):
            found = found.meet(_trace(body.inputs[index], seen))
    return found


def _of_cast(node: Node, seen: set[Value]) -> Bounds:
    dtype = _cast_dtype(node)
    if dtype is None or dtype is DType.STR:
        return NARROW
    if dtype is DType.BOOL:
        return Bounds(is_mask=True)
    found = _of_results(node, seen)
    if dtype.is_float:
        return Bounds(is_mask=True, points=found.points)
    return found


def _cast_dtype(node: Node) -> DType | None:
    """What a Cast makes: its attribute says so where models leave out the types of what is between."""
    type_ = tensor_type(node.results[0].type)
    if type_ is not None:
        return type_.dtype
    number = node.attributes.get("to")
    return dtype_of_onnx(number) if isinstance(number, int) else None


def _of_shift(node: Node, index: int, seen: set[Value]) -> Bounds:
    """`x + c` and `x - c` with a constant c: the bounds of the result, shifted back."""
    other = node.operands[1 - index]
    bounds = _trace(node.results[0], seen)
    is_negated = node.op_type == "Sub" and index == 1
    shift = None if other is None or other.data is None or is_negated else _numbers(other)
    if shift is None or not shift.size:
        return _unknown_preimage(bounds)
    least, most = int(shift.min()), int(shift.max())
    if node.op_type == "Sub":
        least, most = -most, -least
    points = tuple(point - least for point in bounds.points)
    high = None if bounds.high is None else bounds.high - most
    return Bounds(bounds.low - least, high, bounds.is_mask, bounds.is_free, False, points)


def _of_arithmetic(node: Node, index: int, seen: set[Value]) -> Bounds:
    is_divisor = node.op_type in ("Div", "Mod") and index == 1
    found = _of_results(node, seen)
    other = node.operands[1 - index] if len(node.operands) == 2 else None
    numbers = None if other is None or other.data is None else _numbers(other)
    factor = int(numbers.reshape(-1)[0]) if numbers is not None and numbers.size == 1 else 0
    points = found.points
    if factor > 0 and index == 0 and node.op_type in ("Mul", "Div"):
        points = tuple(p // factor if node.op_type == "Mul" else p * factor for p in points)
        if found.high is not None:
            high = -(-found.high // factor) if node.op_type == "Mul" else found.high * factor
            return Bounds(0, max(high, 1), False, found.is_free, False, points)
    known = _unknown_preimage(found)
    return Bounds(0, known.high, known.is_mask, known.is_free, is_divisor, points)


def _unknown_preimage(bounds: Bounds) -> Bounds:
    """Of a number of which one is made that has bounds: small ones do best."""
    is_free = bounds.is_free and bounds.high is None
    return Bounds(is_mask=bounds.is_mask, is_free=is_free, points=bounds.points)


def _compared_with(node: Node, index: int) -> tuple[int, ...]:
    """The numbers that an operand is compared with; where these are not known 0 and the sizes of what has them."""
    other = node.operands[1 - index]
    if other is None:
        return ()
    if other.data is not None:
        numbers = np.unique(other.data.numpy().astype(np.float64))
        finite = numbers[np.isfinite(numbers) & (np.abs(numbers) < 2**53)]
        return tuple(int(number) for number in finite[:_MOST_POINTS])
    return (0, *(size for size in _shape(other) or () if size))


def _numbers(value: Value) -> np.ndarray[Any, Any] | None:
    assert value.data is not None
    numbers = value.data.numpy()
    return numbers.astype(np.int64) if numbers.dtype.kind in "iu" else None


def _dim_of(operand: int, default: int = 0) -> Callable[[Node], int | None]:
    """Size of the indexed dim (attribute `axis`) of an operand."""

    def size(node: Node) -> int | None:
        shape = _shape(node.operands[operand]) if operand < len(node.operands) else None
        axis = node.attributes.get("axis", default)
        if shape is None or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
            return None
        return shape[axis]

    return size


def _largest_end(node: Node) -> int | None:
    """Starts and ends of a Slice: up to its largest dim."""
    shape = _shape(node.operands[0])
    sizes = [size for size in shape or () if size is not None]
    return max(sizes) + 1 if sizes else None


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


_INDEXED: Mapping[tuple[str, str, int], Callable[[Node], Any]] = {
    ("", "Gather", 1): _dim_of(0),
    ("", "GatherElements", 1): _dim_of(0),
    ("", "ScatterElements", 1): _dim_of(0),
    ("", "Scatter", 1): _dim_of(0),
    ("", "GatherND", 1): _smallest_dim,
    ("", "ScatterND", 1): _smallest_dim,
    ("", "OneHot", 0): _depth,
    ("", "Slice", 1): _largest_end,
    ("", "Slice", 2): _largest_end,
    ("", "SoftmaxCrossEntropyLoss", 1): _dim_of(0, 1),
    ("", "NegativeLogLikelihoodLoss", 1): _dim_of(0, 1),
    ("", "RotaryEmbedding", 3): _dim_of(1),
    ("com.microsoft", "RotaryEmbedding", 1): _dim_of(2),
    ("com.microsoft", "EmbedLayerNormalization", 0): _dim_of(2),
    ("com.microsoft", "EmbedLayerNormalization", 1): _dim_of(4),
    ("com.microsoft", "GatherBlockQuantized", 1): _dim_of(0),
}
"""(domain, op, operand) that holds indices, bounds of slices or classes: how many values they may have."""
