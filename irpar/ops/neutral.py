"""What changes nothing in a reduction, and operands that are to count once in one."""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from irpar.ir import ArrayTensor, Builder, DType, TensorType, Value
from irpar.sharding import Axis, Mesh, Reduction

from .coords import block_index

COMBINED: dict[DType, Reduction] = {
    DType.F16: "sum",
    DType.BF16: "sum",
    DType.F32: "sum",
    DType.F64: "sum",
    DType.I32: "sum",
    DType.I64: "sum",
    DType.I8: "sum",
    DType.U8: "sum",
    DType.I16: "sum",
    DType.U16: "sum",
    DType.U32: "sum",
    DType.U64: "sum",
    DType.BOOL: "or",
}
"""Element types of which blocks of rows can be taken apart, and how zeros and rows combine.

Others have no kernels in ONNX Runtime (integers of 4 bits), or nothing to combine them with (strings).
"""


def neutral(reduce: Reduction, dtype: DType) -> "np.ndarray[Any, Any]":
    """The element of a type that changes nothing in a reduction, as an array without dims.

    In sums of floats that is -0.0: -0.0 + 0.0 is 0.0, which has lost the sign (IEEE 754-2019, section 6.3).
    """
    return np.asarray(_NEUTRAL[reduce](dtype), dtype.numpy)


def is_neutral(value: Value, reduce: Reduction) -> bool:
    """Whether every element of a value is known to be one that changes nothing, the sign of a zero aside."""
    node = value.node
    source = node.inputs[0] if node is not None and node.identity == ("", "Expand") else value
    data = source.data
    if not isinstance(data, ArrayTensor) or data.dtype is DType.STR:
        return False
    return bool((data.numpy() == neutral(reduce, data.dtype)).all())


def _limit(dtype: DType, sign: int) -> object:
    """The greatest (1) or least (-1) number of a type."""
    if dtype.is_integer:
        limits = ml_dtypes.iinfo(dtype.numpy)
    else:
        with np.errstate(all="ignore"):
            infinite = np.asarray(sign * np.inf).astype(dtype.numpy)
        if infinite.astype(np.float64) == sign * np.inf:
            return infinite
        limits = ml_dtypes.finfo(dtype.numpy)
    return limits.max if sign > 0 else limits.min


_NEUTRAL: dict[Reduction, Callable[[DType], object]] = {
    "sum": lambda dtype: -0.0 if dtype.is_float else 0,
    "prod": lambda _: 1,
    "max": lambda dtype: _limit(dtype, -1),
    "min": lambda dtype: _limit(dtype, 1),
    "and": lambda dtype: np.invert(np.zeros((), dtype.numpy)),
    "or": lambda _: 0,
}


def first_only(
    value: Value, reduce: Reduction, mesh: Mesh, axes: Sequence[Axis], builder: Builder, name: str = ""
) -> Value:
    """A value that all devices along axes hold, so that it counts once when they reduce it.

    The first keeps it; the others get what changes nothing. A maximum is the same however often it counts.
    """
    if reduce not in ("sum", "prod") or is_neutral(value, reduce):
        return value
    position = block_index(builder, mesh, axes)
    zero = builder.constant(np.asarray(0, np.int64), "number_0")
    is_first = builder.op("Equal", [position, zero], type=TensorType(DType.BOOL, ()))
    nothing = builder.constant(neutral(reduce, value.dtype), "neutral")
    return builder.op("Where", [is_first, value, nothing], type=value.type, name=name)
