"""CUDA kernels on a device: fresh numbers, results in poisoned memory between guard words, operands that lie anywhere."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from irpar.kernels.cuda import Gpu
from irpar.kernels.cuda.copies import copy_into
from tests.gpu import NEEDS_GPU, cupy

from . import cases
from .cases import Case, check, run
from .test_copies import DTYPES, JOINED, drawn, join_case, views
from .test_emulated import FAMILIES

pytestmark = NEEDS_GPU

GUARD = 256
"""Bytes before and behind a result."""
POISON = 0xA5


def to_device(x: np.ndarray) -> Any:
    """The array on the device, with the strides that it has and as far from where memory begins."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    raw = cupy().asarray(np.frombuffer(base.tobytes("A"), np.uint8)) if base.size else cupy().empty(16, np.uint8)
    memory = raw.data + (x.ctypes.data - base.ctypes.data)
    return cupy().ndarray(x.shape, x.dtype, memory, strides=x.strides)


def to_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


class Guarded:
    """A result's place, of poison, between other poison."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.nbytes = int(np.prod(shape)) * dtype.itemsize
        self.memory = cupy().full(self.nbytes + 2 * GUARD, POISON, np.uint8)
        self.array = self.memory[GUARD : GUARD + self.nbytes].view(dtype).reshape(shape)

    def check(self) -> None:
        """Nothing around it is written."""
        assert (self.memory[:GUARD] == POISON).all()
        assert (self.memory[GUARD + self.nbytes :] == POISON).all()


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu(cupy())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_cases(gpu: Gpu, family: Callable[[np.random.Generator], list[Case]]) -> None:
    for case in family(np.random.default_rng()):
        outs = [Guarded(result.shape, dtype) for result, dtype in zip(case.expected(), case.dtypes(), strict=True)]
        given = tuple(out.array for out in outs)
        results = run(case, gpu, to_device, to_host, given if len(given) > 1 else given[0])
        assert results is not None, str(case)
        check(case, results)
        for out, result in zip(outs, results, strict=True):
            out.check()
            np.testing.assert_array_equal(to_host(out.array).tobytes(), result.tobytes())


def test_sums_are_the_same_at_every_run(gpu: Gpu) -> None:
    for family in (cases.scatters, cases.sums, cases.losses):
        for case in family(np.random.default_rng(3)):
            first, second = (run(case, gpu, to_device, to_host) for _ in range(2))
            assert first is not None
            assert second is not None
            assert [x.tobytes() for x in first] == [x.tobytes() for x in second]


def test_large_ones(gpu: Gpu) -> None:
    numbers = np.random.default_rng(4)
    table = numbers.standard_normal((50257, 768)).astype(np.float32)
    ids = numbers.integers(0, 50257, (4, 1024))
    ids[:, ::3] = 11
    updates = numbers.standard_normal((4, 1024, 768)).astype(np.float32)
    scores = numbers.standard_normal((300, 50257)).astype(np.float32)
    large = [
        Case("Gather", 13, (table, ids)),
        Case("ScatterND", 18, (np.zeros_like(table), ids[..., None], updates), {"reduction": "add"}, is_exact=False),
        Case("SoftmaxCrossEntropyLoss", 13, (scores, ids.reshape(-1)[:300]), {}, 2, is_exact=False),
        Case("ReduceSum", 13, (updates, np.array([0, 1])), {"keepdims": 0}, is_exact=False),
    ]
    for case in large:
        results = run(case, gpu, to_device, to_host)
        assert results is not None
        for found, expected in zip(results, case.expected(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_copies(gpu: Gpu, dtype: Any) -> None:
    for view in views(np.random.default_rng(), dtype):
        out = Guarded(view.shape, view.dtype)
        assert copy_into(gpu, to_device(view), out.array)
        np.testing.assert_array_equal(to_host(out.array).tobytes(), view.tobytes())
        out.check()
    large = drawn(np.random.default_rng(), (3, 515, 7, 130), dtype)
    for order in ((0, 2, 1, 3), (3, 1, 2, 0), (0, 1, 3, 2), (2, 3, 0, 1)):
        view = large.transpose(order)
        out = Guarded(view.shape, view.dtype)
        assert copy_into(gpu, to_device(view), out.array)
        np.testing.assert_array_equal(to_host(out.array).tobytes(), view.tobytes())
        out.check()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(gpu: Gpu, axis: int) -> None:
    for dtype in (np.uint8, np.float16, np.float32):
        for sizes in JOINED:
            case = join_case(np.random.default_rng(), sizes, axis, dtype)
            (expected,) = case.expected()
            out = Guarded(expected.shape, expected.dtype)
            results = run(case, gpu, to_device, to_host, out.array)
            assert results is not None
            check(case, results)
            out.check()
