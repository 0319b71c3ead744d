"""Tensors: raw bytes as ONNX packs them, slices, files that are missing or short."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from irpar.ir import (
    ArrayTensor,
    DType,
    ExternalTensor,
    JoinedTensor,
    LazyTensor,
    SlicedTensor,
    TensorError,
    joined_tensor,
    parse_module,
    range_along,
)
from irpar.ir.tensor import pack, unpack

NUMERIC = [dtype for dtype in DType if dtype is not DType.STR]


def numbers(dtype: DType, count: int) -> np.ndarray:
    return (np.arange(count) % (2 if dtype.bits == 2 or dtype is DType.BOOL else 7)).astype(dtype.numpy)


@pytest.mark.parametrize("dtype", NUMERIC)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5])
def test_raw_bytes_are_those_of_onnx(dtype: DType, count: int) -> None:
    array = numbers(dtype, count)
    tensor = ArrayTensor(array, dtype)
    proto = numpy_helper.from_array(array)
    assert tensor.raw() == (proto.raw_data or b"")
    assert tensor.nbytes == len(tensor.raw())
    back = unpack(tensor.raw(), dtype, (count,))
    assert back.dtype == dtype.numpy
    assert pack(back, dtype) == tensor.raw()


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.bits < 8])
@given(data=st.binary(min_size=3, max_size=3))
def test_every_packed_byte_unpacks_as_onnx_does(dtype: DType, data: bytes) -> None:
    count = 24 // dtype.bits
    proto = onnx.TensorProto(data_type=dtype.value, dims=[count], raw_data=data)
    assert unpack(data, dtype, (count,)).tobytes() == numpy_helper.to_array(proto).tobytes()


def test_bytes_that_do_not_fill_a_shape() -> None:
    with pytest.raises(TensorError, match=r"3 bytes of data for a tensor f32\[1\]"):
        unpack(b"abc", DType.F32, (1,))
    with pytest.raises(TensorError, match="strings have no raw form"):
        ArrayTensor(np.array(["a"])).raw()


def test_numbers_cannot_be_written_to() -> None:
    array = np.zeros(3, np.float32)
    tensor = ArrayTensor(array)
    with pytest.raises(ValueError, match="read-only"):
        tensor.numpy()[0] = 1
    array[0] = 1  # the owner still can


@pytest.mark.parametrize("dtype", [DType.F32, DType.I4])
def test_slices_are_lazy_and_exact(tmp_path: Path, dtype: DType) -> None:
    whole = np.arange(24).reshape(4, 6) % 8
    raw = pack(whole.astype(dtype.numpy), dtype)
    (tmp_path / "w.bin").write_bytes(b"##" + raw)
    tensor = ExternalTensor(dtype, (4, 6), tmp_path / "w.bin", "w.bin", 2, len(raw))
    part = tensor.slice([(1, 3), (2, 6)]).slice([(1, 2), (0, 3)])
    assert isinstance(part, SlicedTensor)
    assert (part.base, part.region) == (tensor, ((2, 3), (2, 5)))
    assert (tensor.base, tensor.region) == (tensor, ((0, 4), (0, 6)))
    assert part.base is tensor
    assert part.region == ((2, 3), (2, 5))
    assert part.numpy().astype(int).tolist() == whole[2:3, 2:5].tolist()
    assert tensor.slice([(0, 4), (0, 6)]) is tensor
    with pytest.raises(ValueError, match="outside a dim"):
        tensor.slice([(0, 5), (0, 6)])


@pytest.mark.parametrize("count", [1024, 1025], ids=["read", "mapped"])
def test_numbers_of_a_file_are_not_written_over(count: int, tmp_path: Path) -> None:
    numbers = np.arange(count, dtype=np.float32)
    (tmp_path / "w.bin").write_bytes(b"#" * 6 + numbers.tobytes() + b"#")
    found = ExternalTensor(DType.F32, (1, count), tmp_path / "w.bin", "w.bin", 6, 4 * count).numpy()
    np.testing.assert_array_equal(found, numbers[None])
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0] = 1


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    missing = ExternalTensor(DType.F32, (2,), path, "w.bin", 0, 8)
    with pytest.raises(TensorError, match="cannot read external data"):
        missing.numpy()
    path.write_bytes(b"1234567")
    with pytest.raises(TensorError, match=r"ends at byte 7, but a tensor f32\[2\] needs bytes 0 to 8"):
        missing.numpy()
    with pytest.raises(TensorError, match="external data of 4 bytes"):
        ExternalTensor(DType.F32, (2,), path, "w.bin", 0, 4).numpy()
    assert ExternalTensor(DType.F32, (0, 2), path, "w.bin", 7, 0).numpy().shape == (0, 2)


def test_equality_is_bit_by_bit() -> None:
    a = ArrayTensor(np.array([0.0, np.nan], np.float32))
    assert a.equals(ArrayTensor(np.array([0.0, np.nan], np.float32)))
    assert not a.equals(ArrayTensor(np.array([-0.0, np.nan], np.float32)))
    assert not a.equals(ArrayTensor(np.array([[0.0, np.nan]], np.float32)))
    assert ArrayTensor(np.array(["a", "b"])).equals(ArrayTensor(["a", "b"]))
    lazy = LazyTensor(DType.F32, (2,), lambda: np.array([0.0, np.nan], np.float32))
    assert lazy.equals(a)


def test_part_by_part() -> None:
    pieces = [ArrayTensor(np.array(numbers)) for numbers in ([0, 1, 2, 3], [10, 11], [20, 21])]
    joined = JoinedTensor(pieces, 0, 2)
    assert joined.numpy().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert joined.slice([(4, 8)]).numpy().tolist() == [2, 3, 11, 21]
    assert joined.bases == tuple(pieces)
    with pytest.raises(ValueError, match=r"i64\[2\] does not stand beside i64\[4\] along dim 0 in 4 parts"):
        JoinedTensor(pieces, 0, 4)
    with pytest.raises(ValueError, match="outside a dim"):
        joined.slice([(4, 9)])


@given(st.data())
def test_any_slice_of_what_is_joined(data: st.DataObject) -> None:
    dim, parts = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    shape = [2, 3, 4]
    pieces = []
    for number, count in enumerate(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))):
        shape[dim] = count * parts
        pieces.append(np.random.default_rng(number).integers(0, 99, shape))
    blocks = [np.split(piece, parts, dim) for piece in pieces]
    whole = np.concatenate([block[part] for part in range(parts) for block in blocks], dim)
    joined = JoinedTensor([ArrayTensor(piece) for piece in pieces], dim, parts)
    np.testing.assert_array_equal(joined.numpy(), whole)
    region = []
    for size in whole.shape:
        start = data.draw(st.integers(0, size))
        region.append((start, data.draw(st.integers(start, size))))
    cut = joined.slice(region)
    np.testing.assert_array_equal(cut.numpy(), whole[tuple(slice(*bounds) for bounds in region)])
    again = [(0, size // 2) for size in cut.shape]
    np.testing.assert_array_equal(cut.slice(again).numpy(), cut.numpy()[tuple(slice(*bounds) for bounds in again)])


@pytest.mark.parametrize("region", [[(0, 4), (3, 3)], [(2, 2), (0, 10)], [(2, 2), (0, 4)], [(1, 1), (10, 10)]])
def test_a_slice_without_elements_of_what_is_joined_has_a_text(region: list[tuple[int, int]]) -> None:
    text = """graph @g(%x: f32[4]) -> (%x) opset 21 {
  %w = constant : f32[4, 10] join(1, 2, f32[4, 4] slice([0:4, 0:4] of f32[4, 10] data("w.bin", 0, 160)), f32[4, 6] slice([0:4, 4:10] of f32[4, 10] data("w.bin", 0, 160)))
}
"""
    module = parse_module(text)
    (joined,) = (value.data for value in module.graph.constants)
    assert joined is not None
    cut = joined.slice(region)
    assert cut.shape == tuple(stop - start for start, stop in region)
    module.graph.add_constant(cut, "cut")
    again = parse_module(str(module))
    (found,) = (value.data for value in again.graph.constants if value.name == "cut")
    assert found is not None
    assert found.shape == cut.shape


def test_neighbours_in_one_tensor_are_one_block() -> None:
    whole = ArrayTensor(np.arange(24).reshape(4, 6))
    thirds = [range_along(whole, 1, start, start + 2) for start in (0, 2, 4)]
    assert joined_tensor(thirds, 1) is whole
    assert joined_tensor(thirds[:2], 1).region == ((0, 4), (0, 4))
    assert isinstance(joined_tensor(thirds[::-1], 1), JoinedTensor)
    assert isinstance(joined_tensor([thirds[0], thirds[2]], 1), JoinedTensor)
    joined = joined_tensor(thirds, 1, 2)
    assert isinstance(joined, JoinedTensor)
    assert joined.sections == ((0, 2), (2, 4), (4, 6))
    assert JoinedTensor([whole, ArrayTensor(np.arange(8).reshape(4, 2))], 1).sections is None
