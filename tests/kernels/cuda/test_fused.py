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

    def __init__(self, address: int) -> None:
        self.shape, self.strides, self.size, self.dtype = SHAPE, (32, 4), 32, np.dtype(np.float32)
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

    def empty(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> DeviceArray:
        return self.made

    def address(self, x: DeviceArray) -> int:
        return int(x.data.ptr)

    def launch(self, program: Program, name: str, grid: int, block: int, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments


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
