"""Attention without a matrix of scores in memory: in tiles, and for few queries over ranges of keys.

Scores and sums are float32's. What is asked for beside the result and the cache (the scores) is left to
`irpar.kernels.attention`, as are head sizes that 8 does not divide or that are above 256.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..registry import Array
from .attention_division import Sizes, division
from .gpu import Gpu, pointers_of, strides_of
from .programs import Program
from .registry import cuda_kernel

ELEMENTS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
"""What `ELEMENT` is in the programs."""
CUDA_MASKS = {
    np.dtype(np.bool_): 1,
    np.dtype(np.float32): 2,
    np.dtype(np.float16): 3,
    np.dtype(ml_dtypes.bfloat16): 4,
}
"""What `MASK` is in the programs."""
_FLOAT = 1
"""ONNX's number of float32."""
_HEAD_MULTIPLE, _LONGEST_HEAD = 8, 256
_FEW_QUERIES, _MOST_ROWS = 8, 32
"""Up to so many queries, of so many in the heads that share one of keys, are computed over ranges of keys."""
_MOST_BLOCKS = 65_535
"""Of a grid's second and third dim."""
_FAR = 2**30
"""A window that reaches further is none."""


@dataclass(frozen=True)
class Call:
    """What is computed beside the products.

    Attributes:
        mask: broadcast to (batch, heads, queries, keys that it reaches); or None.
        valid: how many keys each member of the batch has, int64; or None.
        offset: the place of the first query, where `valid` does not tell it.
        left, right: how far a query sees; -1 for all.
        scale, cap: of the scores; a cap of 0 is none.
    """

    mask: Array | None
    valid: Array | None
    offset: int
    left: int
    right: int
    scale: float
    cap: float

    @property
    def is_shaped(self) -> bool:
        """Whether a score is more than a product with a positive number."""
        return self.mask is not None or self.cap != 0 or not self.scale > 0

    def defines(self, dtype: "np.dtype[Any]", of: Sizes) -> dict[str, Any]:
        """What the programs are told."""
        return {
            "ELEMENT": ELEMENTS[dtype],
            "HEAD": of.head,
            "VALUE_HEAD": of.value_head,
            "MASK": 0 if self.mask is None else CUDA_MASKS[self.mask.dtype],
            "SHAPED": 2 if self.cap != 0 else int(self.is_shaped),
        }

    def numbers(self) -> list[Any]:
        """The arguments from the offset to the cap."""
        places = [np.int32(place) for place in (self.offset, self.left, self.right)]
        return [*places, np.float32(self.scale), np.float32(self.cap)]

    def strides(self) -> list[Any]:
        """Of the mask, in elements."""
        return [np.int64(0)] * 4 if self.mask is None else strides_of(self.mask)


@cuda_kernel("Attention", since=23)
def attention(
    gpu: Gpu,
    q: Array,
    k: Array,
    v: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    n_outputs: int = 1,
    outs: tuple[Array | None, ...] | None = None,
) -> tuple[Array, ...] | None:
    """y, present key, present value; see `irpar.kernels.attention.attention`."""
    if n_outputs > 3 or qk_matmul_output_mode not in (0, 1, 2, 3) or softmax_precision not in (None, _FLOAT):
        return None
    if q.dtype not in ELEMENTS or any(x is not None and x.dtype != q.dtype for x in (k, v, past_key, past_value)):
        return None
    queries, key, value = _by_heads(q, q_num_heads), _by_heads(k, kv_num_heads), _by_heads(v, kv_num_heads)
    if queries is None or key is None or value is None:
        return None
    of = sizes_of(queries, key, value, past_key, past_value, attn_mask)
    if of is None or not fits(of):
        return None
    mask = None
    if attn_mask is not None:
        if attn_mask.dtype not in CUDA_MASKS:
            return None
        try:
            mask = gpu.module.broadcast_to(attn_mask, (of.batch, of.heads, of.queries, of.seen))
        except ValueError:
            return None
    if nonpad_kv_seqlen is not None:
        if nonpad_kv_seqlen.shape != (of.batch,) or nonpad_kv_seqlen.dtype != np.int64:
            return None
        nonpad_kv_seqlen = gpu.module.ascontiguousarray(nonpad_kv_seqlen)
    left, right = (far if 0 <= far < _FAR else -1 for far in (left_window_size, 0 if is_causal else right_window_size))
    call = Call(
        mask,
        nonpad_kv_seqlen,
        of.past,
        left,
        right,
        1 / math.sqrt(of.head) if scale is None else scale,
        softcap,
    )
    given = (*(outs or ()), None, None, None)[:3]
    y, result = result_arrays(gpu, q, of, given[0])
    presents = []
    if n_outputs > 1:
        for size, out in ((of.head, given[1]), (of.value_head, given[2])):
            shape = (of.batch, of.key_heads, of.keys, size)
            presents.append(gpu.empty(shape, q.dtype) if out is None or not _is_aligned(gpu, out) else out)
    pasts = (past_key, past_value)
    if of.queries <= _FEW_QUERIES and of.group * of.queries <= _MOST_ROWS:
        _decode(gpu, queries, (key, value), pasts, presents, result, of, call)
    else:
        if past_key is not None or presents:
            presents = presents or [gpu.empty((*x.shape[:2], of.keys, x.shape[3]), q.dtype) for x in (key, value)]
            for present, past, added in zip(presents, pasts, (key, value), strict=True):
                if past is not None:
                    present[:, :, : of.past] = past
                present[:, :, of.past :] = added
            key, value = presents
        in_tiles(gpu, queries, key, value, result, None, of, call)
    if given[0] is not None and y is not given[0]:
        given[0][...] = y
        y = given[0]
    return y, *presents


def _by_heads(x: Array, heads: int | None) -> Array | None:
    """(batch, heads, sequence, size) of that shape or of (batch, sequence, heads * size); None for another."""
    if x.ndim == 4:
        return x
    if x.ndim != 3 or not heads or x.shape[2] % heads:
        return None
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def sizes_of(
    q: Array, k: Array, v: Array, past_key: Array | None, past_value: Array | None, mask: Array | None
) -> Sizes | None:
    """What the shapes say; None where they do not fit each other."""
    (batch, heads, queries, head), (_, key_heads, added, _), value_head = q.shape, k.shape, v.shape[3]
    if (past_key is None) != (past_value is None) or not key_heads or heads % key_heads:
        return None
    past = 0
    if past_key is not None and past_value is not None:
        if past_key.ndim != 4 or past_value.ndim != 4:
            return None
        past = past_key.shape[2]
        pasts = ((batch, key_heads, past, head), (batch, key_heads, past, value_head))
        if (past_key.shape, past_value.shape) != pasts:
            return None
    if (k.shape, v.shape) != ((batch, key_heads, added, head), (batch, key_heads, added, value_head)):
        return None
    keys = seen = past + added
    if mask is not None and mask.ndim and mask.shape[-1] > 1:
        seen = mask.shape[-1]  # What it does not reach is not seen.
        if seen > keys:
            return None
    return Sizes(batch, heads, key_heads, queries, past, keys, seen, head, value_head)


def fits(of: Sizes) -> bool:
    """Whether the kernels take such sizes: heads of whole chunks of 16 bytes, as many blocks as a grid has."""
    sizes = (of.head, of.value_head)
    blocks = max(of.batch, of.heads * (of.queries if of.queries <= _FEW_QUERIES else 1))
    return (
        all(size % _HEAD_MULTIPLE == 0 and 0 < size <= _LONGEST_HEAD for size in sizes)
        and min(of.batch, of.queries, of.keys) > 0
        and max(of.queries, of.keys) < _MOST_BLOCKS * 32
        and blocks <= _MOST_BLOCKS
    )


def _is_aligned(gpu: Gpu, x: Array) -> bool:
    """Whether 16-byte chunks of its last dim can be read."""
    if gpu.address(x) % 16 or x.strides[-1] != x.dtype.itemsize or abs(x.strides[-2]) >= 2**31:
        return False
    return all(stride % 16 == 0 for size, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if size > 1)


def aligned(gpu: Gpu, x: Array) -> Array:
    """An operand of which 16-byte chunks can be read: itself, or a copy."""
    if _is_aligned(gpu, x):
        return x
    copied = gpu.empty(x.shape, x.dtype)
    copied[...] = x
    return copied


def result_arrays(gpu: Gpu, q: Array, of: Sizes, out: Array | None) -> tuple[Array, Array]:
    """The result as the node has it and as (batch, heads, queries, size).

    Where nobody says where it goes, the heads of a query lie side by side, so that joining them moves nothing.
    """
    rows = (of.batch, of.queries, of.heads * of.value_head)
    is_given = out is not None and _is_aligned(gpu, out)
    y = out if is_given and out is not None else gpu.empty(rows, q.dtype)
    heads = _by_heads(y, of.heads)
    assert heads is not None
    return y if is_given or q.ndim == 3 else heads, heads


# -- in tiles -------------------------------------------------------------------------------------------------------


def in_tiles(gpu: Gpu, q: Array, k: Array, v: Array, y: Array, logarithms: Array | None, of: Sizes, call: Call) -> None:
    """Write y, and `logarithms` of what weights are normalised by (attention.cu), tile of keys by tile of keys."""
    operands = [aligned(gpu, x) for x in (q, k, v)]
    found = division(gpu, of, call.defines(q.dtype, of), q.dtype)
    counts = [np.int32(count) for count in (of.group, of.queries, of.seen)]
    strides = [stride for x in operands for stride in (*strides_of(x)[:2], np.int32(strides_of(x)[2]))]
    pointers = [*operands, *pointers_of(call.mask, call.valid), y, *pointers_of(logarithms)]
    arguments = [*pointers, *counts, *call.numbers(), *strides, *call.strides(), *strides_of(y)[:3]]
    blocks = of.heads, -(-of.queries // found.rows), of.batch
    gpu.launch(found.program, found.function, blocks, found.threads, arguments, found.shared)


# -- few queries ----------------------------------------------------------------------------------------------------

_AHEAD, _COUNT = 2, 2


def _decode(
    gpu: Gpu,
    q: Array,
    added: Sequence[Array],
    pasts: Sequence[Array | None],
    presents: Sequence[Array],
    y: Array,
    of: Sizes,
    call: Call,
) -> None:
    """Over ranges of keys, which are joined then; what is read of the cache is written to the present."""
    total = of.group * of.queries
    rows = min(1 << (total - 1).bit_length(), 8)
    chunks = [-(-size * q.dtype.itemsize // 16) for size in (of.head, of.value_head)]
    lanes = min(32, 1 << (max(chunks) - 1).bit_length())
    shared = 16 * 32 * _AHEAD * _COUNT * sum(-(-count // lanes) for count in chunks)  # of a warp
    shared = max(shared, 4 * rows * (2 + of.value_head))
    warps = 8 if rows > 4 or 16 * shared > gpu.shared_bytes else 16  # Eight rows take the registers of two blocks.
    blocks = of.batch * of.key_heads * -(-total // rows)
    wanted = max(1, gpu.multiprocessors // blocks)
    keys = max(-(-of.keys // wanted), warps * 32 // lanes)  # of a range; no fewer than a block reads at once
    splits = -(-of.keys // keys)

    q = aligned(gpu, q)
    new = [aligned(gpu, x) for x in added]
    old = [x if past is None else aligned(gpu, past) for past, x in zip(pasts, new, strict=True)]
    present = list(presents) or pointers_of(None, None)
    parts = states = y
    if splits > 1:
        parts = gpu.empty((blocks * splits * rows * of.value_head,), np.dtype(np.float32))
        states = gpu.empty((blocks * splits * rows * 2,), np.dtype(np.float32))
    pointers = [q, old[0], new[0], present[0], old[1], new[1], present[1]]
    pointers += [*pointers_of(call.mask, call.valid), y, parts, states, gpu.counters()]
    counts = [np.int32(n) for n in (of.heads, of.group, of.queries, of.past, of.keys, of.seen, keys)]
    strides = [stride for x in (q, old[0], new[0], old[1], new[1]) for stride in strides_of(x)[:3]]
    rest = [*call.numbers(), *strides, *call.strides(), *strides_of(y)[:3]]
    grid = (splits, of.key_heads * -(-total // rows), of.batch)
    program = Program.file("attention_decode.cu", **call.defines(q.dtype, of), ROWS=rows, WARPS=warps)
    shared_bytes = max(warps * shared, 4 * (4 + splits * rows * 2))
    gpu.launch(program, "decode", grid, warps * 32, [*pointers, *counts, *rest], shared_bytes)


def all_programs() -> Iterator[Program]:
    """Some of each source."""
    for element, mask in ((1, 0), (2, 2)):
        for head, tiles, keys in ((64, 2, 64), (128, 2, 32 if mask else 64), (256, 1, 64), (80, 1, 64)):
            sizes: dict[str, Any] = {"HEAD": head, "VALUE_HEAD": head, "WARPS": 4, "TILES": tiles, "KEYS": keys}
            yield Program.file("attention.cu", ELEMENT=element, MASK=mask, SHAPED=int(mask > 0), **sizes)
    for mask, head in ((0, 64), (2, 128), (0, 256)):
        sizes = {"HEAD": head, "VALUE_HEAD": head, "WARPS": 4, "TILES": 1 if head > 128 else 2, "KEYS": 32}
        yield Program.file("attention.cu", ELEMENT=0, MASK=mask, SHAPED=int(mask > 0), **sizes)
    for element, mask, groups, blocks in ((1, 0, 2, 2), (2, 2, 1, 2)):
        sizes = {"HEAD": 64 * groups, "VALUE_HEAD": 64, "GROUPS": groups, "BLOCKS": blocks, "KEYS": 64, "STAGES": 4}
        defines = {"ELEMENT": element, "MASK": mask, "SHAPED": mask, **sizes}
        yield Program.file("attention_warpgroups.cu", "a", **defines)
    for head, keys, mask in ((64, 64, 0), (128, 32, 2), (256, 32, 0)):
        sizes = {"HEAD": head, "VALUE_HEAD": head, "TILES": 4, "KEYS": keys}
        yield Program.file("attention_f32.cu", ELEMENT=0, MASK=mask, SHAPED=int(mask > 0), **sizes)
    for element, rows, head in ((0, 1, 128), (1, 4, 128), (2, 8, 64)):
        yield Program.file(
            "attention_decode.cu", ELEMENT=element, HEAD=head, VALUE_HEAD=head, MASK=0, SHAPED=0, ROWS=rows, WARPS=8
        )
