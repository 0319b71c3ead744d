"""State through the passes: what replaces it is brought to how it is sharded, as at the end of a loop."""

import irpar
from irpar.ir import parse_module

STEP = """
mesh @m = ["dp"=2]
graph @step(%x: f32[8@dp, 4], state parameter %w: {w}) -> (%y, %w_1 replaces %w) opset 21 {{
  %y = MatMul(%x, %w) : f32[8, 4]
  %t = Transpose(%x) : f32[4, 8]
  %g = MatMul(%t, %y) : f32[4, 4]
  %w_1 = Sub(%w, %g) : f32[4, 4]
}}
"""
PIPELINE = "complete-sharding,insert-redistribution,localize"


def test_a_parameter_that_is_cut_is_gathered_and_its_change_scattered(check_golden):
    check_golden(
        PIPELINE,
        STEP.format(w="f32[4@dp, 4]"),
        """
        mesh @m = ["dp"=2]
        graph local @step(%x: f32[4, 4] of [8@dp, 4], state parameter %w: f32[2, 4] of [4@dp, 4]) -> (%y, %w_1 replaces %w) opset 21 ranks [0, 1] {
          %w_2 = irpar.AllGather(%w) {axes=["dp"], dim=0, id=0} : f32[4, 4] of [4, 4] replicated doc "MatMul of %y needs it as [_, _] replicated: it reads %x as [@dp, _]; %w is sharded as [@dp, _]"
          %y = MatMul(%x, %w_2) : f32[4, 4] of [8@dp, 4]
          %t = Transpose(%x) : f32[4, 4] of [4, 8@dp]
          %g = MatMul(%t, %y) : f32[4, 4] of [4, 4] partial(sum: dp)
          %g_1 = irpar.ReduceScatter(%g) {axes=["dp"], dim=0, reduce="sum", id=1} : f32[2, 4] of [4@dp, 4] doc "MatMul of %g sums over dp, which shards %t (follows %x through Transpose of %t) and %y (follows %x through MatMul of %y)"
          %w_1 = Sub(%w, %g_1) : f32[2, 4] of [4@dp, 4]
        }
        """,
    )


def test_a_parameter_on_all_ranks_is_changed_alike(check_golden):
    check_golden(
        PIPELINE,
        STEP.format(w="f32[4, 4] replicated"),
        """
        mesh @m = ["dp"=2]
        graph local @step(%x: f32[4, 4] of [8@dp, 4], state parameter %w: f32[4, 4] of [4, 4] replicated) -> (%y, %w_1 replaces %w) opset 21 ranks [0, 1] {
          %y = MatMul(%x, %w) : f32[4, 4] of [8@dp, 4]
          %t = Transpose(%x) : f32[4, 4] of [4, 8@dp]
          %g = MatMul(%t, %y) : f32[4, 4] of [4, 4] partial(sum: dp)
          %g_1 = irpar.AllReduce(%g) {axes=["dp"], reduce="sum", id=0} : f32[4, 4] of [4, 4] replicated doc "MatMul of %g sums over dp, which shards %t (follows %x through Transpose of %t) and %y (follows %x through MatMul of %y)"
          %w_1 = Sub(%w, %g_1) : f32[4, 4] of [4, 4] replicated
        }
        """,
    )


def test_a_result_that_is_annotated_otherwise_than_the_state_that_it_replaces():
    module = parse_module(
        """
        graph @g(%x: f32[8, 4], state cache %c: f32[8, 4]) -> (%c_1 replaces %c) opset 21 {
          %c_1 = Add(%c, %x) : f32[8, 4]
        }
        """
    )
    module.shard("c", ["dp", None])
    module.shard("c_1", [None, "dp"])
    partition = irpar.partition(module, {"dp": 2})
    (entry,) = partition.plan.collectives[-1:]
    assert entry["reason"].startswith("the next run takes it as [@dp, _], as the state lies that it replaces")
    assert {row["name"]: row["sharding"] for row in partition.plan.values}["c_1"] == [None, ["dp"]]
