"""Where a generated kernel writes: over operands only where each element is made of its own."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from irpar.kernels import cuda
from irpar.kernels.cuda import Program

SHAPE = (4, 8)


class DeviceArray:
    """An array at an address, of which nothing is read."""

    def __init__(self, address: int, shape: tuple[int, ...] = SHAPE, strides: tuple[int, ...] = (32, 4)) -> None:
        self.shape, self.strides, self.size, self.dtype = shape, strides, int(np.prod(shape)), np.dtype(np.float32)
        self.flags = SimpleNamespace(c_contiguous=False)
        self.data = SimpleNamespace(ptr=address)
        self.copied: list[Any] = []

    def __setitem__(self, place: Any, value: Any) -> None:
        self.copied.append(value)


class NotingGpu:
    """A device with memory for one more array, which notes what kernels are given."""

    multiprocessors = 2

    def __init__(self) -> None:
        self.made = DeviceArray(2**21)
        self.arguments: tuple[Any, ...] = ()
        self.launched: list[str] = []

    def empty(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> DeviceArray:
        return self.made

    def address(self, x: DeviceArray) -> int:
        return int(x.data.ptr)

    def launch(
        self, program: Program, name: str, grid: int, block: int, arguments: tuple[Any, ...], _: int = 0
    ) -> None:
        self.arguments = arguments
        self.launched.append(name)


@pytest.mark.parametrize(
    ("lines", "is_in_place"),
    [
        (("y0 = Mul(x0, 2.0)",), True),
        (("t0 = ReduceSum(x0, axes=[-1])", "y0 = Sub(x0, t0)"), False),
        (("t0 = RotateHalf(x0)", "y0 = Add(x0, t0)"), False),
    ],
    ids=["elements", "rows", "halves of rows"],
)
def test_a_result_over_an_operand(lines: tuple[str, ...], is_in_place: bool) -> None:
    kernel = cuda.lookup("irpar", "Fused", 1)
    assert kernel is not None
    gpu: Any = NotingGpu()
    x: Any = DeviceArray(2**20)
    results = kernel(gpu, [x], {"expression": lines}, 1, x)
    assert results is not None
    assert results[0] is x
    assert gpu.arguments[1] is (x if is_in_place else gpu.made)
    assert x.copied == ([] if is_in_place else [gpu.made])


TALL, FLAT = (512, 256), (8, 16)


@pytest.mark.parametrize(
    ("shape", "strides", "is_copied"),
    [
        (TALL, (4, 2048), True),
        (TALL, (1024, 4), False),
        (TALL, (0, 4096), False),  # Elements lie apart along all dims.
        (TALL, (4, 0), False),  # All of a row are one element.
        (FLAT, (4, 32), False),  # Few.
    ],
    ids=str,
)
def test_what_lies_along_another_dim_is_put_in_order_first(
    shape: tuple[int, ...], strides: tuple[int, ...], is_copied: bool
) -> None:
    kernel = cuda.lookup("irpar", "Fused", 1)
    assert kernel is not None
    gpu: Any = NotingGpu()
    gpu.made = DeviceArray(2**21, shape, (4 * shape[1], 4))
    x: Any = DeviceArray(2**22, shape, strides)
    assert kernel(gpu, [x], {"expression": ("t0 = ReduceSum(x0, axes=[-1])", "y0 = Sub(x0, t0)")}, 1) is not None
    assert gpu.launched == (["transpose", "fused"] if is_copied else ["fused"])
    assert gpu.arguments[0] is (gpu.made if is_copied else x)
