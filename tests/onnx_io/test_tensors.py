import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from irpar.ir import ArrayTensor, DType, dtype_of_onnx
from irpar.onnx_io import OnnxError
from irpar.onnx_io.external import ExternalFolder
from irpar.onnx_io.tensors import read_sparse, read_tensor, write_tensor

NOWHERE = ExternalFolder(None)


def sample(dtype: DType, count: int) -> np.ndarray:
    if dtype is DType.STR:
        return np.array(["a", "", "ü"] * count, object)[:count]
    if dtype is DType.F8E8M0:
        return np.array([1, 2, 4, 0.5] * count)[:count].astype(dtype.numpy)
    values = np.array([0, 1, 1, 0, 1] * count)[:count]
    return values.astype(dtype.numpy)


@pytest.mark.parametrize("dtype", list(DType), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)], ids=str)
def test_every_dtype_reads_as_onnx_reads_it(dtype: DType, shape: tuple[int, ...]) -> None:
    array = sample(dtype, int(np.prod(shape, dtype=int))).reshape(shape)
    proto = TensorProto()
    write_tensor(ArrayTensor(array, dtype), proto)
    again = read_tensor(proto, NOWHERE)
    assert (again.dtype, again.shape) == (dtype, shape)
    np.testing.assert_array_equal(again.numpy(), array)
    np.testing.assert_array_equal(np.asarray(numpy_helper.to_array(proto)).astype(array.dtype), array)


@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_typed_fields(dtype: DType) -> None:
    array = sample(dtype, 5)
    listed = [item.encode() for item in array] if dtype is DType.STR else array.tolist()
    proto = helper.make_tensor("t", dtype.value, [5], listed)
    assert not proto.HasField("raw_data")
    np.testing.assert_array_equal(read_tensor(proto, NOWHERE).numpy(), array)


@given(
    st.binary(max_size=40), st.lists(st.integers(0, 6), max_size=3), st.sampled_from([1, 5, 7, 10, 16, 17, 21, 22, 26])
)
def test_raw_bytes_of_any_length(raw: bytes, shape: list[int], kind: int) -> None:
    proto = TensorProto(data_type=kind, dims=shape, raw_data=raw)
    dtype = dtype_of_onnx(kind)
    assert dtype is not None
    if len(raw) == dtype.nbytes(int(np.prod(shape, dtype=int))):
        assert read_tensor(proto, NOWHERE).numpy().shape == tuple(shape)
    else:
        with pytest.raises(OnnxError, match="bytes of data"):
            read_tensor(proto, NOWHERE)


def test_large_raw_data_is_checked_when_read() -> None:
    proto = TensorProto(name="w", data_type=1, dims=[1000], raw_data=bytes(3999))
    with pytest.raises(OnnxError, match=r"3999 bytes of data for a tensor f32\[1000\]"):
        read_tensor(proto, NOWHERE).numpy()
    with pytest.raises(OnnxError, match="3000 bytes"):
        read_tensor(TensorProto(data_type=1, dims=[1000], raw_data=bytes(3000)), NOWHERE)


def test_bfloat16_bits() -> None:
    array = np.array([1.5, -2, np.inf], ml_dtypes.bfloat16)
    tensor = read_tensor(numpy_helper.from_array(array), NOWHERE)
    assert tensor.raw() == array.tobytes()


@pytest.mark.parametrize("indices", [[0, 6], [-1, 2]])
def test_sparse_indices_outside_the_shape(indices: list[int]) -> None:
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("s", 1, [2], [1.0, 2.0]), helper.make_tensor("i", 7, [2], indices), [2, 3]
    )
    with pytest.raises(OnnxError, match="outside its shape"):
        read_sparse(sparse, NOWHERE).numpy()


def test_huge_sparse_tensors_are_refused() -> None:
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("s", 1, [1], [1.0]), helper.make_tensor("i", 7, [1], [0]), [1 << 40]
    )
    with pytest.raises(OnnxError, match="too large"):
        read_sparse(sparse, NOWHERE)
