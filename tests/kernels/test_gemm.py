"""The calls that a matrix product makes of cuBLAS, executed by hand: any layout, any batch."""

import random

import numpy as np

from irpar.kernels import gemm


def flat(x: np.ndarray) -> tuple[np.ndarray, int]:
    """All elements of the array that x is a view of, and where x begins."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    start = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return base.reshape(-1), start // x.itemsize


def element_strides(x: np.ndarray) -> tuple[int, ...]:
    return tuple(stride // x.itemsize for stride in x.strides)


def matrix(elements: np.ndarray, operand: gemm.Operand, start: int, rows: int, columns: int) -> np.ndarray:
    """One matrix of an operand, by its leading dim."""
    assert operand.leading >= max(1, rows if operand.transposed else columns)
    steps = (1, operand.leading) if operand.transposed else (operand.leading, 1)
    strides = tuple(step * elements.itemsize for step in steps)
    return np.lib.stride_tricks.as_strided(elements[operand.offset + start :], (rows, columns), strides)


def execute(call: gemm.Gemm, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    (a_elements, a_start), (b_elements, b_start) = flat(a), flat(b)
    for place in range(call.batch):
        left = matrix(a_elements, call.a, a_start + place * call.a.stride, call.m, call.k)
        right = matrix(b_elements, call.b, b_start + place * call.b.stride, call.k, call.n)
        matrix(c.reshape(-1), call.c, place * call.c.stride, call.m, call.n)[...] = left @ right


def drawn(draw: random.Random, batch: list[int], rows: int, columns: int) -> np.ndarray:
    """A view of some array: dims in any order in memory, with gaps, some broadcast or missing."""
    kept = draw.randrange(len(batch) + 1)
    dims = [size if draw.random() < 0.7 else 1 for size in batch[len(batch) - kept :]] + [rows, columns]
    order = list(range(len(dims)))
    if draw.random() < 0.6:
        draw.shuffle(order)
    whole = np.random.default_rng(draw.randrange(2**32)).standard_normal(
        [dims[place] + draw.choice([0, 0, 1]) for place in order]
    )
    view = whole[tuple(slice(0, dims[place]) for place in order)].transpose(np.argsort(order))
    if kept and draw.random() < 0.2:
        view = np.broadcast_to(view, (*batch[len(batch) - kept :], rows, columns))
    return view


def test_calls_multiply_views_of_any_layout() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        batch = [draw.choice([1, 1, 2, 3]) for _ in range(draw.randrange(4))]
        m, k, n = (draw.choice([1, 2, 3, 5]) for _ in range(3))
        operands = []
        for x in (drawn(draw, batch, m, k), drawn(draw, batch, k, n)):
            is_taken = gemm.layout(x.shape[-2:], element_strides(x)[-2:]) is not None
            operands.append(x if is_taken else np.ascontiguousarray(x))
        a, b = operands
        shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        c = np.full((*shape, m, n), np.nan)
        for call in gemm.gemm_calls(a.shape, element_strides(a), b.shape, element_strides(b), shape):
            execute(call, a, b, c)
        np.testing.assert_allclose(c, a @ b, rtol=1e-12, atol=1e-12)


def calls(a: np.ndarray, b: np.ndarray) -> list[gemm.Gemm]:
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return gemm.gemm_calls(a.shape, element_strides(a), b.shape, element_strides(b), batch)


def test_a_shared_weight_makes_one_product_of_all_rows() -> None:
    (call,) = calls(np.empty((8, 128, 768)), np.empty((768, 64)))
    assert (call.m, call.n, call.k, call.batch) == (1024, 64, 768, 1)


def test_heads_are_multiplied_as_they_lie() -> None:
    """(batch, heads, places, size) as views of (batch, places, heads * size)."""
    q = np.empty((1, 128, 12, 64)).transpose(0, 2, 1, 3)
    k = np.empty((1, 128, 12, 64)).transpose(0, 2, 3, 1)
    (call,) = calls(q, k)
    assert (call.m, call.n, call.k, call.batch) == (128, 128, 64, 12)
    assert call.a == gemm.Operand(False, 0, 768, 64)
    assert call.b == gemm.Operand(True, 0, 768, 64)
    # Of several sequences the longest batch dim is that of the calls.
    many = calls(np.empty((4, 128, 12, 64)).transpose(0, 2, 1, 3), np.empty((4, 128, 12, 64)).transpose(0, 2, 3, 1))
    assert [call.batch for call in many] == [12] * 4


def test_one_token_of_many_sequences_is_one_product() -> None:
    (call,) = calls(np.empty((64, 1, 768)), np.empty((768, 64)))
    assert (call.m, call.batch) == (64, 1)
