"""split-weights and join-weights: heads that do not divide over the ranks become a dim of the weight."""

import re
from unittest import mock

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import irpar
from irpar import models
from irpar.onnx_io import to_module

from .golden import check, read, run_pipeline

HEADS = """
mesh @m = ["tp"=4]
graph @g(%x: f32[2, 5, 48]) -> (%y) opset 18 {{
  %apart = constant : i64[4] [2, 5, {heads}, {size}]
  %whole = constant : i64[3] [2, 5, 48]
  %wk = constant : f32[48, 48{columns}] data("w.bin", 0, 9216) from "k.weight"
  %bk = constant : f32[48] data("w.bin", 9216, 192) from "k.bias"
  %wo = constant : f32[48{rows}, 48] data("w.bin", 9408, 9216) from "o.weight"
  %p = MatMul(%x, %wk) : f32[2, 5, 48] from "/k/MatMul"
  %a = Add(%bk, %p) : f32[2, 5, 48] from "/k/Add"
  %r = Reshape(%a, %apart) : f32[2, 5, {heads}, {size}] from "/k/Reshape"
  %t = Transpose(%r) {{perm=[0, 2, 1, 3]}} : f32[2, {heads}, 5, {size}] from "/k/Transpose"
  %s = Softmax(%t) {{axis=-1}} : f32[2, {heads}, 5, {size}]
  %u = Transpose(%s) {{perm=[0, 2, 1, 3]}} : f32[2, 5, {heads}, {size}]
  %c = Reshape(%u, %whole) : f32[2, 5, 48]
  %y = MatMul(%c, %wo) : f32[2, 5, 48] from "/o/MatMul"
}}
"""


def text(heads=6, columns="@tp", rows="@tp"):
    return HEADS.format(heads=heads, size=48 // heads, columns=columns, rows=rows)


def test_columns_and_rows_get_a_dim_of_heads():
    check(
        "split-weights",
        text(),
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[2, 5, 48]) -> (%y) opset 18 {
          %wk = constant : f32[48, 6@tp, 8] data("w.bin", 0, 9216) from "k.weight"
          %bk = constant : f32[6, 8] data("w.bin", 9216, 192) from "k.bias"
          %wo = constant : f32[6@tp, 8, 48] data("w.bin", 9408, 9216) from "o.weight"
          %p_1 = Einsum(%x, %wk) {equation="abk,khd->abhd"} : f32[2, 5, 6, 8] for "/k/MatMul"
          %a_1 = Add(%bk, %p_1) : f32[2, 5, 6, 8] for "/k/Add"
          %t = Transpose(%a_1) {perm=[0, 2, 1, 3]} : f32[2, 6, 5, 8] for "/k/Transpose" as "t"
          %s = Softmax(%t) {axis=-1} : f32[2, 6, 5, 8]
          %c_1 = Transpose(%s) {perm=[0, 2, 1, 3]} : f32[2, 5, 6, 8] for "/o/MatMul"
          %y = Einsum(%c_1, %wo) {equation="abhd,hdk->abk"} : f32[2, 5, 48] for "/o/MatMul" as "y"
        }
        """,
    )


@pytest.mark.parametrize(
    ("heads", "columns", "rows"),
    [
        (8, "@tp", "@tp"),  # They divide.
        (3, "@tp", "@tp"),  # There are fewer than devices.
        (6, "", ""),  # Nothing says over how many devices.
    ],
)
def test_weights_stay(heads, columns, rows):
    given_text = text(heads, columns, rows)
    check("split-weights", given_text, given_text)


@pytest.mark.parametrize(
    "changed",
    [
        ("opset 18", "opset 11"),  # It has no Einsum.
        ("%a = Add(%bk, %p) : f32[2, 5, 48]", "%a = Add(%wk, %p) : f32[2, 5, 48]"),  # Something else reads the weight.
        ("%p = MatMul(%x, %wk) : f32[2, 5, 48]", "%p = MatMul(%x, %wk) : f32[2, 5, 48@tp]"),  # It is annotated itself.
        ("-> (%y)", "-> (%y, %a)"),  # Columns are asked for.
    ],
)
def test_columns_stay_that_something_else_reads(changed):
    before, after = changed
    module = read(text(rows="").replace(before, after))
    run_pipeline("split-weights", module)
    assert "Einsum" not in str(module)


def test_sections_of_one_weight_stay_blocks_of_it():
    """q, k and v of 6 heads in one matrix, over 4: each device reads its heads, and nothing else, of the file."""
    module = to_module(models.build("gpt", layers=1, heads=6, hidden=48, fused_qkv=True))
    for name, spec in models.annotations("gpt", layers=1, fused_qkv=True).items():
        module.shard(name, [None if dim is None or "tp" not in dim else ["tp"] for dim in spec])
    partition = irpar.partition(module, "tp=4")
    partition.verify().check()
    assert list(partition.plan.totals["by_kind"]) == ["all_reduce"]
    weights = [value for value in partition.module.graphs[0].constants if "c_attn" in value.source_name]
    assert all(value.data.base is not value.data for value in weights if len(value.shape) == 3)


def test_blocks_that_share_a_scale_get_heads_with_it():
    check(
        "split-weights",
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[2, 5, 48]) -> (%y) opset 21 {
          %apart = constant : i64[4] [2, 5, 6, 8]
          %whole = constant : i64[3] [2, 5, 48]
          %wk = constant : i8[48, 48@tp] data("w.bin", 0, 2304) from "k.weight"
          %sk = constant : f32[3, 48] data("w.bin", 2304, 576)
          %wo = constant : i8[48@tp, 48] data("w.bin", 2880, 2304) from "o.weight"
          %so = constant : f32[12, 48] data("w.bin", 5184, 2304)
          %k = DequantizeLinear(%wk, %sk) {axis=0, block_size=16} : f32[48, 48]
          %p = MatMul(%x, %k) : f32[2, 5, 48]
          %r = Reshape(%p, %apart) : f32[2, 5, 6, 8]
          %s = Softmax(%r) : f32[2, 5, 6, 8]
          %c = Reshape(%s, %whole) : f32[2, 5, 48]
          %o = DequantizeLinear(%wo, %so) {axis=0, block_size=4} : f32[48, 48]
          %y = MatMul(%c, %o) : f32[2, 5, 48]
        }
        """,
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[2, 5, 48]) -> (%y) opset 21 {
          %apart = constant : i64[4] [2, 5, 6, 8]
          %wk = constant : i8[48, 6@tp, 8] data("w.bin", 0, 2304) from "k.weight"
          %sk = constant : f32[3, 6, 8] data("w.bin", 2304, 576)
          %wo = constant : i8[6@tp, 8, 48] data("w.bin", 2880, 2304) from "o.weight"
          %so = constant : f32[6, 2, 48] data("w.bin", 5184, 2304)
          %k_by_heads = DequantizeLinear(%wk, %sk) {block_size=16, axis=0} : f32[48, 6, 8]
          %r = Einsum(%x, %k_by_heads) {equation="abk,khd->abhd"} : f32[2, 5, 6, 8]
          %s = Softmax(%r) : f32[2, 5, 6, 8]
          %o_by_heads = DequantizeLinear(%wo, %so) {block_size=4, axis=1} : f32[6, 8, 48]
          %y = Einsum(%s, %o_by_heads) {equation="abhd,hdk->abk"} : f32[2, 5, 48]
        }
        """,
    )


def test_matrices_are_multiplied_device_by_device():
    """What was an Einsum to plan with is a MatMul, or a Gemm, with the block of a matrix."""
    module = read(text())
    run_pipeline("split-weights,complete-sharding,insert-redistribution,localize,simplify-collectives", module)
    assert str(module).count("= Einsum(") == 2  # The last device has no heads, and a program of its own.
    run_pipeline("join-weights", module)
    program = str(module)
    assert "= Einsum(" not in program
    assert re.search(r'%wk_1 = Reshape\(%wk, %shape(_\d)?\) : f32\[48, 16\] for "/k/MatMul"', program)
    assert "= MatMul(%x, %wk_1)" in program


@pytest.mark.parametrize(("heads", "devices"), [(5, 2), (14, 4), (7, 3)])
def test_equal_layers_are_planned_once(heads, devices):
    def module():
        made = to_module(models.build("gpt", layers=16, heads=heads, hidden=8 * heads))
        for name, spec in models.annotations("gpt", layers=16).items():
            made.shard(name, [None if dim is None or "tp" not in dim else ["tp"] for dim in spec])
        return made

    mesh = {"tp": devices}
    partition = irpar.partition(module(), mesh)
    with mock.patch("irpar.folded_layers.find_chain", return_value=None):
        expected = irpar.partition(module(), mesh)
    assert partition.plan.to_json() == expected.plan.to_json()
    assert str(partition.module) == str(expected.module)
    assert any("equal layers of" in note for note in partition.passes.notes) or heads != 14


def attention(heads, size, products, seed):
    """A block of attention; `products` says how q, k, v and o are written."""
    hidden, numbers = heads * size, np.random.default_rng(seed)
    weights, nodes = [], []

    def constant(name, array):
        weights.append(numpy_helper.from_array(array, name))
        return name

    def drawn(*shape):
        return (numbers.standard_normal(shape) / 4).astype(np.float32)

    def product(kind, data, name, made):
        weight = drawn(hidden, hidden)
        if kind == "gemm":
            flat = constant(f"{name}.rows", np.array([2 * 5, hidden]))
            back = constant(f"{name}.back", np.array([2, 5, hidden]))
            nodes.append(helper.make_node("Reshape", [data, flat], [f"{name}.flat"]))
            operands = [f"{name}.flat", constant(f"{name}.weight", weight), constant(f"{name}.bias", drawn(hidden))]
            nodes.append(helper.make_node("Gemm", operands, [f"{name}.gemm"], name=f"/{name}", transB=1))
            nodes.append(helper.make_node("Reshape", [f"{name}.gemm", back], [made]))
        elif kind.startswith("quantized"):
            turns, axis = kind.endswith("turned"), int(kind.endswith("turned"))
            block = size if name == "o" or hidden % 4 else 4  # What heads share no scale with is whole in each.
            scales = [hidden // block, hidden][:: -1 if turns else 1]
            constant(f"{name}.weight", (numbers.integers(-99, 99, (hidden, hidden))).astype(np.int8))
            constant(f"{name}.scales", np.abs(drawn(*scales)) / 100)
            constant(f"{name}.points", numbers.integers(-9, 9, scales).astype(np.int8))
            operands = [f"{name}.weight", f"{name}.scales", f"{name}.points"]
            nodes.append(helper.make_node("DequantizeLinear", operands, [f"{name}.d"], axis=axis, block_size=block))
            if turns:
                nodes.append(helper.make_node("Transpose", [f"{name}.d"], [f"{name}.t"], perm=[1, 0]))
            nodes.append(helper.make_node("MatMul", [data, f"{name}.t" if turns else f"{name}.d"], [made]))
        elif kind == "turned":
            nodes.append(
                helper.make_node("Transpose", [constant(f"{name}.weight", weight)], [f"{name}.t"], perm=[1, 0])
            )
            nodes.append(helper.make_node("MatMul", [data, f"{name}.t"], [made], name=f"/{name}"))
        else:
            nodes.append(helper.make_node("MatMul", [data, constant(f"{name}.weight", weight)], [f"{name}.p"]))
            bias = constant(f"{name}.bias", drawn(1, 1, hidden))
            nodes.append(helper.make_node("Add", [f"{name}.p", bias], [made]))

    shape = constant("apart", np.array([2, 5, heads, size]))
    for name, kind in zip("qkv", products, strict=False):
        product(kind, "x", name, f"{name}.made")
        nodes.append(helper.make_node("Reshape", [f"{name}.made", shape], [f"{name}.heads"]))
        perm = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        nodes.append(helper.make_node("Transpose", [f"{name}.heads"], [name], perm=perm))
    nodes.append(helper.make_node("MatMul", ["q", "k"], ["scores"]))
    nodes.append(helper.make_node("Softmax", ["scores"], ["probs"]))
    nodes.append(helper.make_node("MatMul", ["probs", "v"], ["context"]))
    nodes.append(helper.make_node("Transpose", ["context"], ["context.t"], perm=[0, 2, 1, 3]))
    nodes.append(helper.make_node("Reshape", ["context.t", constant("whole", np.array([2, 5, hidden]))], ["c"]))
    product(products[3], "c", "o", "y")
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("x", 1, [2, 5, hidden])],
        [helper.make_tensor_value_info("y", 1, [2, 5, hidden])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return model


KINDS = st.sampled_from(["matmul", "gemm", "turned", "quantized", "quantized, turned"])


@given(
    st.integers(2, 9),
    st.integers(2, 4),
    st.integers(2, 4),
    st.tuples(KINDS, KINDS, KINDS, KINDS),
    st.integers(0, 99),
)
def test_random_attention_sends_one_sum(heads, size, devices, products, seed):
    module = irpar.load(attention(heads, size, products, seed=seed))
    for name, kind in zip("qkvo", products, strict=True):
        columns_first = kind not in ("matmul", "quantized")
        is_rows = (name == "o") != columns_first
        module.shard(f"{name}.weight", ["tp", None] if is_rows else [None, "tp"])
    partition = irpar.partition(module, {"tp": devices})
    for engine in ("ort", "numpy"):
        partition.verify(engine=engine).check()
    if heads >= devices and any(kind.startswith("quantized") for kind in products):
        # Weights of a byte each may be less than what they are multiplied with.
        assert partition.plan.totals["sent_bytes"] <= 2 * 5 * heads * size * 4 * 2 * (devices - 1)
    elif heads >= devices:
        assert set(partition.plan.totals["by_kind"]) <= {"all_reduce", "reduce_scatter"}
        assert partition.plan.totals["collectives"] == 1
