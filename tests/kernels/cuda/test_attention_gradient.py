"""Attention for training: irpar's own kernels against finite sums, and those in CUDA C++, emulated, against them."""

import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irpar.kernels import lookup
from irpar.kernels.cuda import lookup as lookup_cuda
from irpar.kernels.cuda.cublas_lt import tf32

from .attention_cases import DTYPES, TOLERANCES, Case, operands
from .emulation import NEEDS_COMPILER, EmulatedGpu

CASES = [
    Case(queries=75, keys=131, heads=4),
    Case(queries=70, keys=70, heads=2, head=64, attributes={"is_causal": 1}),
    Case(dtype="bf16", batch=2, queries=40, keys=70, heads=4, head=40, value_head=24, mask=("bool", "h")),
    Case(dtype="f32", batch=2, queries=40, keys=70, heads=4, head=40, value_head=24, mask=("bool", "h")),
    Case(dtype="f32", queries=70, keys=70, heads=2, key_heads=1, head=128, attributes={"is_causal": 1}),
    Case(dtype="tf32", batch=2, queries=40, keys=70, heads=4, head=40, value_head=24, mask=("bool", "h")),
    Case(dtype="tf32", queries=70, keys=70, heads=2, key_heads=1, head=128, attributes={"is_causal": 1}),
    Case(queries=33, keys=65, heads=2, key_heads=1, head=128, mask=("f32", "bq"), layout="strided"),
    Case(dtype="bf16", batch=2, queries=130, keys=200, heads=4, key_heads=2, head=64, value_head=128),
]


def call(table: Any, first: Any, name: str, given: list[Any], case: Case, results: int, outs: Any = None) -> Any:
    kernel = table("irpar", name, 1)
    assert kernel is not None
    with tf32(case.dtype == "tf32"):
        return kernel(first, given, {"scale": 0.2, **case.attributes}, results, outs)


def gradient_of(case: Case, rng: np.random.Generator) -> Any:
    shape = (case.batch, case.queries, case.heads, case.value_head or case.head)
    return rng.standard_normal(shape).astype(DTYPES[case.dtype]).transpose(0, 2, 1, 3)


def test_the_reference_against_differences() -> None:
    case = Case(queries=3, keys=4, heads=2, key_heads=1, head=8, mask=("f32", "bh"))
    q, k, v, mask = (x if x is None else x.astype(np.float64) for x in operands(case)[:4])
    mask = np.maximum(mask, -9)
    dy = gradient_of(case, np.random.default_rng(1)).astype(np.float64)
    y, logarithms = call(lookup, np, "AttentionForward", [q, k, v, mask], case, 2)
    found = call(lookup, np, "AttentionGradient", [q, k, v, dy, y, logarithms, mask], case, 3)

    def loss(*given: Any) -> float:
        return float((call(lookup, np, "AttentionForward", [*given, mask], case, 2)[0] * dy).sum())

    for place, gradient in enumerate(found):
        for index in [(0, 0, 0, 0), (0, 0, 2, 5), (0, 0, 1, 7)]:
            moved = [[x.copy() for x in (q, k, v)] for _ in range(2)]
            moved[0][place][index] += 1e-4
            moved[1][place][index] -= 1e-4
            slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-4
            assert abs(slope - gradient[index]) < 1e-5


def check(gpu: Any, case: Case, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    given, dy = operands(case, seed)[:4], gradient_of(case, rng)
    on_device = [None if x is None else gpu.module.asarray(x) for x in (*given, dy)]
    forward = call(lookup_cuda, gpu, "AttentionForward", on_device[:4], case, 2)
    assert forward is not None
    backward = [*on_device[:3], on_device[4], *forward, on_device[3]]
    outs = tuple(gpu.empty(x.shape, x.dtype) for x in on_device[:3])
    for places in (None, outs):
        gradients = call(lookup_cuda, gpu, "AttentionGradient", backward, case, 3, places)
        assert gradients is not None
    assert all(map(operator.is_, gradients, outs))

    wide = [x if x is None or x.dtype == bool else x.astype(np.float64) for x in given]
    y, logarithms = call(lookup, np, "AttentionForward", wide, case, 2)
    dys = dy.astype(np.float64)
    right = call(lookup, np, "AttentionGradient", [*wide[:3], dys, y, logarithms, wide[3]], case, 3)
    tolerance = TOLERANCES[case.dtype]
    found = [x if isinstance(x, np.ndarray) else x.get() for x in (*forward, *gradients)]
    rounding = 5e-3 if case.dtype == "tf32" else 1e-4
    np.testing.assert_allclose(found[1], logarithms, rtol=rounding, atol=rounding)
    for one, wanted in zip((found[0], *found[2:]), (y, *right), strict=True):
        assert one.dtype == DTYPES[case.dtype]
        assert one.shape == wanted.shape
        largest = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(one.astype(np.float64), wanted, rtol=0, atol=4 * tolerance * largest)


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, arch: int, tmp_path: Path) -> None:
    check(EmulatedGpu(tmp_path, arch=arch), case)


def test_what_is_left_to_others(tmp_path: Path) -> None:
    gpu = EmulatedGpu(tmp_path)
    for case in (replace(CASES[0], head=136), replace(CASES[0], head=36)):
        assert call(lookup_cuda, gpu, "AttentionForward", operands(case)[:3], case, 2) is None
