"""Tensors in and out of ONNX Runtime, those of dtypes that numpy lacks included."""

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnxruntime

from irpar.ir import DType
from irpar.ir.tensor import pack, unpack

from .base import Array

PLAIN = frozenset(
    {
        *(DType.F16, DType.F32, DType.F64, DType.BOOL, DType.STR),
        *(DType.I8, DType.I16, DType.I32, DType.I64, DType.U8, DType.U16, DType.U32, DType.U64),
    }
)
"""Dtypes that ONNX Runtime takes and gives as numpy arrays."""

_ACCURACY = "session.qdq_matmulnbits_accuracy_level"
_NO_FUSIONS = "session.disable_quant_qdq"
_TWO_BITS = frozenset({DType.I2, DType.U2})


def exact_options(dtypes: Iterable[DType] = ()) -> onnxruntime.SessionOptions:
    """Options for a session that prints nothing and computes what the model says.

    By default ONNX Runtime rounds activations to 8 bits before it multiplies them with weights of 4 bits. Its product
    with weights of 2 bits (in 1.31) is wrong where a dim is no multiple of 4: that fusion is switched off.

    Args:
        dtypes: those of the model's constants.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # Errors are raised; they need not be printed as well.
    options.add_session_config_entry(_ACCURACY, "1")  # 1: float32
    if not _TWO_BITS.isdisjoint(dtypes):
        options.add_session_config_entry(_NO_FUSIONS, "1")
    return options


def to_ort(array: Array, dtype: DType) -> Any:
    """A contiguous array as ONNX Runtime sees it; without a copy for dtypes of a byte and more."""
    if dtype in PLAIN:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    if dtype.bits >= 8:
        integers = array.reshape(-1).view(f"u{array.itemsize}").reshape(array.shape)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(integers, dtype.value)
    made = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(array.shape), dtype.value)
    data = pack(array, dtype)
    if data:
        ctypes.memmove(made.data_ptr(), data, len(data))
    return made


def from_ort(value: Any) -> Array:
    """The array of a tensor that ONNX Runtime made: a view for dtypes that numpy has, else a copy."""
    dtype = DType(value.element_type())
    if dtype in PLAIN:
        return np.asarray(value.numpy())
    size = value.tensor_size_in_bytes()
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return unpack(data, dtype, value.shape())
