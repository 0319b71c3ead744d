"""Attention that keeps keys and values: caches that are sharded stay where they are, and take in what is new."""

import itertools
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irpar.ops.attention import RING
from irpar.ops.local_programs.attention import LOCAL_PROGRAM
from irpar.ops.local_programs.cached_attention import CACHED
from irpar.sharding import filled_blocks
from tests.budget import budget, every

from .attentions import Cuts, blocks, cut_attention, draw_axes, draw_heads, draw_mask, heads, kinds, node_of
from .nodes import Operands, check, chosen

CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
CACHES = ("past_k", "past_v")


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Operands, dict[str, Any], Cuts, dict[str, int], list[str], int]:
    """Operands, attributes, how the operands are sharded, the mesh, the axes that cut the caches, and the opset."""
    mesh, axes, other = draw_axes(draw)
    parts = prod(mesh[axis] for axis in axes)
    sizes, new, is_causal = draw_heads(draw), draw(st.integers(1, 5)), draw(st.integers(0, 1))
    # ONNX Runtime lets a single query see all keys.
    queries = new if is_causal else draw(st.integers(1, 5))
    lengths = st.integers(parts, 4 * parts + 2)
    past = draw(lengths.filter(lambda length: all(filled_blocks(n, parts) == parts for n in (length, length + new))))
    operands = sizes.operands(queries, new)
    operands |= draw_mask(draw, [(queries, past + new), (sizes.batch, 1, queries, past + new)])
    operands["past_k"] = heads(sizes.batch, sizes.of_keys, past, sizes.size)
    operands["past_v"] = heads(sizes.batch, sizes.of_keys, past, sizes.value_size)
    attributes = {"is_causal": is_causal, **sizes.attributes}
    cuts: dict[str, Any] = {name: [(2, axes)] for name in CACHES}
    if other is not None and sizes.of_keys % mesh[other] == 0 and draw(st.booleans()):
        cuts = {name: [(1, [other]), *cut] for name, cut in cuts.items()}
    return operands, attributes, cuts, mesh, axes, draw(st.sampled_from([23, 24]))


@settings(max_examples=budget(40), deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
@given(data=drawn())
def test_blocks_of_caches_take_in_what_is_new(data: Any, tmp_path: Path) -> None:
    operands, attributes, cuts, mesh, axes, opset = data
    with chosen(CACHED):
        partition = cut_attention(operands, cuts, mesh, tmp_path, results=3, opset=opset, **attributes)
    check(partition, operands, tmp_path)
    assert [entry["sharding"][2] for entry in partition.plan.outputs[1:]] == [axes, axes]
    node, shapes = node_of(tmp_path), blocks(partition, operands)
    given = [shapes.get(name) for name in ("q", "k", "v", "mask", *CACHES)]
    priced = [(sent.kind, sent.bytes) for sent in CACHED.sends(node, given, {2: prod(mesh[axis] for axis in axes)})]
    made = [entry for entry in partition.plan.collectives if "works along" in entry["reason"]]
    assert priced == [(entry["kind"], entry["bytes"]) for entry in made]


def test_a_step_of_generation_sends_little(tmp_path: Path) -> None:
    """The new key falls into the last block: of the cache nothing moves."""
    operands = {"q": heads(1, 4, 1, 8), **{name: heads(1, 2, 1, 8) for name in "kv"}}
    operands |= {name: heads(1, 2, 63, 8) for name in CACHES}
    cuts = dict.fromkeys(CACHES, (2, "sp"))
    partition = cut_attention(operands, cuts, {"sp": 4}, tmp_path, results=3, is_causal=1)
    check(partition, operands, tmp_path)
    assert [entry["bytes"] for entry in partition.plan.collectives] == [16, 16, 4 * 8 * 4]
    assert kinds(partition) == ["all_reduce"] * 3


def test_caches_of_half_precision(tmp_path: Path) -> None:
    operands = {name: heads(1, 2, 3, 4).astype(np.float16) for name in "qkv"}
    operands |= {name: heads(1, 2, 30, 4).astype(np.float16) for name in CACHES}
    cuts = dict.fromkeys(CACHES, (2, "sp"))
    partition = cut_attention(operands, cuts, {"sp": 4}, tmp_path, results=3)
    wide = {name: np.concatenate([operands[f"past_{name}"], operands[name]], 2) for name in "kv"}
    for engine in ("ort", "numpy"):
        got = partition.run(operands, engine=engine)
        for name, array in wide.items():
            np.testing.assert_array_equal(got[f"present_{name}"], array)
        scores = np.einsum("bhqd,bhkd->bhqk", operands["q"].astype(float), wide["k"].astype(float)) / 2
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        expected = np.einsum("bhqk,bhkd->bhqd", weights, wide["v"].astype(float))
        np.testing.assert_allclose(got["y"], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("places", "is_packed", "is_ring"), every(3, itertools.product([32, 30], [False, True], [False, True]))
)
def test_keys_of_a_prompt_are_a_cache_that_is_cut(places: int, is_packed: bool, is_ring: bool, tmp_path: Path) -> None:
    """Keys and values are results as they are sharded, whichever way attention runs."""
    operands = {name: heads(1, 2, places, 8) for name in "qkv"}
    attributes: dict[str, Any] = {"is_causal": 1}
    if is_packed:
        operands = {name: array.reshape(1, places, 16) for name, array in operands.items()}
        attributes |= {"q_num_heads": 2, "kv_num_heads": 2}
    dim = 1 if is_packed else 2
    cut = "qkv" if is_ring else "kv"
    with chosen(RING if is_ring else LOCAL_PROGRAM):
        cuts = dict.fromkeys(cut, (dim, "sp"))
        partition = cut_attention(operands, cuts, {"sp": 4}, tmp_path, results=3, **attributes)
    check(partition, operands, tmp_path)
    assert [entry["sharding"][2] for entry in partition.plan.outputs[1:]] == [["sp"], ["sp"]]
    # Heads that are a dim of their own may be sharded behind the sums instead, which sends less.
    sums = {"all_reduce"} if is_packed else {"all_reduce", "all_to_all", "reduce_scatter"}
    assert set(kinds(partition)) == ({"permute"} if is_ring else sums)
