"""Products by cuBLASLt on a device, against numpy in float64: layouts, epilogues, what lies around, CUDA graphs."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.kernels import lookup
from irpar.kernels.cuda import Gpu
from irpar.kernels.cuda import lookup as lookup_cuda
from irpar.kernels.cuda.cublas_lt import matmul, tf32
from irpar.kernels.gemm import product
from tests.gpu import NEEDS_GPU, cupy

from .test_cublas_lt import finished

pytestmark = NEEDS_GPU

F16, BF16, F32, F64 = (np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
# Tensor cores cut digits off what they add up in float32.
UNIT = {F16: 2.0**-10, BF16: 2.0**-7, F32: 2.0**-20, F64: 2.0**-48}
DTYPES = [(F16, F16), (F16, F32), (BF16, BF16), (BF16, F32), (F32, F32), (F64, F64)]
GUARD, POISON = 64, 12345.0

SHAPES = [
    ((1, 1), (1, 1)),
    ((33, 65), (65, 17)),
    ((128, 256), (256, 384)),
    ((1, 300), (300, 129)),
    ((255, 31), (31, 1)),
    ((3, 5, 70), (70, 9)),
    ((2, 3, 33, 17), (2, 3, 17, 40)),
    ((2, 1, 33, 17), (1, 3, 17, 40)),
    ((40, 64), (6, 64, 8)),
    ((2, 4, 512), (512, 1000)),
]
FEW_ROWS = [((1, 2048), (2048, 264)), ((2, 4096), (4096, 136)), ((2, 520), (520, 4096)), ((2048,), (2048, 512))]
"""Of large matrices."""
ODD_ROWS = ((640, 512), (512, 1001))
"""Of a product that is computed with rows further apart."""


def place(x: np.ndarray, layout: str, offset: int) -> Any:
    """x on the device: its last two dims turned in memory or not, at an offset of some elements."""
    turned = x.swapaxes(-1, -2) if layout == "turned" else x
    memory = cupy().zeros(offset + turned.size, dtype=x.dtype)
    memory[offset:] = cupy().asarray(np.ascontiguousarray(turned)).reshape(-1)
    view = memory[offset:].reshape(turned.shape)
    return view.swapaxes(-1, -2) if layout == "turned" else view


def guarded(shape: tuple[int, ...], dtype: np.dtype, offset: int) -> tuple[Any, Any]:
    """A poisoned result between guards, and all of that memory."""
    memory = cupy().asarray(np.full(offset + int(np.prod(shape)) + 2 * GUARD, POISON).astype(dtype))
    return memory[offset + GUARD : memory.size - GUARD].reshape(shape), memory


class Exact:
    """A product in float64, and the sum of what was added up without signs."""

    def __init__(self, a: np.ndarray, b: np.ndarray) -> None:
        wide = [x.astype(F64) for x in (a, b)]
        self.product, self.room = np.matmul(*wide), np.matmul(*map(abs, wide))

    def check(self, found: Any, unit: float, **addends: Any) -> None:
        """A result, by what rounding explains."""
        room = abs(addends["alpha"]) * self.room
        for addend in (addends["bias"], addends["residual"]):
            room = room if addend is None else room + abs(addend.astype(F64))
        error = abs(cupy().asnumpy(found).astype(F64) - finished(self.product, **addends))
        worst = (error / (unit * (room + 1e-3))).max()
        assert worst <= 1, f"an error of {worst:.3g} times what rounding explains"


PLAIN: dict[str, Any] = {"bias": None, "activation": None, "residual": None, "alpha": 1.0, "beta": 1.0}


@pytest.mark.parametrize(("dtype", "result"), DTYPES, ids=str)
@pytest.mark.parametrize("shapes", [*SHAPES, *FEW_ROWS[:3], ODD_ROWS], ids=str)
def test_products(dtype: np.dtype, result: np.dtype, shapes: Any) -> None:
    numbers = np.random.default_rng()
    a, b = (numbers.standard_normal(shape).astype(dtype) for shape in shapes)
    exact = Exact(a, b)
    shape = exact.product.shape
    for layouts in itertools.product(("plain", "turned"), repeat=2):
        for offsets in ((0, 0, 0), (1, 3, 1), (8, 0, 4)):
            left, right = (place(x, *how) for x, *how in zip((a, b), layouts, offsets, strict=False))
            out, memory = guarded(shape, result, offsets[2])
            assert matmul(cupy(), left, right, out, dtype=result) is out
            exact.check(out, UNIT[result], **PLAIN)
            edges = cupy().concatenate([memory[: offsets[2] + GUARD], memory[-GUARD:]])
            np.testing.assert_array_equal(cupy().asnumpy(edges), np.asarray(POISON).astype(result))


@pytest.mark.parametrize(("dtype", "result"), DTYPES, ids=str)
@pytest.mark.parametrize("shapes", [SHAPES[1], SHAPES[2], SHAPES[5], SHAPES[6], *FEW_ROWS, ODD_ROWS], ids=str)
def test_what_follows(dtype: np.dtype, result: np.dtype, shapes: Any) -> None:
    numbers = np.random.default_rng()
    a, b = (numbers.standard_normal(shape).astype(dtype) for shape in shapes)
    exact = Exact(a, b)
    shape = exact.product.shape
    bias, residual = (numbers.standard_normal(x).astype(dtype) for x in (shape[-1], shape))
    left, right = place(a, "plain", 0), place(b, "plain", 0)
    for activation in (None, "relu", "gelu_tanh"):
        # Of 16 bits the library computes tanh in hardware, to some 2**-11.
        unit = max(UNIT[result], 2.0**-10) if activation == "gelu_tanh" and dtype.itemsize == 2 else UNIT[result]
        for given in ((bias, None), (None, residual), (bias, residual), (None, None)):
            addends = dict(zip(("bias", "residual"), given, strict=True))
            placed = {name: None if x is None else cupy().asarray(x) for name, x in addends.items()}
            factors: dict[str, Any] = {"activation": activation, "alpha": 0.5, "beta": 1.0}
            out, _ = guarded(shape, result, 0)
            assert matmul(cupy(), left, right, out, dtype=result, **placed, **factors) is out
            exact.check(out, 2 * unit, **addends, **factors)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("sizes", [(4104, 520), (33, 32768), (14336, 136)], ids=str)
def test_few_rows_are_summed_in_one_order(dtype: np.dtype, rows: int, sizes: tuple[int, int]) -> None:
    numbers = np.random.default_rng()
    a, b = (numbers.standard_normal(shape).astype(dtype) for shape in ((rows, sizes[0]), sizes))
    left, right, exact = place(a, "plain", 0), place(b, "plain", 0), Exact(a, b)
    first, memory = guarded((rows, sizes[1]), dtype, 0)
    matmul(cupy(), left, right, first)
    exact.check(first, UNIT[dtype], **PLAIN)
    edges = cupy().concatenate([memory[:GUARD], memory[-GUARD:]])
    np.testing.assert_array_equal(cupy().asnumpy(edges), np.asarray(POISON).astype(dtype))
    others = [cupy().empty_like(first) for _ in range(50)]
    for other in others:
        matmul(cupy(), left, right, other)
    for other in others:
        np.testing.assert_array_equal(cupy().asnumpy(other).view(np.uint8), cupy().asnumpy(first).view(np.uint8))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rows_of_a_length(dtype: np.dtype) -> None:
    kernel = lookup("irpar", "FusedMatMul", 1)
    assert kernel is not None
    numbers = np.random.default_rng()
    a, b = (numbers.standard_normal(shape).astype(dtype) for shape in ((3, 300, 320), (1021, 320)))
    exact = Exact(a, b.T)
    for rows in (b.T, np.ascontiguousarray(b.T)):
        out, memory = guarded((3, 300, 1024), dtype, 8)
        (found,) = kernel(cupy(), [cupy().asarray(a), cupy().asarray(rows)], {"length": 1024}, 1, out)
        assert found is out
        exact.check(out[..., :1021], UNIT[dtype], **PLAIN)
        edges = cupy().concatenate([memory[: 8 + GUARD], memory[-GUARD:]])
        np.testing.assert_array_equal(cupy().asnumpy(edges), np.asarray(POISON).astype(dtype))


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("gate", "sizes"),
    [("none", (4096, 520, 1032)), ("none", (2048, 520)), ("silu", (2056, 2056)), ("gelu_tanh", (520, 520))],
)
def test_few_rows_with_several_matrices(dtype: np.dtype, rows: int, gate: str, sizes: tuple[int, ...]) -> None:
    numbers, kernel = np.random.default_rng(), lookup("irpar", "SharedMatMul", 1)
    cuda_kernel = lookup_cuda("irpar", "SharedMatMul", 1)
    assert kernel is not None
    assert cuda_kernel is not None
    a = (numbers.standard_normal((1, rows, 1032)) / 32).astype(dtype)
    matrices = [numbers.standard_normal((1032, size)).astype(dtype) for size in sizes]
    count = len(sizes) if gate == "none" else 1
    wanted = kernel(np, [x.astype(F64) for x in (a, *matrices)], {"gate": gate}, count)
    given = [place(x, "plain", 0) for x in (a, *matrices)]
    first = None
    for _ in range(20):
        results = cuda_kernel(Gpu(cupy()), given, {"gate": gate}, count)
        assert results is not None
        found = [cupy().asnumpy(result) for result in results]
        for result, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(result.astype(F64), right, rtol=0, atol=8 * UNIT[dtype] * abs(right).max())
        first = first or found
        for result, before in zip(found, first, strict=True):
            np.testing.assert_array_equal(result.view(np.uint8), before.view(np.uint8))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_odd_rows_and_terms(dtype: np.dtype, turned: bool) -> None:
    """Of gradients of logits, in rows that lie apart: a matrix of weights, and what the logits are made of."""
    numbers = np.random.default_rng()
    wide, other = numbers.standard_normal((512, 1024)).astype(dtype), numbers.standard_normal((1021, 768)).astype(dtype)
    given = cupy().asarray(wide)[:, :1021]
    a, b = (given.T, cupy().asarray(other[:512])) if turned else (given, cupy().asarray(other))
    out, memory = guarded((a.shape[0], 768), dtype, 8)
    assert matmul(cupy(), a, b, out) is out
    Exact(cupy().asnumpy(a), cupy().asnumpy(b)).check(out, UNIT[dtype], **PLAIN)
    edges = cupy().concatenate([memory[: 8 + GUARD], memory[-GUARD:]])
    np.testing.assert_array_equal(cupy().asnumpy(edges), np.asarray(POISON).astype(dtype))


@pytest.mark.parametrize("batch", [65535, 65536, 70001])
def test_batches_of_many_small_products(batch: int) -> None:
    numbers = np.random.default_rng()
    a, b = (numbers.standard_normal((batch, 3, 3)).astype(F32) for _ in range(2))
    Exact(a, b).check(product(cupy(), cupy().asarray(a), cupy().asarray(b)), UNIT[F32], **PLAIN)


def test_sums_of_16_bit_products_are_not_rounded_in_between() -> None:
    """Few results of long sums are computed in parts: 1 and 2**-12 in turn, which float16 loses beside larger sums."""
    k = 2**16
    a = np.ones((8, k), F16)
    b = np.where(np.arange(k) % 2, 2.0**-12, 1.0).astype(F16)[:, None].repeat(8, 1)
    found = cupy().asnumpy(product(cupy(), cupy().asarray(a), cupy().asarray(b), F32))
    np.testing.assert_allclose(found, a.astype(F64) @ b.astype(F64), rtol=2.0**-20)


def error_of(found: Any, wanted: np.ndarray) -> float:
    return float(abs(cupy().asnumpy(found).astype(F64) - wanted).max())


def test_tf32_is_off_unless_allowed() -> None:
    numbers = np.random.default_rng(0)
    a, b = (numbers.standard_normal((512, 512)).astype(F32) for _ in range(2))
    wanted, left, right = a.astype(F64) @ b.astype(F64), cupy().asarray(a), cupy().asarray(b)
    full = error_of(product(cupy(), left, right), wanted)
    with tf32(True):
        rounded = error_of(product(cupy(), left, right), wanted)
    assert full < 2e-4
    assert rounded > 10 * full
    assert error_of(product(cupy(), left, right), wanted) == full


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("operator", ["MatMul", "Gemm", "Einsum"])
def test_captured_products_see_operands_of_the_replay(dtype: np.dtype, operator: str) -> None:
    xp, numbers = cupy(), np.random.default_rng()
    a, b, c = (xp.zeros(shape, dtype=dtype) for shape in ((2, 65, 96), (2, 96, 33), (65,)))
    out = xp.zeros((2, 65, 33), dtype=dtype)
    kernel = lookup("", operator, 13)
    assert kernel is not None

    def compute() -> Any:
        if operator == "Gemm":
            return kernel(xp, [b[1], a[1], c], {"transA": 1, "transB": 1}, 1)[0]
        if operator == "Einsum":
            return kernel(xp, [a, b], {"equation": "bij,bjk->bik"}, 1)[0]
        return kernel(xp, [a, b], {}, 1, out)[0]

    stream = xp.cuda.Stream(non_blocking=True)
    pool = xp.cuda.MemoryPool()
    with stream:
        compute()
        stream.synchronize()
        with xp.cuda.using_allocator(pool.malloc):
            stream.begin_capture()
            try:
                found = compute()
            finally:
                graph = stream.end_capture()
        for _ in range(3):
            given = [numbers.standard_normal(x.shape).astype(dtype) for x in (a, b, c)]
            for array, numbers_of_it in zip((a, b, c), given, strict=True):
                array.set(numbers_of_it)
            found[...] = 0
            graph.launch()
            stream.synchronize()
            left, right, added = given
            if operator == "Gemm":
                Exact(right[1].T, left[1].T).check(found, 2 * UNIT[dtype], **{**PLAIN, "bias": added})
            else:
                Exact(left, right).check(found, UNIT[dtype], **PLAIN)
