"""join-weights: blocks of one weight that become one again, and which stay apart."""

import pytest

from irpar.ir import Conflict, Decision

from .golden import check, read, run_pipeline


def test_biases_and_reductions_run_once():
    """A sum over dp behind the products is one AllReduce; of a Transpose before them there is one too."""
    check(
        "join-weights",
        """
        mesh @m = ["dp"=2, "tp"=2]
        graph local @g(%x: f32[2, 8] of [2, 16@dp]) -> (%y) opset 21 ranks [0, 1, 2, 3] {
          %w_1 = constant : f32[4, 8] of [8@tp, 16@dp] whole slice([0:8, 0:16] of f32[24, 16] data("w.bin", 0, 1536)) from "w"
          %w_2 = constant : f32[8, 8] of [16@tp, 16@dp] whole slice([8:24, 0:16] of f32[24, 16] data("w.bin", 0, 1536)) from "w"
          %b_1 = constant : f32[4] of [8@tp] whole slice([0:8] of f32[24] data("w.bin", 1536, 96)) from "b"
          %b_2 = constant : f32[8] of [16@tp] whole slice([8:24] of f32[24] data("w.bin", 1536, 96)) from "b"
          %two = constant : f32[] of [] 2.0
          %u_1 = Transpose(%w_1) {perm=[1, 0]} : f32[8, 4] of [16@dp, 8@tp]
          %u_2 = Transpose(%w_2) {perm=[1, 0]} : f32[8, 8] of [16@dp, 16@tp]
          %p_1 = MatMul(%x, %u_1) : f32[2, 4] of [2, 8@tp] partial(sum: dp)
          %p_2 = MatMul(%x, %u_2) : f32[2, 8] of [2, 16@tp] partial(sum: dp)
          %r_1 = irpar.AllReduce(%p_1) {axes=["dp"], reduce="sum", id=0} : f32[2, 4] of [2, 8@tp] doc "%u_1 is sharded"
          %r_2 = irpar.AllReduce(%p_2) {axes=["dp"], reduce="sum", id=1} : f32[2, 8] of [2, 16@tp] doc "%u_2 is sharded"
          %a_1 = Add(%r_1, %b_1) : f32[2, 4] of [2, 8@tp]
          %a_2 = Add(%r_2, %b_2) : f32[2, 8] of [2, 16@tp]
          %s_1 = Mul(%two, %a_1) : f32[2, 4] of [2, 8@tp]
          %s_2 = Mul(%two, %a_2) : f32[2, 8] of [2, 16@tp]
          %g = Relu(%s_1) : f32[2, 4] of [2, 8@tp]
          %h = irpar.AllGather(%s_2) {axes=["tp"], dim=1, id=2} : f32[2, 16] of [2, 16]
          %y = Gemm(%g, %h) {transA=1} : f32[4, 16] of [8@tp, 16]
        }
        """,
        """
        mesh @m = ["dp"=2, "tp"=2]
        graph local @g(%x: f32[2, 8] of [2, 16@dp]) -> (%y) opset 21 ranks [0, 1, 2, 3] {
          %two = constant : f32[] of [] 2.0
          %w = constant : f32[12, 8] of [24@tp, 16@dp] whole join(0, 2, f32[8, 16] slice([0:8, 0:16] of f32[24, 16] data("w.bin", 0, 1536)), f32[16, 16] slice([8:24, 0:16] of f32[24, 16] data("w.bin", 0, 1536))) from "w"
          %b = constant : f32[12] of [24@tp] whole join(0, 2, f32[8] slice([0:8] of f32[24] data("w.bin", 1536, 96)), f32[16] slice([8:24] of f32[24] data("w.bin", 1536, 96))) from "b"
          %sizes = constant : i64[2] [4, 8]
          %u_1 = Transpose(%w) {perm=[1, 0]} : f32[8, 12] of [16@dp, 24@tp]
          %p_1 = MatMul(%x, %u_1) : f32[2, 12] of [2, 24@tp] partial(sum: dp)
          %r_1 = irpar.AllReduce(%p_1) {axes=["dp"], reduce="sum", id=0} : f32[2, 12] of [2, 24@tp] doc "%u_1 is sharded"
          %a_1 = Add(%r_1, %b) : f32[2, 12] of [2, 24@tp]
          %s_1_joined = Mul(%two, %a_1) : f32[2, 12] of [2, 24@tp]
          %s_1, %s_2 = Split(%s_1_joined, %sizes) {axis=1} : f32[2, 4] of [2, 8@tp], f32[2, 8] of [2, 16@tp]
          %g = Relu(%s_1) : f32[2, 4] of [2, 8@tp]
          %h = irpar.AllGather(%s_2) {axes=["tp"], dim=1, id=1} : f32[2, 16] of [2, 16]
          %y = Gemm(%g, %h) {transA=1} : f32[4, 16] of [8@tp, 16]
        }
        """,
    )


def test_scales_stand_side_by_side_too():
    """What is joined behind `gate` is no tensor of the model, and has no name of one."""
    check(
        "join-weights",
        """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[8, 32] of [8, 32]) -> (%y) opset 21 ranks [0, 1] {
          %w_1 = constant : i8[32, 8] of [32, 16@tp] whole slice([0:32, 0:16] of i8[32, 32] data("w.bin", 0, 1024)) from "w"
          %w_2 = constant : i8[32, 8] of [32, 16@tp] whole slice([0:32, 16:32] of i8[32, 32] data("w.bin", 0, 1024)) from "w"
          %s_1 = constant : f32[2, 8] of [2, 16@tp] whole slice([0:2, 0:16] of f32[2, 32] data("w.bin", 1024, 256)) from "s"
          %s_2 = constant : f32[2, 8] of [2, 16@tp] whole slice([0:2, 16:32] of f32[2, 32] data("w.bin", 1024, 256)) from "s"
          %half = constant : f32[] of [] 0.5
          %d_1 = DequantizeLinear(%w_1, %s_1) {axis=0, block_size=16} : f32[32, 8] of [32, 16@tp]
          %d_2 = DequantizeLinear(%w_2, %s_2) {axis=0, block_size=16} : f32[32, 8] of [32, 16@tp]
          %p_1 = MatMul(%x, %d_1) : f32[8, 8] of [8, 16@tp] for "/gate_up"
          %p_2 = MatMul(%x, %d_2) : f32[8, 8] of [8, 16@tp] for "/gate_up"
          %gate = QuantizeLinear(%p_1, %half) : u8[8, 8] of [8, 16@tp] for "/quantize" as "gate"
          %up = QuantizeLinear(%p_2, %half) : u8[8, 8] of [8, 16@tp] for "/quantize" as "up"
          %g = DequantizeLinear(%gate, %half) : f32[8, 8] of [8, 16@tp]
          %u = DequantizeLinear(%up, %half) : f32[8, 8] of [8, 16@tp]
          %y = Mul(%g, %u) : f32[8, 8] of [8, 16@tp]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[8, 32] of [8, 32]) -> (%y) opset 21 ranks [0, 1] {
          %half = constant : f32[] of [] 0.5
          %w = constant : i8[32, 16] of [32, 32@tp] whole join(1, 2, i8[32, 16] slice([0:32, 0:16] of i8[32, 32] data("w.bin", 0, 1024)), i8[32, 16] slice([0:32, 16:32] of i8[32, 32] data("w.bin", 0, 1024))) from "w"
          %s = constant : f32[2, 16] of [2, 32@tp] whole join(1, 2, f32[2, 16] slice([0:2, 0:16] of f32[2, 32] data("w.bin", 1024, 256)), f32[2, 16] slice([0:2, 16:32] of f32[2, 32] data("w.bin", 1024, 256))) from "s"
          %sizes = constant : i64[2] [8, 8]
          %d_1 = DequantizeLinear(%w, %s) {axis=0, block_size=16} : f32[32, 16] of [32, 32@tp]
          %p_1 = MatMul(%x, %d_1) : f32[8, 16] of [8, 32@tp] for "/gate_up"
          %gate_joined = QuantizeLinear(%p_1, %half) : u8[8, 16] of [8, 32@tp] for "/quantize"
          %g_joined = DequantizeLinear(%gate_joined, %half) : f32[8, 16] of [8, 32@tp]
          %g, %u = Split(%g_joined, %sizes) {axis=1} : f32[8, 8] of [8, 16@tp], f32[8, 8] of [8, 16@tp]
          %y = Mul(%g, %u) : f32[8, 8] of [8, 16@tp]
        }
        """,
    )


def test_what_no_device_cuts_is_what_it_was():
    check(
        "join-weights",
        """
        mesh @m = ["dp"=2]
        graph local @g(%x: f32[4, 8] of [8@dp, 8]) -> (%a, %b) opset 21 ranks [0, 1] {
          %w_1 = constant : f32[8, 4] of [8, 4] slice([0:8, 0:4] of f32[8, 8] data("w.bin", 0, 256)) from "w"
          %w_2 = constant : f32[8, 4] of [8, 4] slice([0:8, 4:8] of f32[8, 8] data("w.bin", 0, 256)) from "w"
          %a = MatMul(%x, %w_1) : f32[4, 4] of [8@dp, 4]
          %b = MatMul(%x, %w_2) : f32[4, 4] of [8@dp, 4]
        }
        """,
        """
        mesh @m = ["dp"=2]
        graph local @g(%x: f32[4, 8] of [8@dp, 8]) -> (%a, %b) opset 21 ranks [0, 1] {
          %w = constant : f32[8, 8] of [8, 8] data("w.bin", 0, 256) from "w"
          %sizes = constant : i64[2] [4, 4]
          %a_joined = MatMul(%x, %w) : f32[4, 8] of [8@dp, 8]
          %a, %b = Split(%a_joined, %sizes) {axis=1} : f32[4, 4] of [8@dp, 4], f32[4, 4] of [8@dp, 4]
        }
        """,
    )


TWO = """
    mesh @m = ["tp"=2]
    graph local @g(%x: f32[4, 8] of [4, 8], %z: f32[4, 8] of [4, 8]) -> (%a, %b) opset 21 ranks [0, 1] {{
      %w_1 = constant : {first} slice([0:8, 0:4] of f32[8, 8] data("w.bin", 0, 256)) from "w"
      %w_2 = constant : {second} slice({region} of f32[8, 8] data("{file}", 0, 256)) from "w"
      %a = MatMul(%x, %w_1) : {product}
      %b = MatMul({other}, %w_2) : {result}
    }}
"""
CUT, WHOLE = "f32[8, 2] of [8, 4@tp] whole", "f32[8, 4] of [8, 4]"
PRODUCT = "f32[4, 2] of [4, 4@tp]"
SAME = {
    "first": CUT,
    "second": CUT,
    "region": "[0:8, 4:8]",
    "file": "w.bin",
    "other": "%x",
    "product": PRODUCT,
    "result": PRODUCT,
}
APART = {
    "products of other operands": {"other": "%z"},
    "blocks of another tensor": {"file": "v.bin"},
    "blocks that overlap": {"region": "[0:8, 3:7]"},
    "one is sharded, one is not": {"second": WHOLE, "result": "f32[4, 4] of [4, 4]"},
}


def test_two():
    module = read(TWO.format(**SAME))
    assert run_pipeline("join-weights", module)[0].statistics["weights"] == 1


@pytest.mark.parametrize("why", APART)
def test_stays_apart(why):
    module = read(TWO.format(**{**SAME, **APART[why]}))
    before = str(module)
    assert not run_pipeline("join-weights", module)[0].changed
    assert str(module) == before


def test_blocks_of_other_sizes_stay_apart():
    """5 columns over tp=2 are 3 and 2: side by side they would be no even blocks of 10."""
    text = TWO.format(**SAME).replace("ranks [0, 1]", "ranks [0]").replace("f32[8, 8]", "f32[8, 10]")
    text = text.replace("256", "320").replace("0:4]", "0:5]").replace("4:8]", "5:10]")
    text = text.replace("f32[8, 2] of [8, 4@tp]", "f32[8, 3] of [8, 5@tp]").replace(PRODUCT, "f32[4, 3] of [4, 5@tp]")
    assert not run_pipeline("join-weights", read(text))[0].changed


REDUCED = """
    mesh @m = ["dp"=2, "tp"=2]
    graph local @g(%x: f32[2, 8] of [2, 16@dp]) -> (%y) opset 21 ranks [0, 1, 2, 3] {{
      %w_1 = constant : f32[8, 8] of [16@dp, 8] whole slice([0:16, 0:8] of f32[16, 24] data("w.bin", 0, 1536)) from "w"
      %w_2 = constant : f32[8, 16] of [16@dp, 16] whole slice([0:16, 8:24] of f32[16, 24] data("w.bin", 0, 1536)) from "w"
      %p_1 = MatMul(%x, %w_1) : f32[2, 8] of [2, 8] partial(sum: dp)
      %p_2 = MatMul(%x, %w_2) : f32[2, 16] of [2, 16] partial(sum: dp)
      %r_1 = irpar.AllReduce(%p_1) {{axes=["dp"], reduce="sum", id=0}} : f32[2, 8] of [2, 8] doc "one: %w_1"
      %r_2 = irpar.AllReduce(%p_2) {{axes=["dp"], reduce="sum", id=1}} : f32[2, 16] of [2, 16] doc "two: %w_2"
      {behind}
      %y = Gemm(%{first}, %{second}) {{transA=1}} : f32[8, 16] of [8, 16]
    }}
"""
BEHIND = {
    "the last step": ("%g = Relu(%r_1) : f32[2, 8] of [2, 8]", "g", "r_2"),
    "a step between": (
        "%s_1 = Relu(%r_1) : f32[2, 8] of [2, 8]\n      %s_2 = Relu(%r_2) : f32[2, 16] of [2, 16]",
        "s_1",
        "s_2",
    ),
}


@pytest.mark.parametrize("where", BEHIND)
def test_what_is_joined_tells_all_reasons(where):
    behind, first, second = BEHIND[where]
    module = read(REDUCED.format(behind=behind, first=first, second=second))
    for name in ("r_1", "r_2"):
        module.conflicts[name] = Conflict(name, "[@tp]", "annotated", "node", "[_]", "", name == "r_2", "do")
    for name in ("w_1", "r_1"):
        module.decide(name, Decision(f"of %{name}"))
    run_pipeline("join-weights", module)
    (reduced,) = (node for node in module.graphs[0] if node.domain == "irpar")
    assert reduced.doc == "one: %w; two: %w"
    (name,) = module.conflicts
    assert name == reduced.result.name
    assert module.conflicts[name] == Conflict("r_1; r_2", "[@tp]", "annotated", "node", "[_]", "", True, "do")
    lists = list(module.decisions.values())
    assert len({id(known) for known in lists}) == len(lists)
    assert name in module.decisions
