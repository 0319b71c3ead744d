"""split-weights: which weights are taken apart, what becomes of them, and which stay."""

import numpy as np
import pytest

from .golden import check, read, run_pipeline


def test_each_section_is_a_product_of_its_own():
    check(
        "split-weights",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[2, 8, 16]) -> (%y) opset 21 {
          %w = constant : f32[16, 48@tp] data("w.bin", 0, 3072) from "c_attn.weight"
          %b = constant : f32[48@tp] data("w.bin", 3072, 192) from "c_attn.bias"
          %p = MatMul(%x, %w) : f32[2, 8, 48] from "/c_attn/MatMul"
          %a = Add(%b, %p) : f32[2, 8, 48] from "/c_attn/Add"
          %q, %k, %v = Split(%a) {axis=-1, num_outputs=3} : f32[2, 8, 16], f32[2, 8, 16], f32[2, 8, 16] from "/Split"
          %s = Mul(%q, %k) : f32[2, 8, 16]
          %y = Mul(%s, %v) : f32[2, 8, 16]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[2, 8, 16]) -> (%y) opset 21 {
          %w_1 = constant : f32[16, 16@tp] slice([0:16, 0:16] of f32[16, 48] data("w.bin", 0, 3072)) from "c_attn.weight"
          %b_1 = constant : f32[16@tp] slice([0:16] of f32[48] data("w.bin", 3072, 192)) from "c_attn.bias"
          %w_2 = constant : f32[16, 16@tp] slice([0:16, 16:32] of f32[16, 48] data("w.bin", 0, 3072)) from "c_attn.weight"
          %b_2 = constant : f32[16@tp] slice([16:32] of f32[48] data("w.bin", 3072, 192)) from "c_attn.bias"
          %w_3 = constant : f32[16, 16@tp] slice([0:16, 32:48] of f32[16, 48] data("w.bin", 0, 3072)) from "c_attn.weight"
          %b_3 = constant : f32[16@tp] slice([32:48] of f32[48] data("w.bin", 3072, 192)) from "c_attn.bias"
          %p_1 = MatMul(%x, %w_1) : f32[2, 8, 16] for "/c_attn/MatMul"
          %q = Add(%b_1, %p_1) : f32[2, 8, 16] for "/c_attn/Add" as "q"
          %p_2 = MatMul(%x, %w_2) : f32[2, 8, 16] for "/c_attn/MatMul"
          %k = Add(%b_2, %p_2) : f32[2, 8, 16] for "/c_attn/Add" as "k"
          %p_3 = MatMul(%x, %w_3) : f32[2, 8, 16] for "/c_attn/MatMul"
          %v = Add(%b_3, %p_3) : f32[2, 8, 16] for "/c_attn/Add" as "v"
          %s = Mul(%q, %k) : f32[2, 8, 16]
          %y = Mul(%s, %v) : f32[2, 8, 16]
        }
        """,
    )


def test_no_merged_section_is_left_behind():
    """Where all that read it work on its dims apart: a merge that nothing reads would be sharded, and sent for."""
    check(
        "split-weights",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[2, 4, 8, 16]) -> (%y) opset 21 {
          %rows = constant : i64[3] [8, 8, 32]
          %apart = constant : i64[4] [2, 4, 8, 16]
          %w = constant : f32[16, 32] data("w.bin", 0, 2048)
          %p = MatMul(%x, %w) : f32[2, 4, 8, 32] from "/qk"
          %r = Reshape(%p, %rows) : f32[8, 8, 32]
          %q, %k = Split(%r) {axis=2, num_outputs=2} : f32[8, 8, 16], f32[8, 8, 16]
          %m = Mul(%q, %k) : f32[8, 8, 16]
          %s = Softmax(%m) : f32[8, 8, 16]
          %y = Reshape(%s, %apart) : f32[2, 4, 8, 16]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[2, 4, 8, 16]) -> (%s_1 as "y") opset 21 {
          %rows = constant : i64[3] [8, 8, 32]
          %w_1 = constant : f32[16, 16] slice([0:16, 0:16] of f32[16, 32] data("w.bin", 0, 2048)) from "w"
          %w_2 = constant : f32[16, 16] slice([0:16, 16:32] of f32[16, 32] data("w.bin", 0, 2048)) from "w"
          %p_1 = MatMul(%x, %w_1) : f32[2, 4, 8, 16] for "/qk"
          %p_2 = MatMul(%x, %w_2) : f32[2, 4, 8, 16] for "/qk"
          %m_1 = Mul(%p_1, %p_2) : f32[2, 4, 8, 16]
          %s_1 = Softmax(%m_1) {axis=-1} : f32[2, 4, 8, 16]
        }
        """,
    )


def test_behind_a_reshape():
    """Its chain, and what followed the Gather, become one chain for each section; one that is not read is left out."""
    check(
        "split-weights,dce",
        """
        graph @g(%x: f32[2, 8, 16]) -> (%y) opset 21 {
          %w = constant : f32[48, 16] data("w.bin", 0, 3072) from "qkv"
          %apart = constant : i64[5] [2, 8, 3, 4, 4]
          %flat = constant : i64[3] [8, 8, 4]
          %zero = constant : i64[] 0
          %last = constant : i64[] -1
          %t = Transpose(%w) {perm=[1, 0]} : f32[16, 48]
          %p = MatMul(%x, %t) : f32[2, 8, 48] from "/qkv"
          %r = Reshape(%p, %apart) : f32[2, 8, 3, 4, 4]
          %u = Transpose(%r) {perm=[2, 0, 3, 1, 4]} : f32[3, 2, 4, 8, 4]
          %q = Gather(%u, %zero) {axis=0} : f32[2, 4, 8, 4]
          %v = Gather(%u, %last) {axis=0} : f32[2, 4, 8, 4]
          %m = Reshape(%q, %flat) : f32[8, 8, 4]
          %n = Reshape(%v, %flat) : f32[8, 8, 4]
          %y = Add(%m, %n) : f32[8, 8, 4]
        }
        """,
        """
        graph @g(%x: f32[2, 8, 16]) -> (%y) opset 21 {
          %w_1 = constant : f32[16, 16] slice([0:16, 0:16] of f32[48, 16] data("w.bin", 0, 3072)) from "qkv"
          %w_2 = constant : f32[16, 16] slice([32:48, 0:16] of f32[48, 16] data("w.bin", 0, 3072)) from "qkv"
          %shape_2 = constant : i64[4] [2, 8, 4, 4]
          %shape_3 = constant : i64[4] [2, 8, 4, 4]
          %shape_4 = constant : i64[3] [8, 8, 4]
          %t_1 = Transpose(%w_1) {perm=[1, 0]} : f32[16, 16]
          %t_2 = Transpose(%w_2) {perm=[1, 0]} : f32[16, 16]
          %p_1 = MatMul(%x, %t_1) : f32[2, 8, 16] for "/qkv"
          %p_2 = MatMul(%x, %t_2) : f32[2, 8, 16] for "/qkv"
          %m_1 = Reshape(%p_1, %shape_2) : f32[2, 8, 4, 4]
          %m_2 = Transpose(%m_1) {perm=[0, 2, 1, 3]} : f32[2, 4, 8, 4]
          %n_1 = Reshape(%p_2, %shape_3) : f32[2, 8, 4, 4]
          %n_2 = Transpose(%n_1) {perm=[0, 2, 1, 3]} : f32[2, 4, 8, 4]
          %y_1 = Add(%m_2, %n_2) : f32[2, 4, 8, 4]
          %y = Reshape(%y_1, %shape_4) : f32[8, 8, 4]
        }
        """,
    )


def test_a_weight_that_is_taken_apart_itself():
    check(
        "split-weights",
        """
        graph @g(%x: f32[8, 4], %z: f32[8, 4]) -> (%p, %q) opset 21 {
          %w = constant : f32[4, 12] data("w.bin", 0, 192) from "in_proj"
          %sizes = constant : i64[2] [4, 8]
          %a, %b = Split(%w, %sizes) {axis=1} : f32[4, 4], f32[4, 8]
          %p = MatMul(%x, %a) : f32[8, 4]
          %q = MatMul(%z, %b) : f32[8, 8]
        }
        """,
        """
        graph @g(%x: f32[8, 4], %z: f32[8, 4]) -> (%p, %q) opset 21 {
          %sizes = constant : i64[2] [4, 8]
          %a = constant : f32[4, 4] slice([0:4, 0:4] of f32[4, 12] data("w.bin", 0, 192)) from "in_proj"
          %b = constant : f32[4, 8] slice([0:4, 4:12] of f32[4, 12] data("w.bin", 0, 192)) from "in_proj"
          %p = MatMul(%x, %a) : f32[8, 4]
          %q = MatMul(%z, %b) : f32[8, 8]
        }
        """,
    )


def test_scales_and_zero_points_go_along():
    """Of columns one for each, of blocks of rows a row of them; one for all is shared."""
    check(
        "split-weights",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8, 64]) -> (%y) opset 21 {
          %w = constant : i8[64, 32@tp] data("w.bin", 0, 2048) from "c_attn"
          %s = constant : f32[2, 32] data("w.bin", 2048, 256)
          %b = constant : i32[32] data("w.bin", 2304, 128)
          %c = constant : f32[32] data("w.bin", 2432, 128)
          %half = constant : f32[] 0.5
          %zero = constant : i8[] 3
          %d = DequantizeLinear(%w, %s) {axis=0, block_size=32} : f32[64, 32]
          %e = DequantizeLinear(%b, %c) {axis=0} : f32[32]
          %p = MatMul(%x, %d) : f32[8, 32] from "/c_attn"
          %a = Add(%p, %e) : f32[8, 32]
          %q = QuantizeLinear(%a, %half, %zero) : i8[8, 32]
          %r = DequantizeLinear(%q, %half, %zero) : f32[8, 32]
          %gate, %up = Split(%r) {axis=1, num_outputs=2} : f32[8, 16], f32[8, 16]
          %y = Mul(%gate, %up) : f32[8, 16]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8, 64]) -> (%y) opset 21 {
          %half = constant : f32[] 0.5
          %zero = constant : i8[] 3
          %w_1 = constant : i8[64, 16@tp] slice([0:64, 0:16] of i8[64, 32] data("w.bin", 0, 2048)) from "c_attn"
          %s_1 = constant : f32[2, 16] slice([0:2, 0:16] of f32[2, 32] data("w.bin", 2048, 256)) from "s"
          %b_1 = constant : i32[16] slice([0:16] of i32[32] data("w.bin", 2304, 128)) from "b"
          %c_1 = constant : f32[16] slice([0:16] of f32[32] data("w.bin", 2432, 128)) from "c"
          %w_2 = constant : i8[64, 16@tp] slice([0:64, 16:32] of i8[64, 32] data("w.bin", 0, 2048)) from "c_attn"
          %s_2 = constant : f32[2, 16] slice([0:2, 16:32] of f32[2, 32] data("w.bin", 2048, 256)) from "s"
          %b_2 = constant : i32[16] slice([16:32] of i32[32] data("w.bin", 2304, 128)) from "b"
          %c_2 = constant : f32[16] slice([16:32] of f32[32] data("w.bin", 2432, 128)) from "c"
          %d_1 = DequantizeLinear(%w_1, %s_1) {axis=0, block_size=32} : f32[64, 16]
          %d_2 = DequantizeLinear(%w_2, %s_2) {axis=0, block_size=32} : f32[64, 16]
          %e_1 = DequantizeLinear(%b_1, %c_1) {axis=0} : f32[16]
          %e_2 = DequantizeLinear(%b_2, %c_2) {axis=0} : f32[16]
          %p_1 = MatMul(%x, %d_1) : f32[8, 16] for "/c_attn"
          %p_2 = MatMul(%x, %d_2) : f32[8, 16] for "/c_attn"
          %a_1 = Add(%p_1, %e_1) : f32[8, 16]
          %a_2 = Add(%p_2, %e_2) : f32[8, 16]
          %q_1 = QuantizeLinear(%a_1, %half, %zero) : i8[8, 16]
          %q_2 = QuantizeLinear(%a_2, %half, %zero) : i8[8, 16]
          %gate = DequantizeLinear(%q_1, %half, %zero) : f32[8, 16]
          %up = DequantizeLinear(%q_2, %half, %zero) : f32[8, 16]
          %y = Mul(%gate, %up) : f32[8, 16]
        }
        """,
    )


ONE = """
    mesh @m = ["tp"=4]
    graph @g(%x: f32[8, 4]) -> (%a, %b) opset 21 {{
      %w = constant : {weight} data("w.bin", 0, 192)
      %zero = constant : i64[1] [0]
      %four = constant : i64[1] [4]
      %end = constant : i64[1] [12]
      %one = constant : i64[1] [1]
      %p = MatMul(%x, %w) : {product}
      {readers}
    }}
"""
SPLIT = "%a, %b = Split(%p) {axis=1} : f32[8, 6], f32[8, 6]"
STAYS = {
    "a cut that does not divide the sections": ("f32[4, 12@tp]", "f32[8, 12]", SPLIT),
    "the product is annotated": ("f32[4, 12]", "f32[8, 12@tp]", SPLIT),
    "something else reads the product": (
        "f32[4, 12]",
        "f32[8, 12]",
        "%a = Relu(%p) : f32[8, 12]\n  %b, %c = Split(%p) {axis=1} : f32[8, 6], f32[8, 6]",
    ),
    "something else reads the weight": (
        "f32[4, 12]",
        "f32[8, 12]",
        "%a = Relu(%w) : f32[4, 12]\n  %b, %c = Split(%p) {axis=1} : f32[8, 6], f32[8, 6]",
    ),
    "rows are split": ("f32[4, 12]", "f32[8, 12]", "%a, %b = Split(%p) {axis=0} : f32[4, 12], f32[4, 12]"),
    "readers overlap": (
        "f32[4, 12]",
        "f32[8, 12]",
        "%a = Slice(%p, %zero, %end, %one) : f32[8, 12]\n  %b = Slice(%p, %four, %end, %one) : f32[8, 8]",
    ),
    "heads are split, not sections": (
        "f32[4, 12]",
        "f32[8, 12]",
        "%s = constant : i64[3] [8, 3, 4]\n  %r = Reshape(%p, %s) : f32[8, 3, 4]\n"
        "  %a, %b = Split(%r) {axis=2} : f32[8, 3, 2], f32[8, 3, 2]",
    ),
    "blocks that share a scale lie along the columns": (
        "f32[4, 12]",
        "f32[8, 12]",
        '%s = constant : f32[8, 3] data("w.bin", 192, 96)\n'
        "  %q = QuantizeLinear(%p, %s) {axis=1, block_size=4} : u8[8, 12]\n"
        "  %a, %b = Split(%q) {axis=1} : u8[8, 6], u8[8, 6]",
    ),
}


@pytest.mark.parametrize("why", STAYS)
def test_stays(why):
    weight, product, readers = STAYS[why]
    module = read(ONE.format(weight=weight, product=product, readers=readers))
    before = str(module)
    assert not run_pipeline("split-weights", module)[0].changed
    assert str(module) == before


def test_annotations_that_wait_for_a_mesh_name_the_weight():
    text = ONE.format(weight="f32[4, 12]", product="f32[8, 12]", readers=SPLIT)
    module = read(text.replace('mesh @m = ["tp"=4]', ""))
    module.shard("w", [None, "tp"])
    assert not run_pipeline("split-weights", module)[0].changed


NUMBERS = {
    "slices of a Gemm behind elementwise operators": """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[6, 5] x) => (float[6, 3] a, float[6, 4] c)
        <float[9, 5] w = {WEIGHT}, float[9] b = {BIAS},
         int64[1] s0 = {0}, int64[1] s1 = {3}, int64[1] s2 = {5}, int64[1] s3 = {9}, int64[1] axis = {1}> {
          p = Gemm<transB = 1, alpha = 0.5>(x, w, b)  t = Tanh(p)
          a = Slice(t, s0, s1, axis)  c = Slice(t, s2, s3, axis) }""",
    "a convolution": """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[2, 5, 4, 4] x) => (float[2, 4, 4, 4] a, float[2, 5, 4, 4] c)
        <float[9, 5, 1, 1] w = {WEIGHT}, float[9] b = {BIAS}, int64[2] sizes = {4, 5}> {
          p = Conv(x, w, b)  a, c = Split<axis = 1>(p, sizes) }""",
    "rows of the left operand, looked up": """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[4, 5, 1] x, int64[4] i) => (float[4, 1] y)
        <float[3, 3, 5] w = {WEIGHT}, int64[1] last = {-1}, int64[2] sizes = {1, 2}, int64[1] one = {1}> {
          e = Gather<axis = 0>(w, i)  p = MatMul(e, x)  r = Squeeze(p, last)
          gate, up = Split<axis = 1>(r, sizes)  m = ReduceSum(up, one)  y = Mul(gate, m) }""",
    "dims that become one again, elsewhere": """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[2, 5] x) => (float[1, 2, 1] q, float[3, 2, 1] k, float[5, 2, 1] v)
        <float[5, 9] w = {WEIGHT}, int64[4] apart = {2, 3, 3, 1}, int64[3] together = {9, 2, 1}, int64[3] sizes = {1, 3, 5}> {
          p = MatMul(x, w)  a = Reshape(p, apart)  t = Transpose<perm = [1, 2, 0, 3]>(a)  r = Relu(t)
          m = Reshape(r, together)  q, k, v = Split<axis = 0>(m, sizes) }""",
    "numbers for each row and for all, and a Reshape": """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[3, 6, 5] x) => (float[3, 6, 1, 3] q, float[3, 6, 1, 3] k, float[3, 6, 1, 3] v)
        <float[5, 9] w = {WEIGHT}, float[9] b = {BIAS}, float[1] half = {0.5}, float[6, 1] row = {1, 2, 3, 4, 5, 6},
         int64[4] apart = {3, 6, 3, 3}> {
          p = MatMul(x, w)  h = Mul(half, p)  a = Add(h, b)  o = Sub(row, a)  c = Reshape(o, apart)  n = Neg(c)
          q, k, v = Split<axis = 2, num_outputs = 3>(n) }""",
    "rows with scales and zero points, and quantized data": """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[6, 5] x) => (float[6, 3] q, float[6, 3] k, float[6, 3] v)
        <int8[9, 5] w = {INTEGERS}, float[9] s = {SCALES}, int8[9] z = {1, -2, 3, 0, 0, 4, -5, 6, 7},
         float[9] b = {BIAS}, float step = {0.04}, uint8 middle = {128}, int64[3] apart = {6, 3, 3}> {
          d = DequantizeLinear<axis = 0>(w, s, z)  p = Gemm<transB = 1>(x, d, b)
          i = QuantizeLinear(p, step, middle)  f = DequantizeLinear(i, step, middle)  r = Reshape(f, apart)
          j = QuantizeLinear(r, step, middle)  h = DequantizeLinear(j, step, middle)
          t = Transpose<perm = [1, 0, 2]>(h)  q, k, v = Split<axis = 0, num_outputs = 3>(t) }""",
    "scales of blocks of rows, and of columns of the result": """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[6, 5] x) => (float[6, 4] gate, float[6, 5] up)
        <int8[5, 9] w = {INTEGERS}, float[1, 9] s = {SCALES}, float[9] steps = {SCALES}, int64[2] sizes = {4, 5}> {
          d = DequantizeLinear<axis = 0, block_size = 5>(w, s)  p = MatMul(x, d)
          i = QuantizeLinear<axis = -1, output_dtype = 3>(p, steps)  f = DequantizeLinear<axis = 1>(i, steps)
          gate, up = Split<axis = 1>(f, sizes) }""",
}
SHAPES = dict(zip(NUMBERS, [(6, 5), (2, 5, 4, 4), (4, 5, 1), (2, 5), (3, 6, 5), (6, 5), (6, 5)], strict=True))
SCALES = "{0.1, 0.2, 0.05, 0.3, 0.15, 0.25, 0.4, 0.1, 0.2}"
INTEGERS = "{" + ", ".join(str((7 * i) % 23 - 11) for i in range(45)) + "}"


def _numbers(count, scale):
    return "{" + ", ".join(f"{((7 * i) % 11 - 5) * scale:.3f}" for i in range(count)) + "}"


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_stay(case, check_numbers):
    text = NUMBERS[case].replace("{WEIGHT}", _numbers(45, 0.17)).replace("{BIAS}", _numbers(9, 0.3))
    for name, numbers in (("{INTEGERS}", INTEGERS), ("{SCALES}", SCALES)):
        text = text.replace(name, numbers)
    rng = np.random.default_rng(0)
    inputs = {"x": rng.normal(size=SHAPES[case]).astype(np.float32)}
    if "looked up" in case:
        inputs["i"] = rng.integers(0, 3, 4)
    module = check_numbers(text, "infer-types,split-weights,dce", inputs, exactly=False)
    assert not any(node.op_type in ("Split", "Slice") for node in module.graph)


def test_a_product_beside_what_has_no_known_size_stays():
    text = """
        graph @g(%x: f32[4, 8], %i: f32[n, 6]) -> (%y) opset 21 {
          %w = constant : f32[8, 6] data("w.bin", 0, 192)
          %h = MatMul(%x, %w) : f32[4, 6]
          %y = Add(%h, %i) : f32[n, 6]
        }
        """
    module = read(text)
    run_pipeline("split-weights", module)
    assert [node.op_type for node in module.graph] == ["MatMul", "Add"]
