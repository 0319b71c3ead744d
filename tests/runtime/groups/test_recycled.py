"""Memory of results is used again once nobody holds it, and not before."""

import ml_dtypes
import numpy as np
import pytest

from irpar.runtime.groups.recycled import MOST, SMALLEST, Recycled
from irpar.runtime.messages import ALIGNMENT

F32 = np.dtype(np.float32)
SHAPE = (64, SMALLEST // 64)


def place(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_that_nobody_holds_is_used_again() -> None:
    made = Recycled().empty
    first = made(SHAPE, F32)
    at = place(first)
    assert place(made(SHAPE, F32)) != at
    del first
    assert at in {place(each) for each in [made(SHAPE, F32) for _ in range(2)]}


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[3:],
        lambda array: array.view(np.uint8),
        lambda array: memoryview(array[1]),
        lambda array: np.asarray(memoryview(array))[2:],
    ],
)
def test_what_a_view_holds_is_not(view) -> None:
    made = Recycled().empty
    array = made(SHAPE, F32)
    at, _held = place(array), view(array)

    del array
    others = [made(SHAPE, F32) for _ in range(3)]
    assert at not in {place(each) for each in others}


def test_any_shape_and_dtype_of_as_many_bytes_has_the_same_memory() -> None:
    made = Recycled().empty
    at = place(made(SHAPE, F32))
    other = made((2, SHAPE[0] * SHAPE[1]), np.dtype(ml_dtypes.bfloat16))
    assert (place(other), other.dtype, other.flags.writeable) == (at, ml_dtypes.bfloat16, True)


def test_what_is_kept_is_bounded() -> None:
    recycled = Recycled()
    many = [recycled.empty((MOST // 8,), F32) for _ in range(4)]
    many.clear()
    kept = sum(memory.nbytes for each in recycled._free.values() for memory in each)
    assert kept == recycled._free_bytes == MOST


@pytest.mark.parametrize(("shape", "dtype"), [((), F32), ((0, 3), F32), ((SMALLEST,), np.dtype(object))])
def test_small_arrays_and_strings_are_numpys(shape: tuple[int, ...], dtype: np.dtype) -> None:
    array = Recycled().empty(shape, dtype)
    assert (array.shape, array.dtype, array.base) == (shape, dtype, None)


def test_sizes_that_nobody_asks_for_again_make_room() -> None:
    recycled = Recycled()
    for extra in range(12):
        recycled.empty((6_000_000 + extra,), np.dtype(np.uint8))
    at = place(recycled.empty((1_000_000,), F32))
    assert place(recycled.empty((1_000_000,), F32)) == at
    assert sum(recycled._free) <= MOST


@pytest.mark.parametrize("count", [SMALLEST, MOST + 1])
def test_large_arrays_lie_where_messages_may(count: int) -> None:
    assert place(Recycled().empty((count,), np.dtype(np.uint8))) % ALIGNMENT == 0
