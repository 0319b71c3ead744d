"""Attention's CUDA kernels on a device, against float64: sizes, masks, layouts, what lies around the results."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from irpar.kernels.cuda import Gpu
from tests.budget import budget
from tests.gpu import NEEDS_GPU, cupy

from . import test_attention_gradient as gradients
from .attention_cases import Case, check, expected, found, operands
from .test_attention import CAUSAL, random_cases

pytestmark = NEEDS_GPU

HEADS = [
    *(("f16", head) for head in (32, 64, 72, 128, 192, 256)),
    *(("bf16", head) for head in (64, 128)),
    *((dtype, head) for dtype in ("f32", "tf32") for head in (40, 64, 128, 256)),
]
GUARD = 256
"""Bytes on each side of a result."""


@cache
def device() -> Gpu:
    return Gpu(cupy())


@cache
def plain_device() -> Gpu:
    """Without products of warpgroups."""
    gpu = Gpu(cupy())
    gpu.arch = min(gpu.arch, 80)
    return gpu


def run(case: Case, seed: int = 0, on: Callable[[], Gpu] = device) -> None:
    """A call into poisoned results with guards around them, compared with float64."""
    module = cupy()
    given = operands(case, seed)
    wanted = expected(case, given)
    on_device = [None if x is None else as_laid_out(module, x) for x in given]
    memories, outs = [], []
    for right in wanted:
        dtype = given[0].dtype
        count = right.size * dtype.itemsize
        memory = module.full(count + 2 * GUARD, 0xFF, np.uint8)
        memories.append(memory)
        outs.append(memory[GUARD : GUARD + count].view(dtype).reshape(right.shape))
    results = found(on(), case, on_device, tuple(outs))
    assert results is not None
    check(case, tuple(result.get() for result in results), given)
    for memory, out, result in zip(memories, outs, results, strict=True):
        assert result.data.ptr == out.data.ptr
        assert bool((memory[:GUARD] == 0xFF).all())
        assert bool((memory[-GUARD:] == 0xFF).all())
    again = found(on(), case, on_device)
    assert again is not None
    for first, second in zip(results, again, strict=True):
        np.testing.assert_array_equal(first.get().view(np.uint8), second.get().view(np.uint8))


def as_laid_out(module: Any, x: Any) -> Any:
    """On the device, with the strides that an array has on the host."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    base = base if base.flags.c_contiguous else np.ascontiguousarray(base)
    start = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    memory = module.asarray(base.reshape(-1).view(np.uint8))
    return module.ndarray(x.shape, x.dtype, memory.data + start, x.strides)


@pytest.mark.parametrize(("dtype", "head"), HEADS)
def test_sizes_of_heads(dtype: str, head: int) -> None:
    run(Case(dtype=dtype, heads=4, queries=150, keys=203, head=head))
    run(Case(dtype=dtype, heads=4, queries=150, keys=150, head=head, layout="rows", attributes=CAUSAL))
    if dtype != "tf32":
        run(Case(dtype=dtype, heads=4, queries=1, keys=1, past=777, head=head, results=3))


def test_random_calls() -> None:
    for place, case in enumerate(random_cases(budget(200), random.Random(23))):
        run(case, place)


@pytest.mark.parametrize("head", [64, 128])
def test_sizes_without_warpgroups(head: int) -> None:
    run(Case(heads=4, queries=150, keys=203, head=head), on=plain_device)
    run(Case(dtype="bf16", heads=4, queries=150, keys=150, head=head, attributes=CAUSAL), on=plain_device)
    gradients.check(plain_device(), Case(heads=4, key_heads=2, queries=150, keys=150, head=head, attributes=CAUSAL))


@pytest.mark.parametrize(
    "case",
    [
        Case(heads=8, key_heads=2, queries=700, keys=1500, head=64),
        Case(dtype="bf16", heads=6, key_heads=2, queries=700, keys=1500, head=128, attributes=CAUSAL),
        Case(batch=3, heads=4, queries=500, keys=1300, head=64, valid=True),
        Case(dtype="bf16", batch=3, heads=4, queries=500, keys=1300, head=128, valid=True, attributes=CAUSAL),
        Case(heads=4, queries=1100, keys=1100, head=64, attributes={"left_window_size": 200, "right_window_size": 30}),
        Case(heads=4, queries=1100, keys=1100, head=128, value_head=64, attributes={"left_window_size": 3}),
        Case(batch=2, heads=4, queries=600, keys=900, head=64, value_head=128, mask=("f16", "hq"), layout="rows"),
        Case(batch=2, heads=40, key_heads=8, queries=600, keys=700, head=64, mask=("bool", "h"), layout="strided"),
        Case(batch=2, heads=4, queries=600, keys=700, head=128, mask=("f32", ""), attributes={"softcap": 3.0}),
    ],
    ids=str,
)
def test_many_tiles(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("past", [0, 1, 31, 32, 33, 255, 1000, 2047, 4095])
def test_one_query_and_a_cache(dtype: str, past: int) -> None:
    run(Case(dtype=dtype, batch=2, heads=8, key_heads=2, queries=1, keys=1, past=past, head=128, results=3))
    run(Case(dtype=dtype, heads=12, key_heads=12, queries=1, keys=1, past=past, head=64, attributes=CAUSAL))


@pytest.mark.parametrize("dtype", ["f32", "tf32", "f16"])
@pytest.mark.parametrize("length", [1, 2, 9, 63, 64, 65, 127, 128, 129, 500, 1024])
def test_lengths(dtype: str, length: int) -> None:
    run(Case(dtype=dtype, batch=2, heads=12, key_heads=4, queries=length, keys=length, head=64, attributes=CAUSAL))
    mask = Case(dtype=dtype, batch=2, queries=length, keys=length + 3, head=64, mask=("bool", "h"), layout="strided")
    run(mask)


@pytest.mark.parametrize("dtype", ["f32", "tf32", "f16"])
def test_many_blocks(dtype: str) -> None:
    """The largest tiles, which take more than 48 KB of shared memory."""
    for head in (64, 128, 256):
        run(Case(dtype=dtype, batch=4, heads=32, key_heads=8, queries=600, keys=600, head=head, attributes=CAUSAL))


@pytest.mark.parametrize(
    "case",
    [
        *gradients.CASES,
        Case(batch=2, heads=12, key_heads=12, queries=513, keys=513, head=64, attributes=CAUSAL),
        Case(dtype="bf16", heads=8, key_heads=2, queries=300, keys=300, head=128, attributes=CAUSAL),
        Case(batch=2, heads=8, key_heads=2, queries=700, keys=900, head=64, mask=("bool", "h")),
    ],
    ids=str,
)
def test_gradients(case: Case) -> None:
    gradients.check(device(), case)
