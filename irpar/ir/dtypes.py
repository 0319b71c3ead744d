"""Element types: every dtype of ONNX that numpy and ml_dtypes can hold, and strings."""

from enum import Enum
from functools import cache

import ml_dtypes
import numpy as np


class DType(Enum):
    """An element type. `value` is ONNX's TensorProto.DataType number."""

    F32 = 1
    U8 = 2
    I8 = 3
    U16 = 4
    I16 = 5
    I32 = 6
    I64 = 7
    STR = 8
    BOOL = 9
    F16 = 10
    F64 = 11
    U32 = 12
    U64 = 13
    C64 = 14
    C128 = 15
    BF16 = 16
    F8E4M3FN = 17
    F8E4M3FNUZ = 18
    F8E5M2 = 19
    F8E5M2FNUZ = 20
    U4 = 21
    I4 = 22
    F4E2M1 = 23
    F8E8M0 = 24
    U2 = 25
    I2 = 26
    F6E2M3 = 27
    F6E3M2 = 28

    text: str
    """The name in the text form, e.g. `f32`, `bf16`, `i64`."""
    numpy: np.dtype
    """The numpy (or ml_dtypes) dtype that holds one element."""
    bits: int
    """Bits of one element as ONNX stores it; strings count 64 (a reference)."""

    def __repr__(self) -> str:
        return f"DType.{self.name}"

    def __str__(self) -> str:
        return self.text

    @property
    def is_index(self) -> bool:
        """True for the types of indices, shapes, axes and predicates, which weights do not have."""
        return self in (DType.I64, DType.I32, DType.BOOL)

    @property
    def is_float(self) -> bool:
        """True for real floating-point types of every width."""
        return self.text.startswith(("f", "bf"))

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integers."""
        return self.text[0] in "iu"

    def nbytes(self, count: int) -> int:
        """Bytes that `count` elements take in ONNX's raw form (types below a byte packed)."""
        return -(-count * self.bits // 8)


_NUMPY: dict[DType, object] = {
    DType.F32: np.float32,
    DType.U8: np.uint8,
    DType.I8: np.int8,
    DType.U16: np.uint16,
    DType.I16: np.int16,
    DType.I32: np.int32,
    DType.I64: np.int64,
    DType.STR: np.object_,
    DType.BOOL: np.bool_,
    DType.F16: np.float16,
    DType.F64: np.float64,
    DType.U32: np.uint32,
    DType.U64: np.uint64,
    DType.C64: np.complex64,
    DType.C128: np.complex128,
    DType.BF16: ml_dtypes.bfloat16,
    DType.F8E4M3FN: ml_dtypes.float8_e4m3fn,
    DType.F8E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    DType.F8E5M2: ml_dtypes.float8_e5m2,
    DType.F8E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    DType.U4: ml_dtypes.uint4,
    DType.I4: ml_dtypes.int4,
    DType.F4E2M1: ml_dtypes.float4_e2m1fn,
    DType.F8E8M0: ml_dtypes.float8_e8m0fnu,
    DType.U2: ml_dtypes.uint2,
    DType.I2: ml_dtypes.int2,
    DType.F6E2M3: ml_dtypes.float6_e2m3fn,
    DType.F6E3M2: ml_dtypes.float6_e3m2fn,
}

_SUB_BYTE = {
    DType.U4: 4,
    DType.I4: 4,
    DType.F4E2M1: 4,
    DType.U2: 2,
    DType.I2: 2,
    DType.F6E2M3: 6,
    DType.F6E3M2: 6,
}

for _dtype, _kind in _NUMPY.items():
    _dtype.text = _dtype.name.lower()
    _dtype.numpy = np.dtype(_kind)  # type: ignore[call-overload]
    _dtype.bits = _SUB_BYTE.get(_dtype, _dtype.numpy.itemsize * 8)

_BY_ONNX = {dtype.value: dtype for dtype in DType}
_BY_TEXT = {dtype.text: dtype for dtype in DType}
_BY_NUMPY = {dtype.numpy: dtype for dtype in DType}


def dtype_of_onnx(number: int) -> DType | None:
    """The dtype with ONNX's number, or None where irpar has none."""
    return _BY_ONNX.get(number)


def dtype_of_text(text: str) -> DType | None:
    """The dtype that the text form calls `text`."""
    return _BY_TEXT.get(text)


@cache
def _dtype_of_numpy(dtype: np.dtype) -> DType | None:
    return DType.STR if dtype.kind in "UST" else _BY_NUMPY.get(dtype.newbyteorder("="))


def dtype_of_numpy(dtype: "np.dtype | type") -> DType:
    """The dtype of numpy arrays of `dtype`.

    Raises:
        TypeError: ONNX has no such element type.
    """
    found = _dtype_of_numpy(np.dtype(dtype))
    if found is None:
        raise TypeError(f"ONNX has no element type for numpy's {dtype}")
    return found
