"""Attention of which the same axes cut queries and keys: blocks of K and V go round."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irpar.analysis.cost.network_fields import network_of_fields
from irpar.ir.text.files import parse_module
from irpar.kernels import lookup
from irpar.ops import other_rules
from irpar.ops.attention import RING
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.sharding import filled_blocks
from tests.budget import budget, pairs
from tests.passes import golden

from .attentions import Cuts, blocks, cut_attention, draw_axes, draw_heads, draw_mask, heads, kinds, node_of
from .nodes import Operands, check, chosen

CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Operands, dict[str, Any], Cuts, dict[str, int], list[str], int]:
    """Operands, attributes, how the operands are sharded, the mesh, the axes of the ring, and the opset."""
    mesh, axes, other = draw_axes(draw)
    parts = prod(mesh[axis] for axis in axes)
    lengths = st.integers(parts, 3 * parts + 2).filter(lambda size: filled_blocks(size, parts) == parts)
    queries = draw(lengths)
    keys = draw(st.sampled_from([queries, queries, draw(lengths)]))
    sizes, opset = draw_heads(draw), draw(st.sampled_from([23, 24]))
    operands = sizes.operands(queries, keys)
    dim = 1 if sizes.is_packed else 2
    cuts: dict[str, Any] = {name: [(dim, axes)] for name in operands}
    if other is not None and sizes.of_keys % mesh[other] == 0 and draw(st.booleans()):
        cuts = {name: [*cut, (3 - dim, [other])] for name, cut in cuts.items()}
    attributes = {"is_causal": draw(st.integers(0, 1)), **sizes.attributes}
    attributes |= draw(st.sampled_from([{}, {"scale": 0.3}, {"softcap": 2.0}]))
    operands |= draw_mask(draw, [(queries, keys), (sizes.batch, 1, queries, keys), (1, queries, keys)])
    if opset == 24 and draw(st.booleans()):
        operands["valid"] = np.array([keys - draw(st.integers(0, keys - 1)) for _ in range(sizes.batch)])
    if "mask" in operands and draw(st.booleans()):
        cuts["mask"] = [(operands["mask"].ndim - 2, axes)]
    return operands, attributes, cuts, mesh, axes, opset


@settings(max_examples=budget(40), deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
@given(data=drawn())
def test_blocks_go_round(data: Any, tmp_path: Path) -> None:
    operands, attributes, cuts, mesh, axes, opset = data
    with chosen(RING):
        partition = cut_attention(operands, cuts, mesh, tmp_path, opset=opset, **attributes)
    check(partition, operands, tmp_path)
    parts = prod(mesh[axis] for axis in axes)
    made = [entry for entry in partition.plan.collectives if "works along" in entry["reason"]]
    assert [entry["kind"] for entry in made] == ["permute"] * 2 * (parts - 1)
    assert all(entry["axes"] == axes for entry in made)
    shapes, dim = blocks(partition, operands), operands["q"].ndim - 2
    of_operands = [shapes[name] for name in "qkv"]
    priced = [(sent.kind, sent.bytes) for sent in RING.sends(node_of(tmp_path), of_operands, {dim: parts})]
    assert priced == [(entry["kind"], entry["bytes"]) for entry in made]


def test_half_precision_is_summed_in_single(tmp_path: Path) -> None:
    """What travels is as narrow as it was."""
    operands = {name: (heads(1, 2, 16, 8) * 3).astype(np.float16) for name in "qkv"}
    with chosen(RING):
        partition = cut_attention(operands, dict.fromkeys(operands, (2, "sp")), {"sp": 4}, tmp_path, is_causal=1)
    assert [entry["bytes"] for entry in partition.plan.collectives] == [2 * 4 * 8 * 2] * 6
    wide = {name: array.astype(np.float64) for name, array in operands.items()}
    scores = np.einsum("bhqd,bhkd->bhqk", wide["q"], wide["k"]) / np.sqrt(8)
    weights = np.exp(np.where(np.tri(16, dtype=bool), scores, -np.inf))
    expected = np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), wide["v"])
    for engine in ("ort", "numpy"):
        np.testing.assert_allclose(partition.run(operands, engine=engine)["y"], expected, rtol=2e-3, atol=2e-3)


WINDOWS = ({}, {"left_window_size": 3}, {"left_window_size": 2, "right_window_size": 4})


@pytest.mark.parametrize(("shape", "window"), pairs([(1, 30), (1, 1, 7, 1), (2, 1, 1, 30)], WINDOWS), ids=str)
def test_windows_and_masks_that_are_broadcast(window: dict[str, int], shape: tuple[int, ...], tmp_path: Path) -> None:
    """ONNX Runtime does not know these: irpar's kernel stands for the original."""
    operands = {"q": heads(2, 4, 7, 4), "k": heads(2, 2, 30, 4), "v": heads(2, 2, 30, 4), "mask": heads(*shape)}
    cuts = dict.fromkeys("qkv", (2, "sp"))
    with chosen(RING):
        partition = cut_attention(operands, cuts, {"sp": 4}, tmp_path, opset=25, **window)
    assert kinds(partition) == ["permute"] * 6
    kernel = lookup("", "Attention", 25)
    assert kernel is not None
    (whole,) = kernel(np, list(operands.values()), window, 1)
    for engine in ("ort", "numpy"):
        np.testing.assert_allclose(partition.run(operands, engine=engine)["y"], whole, rtol=1e-4, atol=1e-5)


# -- which way is taken ---------------------------------------------------------------------------------------------


def whole_sequence(queries: int, keys: int, query_heads: int, key_heads: int) -> Operands:
    return {"q": heads(1, query_heads, queries, 8), **{name: heads(1, key_heads, keys, 8) for name in "kv"}}


WAYS = {
    "all keys, since heads are too few": (whole_sequence(32, 32, 8, 2), 9000, ["all_gather"] * 2),
    "all keys, though heads are enough": (whole_sequence(32, 32, 16, 4), None, ["all_gather"] * 2),
    "heads": (whole_sequence(64, 64, 8, 4), None, ["all_to_all"] * 4),
    "keys": (whole_sequence(4, 64, 8, 8), None, ["all_gather", "all_reduce", "all_reduce", "reduce_scatter"]),
    "both in blocks": (whole_sequence(32, 32, 8, 2), 7000, ["permute"] * 6),
    "heads hold as little, and send less": (whole_sequence(64, 64, 8, 4), 7000, ["all_to_all"] * 4),
}
"""What only the sequence is sharded of, bytes of memory for a node, and what is sent.

Of 32 places with 8 heads in f32 a block is 2 kB, with 2 heads 512 bytes: queries, results and all keys and values are
8,192 bytes, with the block of keys and that of values, and those that come, they are 6,144.
"""


@pytest.mark.parametrize("case", WAYS)
def test_the_cheapest_that_fits_is_taken(case: str, tmp_path: Path) -> None:
    operands, memory, expected = WAYS[case]
    pipeline = DEFAULT_PIPELINE
    if memory is not None:
        pipeline = pipeline.replace("insert-redistribution", f"insert-redistribution{{memory-mb={memory / 1e6}}}")
    cuts = dict.fromkeys((*operands, "y"), (2, "sp"))
    partition = cut_attention(operands, cuts, {"sp": 4}, tmp_path, options={"pipeline": pipeline}, is_causal=1)
    check(partition, operands, tmp_path)
    assert kinds(partition) == expected
    assert partition.plan.outputs[0]["sharding"] == [None, None, ["sp"], None]


@pytest.mark.parametrize(("memory", "expected"), [(9000, "all_gather"), (7000, "permute")])
def test_devices_of_which_the_memory_is_known(memory: int, expected: str, tmp_path: Path) -> None:
    device = {"flops": {"f32": 1e12}, "memory_bandwidth": 1e11, "memory": memory}
    network = network_of_fields({"links": [{"name": "link", "latency": 1e-6, "bandwidth": 1e9}], "device": device})
    operands = whole_sequence(32, 32, 8, 2)
    cuts = dict.fromkeys((*operands, "y"), (2, "sp"))
    partition = cut_attention(operands, cuts, {"sp": 4}, tmp_path, options={"network": network})
    assert set(kinds(partition)) == {expected}


REFUSED = {
    "a past": (
        "%y, %pk, %pv = Attention(%x, %x, %x, _, %p, %p) : f32[1, 2, 8, 4], f32[1, 2, 11, 4], f32[1, 2, 11, 4]",
        "%y, %pk, %pv",
    ),
    "a mask that is shorter than the keys": ("%y = Attention(%x, %x, %x, %m) : f32[1, 2, 8, 4]", "%y"),
    "one query": ("%y = Attention(%o, %x, %x) : f32[1, 2, 1, 4]", "%y"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_not_offered(case: str) -> None:
    line, results = REFUSED[case]
    inputs = "%x: f32[1, 2, 8, 4], %o: f32[1, 2, 1, 4], %p: f32[1, 2, 3, 4], %m: bool[8, 5]"
    node = parse_module(f"graph @g({inputs}) -> ({results}) opset 24 {{\n  {line}\n}}").graph.first
    assert node is not None
    assert other_rules(node) == ()


def test_what_the_rule_says() -> None:
    text = "graph @g(%q: f32[2, 4, 8, 4], %k: f32[2, 2, 6, 4], %m: f32[8, 6]) -> (%y) opset 24 {\n"
    node = parse_module(text + "  %y = Attention(%q, %k, %k, %m) : f32[2, 4, 8, 4]\n}").graph.first
    assert node is not None
    (rule,) = other_rules(node)
    expected = "([i,(jk),l,m],[i,j,l,m],[i,j,l,n],[l,1])->([i,(jk),l,n]) replicate(m,n) permute(l)"
    assert str(rule) == expected


def test_what_a_device_runs() -> None:
    golden.check(
        "localize,cse,dce",
        """
        mesh @m = ["sp"=2]
        graph @g(%q: f32[1, 2, 8@sp, 4], %k: f32[1, 2, 8@sp, 4], %v: f32[1, 2, 8@sp, 4]) -> (%y) opset 24 {
          %y = Attention(%q, %k, %v) : f32[1, 2, 8@sp, 4]
        }
        """,
        """
        mesh @m = ["sp"=2]
        graph local @g(%q: f32[1, 2, 4, 4] of [1, 2, 8@sp, 4], %k: f32[1, 2, 4, 4] of [1, 2, 8@sp, 4], %v: f32[1, 2, 4, 4] of [1, 2, 8@sp, 4]) -> (%y) opset 24 ranks [0, 1] {
          %number = constant : f32[] 0.5
          %numbers = constant : i64[4] [1, 2, 4, 4]
          %numbers_2 = constant : i64[1] [3]
          %number_1 = constant : f32[] 0.0
          %number_3 = constant : f32[] 1.0
          %v_1 = Mul(%q, %number) : f32[1, 2, 4, 4]
          %v_2 = irpar.CollectivePermute(%k) {pairs=[0, 1, 1, 0], axes=["sp"], id=0} : f32[1, 2, 4, 4] of [1, 2, 8@sp, 4] doc "Attention of %y works along sp, which shards %k, in a ring"
          %v_3 = irpar.CollectivePermute(%v) {pairs=[0, 1, 1, 0], axes=["sp"], id=1} : f32[1, 2, 4, 4] of [1, 2, 8@sp, 4] doc "Attention of %y works along sp, which shards %k, in a ring"
          %v_4 = Reshape(%v_1, %numbers) : f32[1, 2, 4, 4]
          %v_5 = Transpose(%k) {perm=[0, 1, 3, 2]} : f32[1, 2, 4, 4]
          %v_6 = MatMul(%v_4, %v_5) : f32[1, 2, 4, 4]
          %v_7 = Reshape(%v_6, %numbers) : f32[1, 2, 4, 4]
          %v_8 = ReduceMax(%v_7, %numbers_2) {keepdims=1} : f32[1, 2, 4, 1]
          %v_9 = IsInf(%v_8) {detect_positive=0} : bool[1, 2, 4, 1]
          %v_10 = Where(%v_9, %number_1, %v_8) : f32[1, 2, 4, 1]
          %v_11 = Sub(%v_7, %v_10) : f32[1, 2, 4, 4]
          %v_12 = Exp(%v_11) : f32[1, 2, 4, 4]
          %v_13 = ReduceSum(%v_12, %numbers_2) {keepdims=1} : f32[1, 2, 4, 1]
          %v_14 = Reshape(%v_12, %numbers) : f32[1, 2, 4, 4]
          %v_15 = MatMul(%v_14, %v) : f32[1, 2, 4, 4]
          %v_16 = Reshape(%v_15, %numbers) : f32[1, 2, 4, 4]
          %v_18 = Transpose(%v_2) {perm=[0, 1, 3, 2]} : f32[1, 2, 4, 4]
          %v_19 = MatMul(%v_4, %v_18) : f32[1, 2, 4, 4]
          %v_20 = Reshape(%v_19, %numbers) : f32[1, 2, 4, 4]
          %v_21 = ReduceMax(%v_20, %numbers_2) {keepdims=1} : f32[1, 2, 4, 1]
          %v_22 = Max(%v_8, %v_21) : f32[1, 2, 4, 1]
          %v_23 = IsInf(%v_22) {detect_positive=0} : bool[1, 2, 4, 1]
          %v_24 = Where(%v_23, %number_1, %v_22) : f32[1, 2, 4, 1]
          %v_25 = Sub(%v_20, %v_24) : f32[1, 2, 4, 4]
          %v_26 = Exp(%v_25) : f32[1, 2, 4, 4]
          %v_27 = ReduceSum(%v_26, %numbers_2) {keepdims=1} : f32[1, 2, 4, 1]
          %v_28 = Reshape(%v_26, %numbers) : f32[1, 2, 4, 4]
          %v_29 = MatMul(%v_28, %v_3) : f32[1, 2, 4, 4]
          %v_30 = Reshape(%v_29, %numbers) : f32[1, 2, 4, 4]
          %v_31 = Sub(%v_8, %v_24) : f32[1, 2, 4, 1]
          %v_32 = Exp(%v_31) : f32[1, 2, 4, 1]
          %v_33 = Mul(%v_13, %v_32) : f32[1, 2, 4, 1]
          %v_34 = Add(%v_33, %v_27) : f32[1, 2, 4, 1]
          %v_35 = Mul(%v_16, %v_32) : f32[1, 2, 4, 4]
          %v_36 = Add(%v_35, %v_30) : f32[1, 2, 4, 4]
          %v_37 = Where(%v_23, %number_3, %v_34) : f32[1, 2, 4, 1]
          %y = Div(%v_36, %v_37) : f32[1, 2, 4, 4] of [1, 2, 8@sp, 4]
        }
        """,
    )
