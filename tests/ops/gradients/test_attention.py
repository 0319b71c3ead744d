"""Gradients of Attention and RotaryEmbedding: what is not drawn in the samples of their rules."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.ops.draws import bools, floats
from tests.ops.gradients.proof import check_sample, decomposed, feeds_of, module_of, run
from tests.ops.rule_proof import Array, Sample

BATCH, HEADS, GROUPS, SIZE = 2, 4, 2, 3
QUERIES, KEYS, PAST = 3, 4, 2


def attention(*more: Array | None, keys: int = KEYS, version: int = 23, results: int = 1, **given: Any) -> Sample:
    """Grouped heads, with masks and caches behind q, k and v."""
    data = floats(BATCH, HEADS, QUERIES, SIZE), floats(BATCH, GROUPS, keys, SIZE), floats(BATCH, GROUPS, keys, SIZE)
    return Sample("Attention", (*data, *more), given, version=version, results=results)


def cache() -> tuple[Array, Array]:
    return floats(BATCH, GROUPS, PAST, SIZE), floats(BATCH, GROUPS, PAST, SIZE)


def _nodes() -> Iterator[Sample]:
    yield attention(is_causal=1)
    yield attention(None, *cache(), is_causal=1, results=3)
    yield attention(floats(QUERIES, KEYS + PAST), *cache(), softcap=0.7, results=3)
    for mode in range(4):
        yield attention(
            floats(BATCH, 1, QUERIES, KEYS), is_causal=1, softcap=0.7, qk_matmul_output_mode=mode, results=4
        )
    mask = bools(HEADS, QUERIES, KEYS)
    mask[1, 2] = False  # a query that sees no key
    yield attention(mask)
    lengths = np.asarray([4, 3], np.int64)
    yield attention(None, None, None, lengths, is_causal=1, version=24)
    yield attention(bools(QUERIES, KEYS - 1), None, None, lengths, version=24)
    yield attention(floats(QUERIES, KEYS - 1), None, None, lengths, version=24)
    for sides in ({"left_window_size": 1}, {"right_window_size": 0, "left_window_size": 0}):
        yield attention(None, *cache(), version=26, results=3, **sides)


@pytest.mark.parametrize("sample", list(_nodes()), ids=str)
def test_node(sample: Sample) -> None:
    module = module_of(sample)
    found = decomposed(module)
    assert found is not None
    feeds = feeds_of(sample)
    for made, expected in zip(run(found, feeds).values(), run(module, feeds).values(), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-12, atol=1e-12)
    if sample.attributes.get("qk_matmul_output_mode") != 2:  # Minus infinity has no differences.
        check_sample(sample)


def test_symbolic_dims() -> None:
    symbols = {
        (0, 2): "queries",
        **{(place, 2): "keys" for place in (1, 2)},
        **{(place, 2): "past" for place in (4, 5)},
    }
    symbols |= {(place, 0): "batch" for place in (0, 1, 2, 4, 5)}
    check_sample(attention(None, *cache(), is_causal=1, results=3), symbols=symbols)


def test_rotary_of_neighbours() -> None:
    operands = floats(2, 3, 5, 8), floats(2, 5, 3), floats(2, 5, 3)
    sample = Sample("RotaryEmbedding", operands, {"interleaved": 1, "rotary_embedding_dim": 6}, version=23)
    found = decomposed(module_of(sample, None))
    assert found is not None
    (made,) = run(found, feeds_of(sample, None)).values()
    np.testing.assert_allclose(made, sample.whole[0], rtol=1e-5, atol=1e-6)
    check_sample(sample)
