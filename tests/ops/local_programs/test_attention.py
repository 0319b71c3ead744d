"""Attention over queries and keys that are cut: positions count from the first one, and what is sent is what is least."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import irpar
from irpar.kernels import lookup
from tests.budget import budget

from .attentions import Cuts, cut_attention, heads, kinds
from .nodes import check

CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=budget(25), deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
@given(data=st.data())
def test_queries_that_are_cut_know_their_positions(data: st.DataObject, tmp_path: Path) -> None:
    queries, past = data.draw(st.integers(5, 13)), data.draw(st.sampled_from([0, 0, 3]))
    keys = data.draw(st.integers(queries, queries + 3))
    is_packed = data.draw(st.booleans()) and not past
    operands = {name: heads(2, 2, size, 4) for name, size in (("q", queries), ("k", keys), ("v", keys))}
    attributes: dict[str, Any] = {"is_causal": 1}
    if is_packed:
        operands = {name: array.reshape(2, -1, 8) for name, array in operands.items()}
        attributes |= {"q_num_heads": 2, "kv_num_heads": 2}
    match data.draw(st.sampled_from(["none", "bool", "float"])):
        case "bool":
            operands["mask"] = heads(queries, keys + past) > -1
        case "float":
            operands["mask"] = heads(2, 1, queries, keys + past)
    if past:
        operands |= {"past_k": heads(2, 2, past, 4), "past_v": heads(2, 2, past, 4)}
    elif data.draw(st.booleans()):
        operands["valid"] = np.array([keys, keys - 1])
    mesh = data.draw(st.sampled_from([{"sp": 2}, {"sp": 3}, {"sp": 2, "other": 2}]))
    cuts = {"q": (1 if is_packed else 2, "sp")}
    partition = cut_attention(operands, cuts, mesh, tmp_path, 3 if past else 1, **attributes)
    check(partition, operands, tmp_path)
    assert kinds(partition) == [], "queries need nothing from each other"


@pytest.mark.parametrize("window", [{"left_window_size": 3}, {"left_window_size": 2, "right_window_size": 4}])
@pytest.mark.parametrize("cuts", [{"q": (2, "a")}, {"k": (2, "b"), "v": (2, "b")}, {"q": (2, "a"), "k": (2, "b")}])
@pytest.mark.parametrize("is_causal", [0, 1])
def test_windows_over_both(window: dict[str, int], cuts: Cuts, is_causal: int, tmp_path: Path) -> None:
    """ONNX Runtime does not know windows: irpar's kernel stands for the original."""
    operands = {"q": heads(1, 4, 7, 4), "k": heads(1, 2, 30, 4), "v": heads(1, 2, 30, 4)}
    attributes = {"is_causal": is_causal, **window}
    partition = cut_attention(operands, cuts, {"a": 2, "b": 3}, tmp_path, opset=25, **attributes)
    kernel = lookup("", "Attention", 25)
    assert kernel is not None
    (whole,) = kernel(np, list(operands.values()), attributes, 1)
    np.testing.assert_allclose(partition.run(operands, engine="numpy")["y"], whole, rtol=1e-4, atol=1e-5)


def test_few_queries_over_many_keys_reduce_what_they_found(tmp_path: Path) -> None:
    """A step of generation over a cache that is sharded: the cache stays where it is."""
    operands = {"q": heads(1, 4, 1, 8), "k": heads(1, 2, 64, 8), "v": heads(1, 2, 64, 8), "valid": np.array([50])}
    cuts = {"k": (2, "sp"), "v": (2, "sp")}
    partition = cut_attention(operands, cuts, {"sp": 4}, tmp_path, is_causal=1)
    check(partition, operands, tmp_path)
    assert kinds(partition) == ["all_reduce", "all_reduce", "reduce_scatter"]
    assert [entry["bytes"] for entry in partition.plan.collectives] == [16, 16, 4 * 8 * 4]


def test_as_many_queries_as_keys_gather_the_keys(tmp_path: Path) -> None:
    """Grouped heads of K and V are smaller than those of Q."""
    operands = {"q": heads(1, 4, 32, 8), "k": heads(1, 2, 32, 8), "v": heads(1, 2, 32, 8)}
    cuts = dict.fromkeys(operands, (2, "sp"))
    partition = cut_attention(operands, cuts, {"sp": 2}, tmp_path, is_causal=1)
    check(partition, operands, tmp_path)
    assert kinds(partition) == ["all_gather", "all_gather"]
    assert partition.plan.outputs[0]["sharding"] == [None, None, ["sp"], None]


@pytest.mark.parametrize("is_causal", [0, 1])
def test_places_move_to_heads_where_that_sends_less(is_causal: int, tmp_path: Path) -> None:
    """Four all-to-alls of a quarter each send less than to gather all of K and V."""
    operands = {name: heads(1, 8, 32, 8) for name in ("q", "k", "v")}
    cuts = dict.fromkeys((*operands, "y"), (2, "sp"))
    partition = cut_attention(operands, cuts, {"sp": 4}, tmp_path, is_causal=is_causal)
    check(partition, operands, tmp_path)
    assert kinds(partition) == ["all_to_all"] * 4
    assert partition.plan.outputs[0]["sharding"] == [None, None, ["sp"], None]


def test_places_of_fused_attention_move_to_heads(tmp_path: Path) -> None:
    """A MultiHeadAttention needs all steps under its causal mask."""
    operands = {name: heads(1, 16, 32) for name in ("q", "k", "v")}
    node = helper.make_node(
        "MultiHeadAttention", list(operands), ["y"], domain="com.microsoft", num_heads=8, unidirectional=1
    )
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in operands.items()]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 16, 32))]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets, ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    for name in (*operands, "y"):
        module.shard(name, [None, "sp", None])
    partition = irpar.partition(module, irpar.Mesh({"sp": 4}))
    assert kinds(partition) == ["all_to_all"] * 4
    partition.verify().check()
