"""Which operators carry partial values: what they give for parts of an operand are parts of what they give for it.

p = MatMul(a : [8@dp, 256@tp], w : [256@tp, 64]) : [8, 64] partial(sum: tp)
q = MatMul(b, v)                                 : [8, 64] partial(sum: tp)
y = Add(p, q)                                    : [8, 64] partial(sum: tp)      one reduction instead of two
"""

from collections.abc import Callable

import numpy as np

from irpar.ir import ArrayTensor, DType, Node, Value
from irpar.sharding import Reduction

from .op_def import traits

Carriers = tuple[tuple[int, ...], ...]
"""Sets of operands that may be partial together; the result then is partial in the same way."""

_JOINTLY: dict[Reduction, frozenset[str]] = {
    "sum": frozenset({"Add", "Sub", "Sum"}),
    "max": frozenset({"Max"}),
    "min": frozenset({"Min"}),
    "prod": frozenset({"Mul"}),
    "and": frozenset({"And"}),
    "or": frozenset({"Or"}),
}
"""Operators that carry a reduction if all of their operands are partial."""

_MOST_ELEMENTS = 64
"""Of a constant whose numbers are looked at."""


def carriers(node: Node, reduce: Reduction) -> Carriers:
    """The sets of operands of a node that may be partial together.

    Integers wrap around and are linear all the same; a division of integers rounds, and is not.
    """
    if node.callee is not None or not node.operands:
        return ()
    if node.domain:
        find = _MICROSOFT.get(node.op_type) if node.domain == "com.microsoft" and reduce == "sum" else None
        return () if find is None else find(node)
    if traits(node).moves_elements:
        return ((0,),)  # Parts in the sense of any reduction stay what they are.
    everyone = tuple(range(len(node.operands)))
    if node.op_type == "Concat" or node.op_type in _JOINTLY[reduce]:
        return (everyone,)
    if reduce != "sum":
        return ()
    find = _SUMS.get(node.op_type)
    return () if find is None else find(node)


def scaled_operand(node: Node) -> int | None:
    """Which operand a node does the same with element by element, so that it may as well do it with a sum; or None.

    A Cast to wider floats, a product with one number. The result has the shape of the operand, and lies as that does.
    """
    if node.domain or node.op_type not in _ELEMENTWISE or not all(value.is_static for value in node.inputs):
        return None
    places = next((places for places in carriers(node, "sum") if len(places) == 1), None)
    if places is None:
        return None
    others = [value for index, value in enumerate(node.operands) if index != places[0] and value is not None]
    return None if any(value.shape for value in others) else places[0]


def _first(node: Node) -> Carriers:
    return ((0,),)


def _first_of_floats(node: Node) -> Carriers:
    return ((0,),) if _is_float(node.operands[0]) else ()


def _scaled(node: Node) -> Carriers:
    """A product with known, finite numbers; others could be infinite, and the sum of infinite parts is no number."""
    return tuple((index,) for index in (0, 1) if _is_finite(node.operands[1 - index]) or _is_of_gradient(node))


def _divided(node: Node) -> Carriers:
    is_safe = _is_finite(node.operands[1], may_be_zero=False) or _is_of_gradient(node)
    return ((0,),) if is_safe and _is_float(node.operands[0]) else ()


def _is_of_gradient(node: Node) -> bool:
    """Whether a node of a backward pass computes in a type in which parts are as finite as what they add up to.

    Where the other number is infinite, the gradient is of no use either way.
    """
    return node.phase == "backward" and node.results[0].dtype in _WIDE


def _branches(node: Node) -> Carriers:
    return ((1, 2),)


def _widened(node: Node) -> Carriers:
    """A Cast that keeps every number."""
    before, after = node.operands[0], node.results[0]
    if before is None:
        return ()
    return ((0,),) if (before.dtype, after.dtype) in _WIDER else ()


def _is_float(value: Value | None) -> bool:
    return value is not None and value.dtype.is_float


def _is_finite(value: Value | None, *, may_be_zero: bool = True) -> bool:
    """True for small constants of ordinary numbers that are in memory; no file is read to plan."""
    data = None if value is None else value.data
    if not isinstance(data, ArrayTensor) or data.size > _MOST_ELEMENTS or data.dtype is DType.STR:
        return False
    numbers = data.numpy().astype(np.float64)
    return bool(np.isfinite(numbers).all() and (may_be_zero or numbers.all()))


_ELEMENTWISE = frozenset({"Cast", "Div", "Identity", "Mul", "Neg"})

_WIDE = {DType.BF16, DType.F32, DType.F64}
"""Floats that do not overflow where numbers are ordinary."""

_WIDER = {
    *((DType.F16, DType.F32), (DType.BF16, DType.F32), (DType.F16, DType.F64), (DType.BF16, DType.F64)),
    (DType.F32, DType.F64),
}

_SUMS: dict[str, Callable[[Node], Carriers]] = {
    "Neg": _first,
    "Trilu": _first,
    "ReduceSum": _first,
    "CumSum": _first,
    "ReduceMean": _first_of_floats,
    "GlobalAveragePool": _first_of_floats,
    "AveragePool": _first_of_floats,
    "Mul": _scaled,
    "Div": _divided,
    "Where": _branches,
    "Cast": _widened,
    "DFT": _first,
    "STFT": _first,
    "Col2Im": _first,
    "MaxUnpool": _first,
    "CenterCropPad": _first,
}
"""Operators that are linear in some operands.

Not products of a forward pass with numbers that are computed or read from a file: where one is infinite, or f16
overflows, parts of the other give no number where the whole gives one.
"""

_MICROSOFT: dict[str, Callable[[Node], Carriers]] = {
    "ExpandDims": _first,
    "GatherND": _first,
    "Trilu": _first,
    "UnfoldTensor": _first,
    "Rfft": _first,
    "Irfft": _first,
}
"""Operators of com.microsoft that are linear in some operands."""
