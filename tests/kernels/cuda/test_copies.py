"""Copies and joins, on a processor: any strides, odd sizes, arrays that lie anywhere."""

import random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from irpar.kernels.cuda import lookup
from irpar.kernels.cuda.copies import copy_into, merged
from irpar.kernels.operands import is_view

from .cases import Case, check, run
from .emulation import NEEDS_COMPILER, EmulatedGpu

DTYPES = [np.uint8, np.float16, np.float32, np.float64, np.complex128]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    return EmulatedGpu(tmp_path_factory.mktemp("copies"), multiprocessors=1)


def drawn(numbers: np.random.Generator, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> np.ndarray:
    """Bytes of any content, that begin some elements behind an address that 16 divides."""
    count = int(np.prod(shape)) + offset
    memory = np.zeros(count * np.dtype(dtype).itemsize + 16, np.uint8)
    start = -memory.ctypes.data % 16
    x = memory[start : start + count * np.dtype(dtype).itemsize]
    x[:] = numbers.integers(0, 120, x.size)
    return x.view(dtype)[offset:].reshape(shape)


def test_dims_are_merged() -> None:
    x = np.zeros((2, 3, 4, 5), np.int8)
    assert [tuple(dim) for dim in merged(x.shape, x.strides, x.strides)] == [(120, 1, 1)]
    y = x.transpose(0, 2, 1, 3)
    assert [tuple(dim) for dim in merged(y.shape, y.strides, np.zeros(y.shape, np.int8).strides)] == [
        (2, 60, 60),
        (4, 5, 15),
        (3, 20, 5),
        (5, 1, 1),
    ]
    assert merged((1, 1), (7, 9), (1, 1)) == []
    assert [tuple(dim) for dim in merged((3, 4), (0, 0), (4, 1))] == [(12, 0, 1)]


def views(numbers: np.random.Generator, dtype: Any) -> list[np.ndarray]:
    """Arrays of many kinds of strides."""
    x = drawn(numbers, (2, 9, 17, 3), dtype)
    return [
        x,
        x[:, ::-1, 1:, ::2],
        x.transpose(0, 2, 1, 3),
        x.transpose(3, 2, 1, 0),
        x[0, :, :, 0].T,
        drawn(numbers, (70, 67), dtype, 1).T,
        np.broadcast_to(x[:1, :, :1], (2, 9, 5, 3)),
        drawn(numbers, (4, 32), dtype)[:, :16],
        x[0, 0, 0, :1],
        drawn(numbers, (), dtype),
        x[:0],
    ]


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_copies(gpu: EmulatedGpu, dtype: Any) -> None:
    for view in views(np.random.default_rng(3), dtype):
        out = gpu.empty(view.shape, view.dtype)
        assert copy_into(gpu, view, out)
        np.testing.assert_array_equal(out.tobytes(), view.tobytes())


@NEEDS_COMPILER
@pytest.mark.slow
def test_copies_into_strides(gpu: EmulatedGpu) -> None:
    numbers = np.random.default_rng(4)
    x = drawn(numbers, (6, 10, 8), np.float32)
    whole = np.full((10, 6, 16), 7, np.float32)
    assert copy_into(gpu, x.transpose(1, 0, 2), whole[..., 3:11])
    np.testing.assert_array_equal(whole[..., 3:11], x.transpose(1, 0, 2))
    assert (whole[..., :3] == 7).all()
    assert (whole[..., 11:] == 7).all()
    assert not copy_into(gpu, np.zeros((2,) * 12).transpose(*range(0, 12, 2), *range(1, 12, 2)), np.zeros((2,) * 12))


def test_views_are_told_from_copies() -> None:
    draw, seen = random.Random(5), set()
    for _ in range(300):
        sizes = [draw.choice((1, 2, 3, 4)) for _ in range(4)]
        x = np.zeros(sizes).transpose(draw.sample(range(4), 4))
        if draw.random() < 0.3:
            x = x[:, 1:]
        shapes = [draw.sample([*x.shape, 1], 5), [x.shape[0] * x.shape[1], *x.shape[2:]]]
        shapes += [[*x.shape[:d], x.shape[d] // 2, 2, *x.shape[d + 1 :]] for d in range(4) if x.shape[d] % 2 == 0]
        shape = draw.choice(shapes)
        is_in_place = not x.size or np.shares_memory(x.reshape(shape), x)
        assert is_view(x, shape) == is_in_place, (x.shape, x.strides, shape)
        seen.add(is_in_place)
    assert seen == {True, False}


@NEEDS_COMPILER
@pytest.mark.slow
def test_reshape(gpu: EmulatedGpu) -> None:
    kernel = lookup("", "Reshape", 21)
    assert kernel is not None
    x = drawn(np.random.default_rng(6), (2, 8, 5, 64), np.float16)
    (found,) = kernel(gpu, [x.transpose(0, 2, 1, 3), np.array([0, -1, 512])], {}, 1) or (None,)
    np.testing.assert_array_equal(found, x.transpose(0, 2, 1, 3).reshape(2, 5, 512))
    for operand, shape in ((x, [2, -1]), (x[:, :3], [2, 3, -1]), (x.transpose(1, 0, 2, 3), [3, -1]), (x[:0].T, [0, 4])):
        assert kernel(gpu, [operand, np.array(shape)], {}, 1) is None


JOINED = ((4, 4), (3, 0, 5, 1), (8,) * 19, (7,))
"""Lengths along an axis of what is joined."""


def join_case(numbers: np.random.Generator, sizes: tuple[int, ...], axis: int, dtype: Any) -> Case:
    shapes = [[4, 6, 8] for _ in sizes]
    for shape, size in zip(shapes, sizes, strict=True):
        shape[axis] = size
    operands = [drawn(numbers, tuple(shape), dtype, place % 2) for place, shape in enumerate(shapes)]
    operands[0::3] = [np.asfortranarray(x) for x in operands[0::3]]
    return Case("Concat", 13, operands, {"axis": axis})


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(gpu: EmulatedGpu, axis: int) -> None:
    for dtype in (np.uint8, np.float16, np.float32):
        for sizes in JOINED:
            case = join_case(np.random.default_rng(7), sizes, axis, dtype)
            (expected,) = case.expected()
            out = gpu.empty(expected.shape, expected.dtype)
            with patch.object(gpu, "empty", side_effect=AssertionError("memory beside the result")):
                (found,) = run(case, gpu, lambda x: x, lambda x: x, out) or (None,)
            assert found is out
            check(case, [out])


def test_what_does_not_fit_is_not_joined(gpu: EmulatedGpu) -> None:
    kernel = lookup("", "Concat", 13)
    assert kernel is not None
    assert kernel(gpu, [np.zeros((2, 3)), np.zeros((2, 4))], {"axis": 0}, 1) is None
    assert kernel(gpu, [np.zeros(2), np.zeros(2, np.float32)], {"axis": 0}, 1) is None
