"""Sample nodes of com.microsoft's attention."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .draws import floats, ints, scalar
from .rule_proof import Constant, Sample
from .samples_microsoft import made


def _multi_head() -> Iterator[Sample]:
    batch, heads, size = 3, 4, 2
    wide = heads * size
    query, key, value = floats(batch, 5, wide), floats(batch, 6, wide), floats(batch, 6, wide)
    yield made("MultiHeadAttention", query, key, value, num_heads=heads)
    yield made("MultiHeadAttention", query, key, floats(batch, 6, heads * 3), floats(2 * wide + 12), num_heads=heads)
    mask = np.asarray([[1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]], np.int32)
    bias = floats(1, heads, 5, 6)
    yield made("MultiHeadAttention", query, key, value, None, mask, bias, num_heads=heads)
    yield made(
        "MultiHeadAttention", query, floats(batch, heads, 6, size), floats(batch, heads, 6, size), num_heads=heads
    )
    lengths = np.asarray([6, 3, 2], np.int32)
    yield made(
        "MultiHeadAttention", query, key, value, None, lengths, num_heads=heads, mask_filter_value=-3.0, scale=0.5
    )
    past = floats(batch, heads, 4, size), floats(batch, heads, 4, size)
    new = floats(batch, 5, wide), floats(batch, 5, wide)
    attributes: dict[str, Any] = {"num_heads": heads, "unidirectional": 1, "results": 3}
    yield made("MultiHeadAttention", query, *new, None, None, floats(batch, 1, 5, 9), *past, **attributes)


def _grouped() -> Iterator[Sample]:
    batch, heads, key_heads, size, steps = 3, 8, 4, 16, 4
    counts: dict[str, Any] = {"num_heads": heads, "kv_num_heads": key_heads, "results": 3}

    def rows(count: int, length: int = steps) -> Any:
        return floats(batch, length, count * size, low=-1, high=1)

    lengths, total = np.asarray([3, 2, 3], np.int32), Constant(np.asarray(steps, np.int32))
    separate = rows(heads), rows(key_heads), rows(key_heads)
    yield made("GroupQueryAttention", *separate, None, None, lengths, total, **counts)
    packed = rows(heads + 2 * key_heads)
    rotary = floats(9, size // 2), floats(9, size // 2)
    yield made("GroupQueryAttention", packed, None, None, None, None, lengths, total, *rotary, do_rotary=1, **counts)
    # of these ONNX Runtime's CPU kernel reads the first and counts on
    places = np.tile(np.arange(3, 3 + steps), (batch, 1))
    turned = (*separate, None, None, np.full(batch, steps - 1, np.int32), total, *rotary, places)
    soft: dict[str, Any] = {**counts, "softcap": 0.5, "local_window_size": 2, "smooth_softmax": 1, "scale": 0.7}
    yield made("GroupQueryAttention", *turned, do_rotary=1, rotary_interleaved=1, **soft)
    cache = (floats(batch, key_heads, 5, size), floats(batch, key_heads, 5, size))
    late, more = np.asarray([5, 3, 4], np.int32), Constant(np.asarray(6, np.int32))
    token = rows(heads, 1), rows(key_heads, 1), rows(key_heads, 1)
    extra: dict[str, Any] = {**counts, "softcap": 3.0, "local_window_size": 3}
    yield made("GroupQueryAttention", *token, *cache, late, more, **extra)
    bias = floats(batch, heads, steps, steps)
    for cap in (0.0, 0.5):
        others = (None, None, lengths, total, None, None, None, bias, floats(heads))
        yield made("GroupQueryAttention", *separate, *others, softcap=cap, **counts)


def _projected() -> Iterator[Sample]:
    batch, steps, channels, heads, size = 3, 5, 6, 2, 4
    wide = heads * size
    data, weights, bias = floats(batch, steps, channels), floats(channels, 3 * wide), floats(3 * wide)
    yield made("Attention", data, weights, bias, num_heads=heads)
    mask = np.asarray([[1] * 5, [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]], np.int32)
    yield made("Attention", data, weights, bias, mask, num_heads=heads, unidirectional=1)
    past = floats(2, batch, heads, 4, size)
    yield made("Attention", data, weights, bias, None, past, num_heads=heads, results=2)
    yield made("Attention", data, floats(channels, 22), floats(22), num_heads=heads, qkv_hidden_sizes=[8, 8, 6])
    scores = floats(batch, heads, steps, steps)
    yield made("Attention", data, weights, bias, None, None, scores, num_heads=heads)
    small: dict[str, Any] = {"dtype": np.uint8, "low": 0}
    scale, zero = Constant(np.asarray(0.1, np.float32)), Constant(np.asarray(3, np.uint8))
    quantised = (ints(batch, steps, channels, **small), ints(channels, 3 * wide, **small))
    yield made("QAttention", *quantised, bias, scale, scale, None, zero, zero, num_heads=heads)


def _rotary() -> Iterator[Sample]:
    caches, places = (floats(9, 4), floats(9, 4)), ints(3, 5, low=0, high=9)
    yield made("RotaryEmbedding", floats(3, 5, 32), places, *caches)
    yield made("RotaryEmbedding", floats(3, 4, 5, 8), places, *caches)
    yield made("RotaryEmbedding", floats(3, 5, 32), scalar(2).array.reshape(1), *caches)
    half = floats(9, 2), floats(9, 2)
    yield made("RotaryEmbedding", floats(3, 5, 32), places, *half, num_heads=4, rotary_embedding_dim=4)
    streams = ints(3, 3, 5, low=0, high=9)
    yield made("MRotaryEmbedding", floats(3, 5, 32), streams, *caches, mrope_section=[1, 1, 2], num_heads=4)
    halves = floats(9, 6), floats(9, 6)
    mixed: dict[str, Any] = {"mrope_section": [3, 1, 2], "mrope_layout": 1, "interleaved": 1}
    yield made("MRotaryEmbedding", floats(3, 4, 5, 12), streams, *halves, **mixed)


HEADS = [*_multi_head(), *_grouped(), *_projected(), *_rotary()]
