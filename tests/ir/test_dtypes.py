"""Element types: numbers, names and widths agree with onnx and numpy."""

import ml_dtypes
import numpy as np
import onnx
import pytest

from irpar.ir import DType, dtype_of_numpy, dtype_of_onnx, dtype_of_text


@pytest.mark.parametrize("dtype", DType)
def test_numbers_and_numpy_types_are_those_of_onnx(dtype: DType) -> None:
    assert onnx.helper.tensor_dtype_to_np_dtype(dtype.value) == dtype.numpy
    assert dtype_of_onnx(dtype.value) is dtype
    assert dtype_of_text(str(dtype)) is dtype
    assert dtype_of_numpy(dtype.numpy) is dtype or dtype is DType.STR


def test_every_type_of_onnx_is_there() -> None:
    numbers = set(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}
    assert {dtype.value for dtype in DType} == numbers


def test_bytes_of_packed_types() -> None:
    assert [DType.I4.nbytes(count) for count in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert [DType.U2.nbytes(count) for count in (1, 4, 5)] == [1, 1, 2]
    assert DType.C128.nbytes(2) == 32


def test_kinds() -> None:
    assert {dtype for dtype in DType if dtype.is_integer} == {
        *(DType.I2, DType.I4, DType.I8, DType.I16, DType.I32, DType.I64),
        *(DType.U2, DType.U4, DType.U8, DType.U16, DType.U32, DType.U64),
    }
    assert DType.BF16.is_float
    assert DType.F8E8M0.is_float
    assert {dtype for dtype in DType if dtype.is_index} == {DType.I64, DType.I32, DType.BOOL}
    assert not any(dtype.is_float for dtype in (DType.BOOL, DType.STR, DType.C64, DType.I8))


def test_numpy_types() -> None:
    assert dtype_of_numpy(np.dtype(">f4")) is DType.F32
    assert dtype_of_numpy(np.dtype("U3")) is DType.STR
    assert dtype_of_numpy(ml_dtypes.bfloat16) is DType.BF16
    with pytest.raises(TypeError, match="no element type"):
        dtype_of_numpy(np.dtype("M8[s]"))
    assert dtype_of_onnx(999) is None
    assert dtype_of_text("f33") is None
