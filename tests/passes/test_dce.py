"""dce: what no result needs goes, what others wait for stays."""

import numpy as np


def test_dead_chains_constants_and_functions_go(check_golden):
    check_golden(
        "dce",
        """
        function @my.Used(%p) -> (%q) opset 21 {
          %q = Neg(%p) : ?
          %dead = Exp(%p) : ?
        }
        function @my.Unused(%p) -> (%q) opset 21 {
          %q = call @my.Helper(%p) : ?
        }
        function @my.Helper(%p) -> (%q) opset 21 {
          %q = Neg(%p) : ?
        }
        graph @g(%x: f32[4], %unused: f32[2]) -> (%y) opset 21, "my" 1 {
          %w = constant : f32[] 2.0
          %a = Mul(%x, %w) : f32[4]
          %b = Exp(%a) : f32[4]
          %y = call @my.Used(%x) : f32[4]
        }
        """,
        """
        function @my.Used(%p) -> (%q) opset 21 {
          %q = Neg(%p) : ?
        }
        graph @g(%x: f32[4], %unused: f32[2]) -> (%y) opset 21, "my" 1 {
          %y = call @my.Used(%x) : f32[4]
        }
        """,
    )


def test_optional_results_at_the_end_go(check_golden):
    check_golden(
        "dce",
        """
        graph @g(%x: f32[2, 4], %s: f32[4]) -> (%y, %a, %k) opset 21 {
          %y, %mean, %dev = LayerNormalization(%x, %s) : f32[2, 4], f32[2, 1], f32[2, 1]
          %a, %b = Split(%x) {num_outputs=2} : f32[1, 4], f32[1, 4]
          %one = constant : i64[1] [1]
          %t, %k = TopK(%x, %one) : f32[2, 1], i64[2, 1]
        }
        """,
        """
        graph @g(%x: f32[2, 4], %s: f32[4]) -> (%y, %a, %k) opset 21 {
          %one = constant : i64[1] [1]
          %y = LayerNormalization(%x, %s) : f32[2, 4]
          %a, %b = Split(%x) {num_outputs=2} : f32[1, 4], f32[1, 4]
          %t, %k = TopK(%x, %one) : f32[2, 1], i64[2, 1]
        }
        """,
    )


def test_unused_results_of_branches_go_with_what_computes_them(check_golden):
    check_golden(
        "dce",
        """
        graph @g(%x: f32[4], %c: bool[]) -> (%z) opset 21 {
          %only = Neg(%x) : f32[4]
          %y, %z = If(%c) {then_branch=graph @t() -> (%t, %u) {
            %t = Exp(%only) : f32[4]
            %u = Abs(%x) : f32[4]
          }, else_branch=graph @e() -> (%e, %f) {
            %e = Log(%only) : f32[4]
            %f = Relu(%x) : f32[4]
          }} : f32[4], f32[4]
        }
        """,
        """
        graph @g(%x: f32[4], %c: bool[]) -> (%z) opset 21 {
          %z = If(%c) {then_branch=graph @t() -> (%u) {
            %u = Abs(%x) : f32[4]
          }, else_branch=graph @e() -> (%f) {
            %f = Relu(%x) : f32[4]
          }} : f32[4]
        }
        """,
    )


def test_a_loop_loses_collected_results_but_keeps_its_carried_values(check_golden):
    check_golden(
        "dce",
        """
        graph @g(%n: i64[], %x: f32[4]) -> (%all) opset 21 {
          %last, %dead, %all = Loop(%n, _, %x) {body=graph @b(%i: i64[], %c: bool[], %v: f32[4]) -> (%c, %w, %p, %q) {
            %w = Exp(%v) : f32[4]
            %p = Neg(%w) : f32[4]
            %q = Abs(%w) : f32[4]
          }} : f32[4], f32[_, 4], f32[_, 4]
        }
        """,
        """
        graph @g(%n: i64[], %x: f32[4]) -> (%all) opset 21 {
          %last, %all = Loop(%n, _, %x) {body=graph @b(%i: i64[], %c: bool[], %v: f32[4]) -> (%c, %w, %q) {
            %w = Exp(%v) : f32[4]
            %q = Abs(%w) : f32[4]
          }} : f32[4], f32[_, 4]
        }
        """,
    )


def test_an_unused_holder_goes_with_what_it_captures(check_golden):
    check_golden(
        "dce",
        """
        graph @g(%x: f32[4], %c: bool[]) -> (%y) opset 21 {
          %w = constant : f32[] 2.0
          %a = Exp(%x) : f32[4]
          %d = If(%c) {then_branch=graph @t() -> (%t) {
            %t = Mul(%a, %w) : f32[4]
          }, else_branch=graph @e() -> (%a) {
          }} : f32[4]
          %y = Neg(%x) : f32[4]
        }
        """,
        """
        graph @g(%x: f32[4], %c: bool[]) -> (%y) opset 21 {
          %y = Neg(%x) : f32[4]
        }
        """,
    )


def test_sends_and_receives_stay_collectives_of_one_program_go(check_golden):
    check_golden(
        "dce",
        """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[4] of [8@tp]) -> (%y) opset 21 ranks [0, 1] {
          irpar.Send(%x) {channel=0, pairs=[0, 1], id=0}
          %s = irpar.Recv() {channel=0, pairs=[0, 1], dtype="f32", shape=[4], id=2} : f32[4] of [8@tp]
          %r = irpar.AllGather(%x) {axes=["tp"], dim=0, id=1} : f32[8] of [8] replicated
          %y = Neg(%x) : f32[4] of [8@tp]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[4] of [8@tp]) -> (%y) opset 21 ranks [0, 1] {
          irpar.Send(%x) {channel=0, pairs=[0, 1], id=0}
          %s = irpar.Recv() {channel=0, pairs=[0, 1], dtype="f32", shape=[4], id=2} : f32[4] of [8@tp]
          %y = Neg(%x) : f32[4] of [8@tp]
        }
        """,
    )


def test_collectives_of_several_programs_stay(check_golden):
    text = """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[4]) -> (%y) opset 21 ranks [0] {
          %r = irpar.AllReduce(%x) {axes=["tp"], reduce="sum", id=1} : f32[4]
          %y = Neg(%x) : f32[4]
        }
        graph local @h(%x: f32[4]) -> (%r) opset 21 ranks [1] {
          %r = irpar.AllReduce(%x) {axes=["tp"], reduce="sum", id=1} : f32[4]
        }
        """
    check_golden("dce", text, text)


def test_batch_normalization_in_training_keeps_its_statistics(check_golden):
    text = """
        graph @g(%x: f32[2, 3], %s: f32[3]) -> (%y) opset 21 {
          %y, %m, %v = BatchNormalization(%x, %s, %s, %s, %s) {training_mode=1} : f32[2, 3], f32[3], f32[3]
        }
        """
    check_golden("dce", text, text)


def test_attention_keeps_the_cache_that_it_makes_of_one_it_reads(check_golden):
    text = """
        graph @g(%q: f32[1, 2, 3, 4], %k: f32[1, 2, 5, 4]) -> (%y) opset 24 {
          %y, %m, %v = Attention(%q, %k, %k, _, %k, %k) : f32[1, 2, 3, 4], f32[1, 2, 10, 4], f32[1, 2, 10, 4]
        }
        """
    check_golden("dce", text, text)


def test_numbers_stay_the_same(check_numbers):
    module = check_numbers(
        """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[2,4] x, float[4] s, bool c) => (float[2,4] z) {
          y, mean, dev = LayerNormalization(x, s)
          a, z = If (c) <
            then_branch = t () => (float[2,4] t1, float[2,4] t2) { t1 = Exp(y) t2 = Abs(y) },
            else_branch = e () => (float[2,4] e1, float[2,4] e2) { e1 = Neg(mean) e2 = Relu(y) }>
        }
        """,
        "dce",
        {"x": np.arange(8, dtype=np.float32).reshape(2, 4), "s": np.ones(4, np.float32), "c": np.array(False)},
    )
    assert [len(node.results) for node in module.graph] == [1, 1]
