"""Which operators simplify-layout lets work on the parts of a merged dim, and their numbers in ONNX Runtime."""

import numpy as np
import onnx
import pytest

import irpar

from .golden import check, read, run_pipeline

X = "float[2, 3, 8] x"
ROWS = "int64[2] rows = {6, 8}"
CASES = {
    "ArgMax": ("i = ArgMax<axis = 1>(m)  o = Cast<to = 1>(i)", "1", ""),
    "ArgMin of vectors": ("i = ArgMin<axis = -1, keepdims = 0>(m)  o = Cast<to = 1>(i)", "", ""),
    "TopK": ("o, u = TopK(m, k)", "3", "int64[1] k = {3}"),
    "TopK, and its places": ("v, u = TopK<axis = 1>(m, k)  o = Cast<to = 1>(u)", "3", "int64[1] k = {3}"),
    "ReduceMean": ("o = ReduceMean(m, one)", "1", "int64[1] one = {1}"),
    "ReduceSum of vectors": ("o = ReduceSum<keepdims = 0>(m, one)", "", "int64[1] one = {-1}"),
    "ReduceL2": ("o = ReduceL2(m, one)", "1", "int64[1] one = {1}"),
    "Slice": ("o = Slice(m, a, b, one)", "4", "int64[1] a = {0}, int64[1] b = {4}, int64[1] one = {1}"),
    "Slice of the first dims": ("o = Slice(m, a, b)", "4", "int64[2] a = {0, 1}, int64[2] b = {6, 5}"),
    "Slice from the end": ("o = Slice(m, a, b, l)", "4", "int32[1] a = {-4}, int32[1] b = {9}, int32[1] l = {-1}"),
    "Split": ("a, c = Split<axis = 1, num_outputs = 2>(m)  o = Mul(a, c)", "4", ""),
    "Pad": ("o = Pad(m, p)", "10", "int64[4] p = {0, 1, 0, 1}"),
    "Pad of named dims": ("o = Pad<mode = \"reflect\">(m, p, , one)", "10", "int64[2] p = {1, 1}, int64[1] one = {1}"),
    "Tile of features": ("o = Tile(m, t)", "16", "int64[2] t = {1, 2}"),
    "CumSum": ("o = CumSum(m, one)", "8", "int64 one = {1}"),
    "QuantizeLinear": (
        "q = QuantizeLinear(m, s, z)  o = DequantizeLinear(q, s, z)", "8", "float s = {0.1}, uint8 z = {99}"
    ),
    "QuantizeLinear along the features": (
        "q = QuantizeLinear<axis = 1>(m, s, z)  o = DequantizeLinear<axis = -1>(q, s, z)",
        "8",
        "float[8] s = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}, int8[8] z = {0, 1, 2, 3, 4, 5, 6, 7}",
    ),
    "DynamicQuantizeLinear, MatMulInteger": (
        "q, s, z = DynamicQuantizeLinear(m)  p = MatMulInteger(q, w, z)  f = Cast<to = 1>(p)  o = Mul(f, s)",
        "2",
        "int8[8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4, -5, -6, -7, -8}",
    ),
    "QLinearMatMul": (
        "q = QuantizeLinear(m, s, z)  p = QLinearMatMul(q, s, z, w, s, z, s, z)  o = DequantizeLinear(p, s, z)",
        "2",
        "float s = {0.1}, uint8 z = {99}, uint8[8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 199, 2, 13, 4, 95, 6, 7, 8}",
    ),
    "Einsum": ('o = Einsum<equation = "nc, nc -> nc">(m, m)', "8", ""),
    "Einsum without its result": ('o = Einsum<equation = "bc,cd">(m, w)', "2", "float[8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}"),
    "GatherElements": ("o = GatherElements<axis = 1>(m, i)", "1", "int64[6, 1] i = {0, 7, 3, -1, 2, 5}"),
    "ScatterElements": (
        "u = Neg(m)  v = Slice(u, a, b, b)  o = ScatterElements<axis = 1>(m, i, v)",
        "8",
        "int64[1] a = {0}, int64[1] b = {1}, int64[6, 1] i = {0, 7, 3, -1, 2, 5}",
    ),
    "Gather of features": ("o = Gather<axis = 1>(m, i)", "2", "int64[2] i = {5, 1}"),
    "Gather of a table": (
        "i = ArgMax<axis = 1, keepdims = 0>(m)  o = Gather(w, i)",
        "2",
        "float[8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}",
    ),
    "OneHot": (
        "i = ArgMax<axis = 1, keepdims = 0>(m)  o = OneHot(i, d, v)", "8", "int64 d = {8}, float[2] v = {0, 1}"
    ),
    "Hardmax, Dropout, CastLike": ("h = Hardmax(m)  d = Dropout(h)  o = CastLike(d, f)", "8", "float f = {0}"),
    "LpNormalization": ("o = LpNormalization<p = 1>(m)", "8", ""),
}  # fmt: skip


OPSET_12 = {
    "ReduceMean by an attribute": ("o = ReduceMean<axes = [-1]>(m)", "1", ""),
    "ReduceSum by an attribute": ("o = ReduceSum<axes = [1]>(m)", "1", ""),
    "Softmax of all dims from an axis on": ("o = Softmax(m)", "8", ""),
    "Split by an attribute": ("a, c = Split<axis = 1, split = [4, 4]>(m)  o = Mul(a, c)", "4", ""),
    "QuantizeLinear without an axis": (
        "q = QuantizeLinear(m, s, z)  o = DequantizeLinear(q, s, z)", "8", "float s = {0.1}, uint8 z = {99}"
    ),
}  # fmt: skip
_QUANTIZED = "float s = {0.1}, int8 z = {1}"
_WEIGHT = "int8[8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4, -5, -6, -7, -8}"
_QUANTIZE = "q = com.microsoft.QuantizeLinear(m, s, z) "
_DEQUANTIZE = " o = com.microsoft.DequantizeLinear(p, s, z)"
MICROSOFT = {
    "FastGelu and QuickGelu": ("f = com.microsoft.FastGelu(m)  o = com.microsoft.QuickGelu(f)", "8", ""),
    "QLinearAdd": (f"{_QUANTIZE} p = com.microsoft.QLinearAdd(q, s, z, q, s, z, s, z) {_DEQUANTIZE}", "8", _QUANTIZED),
    "QLinearSigmoid": (f"{_QUANTIZE} p = com.microsoft.QLinearSigmoid(q, s, z, s, z) {_DEQUANTIZE}", "8", _QUANTIZED),
    "QLinearSoftmax": (
        f"{_QUANTIZE} p = com.microsoft.QLinearSoftmax<axis = 1, opset = 13>(q, s, z, t, u) {_DEQUANTIZE}",
        "8",
        f"{_QUANTIZED}, float t = {{0.00390625}}, int8 u = {{-128}}",
    ),
    "MatMulIntegerToFloat": (
        "q, s, z = DynamicQuantizeLinear(m)  o = com.microsoft.MatMulIntegerToFloat(q, w, s, t, z)",
        "2",
        f"{_WEIGHT}, float t = {{0.1}}",
    ),
    "MatMulNBits": (
        "o = com.microsoft.MatMulNBits<K = 8, N = 2, bits = 4, block_size = 16>(m, w, t)",
        "2",
        "uint8[2, 1, 8] w = {1, 32, 3, 64, 5, 96, 7, 128, 17, 34, 51, 68, 85, 102, 119, 136}, float[2] t = {0.1, 0.2}",
    ),
    "DynamicQuantizeMatMul": (
        "o = com.microsoft.DynamicQuantizeMatMul(m, w, t)", "2", f"{_WEIGHT}, float t = {{0.1}}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *OPSET_12, *MICROSOFT])
def test_numbers_stay(case, check_numbers):
    """And nothing is merged any more."""
    inputs = {"x": np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)}
    module = check_numbers(_model(case), "infer-types,simplify-layout,dce", inputs)
    assert not any(node.op_type == "Reshape" and not node.inputs[0].is_constant for node in module.graph)


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_sharded_stay_where_they_are(case):
    """Of two merged dims the second is sharded; the least and the greatest of dynamic quantisation are reduced."""
    module = irpar.load(onnx.parser.parse_model(_model(case)))
    irpar.annotate(module, {"x": [None, "tp", None]})
    partition = irpar.partition(module, "tp=3")
    assert partition.plan.totals["sent_bytes"] <= (20 if "Dynamic" in case else 0)
    assert partition.verify().result == "equal"


def _model(case):
    body, features, constants = {**CASES, **OPSET_12, **MICROSOFT}[case]
    opset = 12 if case in OPSET_12 else 21
    shape = ", ".join(filter(None, ("2", "3", features)))
    apart = f"int64[{len(shape.split(','))}] apart = {{{shape}}}"
    return f"""
        <ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> g ({X}) => (float[{shape}] y)
        <{", ".join(filter(None, (ROWS, apart, constants)))}> {{ m = Reshape(x, rows)  {body}  y = Reshape(o, apart) }}"""


def test_a_chain_of_them():
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[4, 6, 16]) -> (%o) opset 21 {
          %rows = constant : i64[2] [24, 16]
          %apart = constant : i64[3] [4, 6, 1]
          %k = constant : i64[1] [2]
          %a = constant : i64[1] [0]
          %b = constant : i64[1] [1]
          %last = constant : i64[1] [1]
          %m = Reshape(%x, %rows) : f32[24, 16]
          %v, %i = TopK(%m, %k) {axis=1} : f32[24, 2], i64[24, 2] from "/topk"
          %g = GatherElements(%m, %i) {axis=1} : f32[24, 2]
          %s = Slice(%g, %a, %b, %last) : f32[24, 1]
          %p = Mul(%s, %v) : f32[24, 2]
          %r = ReduceSum(%p, %last) : f32[24, 1]
          %o = Reshape(%r, %apart) : f32[4, 6, 1]
        }
        """,
        """
        graph @g(%x: f32[4, 6, 16]) -> (%r_1 as "o") opset 21 {
          %k = constant : i64[1] [2]
          %a = constant : i64[1] [0]
          %b = constant : i64[1] [1]
          %last_1 = constant : i64[1] [2]
          %last_2 = constant : i64[1] [2]
          %v_1, %i_1 = TopK(%x, %k) {axis=-1} : f32[4, 6, 2], i64[4, 6, 2] for "/topk"
          %g_1 = GatherElements(%x, %i_1) {axis=-1} : f32[4, 6, 2]
          %s_1 = Slice(%g_1, %a, %b, %last_1) : f32[4, 6, 1]
          %p_1 = Mul(%s_1, %v_1) : f32[4, 6, 2]
          %r_1 = ReduceSum(%p_1, %last_2) : f32[4, 6, 1]
        }
        """,
    )


def test_what_is_merged_is_summed_as_several_dims(check_numbers):
    """A reduction and an equation can name them: each rank has a partial sum, of whichever it has a block."""
    text = """
        <ir_version: 10, opset_import: ["" : 21]> g (float[2, 3, 8] x) => (float[1, 8] y, float[8, 8] z)
        <int64[2] rows = {6, 8}, int64[1] first = {0}> {
          m = Reshape(x, rows)  y = ReduceMean(m, first)  z = Einsum<equation = "nc,nd->cd">(m, m) }"""
    inputs = {"x": np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)}
    module = check_numbers(text, "infer-types,simplify-layout,dce", inputs)
    mean, merge, product = module.graph
    assert [node.op_type for node in (mean, merge, product)] == ["ReduceMean", "Reshape", "Einsum"]
    assert mean.result.shape == (1, 1, 8)
    assert product.attributes["equation"] == "nac,nad->cd"


def test_what_a_tile_repeats_is_a_dim_of_its_own():
    """As DeBERTa repeats the keys of positions for each row of the batch, beside queries of batch x heads."""
    check(
        "simplify-layout,dce",
        """
        graph @g(%q: f32[4, 8, 6, 16], %k: f32[8, 6, 16]) -> (%o) opset 21 {
          %heads = constant : i64[3] [32, 6, 16]
          %count = constant : i64[3] [4, 1, 1]
          %apart = constant : i64[4] [4, 8, 6, 6]
          %a = Reshape(%q, %heads) : f32[32, 6, 16]
          %b = Tile(%k, %count) : f32[32, 6, 16]
          %t = Transpose(%b) {perm=[0, 2, 1]} : f32[32, 16, 6]
          %s = MatMul(%a, %t) : f32[32, 6, 6]
          %o = Reshape(%s, %apart) : f32[4, 8, 6, 6]
        }
        """,
        """
        graph @g(%q: f32[4, 8, 6, 16], %k: f32[8, 6, 16]) -> (%s_1 as "o") opset 21 {
          %shape = constant : i64[4] [1, 8, 6, 16]
          %shape_1 = constant : i64[4] [4, 8, 6, 16]
          %b_1 = Reshape(%k, %shape) : f32[1, 8, 6, 16]
          %b_2 = Expand(%b_1, %shape_1) : f32[4, 8, 6, 16]
          %t_1 = Transpose(%b_2) {perm=[0, 1, 3, 2]} : f32[4, 8, 16, 6]
          %s_1 = MatMul(%q, %t_1) : f32[4, 8, 6, 6]
        }
        """,
    )


def test_operands_that_several_read_are_moved_once():
    """The queries of rotary embeddings, read by a Mul and two Slices."""
    module = read(
        """
        graph @g(%x: f32[2, 6, 4, 8]) -> (%o) opset 21 {
          %heads = constant : i64[3] [8, 6, 8]
          %zero = constant : i64[1] [0]
          %half = constant : i64[1] [4]
          %end = constant : i64[1] [8]
          %axis = constant : i64[1] [-1]
          %t = Transpose(%x) {perm=[0, 2, 1, 3]} : f32[2, 4, 6, 8]
          %q = Reshape(%t, %heads) : f32[8, 6, 8]
          %a = Slice(%q, %zero, %half, %axis) : f32[8, 6, 4]
          %b = Slice(%q, %half, %end, %axis) : f32[8, 6, 4]
          %n = Neg(%b) : f32[8, 6, 4]
          %r = Concat(%n, %a) {axis=2} : f32[8, 6, 8]
          %o = Mul(%q, %r) : f32[8, 6, 8]
        }
        """
    )
    run_pipeline("simplify-layout,dce", module)
    assert [node.op_type for node in module.graph].count("Transpose") == 1


STAYS = {
    "the axis is merged": "%y = ArgMax(%m) {axis=0} : i64[1, 8]",
    "slices of what is merged": "%y = Slice(%m, %zero, %two) : f32[2, 8]",
    "sums along what is merged": "%y = CumSum(%m, %zero) : f32[24, 8]",
    "padding of what is merged": "%y = Pad(%m, %pads) : f32[25, 8]",
    "a scale for each element of what is merged": "%y = QuantizeLinear(%m, %scales) {axis=0} : u8[24, 8]",
    "what the rows are looked up in is merged": "%y = Gather(%m, %i) : f32[5, 8]",
    "others count along the axis": "%y = GatherElements(%z, %j) : f32[24, 8]",
    "rows are scattered": "%y = ScatterElements(%m, %j, %m) : f32[24, 8]",
    "rows are scattered by tuples": "%y = ScatterND(%m, %t, %u) : f32[24, 8]",
    "features of a triangle": "%y = Trilu(%m) : f32[24, 8]",
    "channels": "%y = Conv(%c, %k) : f32[24, 2, 2]",
    "an equation with a letter twice": '%y = Einsum(%s) {equation="ii->i"} : f32[24]',
}
STAYING = """
graph @g(INPUTS) -> (%y) opset 21 {
  %rows = constant : i64[2] [24, 8]
  %images = constant : i64[3] [24, 4, 2]
  %square = constant : i64[2] [24, 24]
  %zero = constant : i64[1] [0]
  %two = constant : i64[1] [2]
  %pads = constant : i64[4] [1, 0, 0, 0]
  %scales = constant : f32[24] data("w", 0, 96)
  %k = constant : f32[2, 4, 1] data("w", 96, 32)
  %m = Reshape(%x, %rows) : f32[24, 8]
  %j = Reshape(%p, %rows) : i64[24, 8]
  %c = Reshape(%x, %images) : f32[24, 4, 2]
  %s = Reshape(%v, %square) : f32[24, 24]
  WHAT
}
"""


@pytest.mark.parametrize("why", STAYS)
def test_what_stays(why):
    inputs = ("%x: f32[4, 6, 8]", "%v: f32[4, 6, 24]", "%z: f32[9, 8]", "%p: i64[4, 6, 8]")
    more = ("%i: i64[5]", "%t: i64[5, 1]", "%u: f32[5, 8]")
    text = STAYING.replace("INPUTS", ", ".join((*inputs, *more))).replace("WHAT", STAYS[why])
    check("simplify-layout", text, text)


def test_what_has_no_known_sizes_stays():
    text = """
        graph @g(%x: f32[n, 6, 8]) -> (%y) opset 21 {
          %rows = constant : i64[2] [-1, 8]
          %m = Reshape(%x, %rows) : f32[6*n, 8]
          %y = ArgMax(%m) {axis=1} : i64[6*n, 1]
        }
        """
    check("simplify-layout", text, text)
