"""Copies through pinned buffers, on a device that copies only when it is waited for."""

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from irpar.runtime.engines.staging import Staging
from tests.strict_device import Pinned


class LateDevice:
    """A device that copies to it as late as it may: when a stream, or an event of it, is waited for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int, int]] = []
        self.waits = 0
        self.ptr = 0
        runtime = SimpleNamespace(
            memcpyAsync=lambda to, source, size, kind, stream: self.waiting.append((to, source, size))
        )
        self.cuda = SimpleNamespace(
            alloc_pinned_memory=Pinned, Event=lambda disable_timing: LateEvent(self), runtime=runtime
        )

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = np.empty(shape, dtype)
        return placed(array)

    def ascontiguousarray(self, x: Any) -> Any:
        return x if x.flags.c_contiguous else placed(np.ascontiguousarray(x.numbers))

    def copy(self, count: int) -> None:
        for to, source, size in self.waiting[:count]:
            ctypes.memmove(to, source, size)
        del self.waiting[:count]

    def synchronize(self) -> None:
        self.waits += 1
        self.copy(len(self.waiting))


def placed(array: np.ndarray) -> Any:
    """An array of the device."""
    facts = {name: getattr(array, name) for name in ("shape", "ndim", "dtype", "itemsize", "strides", "flags")}
    return SimpleNamespace(**facts, numbers=array, data=SimpleNamespace(ptr=array.ctypes.data))


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.pending: list[tuple[int, int, int]] = []

    def record(self, stream: LateDevice) -> None:
        self.pending = list(stream.waiting)

    def synchronize(self) -> None:
        left = [copy for copy in self.pending if copy in self.device.waiting]
        self.device.copy(len(left))
        self.pending = []


@pytest.mark.parametrize("gap", [1, 3, 40, 2000])
def test_rows_come_to_the_host_without_what_lies_between_them(gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is much, they are copied on the device before."""
    device, numbers = LateDevice(), np.random.default_rng(3)
    staging = Staging(device, device, block_bytes=1024)
    apart = [
        numbers.integers(0, 99, (*rows, 29 + gap)).astype(np.int16)[..., :29]
        for rows in ((7,), (2, 50), (3, 1, 4), (1,))
    ]
    copied: list[Any] = []
    monkeypatch.setattr(
        device, "ascontiguousarray", lambda x: copied.append(x) or LateDevice.ascontiguousarray(device, x)
    )
    others = [np.arange(700), np.zeros((0, 3))]
    arrays = [*apart, *others]
    for found, expected in zip(staging.download([placed(array) for array in arrays]), arrays, strict=True):
        np.testing.assert_array_equal(found, expected)
    # A row alone has nothing behind it.
    assert len(copied) == len(others) + 1 + (3 if gap >= 40 else 0)


def test_numbers_arrive_whatever_the_sizes() -> None:
    draw, numbers = random.Random(2), np.random.default_rng(2)
    for _ in range(50):
        device = LateDevice()
        staging = Staging(device, device, block_bytes=1024)
        for _ in range(4):
            arrays = [_drawn(draw, numbers) for _ in range(draw.randrange(1, 12))]
            expected = [array.copy() for array in arrays]
            uploaded = [staging.upload(array) for array in arrays]
            for array in arrays:
                array.fill(0)  # What is uploaded was taken at once.
            for found, array in zip(staging.download(uploaded), expected, strict=True):
                assert found.dtype == array.dtype
                np.testing.assert_array_equal(found, array)


def _drawn(draw: random.Random, numbers: np.random.Generator) -> np.ndarray:
    shape = draw.choice([(), (0,), (3,), (7, 11), (100, 13), (5, 0)])
    dtype = draw.choice([np.float32, np.int8, np.float64, np.bool_])
    array = np.asarray(numbers.integers(0, 2, shape)).astype(dtype)
    return array.T.copy().T if draw.random() < 0.5 else array


def test_all_results_are_waited_for_at_once() -> None:
    device = LateDevice()
    staging = Staging(device, device)
    uploaded = [staging.upload(np.ones(100)) for _ in range(10)]
    assert device.waits == 0
    staging.download(uploaded)
    assert device.waits == 1
