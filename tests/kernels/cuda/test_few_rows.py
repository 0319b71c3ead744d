"""Products of few rows on a processor, against numpy in double precision; and which products are such."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.kernels import gemm
from irpar.kernels.activation import gelu_of_tanh
from irpar.kernels.cuda import few_rows, lookup
from irpar.kernels.cuda.finish import Finish

from .emulation import NEEDS_COMPILER, EmulatedGpu
from .test_cublas_lt import exact

F16, BF16, F32, F64 = (np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
UNIT = {F16: 2.0**-10, BF16: 2.0**-7, F32: 2.0**-21}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    return EmulatedGpu(tmp_path_factory.mktemp("emulated"), multiprocessors=2)


def call_of(a: np.ndarray, b: np.ndarray) -> gemm.Gemm:
    strides = [tuple(step // x.itemsize for step in x.strides) for x in (a, b)]
    (call,) = gemm.gemm_calls(a.shape, strides[0], b.shape, strides[1], ())
    return call


def placed(gpu: EmulatedGpu, x: np.ndarray, gap: int = 0) -> np.ndarray:
    """A copy with its rows further apart, where that is wanted; between them are NaNs."""
    memory = gpu.empty((x.shape[0], x.shape[1] + gap), x.dtype)
    memory[:, : x.shape[1]] = x
    return memory[:, : x.shape[1]]


CASES = [(1, 64, 520), (2, 37, 256), (3, 200, 1048), (8, 129, 264), (1, 8, 8)]
ADDENDS: list[dict[str, Any]] = [
    {"activation": None, "alpha": 1.0, "beta": 1.0},
    {"activation": "relu", "alpha": 0.5, "beta": 2.0},
    {"activation": "gelu_tanh", "alpha": 1.0, "beta": 1.0},
]


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("sizes", CASES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_products(gpu: EmulatedGpu, dtype: np.dtype, sizes: tuple[int, int, int], turned: bool) -> None:
    numbers = np.random.default_rng()
    m, k, n = sizes
    if turned:
        k, n = n, k
    a, b = numbers.standard_normal((m, k)).astype(dtype), numbers.standard_normal((k, n)).astype(dtype)
    x, w = placed(gpu, a, 8), placed(gpu, b.T, 16).T if turned else placed(gpu, b, 16)
    for place, addends in enumerate(ADDENDS):
        bias = numbers.standard_normal(n).astype(dtype) if place else None
        residual = numbers.standard_normal((m, n)).astype(dtype) if place == 1 else None
        memory = gpu.empty((m * n + 64,), dtype)
        guards = memory.view(np.uint8).copy()
        y = memory[32 : 32 + m * n].reshape(m, n)
        few_rows.multiply(gpu, call_of(x, w), x, w, y, Finish(bias, residual=residual, **addends))  # type: ignore[arg-type]
        wanted = exact(a, b, bias=bias, residual=residual, **addends)
        room = np.matmul(abs(a.astype(F64)), abs(b.astype(F64))) + 4
        assert (abs(y.astype(F64) - wanted) <= UNIT[dtype] * room).all()
        raw, edge = memory.view(np.uint8), 32 * dtype.itemsize
        np.testing.assert_array_equal(raw[:edge], guards[:edge])
        np.testing.assert_array_equal(raw[-edge:], guards[-edge:])


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("multiprocessors", [1, 3, 40])
def test_results_do_not_depend_on_which_block_comes_last(tmp_path: Path, multiprocessors: int) -> None:
    numbers = np.random.default_rng()
    x, w = (numbers.standard_normal(shape).astype(F16) for shape in ((2, 230), (230, 776)))
    found = []
    for is_backwards in (False, True):
        gpu = EmulatedGpu(tmp_path, multiprocessors, is_backwards=is_backwards)
        found.append(gpu.empty((2, 776), F16))
        few_rows.multiply(gpu, call_of(x, w), placed(gpu, x), placed(gpu, w), found[-1], Finish())  # type: ignore[arg-type]
    np.testing.assert_array_equal(found[0].view(np.uint16), found[1].view(np.uint16))


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("addends", ADDENDS, ids=lambda addends: str(addends["activation"]))
def test_what_follows_on_sums(gpu: EmulatedGpu, dtype: np.dtype, addends: dict[str, Any]) -> None:
    numbers = np.random.default_rng()
    sums = numbers.standard_normal((3, 7, 999)).astype(dtype if dtype.itemsize > 2 else F32)
    bias, residual = (numbers.standard_normal(shape).astype(dtype) for shape in ((999,), sums.shape))
    for given in ((bias, None), (None, residual), (bias, residual), (None, None)):
        wanted = exact(sums, np.eye(999), bias=given[0], residual=given[1], **addends)
        result = sums.copy() if dtype == sums.dtype else gpu.empty(sums.shape, dtype)
        source = result if dtype == sums.dtype else sums
        Finish(bias=given[0], residual=given[1], **addends).launch(gpu, source, result)  # type: ignore[arg-type]
        unit = UNIT.get(dtype, 2.0**-48)
        np.testing.assert_allclose(result.astype(F64), wanted, rtol=unit, atol=2 * unit)


SHARED = [("none", (520, 264, 8)), ("none", (264, 1048)), ("silu", (520, 520)), ("gelu_tanh", (264, 264))]


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize(("gate", "sizes"), SHARED, ids=str)
def test_several_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: np.dtype, gate: str, sizes: Any
) -> None:
    monkeypatch.setattr(few_rows, "FEWEST_BYTES", 1)
    kernel, numbers = lookup("irpar", "SharedMatMul", 1), np.random.default_rng()
    assert kernel is not None
    for multiprocessors, rows in ((1, 2), (3, 1), (40, 1)):
        found = []
        gpus = [EmulatedGpu(tmp_path, multiprocessors, is_backwards=is_backwards) for is_backwards in (False, True)]
        a = placed(gpus[0], (numbers.standard_normal((1, rows, 70))[0] / 8).astype(dtype), 8)[None]
        matrices = [placed(gpus[0], numbers.standard_normal((70, size)).astype(dtype), 8) for size in sizes]
        for gpu in gpus:
            results = kernel(gpu, [a, *matrices], {"gate": gate}, len(sizes) if gate == "none" else 1)
            assert results is not None
            assert gpu.launched == ["columns_of"]
            found.append(results)
        products = [np.matmul(a.astype(F64), b.astype(F64)) for b in matrices]
        wanted = products if gate == "none" else [opened(gate, products[0]) * products[1]]
        for result, again, right in zip(*found, wanted, strict=True):
            assert result.shape == right.shape
            np.testing.assert_allclose(result.astype(F64), right, rtol=4 * UNIT[dtype], atol=4 * UNIT[dtype])
            np.testing.assert_array_equal(result.view(np.uint8), again.view(np.uint8))


def opened(gate: str, x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x)) if gate == "silu" else gelu_of_tanh(np, x)


@pytest.mark.parametrize("wrong", ["small", "columns", "vector", "four", "other sizes"])
def test_what_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(few_rows, "FEWEST_BYTES", 1 << 20 if wrong == "small" else 1)
    kernel, a, b = lookup("irpar", "SharedMatMul", 1), np.ones((1, 64), F16), np.ones((64, 64), F16)
    assert kernel is not None
    matrices = [b.T if wrong == "columns" else b] * (4 if wrong == "four" else 2)
    if wrong == "other sizes":
        matrices[1] = np.ones((64, 72), F16)
    attributes = {"gate": "silu"} if wrong == "other sizes" else {}
    assert kernel(EmulatedGpu(tmp_path), [a[0] if wrong == "vector" else a, *matrices], attributes, 1) is None


def fits(
    a: np.ndarray, b: np.ndarray, dtype: np.dtype | None = None, addresses: tuple[int, int] = (4096, 4096)
) -> bool:
    result = np.empty((len(a), b.shape[1]), dtype or a.dtype)
    return few_rows.is_fit(call_of(a, b), a, b, result, addresses)


def test_which_products_are_such() -> None:
    x, w = np.empty((1, 1024), F16), np.empty((1024, 1024), F16)
    assert fits(x, w)
    assert fits(x, w.T)
    assert fits(np.empty((2, 1024), F16), w)
    assert not fits(np.empty((3, 1024), F16), w), "too many rows"
    assert not fits(np.empty((1024, 2), F16).T, w), "rows that do not lie one after the other"
    assert not fits(x[:, :256], w[:256]), "a small matrix"
    assert not fits(x, np.empty((1024, 1025), F16)), "no whole chunks"
    assert not fits(x, np.empty((1024, 1028), F16)[:, :1024]), "rows that begin anywhere"
    assert not fits(x, w, addresses=(4096, 4104)), "a matrix that begins anywhere"
    assert fits(x, w, addresses=(4098, 4096)), "single elements of the rows are read"
    assert not fits(x, w.T, addresses=(4104, 4096)), "chunks of the rows are read"
    assert not fits(x, w, F32), "another dtype"
    assert not fits(np.empty((1, 1024), F64), np.empty((1024, 1024), F64))
