"""Attention for training: nothing of the size of its scores is written, in either direction."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..operands import contiguous_result
from ..registry import Array
from .attention import (
    CUDA_MASKS,
    ELEMENTS,
    Call,
    aligned,
    fits,
    in_tiles,
    result_arrays,
    sizes_of,
)
from .attention_division import Sizes, division_of_gradients, has_warpgroups, padded
from .gpu import Gpu, pointers_of, strides_of
from .programs import Program
from .registry import cuda_kernel

_LONGEST_HEAD = 128
"""Longer ones leave no registers for the sums of k and v."""
_ROWS = 64
"""Of a block's own."""
_FLOAT = np.dtype(np.float32)


def _prepared(
    gpu: Gpu, q: Array, k: Array, v: Array, mask: Array | None, scale: float, is_causal: int
) -> tuple[Sizes, Call] | None:
    """Sizes and what is computed beside the products; None where it is nothing for these kernels."""
    if q.dtype not in ELEMENTS or any(x.ndim != 4 or x.dtype != q.dtype for x in (q, k, v)):
        return None
    of = sizes_of(q, k, v, None, None, mask)
    if of is None or not fits(of) or max(of.head, of.value_head) > _LONGEST_HEAD or of.seen != of.keys:
        return None
    if mask is not None:
        if mask.dtype not in CUDA_MASKS:
            return None
        mask = gpu.module.broadcast_to(mask, (of.batch, of.heads, of.queries, of.keys))
    if _shared_bytes(of, q.dtype) > gpu.shared_bytes:
        return None
    return of, Call(mask, None, 0, -1, 0 if is_causal else -1, scale, 0.0)


@cuda_kernel("AttentionForward", since=1, domain="irpar")
def attention_forward(
    gpu: Gpu, q: Array, k: Array, v: Array, mask: Array | None = None, *, scale: float, is_causal: int = 0
) -> tuple[Array, Array] | None:
    """See `irpar.kernels.attention_gradient.attention_forward`."""
    prepared = _prepared(gpu, q, k, v, mask, scale, is_causal)
    if prepared is None:
        return None
    of, call = prepared
    y, heads = result_arrays(gpu, q, of, None)
    logarithms = gpu.empty((of.batch, of.heads, of.queries), _FLOAT)
    in_tiles(gpu, q, k, v, heads, logarithms, of, call)
    return y, logarithms


@cuda_kernel("AttentionGradient", since=1, domain="irpar")
def attention_gradient(
    gpu: Gpu,
    q: Array,
    k: Array,
    v: Array,
    dy: Array,
    y: Array,
    logarithms: Array,
    mask: Array | None = None,
    *,
    scale: float,
    is_causal: int = 0,
    outs: Sequence[Array | None] = (),
) -> tuple[Array, Array, Array] | None:
    """See `irpar.kernels.attention_gradient.attention_gradient`: first of q, then of k and v."""
    prepared = _prepared(gpu, q, k, v, mask, scale, is_causal)
    if prepared is None or dy.dtype != q.dtype or y.dtype != q.dtype or dy.shape != y.shape:
        return None
    of, call = prepared
    if dy.shape != (of.batch, of.heads, of.queries, of.value_head):
        return None
    means = gpu.empty((of.batch, of.heads, of.queries), _FLOAT)
    logarithms = gpu.module.ascontiguousarray(logarithms)
    dq, dk, dv = (_result_like(gpu, x, out) for x, out in zip((q, k, v), (*outs, None, None, None), strict=False))
    operands = [aligned(gpu, x) for x in (q, k, v, dy)]
    steps = [stride for x in operands for stride in strides_of(x)[:3]]
    counts = [np.int32(count) for count in (of.group, of.queries, of.keys)]
    numbers = [*call.numbers()[:-1], np.float32(scale), *steps, *call.strides()]
    inputs = [*operands, *pointers_of(call.mask), logarithms, means]
    if has_warpgroups(gpu, of, q.dtype):
        found = division_of_gradients(of, call.defines(q.dtype, of))
        _mean_gradients(gpu, found.program, of, y, operands[3], means)
        rows = of.heads * -(-of.queries // found.rows) + of.key_heads * -(-of.keys // found.rows)
        arguments = [*inputs, dq, dk, dv, np.int32(of.batch), np.int32(of.heads), *counts, *numbers]
        gpu.launch(found.program, found.function, of.batch * rows, found.threads, arguments, found.shared)
        return dq, dk, dv
    first, second = (_program(of, call, q.dtype, of_keys) for of_keys in (0, 1))
    _mean_gradients(gpu, first, of, y, operands[3], means)
    shared, threads = _shared_bytes(of, q.dtype), 256 if q.dtype == _FLOAT else 128
    blocks = -(-of.queries // _ROWS), of.heads, of.batch
    gpu.launch(first, "attention_gradient", blocks, threads, [*inputs, dq, dq, *counts, *numbers], shared)
    blocks = -(-of.keys // _ROWS), of.key_heads, of.batch
    gpu.launch(second, "attention_gradient", blocks, threads, [*inputs, dk, dv, *counts, *numbers], shared)
    return dq, dk, dv


def _mean_gradients(gpu: Gpu, program: Program, of: Sizes, y: Array, dy: Array, means: Array) -> None:
    """Of a program that has that function (attention_means.cuh)."""
    y, threads = aligned(gpu, y), 128
    chunks = of.value_head * y.dtype.itemsize // 16
    lanes = min(max(2, 1 << (chunks - 1).bit_length()), 32)
    blocks = -(-of.queries // (threads // lanes)), of.heads, of.batch
    given = [y, dy, means, np.int32(of.queries), *strides_of(y)[:3], *strides_of(dy)[:3]]
    gpu.launch(program, "mean_gradients", blocks, threads, given)


def _result_like(gpu: Gpu, x: Array, out: Array | None) -> Array:
    """Where the gradient of an operand goes: `out`, where that fits, else new memory."""
    result = contiguous_result(out, x.shape, x.dtype, gpu)
    return result if gpu.address(result) % 16 == 0 else gpu.empty(x.shape, x.dtype)


def _columns(of: Sizes) -> int:
    return 64 if max(of.head, of.value_head) <= 64 else 32


def _program(of: Sizes, call: Call, dtype: "np.dtype[Any]", of_keys: int) -> Program:
    defines = call.defines(dtype, of)
    if dtype == _FLOAT:
        return Program.file("attention_gradient_f32.cu", **defines, OF_KEYS=of_keys)
    return Program.file("attention_gradient.cu", **defines, OF_KEYS=of_keys, COLUMNS=_columns(of))


def _shared_bytes(of: Sizes, dtype: "np.dtype[Any]") -> int:
    """Of a block: its own rows, two tiles, and in float32 the factors of both."""
    if dtype == _FLOAT:
        return 4 * ((_ROWS + 2 * 32) * (of.head + of.value_head + 8) + 2 * _ROWS * (32 + 4))
    return 2 * (_ROWS + 2 * _columns(of)) * (padded(of.head) + padded(of.value_head) + 16)


def all_programs() -> Iterator[Program]:
    """Some of the source."""
    for element, mask, head in ((1, 0, 64), (2, 2, 128)):
        for of_keys in (0, 1):
            sizes = {"HEAD": head, "VALUE_HEAD": head, "OF_KEYS": of_keys, "COLUMNS": 64 if head <= 64 else 32}
            defines: dict[str, Any] = {"ELEMENT": element, "MASK": mask, "SHAPED": int(mask > 0), **sizes}
            yield Program.file("attention_gradient.cu", **defines)
        sizes = {"HEAD": head, "VALUE_HEAD": head, "GROUPS": head // 64, "BLOCKS": 1, "STAGES": 2}
        defines = {"ELEMENT": element, "MASK": mask, "SHAPED": int(mask > 0), **sizes}
        yield Program.file("attention_gradient_warpgroups.cu", "a", **defines)
    for mask, head in ((0, 64), (2, 128)):
        for of_keys in (0, 1):
            floats: dict[str, Any] = {"HEAD": head, "VALUE_HEAD": head, "OF_KEYS": of_keys}
            yield Program.file("attention_gradient_f32.cu", ELEMENT=0, MASK=mask, SHAPED=int(mask > 0), **floats)
