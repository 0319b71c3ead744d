"""Tensors: ONNX's TensorProto to lazy tensors and back."""

import math
from functools import partial

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from irpar.ir import ArrayTensor, DType, LazyTensor, Tensor, dtype_of_onnx
from irpar.ir.tensor import Array, unpack

from .errors import OnnxError
from .external import ExternalFolder

_KEEP_BYTES = 1024
"""Up to this many bytes are copied out of the protobuf, so that the model as parsed can be freed."""

_MAX_DENSE_BYTES = 1 << 30
"""Sparse tensors are made dense up to 1 GiB."""

_FIELDS: dict[DType, tuple[str, int]] = {
    **dict.fromkeys((DType.F32,), ("float_data", 1)),
    **dict.fromkeys((DType.C64,), ("float_data", 2)),
    **dict.fromkeys((DType.F64,), ("double_data", 1)),
    **dict.fromkeys((DType.C128,), ("double_data", 2)),
    **dict.fromkeys((DType.I64,), ("int64_data", 1)),
    **dict.fromkeys((DType.U32, DType.U64), ("uint64_data", 1)),
    **dict.fromkeys((DType.STR,), ("string_data", 1)),
}
"""The typed field of each dtype, and entries per element; all others: int32_data, 4 and 2 bits packed."""


def read_tensor(proto: TensorProto, external: ExternalFolder) -> Tensor:
    """The tensor of a TensorProto, not decoded: numbers are read when something asks for them.

    Raises:
        OnnxError: an unknown dtype, a negative dim, data that does not fill the shape, or a wrong external location.
    """
    dtype = dtype_of_onnx(proto.data_type)
    if dtype is None:
        raise OnnxError(
            f"unknown element type {proto.data_type}", do="export the model again with a type of ONNX 1.23 or older"
        )
    shape = tuple(proto.dims)
    if shape and min(shape) < 0:
        raise OnnxError(f"tensor with a negative dim: {list(shape)}", do="write the model again; a size is 0 or more")
    if proto.data_location == TensorProto.EXTERNAL:
        return external.tensor(proto, dtype, shape)
    if proto.HasField("segment"):
        raise OnnxError("tensor stored in segments", do="write the tensor in one piece; no exporter makes segments")
    if proto.HasField("raw_data"):
        return _raw(proto, dtype, shape)
    return _typed(proto, dtype, shape)


def _raw(proto: TensorProto, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    if dtype is DType.STR:
        raise OnnxError("string tensor with raw_data", do="write strings into string_data")
    needed = dtype.nbytes(math.prod(shape))
    if needed <= _KEEP_BYTES:
        raw = proto.raw_data
        if len(raw) != needed:
            raise _short(len(raw), dtype, shape)
        return LazyTensor(dtype, shape, partial(unpack, raw, dtype, shape))
    # The message's size bounds that of its bytes without a copy of them; reading checks the exact number.
    if proto.ByteSize() < needed:
        raise _short(len(proto.raw_data), dtype, shape)
    return LazyTensor(dtype, shape, partial(_unpack_raw, proto, dtype, shape), proto.name)


def _unpack_raw(proto: TensorProto, dtype: DType, shape: tuple[int, ...]) -> Array:
    raw = proto.raw_data
    if len(raw) != dtype.nbytes(math.prod(shape)):
        raise _short(len(raw), dtype, shape).inside(f"value {proto.name}")
    return unpack(raw, dtype, shape)


def _short(count: int, dtype: DType, shape: tuple[int, ...], unit: str = "bytes") -> OnnxError:
    needed = dtype.nbytes(math.prod(shape)) if unit == "bytes" else math.prod(shape)
    return OnnxError(
        f"{count} {unit} of data for a tensor {dtype}{list(shape)}, which needs {needed}",
        do="the model is damaged or cut short: export or copy it again",
    )


def _typed(proto: TensorProto, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    field, each = _FIELDS.get(dtype, ("int32_data", 1))
    count = len(getattr(proto, field))
    size = math.prod(shape)
    # Types of 4 and 2 bits are packed into bytes here as well; those of 6 bits are not.
    packed = 8 // dtype.bits if dtype.bits < 8 and 8 % dtype.bits == 0 else 1
    if count != -(-size // packed) * each:
        raise _short(count // each * packed, dtype, shape, "elements")
    if dtype is DType.STR:
        return LazyTensor(dtype, shape, partial(_strings, proto))
    return LazyTensor(dtype, shape, partial(_decode, proto, dtype, shape))


def _strings(proto: TensorProto) -> Array:
    array = np.empty(len(proto.string_data), object)
    array[:] = [decode_text(item) for item in proto.string_data]
    return array.reshape(tuple(proto.dims))


def _decode(proto: TensorProto, dtype: DType, shape: tuple[int, ...]) -> Array:
    return np.asarray(numpy_helper.to_array(proto)).reshape(shape).astype(dtype.numpy, copy=False).copy()


def decode_text(data: bytes) -> str | bytes:
    """A string of ONNX as text, or the bytes themselves where they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def encode_text(text: str | bytes) -> bytes:
    """The bytes of a string."""
    return text.encode() if isinstance(text, str) else bytes(text)


def read_sparse(proto: onnx.SparseTensorProto, external: ExternalFolder) -> Tensor:
    """A sparse tensor as a dense one, made when it is read.

    Raises:
        OnnxError: it is malformed, or dense takes more than 1 GiB.
    """
    values = read_tensor(proto.values, external)
    indices = read_tensor(proto.indices, external)
    shape = tuple(proto.dims)
    count = values.size
    if (
        any(dim < 0 for dim in shape)
        or len(values.shape) != 1
        or indices.dtype is not DType.I64
        or indices.shape not in ((count,), (count, len(shape)))
    ):
        raise OnnxError(
            f"sparse tensor of shape {list(shape)} with values {values.type} and indices {indices.type}",
            do="write [n] values and int64 indices [n] or [n, rank]",
        )
    if values.dtype is DType.STR or values.dtype.nbytes(math.prod(shape)) > _MAX_DENSE_BYTES:
        raise OnnxError(
            f"sparse tensor {values.dtype}{list(shape)}: irpar holds dense tensors, and this one would be too large",
            do="replace it by operators that use its indices and values",
        )
    return LazyTensor(values.dtype, shape, partial(_densify, proto.values.name, values, indices, shape))


def _densify(name: str, values: Tensor, indices: Tensor, shape: tuple[int, ...]) -> Array:
    places = indices.numpy()
    is_flat = places.ndim == 1
    bounds = np.array(math.prod(shape) if is_flat else shape, np.int64)
    if ((places < 0) | (places >= bounds)).any():
        raise OnnxError(
            f"an index of a sparse tensor is outside its shape {list(shape)}",
            where=f"sparse initializer {name}",
            do="the model is damaged: export it again",
        )
    flat = places if is_flat else np.zeros(len(places), np.int64)
    if shape and not is_flat:
        flat = np.ravel_multi_index(tuple(places.T), shape)
    dense = np.zeros(math.prod(shape), values.dtype.numpy)
    dense[flat] = values.numpy()
    return dense.reshape(shape)


def write_tensor(tensor: Tensor, proto: TensorProto) -> None:
    """Put a tensor with all its numbers into a TensorProto.

    Raises:
        TensorError: its bytes cannot be read.
    """
    proto.data_type = tensor.dtype.value
    proto.dims.extend(tensor.shape)
    if tensor.dtype is DType.STR:
        proto.string_data.extend(encode_text(item) for item in tensor.numpy().ravel().tolist())
    else:
        proto.raw_data = tensor.raw()


def scalar_tensor(value: object, dtype: DType, rank: int) -> Tensor:
    """The tensor that a Constant node's `value_int`, `value_floats` and the like stand for."""
    array = np.array(value, dtype.numpy) if dtype is not DType.STR else _object_array(value)
    return ArrayTensor(array.reshape((-1,) if rank else ()), dtype)


def _object_array(value: object) -> Array:
    items = [value] if isinstance(value, (str, bytes)) else list(value)  # type: ignore[call-overload]
    array = np.empty(len(items), object)
    array[:] = items
    return array
