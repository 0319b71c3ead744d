import pytest

from irpar.analysis.completion.flow import Flow
from irpar.pass_manager import PassManager
from irpar.passes.localize import distinct_programs
from irpar.sharding import IrparError

from .golden import check, read, run


def test_types_become_blocks() -> None:
    check(
        "localize",
        """
        mesh @m = ["dp"=2, "tp"=4]
        graph @g(%x: f32[8@dp, 64]) -> (%h) opset 21 {
          %w = constant : f32[64, 256@tp] data("w.bin", 0, 65536) from "fc1.weight"
          %h = MatMul(%x, %w) : f32[8@dp, 256@tp]
        }
        """,
        """
        mesh @m = ["dp"=2, "tp"=4]
        graph local @g(%x: f32[4, 64] of [8@dp, 64]) -> (%h) opset 21 ranks [0, 1, 2, 3, 4, 5, 6, 7] {
          %w = constant : f32[64, 64] of [64, 256@tp] whole data("w.bin", 0, 65536) from "fc1.weight"
          %h = MatMul(%x, %w) : f32[4, 64] of [8@dp, 256@tp]
        }
        """,
    )


def test_a_slice_starts_where_the_coordinates_say() -> None:
    check(
        "complete-sharding,insert-redistribution,localize",
        """
        mesh @m = ["x"=2, "y"=4]
        graph @g(%x: f32[8@x, 64]) -> (%y) opset 21 {
          %y = Relu(%x) : f32[8@x, 64@y]
        }
        """,
        """
        mesh @m = ["x"=2, "y"=4]
        graph local @g(%x: f32[4, 64] of [8@x, 64], %irpar.coords: i64[2]) -> (%y) opset 21 ranks [0, 1, 2, 3, 4, 5, 6, 7] {
          %irpar.number_1 = constant : i64[] 1
          %irpar.number_16 = constant : i64[] 16
          %const = constant : i64[1] [1]
          %const_1 = constant : i64[1] [16]
          %irpar.index.m.y = Gather(%irpar.coords, %irpar.number_1) {axis=0} : i64[]
          %irpar.start.m.y.16 = Mul(%irpar.index.m.y, %irpar.number_16) : i64[]
          %v_1 = Reshape(%irpar.start.m.y.16, %const) : i64[1]
          %v_2 = Add(%v_1, %const_1) : i64[1]
          %x_1 = Slice(%x, %v_1, %v_2, %const) : f32[4, 16] of [8@x, 64@y]
          %y = Relu(%x_1) : f32[4, 16] of [8@x, 64@y]
        }
        """,
    )


def test_uneven_blocks_make_a_program_for_each_size() -> None:
    check(
        "localize",
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[10@tp, 6]) -> (%z) opset 21 {
          %y = Relu(%x) : f32[10@tp, 6]
          %z = irpar.AllGather(%y) {axes=["tp"], dim=0, id=0} : f32[10, 6] replicated
        }
        """,
        """
        mesh @m = ["tp"=4]
        graph local @g.0(%x: f32[3, 6] of [10@tp, 6]) -> (%z) opset 21 ranks [0, 1, 2] {
          %y = Relu(%x) : f32[3, 6] of [10@tp, 6]
          %z = irpar.AllGather(%y) {axes=["tp"], dim=0, id=0, sizes=[3, 3, 3, 1]} : f32[10, 6] of [10, 6] replicated
        }
        graph local @g.1(%x: f32[1, 6] of [10@tp, 6]) -> (%z) opset 21 ranks [3] {
          %y = Relu(%x) : f32[1, 6] of [10@tp, 6]
          %z = irpar.AllGather(%y) {axes=["tp"], dim=0, id=0, sizes=[3, 3, 3, 1]} : f32[10, 6] of [10, 6] replicated
        }
        """,
    )


def test_members_of_one_group_agree_on_its_sizes() -> None:
    # 7 over (x, y) is 2, 2, 2, 1: ranks 0 and 2 both hold 2 rows, but their neighbours along y do not.
    module = read(
        """
        mesh @m = ["x"=2, "y"=2]
        graph @g(%a: f32[7@(x,y)]) -> (%b) opset 21 {
          %b = Relu(%a) : f32[7@(x,y)]
        }
        """
    )
    assert distinct_programs(Flow(module.graph, module.mesh)) == [(0, 1), (2,), (3,)]


def test_a_device_without_elements_computes_nothing() -> None:
    # 3 over 4: the last device has no row of x, and no part of the sum; the weight that it would have read is gone.
    check(
        "localize",
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[3@tp, 6]) -> (%y, %t) opset 21 {
          %w = constant : f32[6, 8] replicated data("w.bin", 0, 192)
          %h = MatMul(%x, %w) : f32[3@tp, 8]
          %y = irpar.AllGather(%h) {axes=["tp"], dim=0, id=0} : f32[3, 8] replicated
          %m = ReduceMax(%h) {keepdims=0} : f32[] partial(max: tp)
          %t = irpar.AllReduce(%m) {axes=["tp"], reduce="max", id=1} : f32[] replicated
        }
        """,
        """
        mesh @m = ["tp"=4]
        graph local @g.0(%x: f32[1, 6] of [3@tp, 6]) -> (%y, %t) opset 21 ranks [0, 1, 2] {
          %w = constant : f32[6, 8] of [6, 8] replicated data("w.bin", 0, 192)
          %h = MatMul(%x, %w) : f32[1, 8] of [3@tp, 8]
          %y = irpar.AllGather(%h) {axes=["tp"], dim=0, id=0, sizes=[1, 1, 1, 0]} : f32[3, 8] of [3, 8] replicated
          %m = ReduceMax(%h) {keepdims=0} : f32[] of [] partial(max: tp)
          %t = irpar.AllReduce(%m) {axes=["tp"], reduce="max", id=1} : f32[] of [] replicated
        }
        graph local @g.1(%x: f32[0, 6] of [3@tp, 6]) -> (%y, %t) opset 21 ranks [3] {
          %h = constant : f32[0, 8] of [3@tp, 8] []
          %m = constant : f32[] of [] partial(max: tp) -inf
          %y = irpar.AllGather(%h) {axes=["tp"], dim=0, id=0, sizes=[1, 1, 1, 0]} : f32[3, 8] of [3, 8] replicated
          %t = irpar.AllReduce(%m) {axes=["tp"], reduce="max", id=1} : f32[] of [] replicated
        }
        """,
    )


def test_a_sum_over_no_elements_is_what_changes_no_sum() -> None:
    module = run(
        "complete-sharding,insert-redistribution,localize",
        """
        mesh @m = ["tp"=8]
        graph @g(%a: f32[4, 9@tp], %b: f32[9@tp, 16]) -> (%y) opset 21 {
          %y = MatMul(%a, %b) : f32[4, 16] replicated
        }
        """,
    )
    assert [graph.ranks for graph in module.graphs] == [(0, 1, 2, 3), (4,), (5, 6, 7)]  # 2 2 2 2 1 0 0 0
    expand, reduce = module.graphs[2]
    assert (expand.op_type, reduce.op_type) == ("Expand", "AllReduce")
    number, shape = (value.data.numpy().tolist() for value in expand.inputs)
    assert (number, shape) == (0, [4, 16])


def test_baked_shapes_become_local() -> None:
    module = run(
        "complete-sharding,insert-redistribution,localize",
        """
        mesh @m = ["dp"=2, "tp"=4]
        graph @g(%x: f32[4@dp, 17, 64@tp]) -> (%y) opset 21 {
          %s = constant : i64[4] [-1, 17, 4, 16]
          %y = Reshape(%x, %s) : f32[4, 17, 4, 16]
        }
        """,
    )
    (node,) = module.graph
    assert node.inputs[1].data.numpy().tolist() == [2, 17, 1, 16]
    assert node.result.shape == (2, 17, 1, 16)


def test_values_whose_size_depends_on_data_stay_whole() -> None:
    module = run(
        "complete-sharding,insert-redistribution,localize",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp]) -> (%n) opset 21 {
          %n = NonZero(%x) : i64[1, _]
        }
        """,
    )
    assert [node.op_type for node in module.graph] == ["AllGather", "NonZero"]
    assert module.whole == {"n": "the size of its result depends on data"}


def test_it_runs_once() -> None:
    module = run(
        "complete-sharding,insert-redistribution,localize",
        'mesh @m = ["tp"=2]\ngraph @g(%x: f32[8@tp]) -> (%y) opset 21 { %y = Relu(%x) : f32[8] }',
    )
    with pytest.raises(IrparError, match="local view already"):
        PassManager.parse("localize").run(module)


@pytest.mark.parametrize(
    "text",
    [
        "graph @g(%x: f32[2, 8@tp, 4]) -> (%y) opset 21 { %y = LRN(%x) {size=3} : f32[2, 8@tp, 4] }",
        "graph @g(%x: f32[8@tp]) -> (%y) opset 21 { %y = Relu(%x) : f32[8] replicated }",
        "graph @g(%a: f32[8, 4@tp], %b: f32[4@tp, 8]) -> (%y) opset 21 { %y = MatMul(%a, %b) : f32[8, 8] replicated }",
        "graph @g(%x: f32[8@tp]) -> (%n) opset 21 { %n = NonZero(%x) : i64[1, _] replicated }",
    ],
    ids=["banned axis", "result", "partial", "no rule"],
)
def test_a_missing_redistribution_is_refused(text: str) -> None:
    module = read('mesh @m = ["tp"=2]\n' + text)
    with pytest.raises(IrparError, match="run insert-redistribution between"):
        PassManager.parse("localize").run(module)


def test_axes_of_one_device_cut_nothing() -> None:
    module = run(
        "complete-sharding,insert-redistribution,localize",
        """
        mesh @m = ["x"=1, "y"=2]
        graph @g(%a: i64[2@x, 2]) -> (%b) opset 21 {
          %b = CastLike(%a, %a) : i64[2, 2]
        }
        """,
    )
    assert len(module.graph) == 1


def test_an_axis_spelled_by_its_parts_is_the_axis() -> None:
    module = run(
        "complete-sharding,insert-redistribution,localize",
        """
        mesh @m = ["x"=4]
        graph @g(%a: f32[4@(x:(1)2,x:(2)2)]) -> (%b) opset 21 {
          %b = Abs(%a) : f32[4]
        }
        """,
    )
    assert [node.op_type for node in module.graph] == ["Abs"]
    assert module.graph.outputs[0].shape == (1,)


def test_a_maximum_over_an_axis_of_one_device_is_whole() -> None:
    module = run(
        "complete-sharding,insert-redistribution,localize",
        """
        mesh @m = ["x"=1, "y"=3]
        graph @g(%a: f32[4@x]) -> (%b) opset 21 {
          %b = ReduceMax(%a) {keepdims=0} : f32[]
        }
        """,
    )
    assert module.graph.outputs[0].shape == ()


def test_bodies_become_local() -> None:
    check(
        "localize",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[4, 8@tp], %w: f32[8, 8@tp]) -> (%y, %ys) opset 21 {
          %n = constant : i64[] replicated 3
          %y, %ys = Loop(%n, _, %x) {body=graph @b(%i: i64[] replicated, %c: bool[] replicated, %a: f32[4, 8@tp]) -> (%d, %o, %r) {
            %d = Identity(%c) : bool[] replicated
            %a_1 = irpar.AllGather(%a) {axes=["tp"], dim=1, id=0} : f32[4, 8] replicated doc "MatMul of %o needs it as [_, _] replicated: it reads %w as [_, @tp]; %a is sharded as [_, @tp]"
            %o = MatMul(%a_1, %w) : f32[4, 8@tp]
            %r = Relu(%o) : f32[4, 8@tp]
          }} : f32[4, 8@tp], f32[3, 4, 8@tp]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[4, 4] of [4, 8@tp], %w: f32[8, 4] of [8, 8@tp]) -> (%y, %ys) opset 21 ranks [0, 1] {
          %n = constant : i64[] of [] replicated 3
          %y, %ys = Loop(%n, _, %x) {body=graph @b(%i: i64[] of [] replicated, %c: bool[] of [] replicated, %a: f32[4, 4] of [4, 8@tp]) -> (%d, %o, %r) {
            %d = Identity(%c) : bool[] of [] replicated
            %a_1 = irpar.AllGather(%a) {axes=["tp"], dim=1, id=0} : f32[4, 8] of [4, 8] replicated doc "MatMul of %o needs it as [_, _] replicated: it reads %w as [_, @tp]; %a is sharded as [_, @tp]"
            %o = MatMul(%a_1, %w) : f32[4, 4] of [4, 8@tp]
            %r = Relu(%o) : f32[4, 4] of [4, 8@tp]
          }} : f32[4, 4] of [4, 8@tp], f32[3, 4, 4] of [3, 4, 8@tp]
        }
        """,
    )


def test_shares_of_a_whole_value() -> None:
    """Of a sum the first device of tp keeps the value and the others take zeros; a maximum is its own share."""
    text = """
        mesh @m = ["dp"=2, "tp"=4]
        graph @g(%x: f32[8@dp, 64]) -> (%y) opset 21 {{
          %s = irpar.MakePartial(%x) {{axes=["tp"], reduce="{0}"}} : f32[8@dp, 64] partial({0}: tp)
          %y = irpar.AllReduce(%s) {{axes=["tp"], reduce="{0}", id=0}} : f32[8@dp, 64]
        }}
        """
    (local,) = run("localize", text.format("sum")).graphs
    assert [node.op_type for node in local] == ["Gather", "Equal", "Where", "AllReduce"]
    where = next(node for node in local if node.op_type == "Where")
    assert where.result.sharding is not None
    assert str(where.result.sharding) == "[@dp, _] partial(sum: tp)"
    assert where.result.shape == (4, 64)
    (local,) = run("localize", text.format("max")).graphs
    assert [node.op_type for node in local] == ["Identity", "AllReduce"]


def test_blocks_of_other_sizes_change_places() -> None:
    """7 over (x, y) is 2, 2, 2, 1: every rank's program says what all members hold."""
    module = run(
        "insert-redistribution,localize",
        """
        mesh @m = ["x"=2, "y"=2]
        graph @g(%a: f32[7@(x,y)]) -> (%b) opset 21 {
          %b = Relu(%a) : f32[7@(y,x)]
        }
        """,
    )
    assert sorted(rank for graph in module.graphs for rank in graph.ranks) == [0, 1, 2, 3]
    for graph in module.graphs:
        permute = next(node for node in graph if node.op_type == "CollectivePermute")
        assert list(permute.attributes["shapes"]) == [2, 2, 2, 1]
        assert list(permute.attributes["pairs"]) == [0, 0, 1, 2, 2, 1, 3, 3]


def test_a_local_program_works_along_a_dim_that_is_cut() -> None:
    check(
        "localize",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8, 64@tp]) -> (%y) opset 21 {
          %y = LpNormalization(%x) {p=1} : f32[8, 64@tp]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[8, 32] of [8, 64@tp]) -> (%y) opset 21 ranks [0, 1] {
          %numbers = constant : i64[1] [1]
          %number = constant : f32[] 0.0
          %number_1 = constant : f32[] 1.0
          %v_1 = Abs(%x) : f32[8, 32]
          %v_2 = ReduceSum(%v_1, %numbers) {keepdims=1} : f32[8, 1] of [8, 1] partial(sum: tp)
          %v_3 = irpar.AllReduce(%v_2) {reduce="sum", axes=["tp"], id=0} : f32[8, 1] of [8, 1] replicated doc "LpNormalization of %y works along tp, which shards %x"
          %v_4 = Equal(%v_3, %number) : bool[8, 1]
          %v_5 = Where(%v_4, %number_1, %v_3) : f32[8, 1]
          %y = Div(%x, %v_5) : f32[8, 32] of [8, 64@tp]
        }
        """,
    )


LOOP = """
mesh @m = ["d"=1]
graph @g(%x: f32[3, 2, 4], %s: f32[2, 4]) -> (%t) opset 21 {
  %w = constant : f32[4, 4] data("w", 0, 64) from "w"
  %shape = constant : i64[2] [4, 4]
  %a = Transpose(%w) {perm=[1, 0]} : f32[4, 4]
  %b = Reshape(%a, %shape) : f32[4, 4]
  %c = Exp(%w) : f32[4, 4]
  %d = Transpose(%c) {perm=[1, 0]} : f32[4, 4]
  %t = Scan(%s, %x) {num_scan_inputs=1, body=graph @body(%u: f32[2, 4], %i: f32[2, 4]) -> (%m) {
    %k = MatMul(%i, %b) : f32[2, 4]
    %l = MatMul(%k, %d) : f32[2, 4]
    %m = Add(%u, %l) : f32[2, 4]
  }} : f32[2, 4]
}
"""


def test_what_is_rearranged_for_a_loop_is_rearranged_in_it() -> None:
    graph = run("complete-sharding,insert-redistribution,localize", LOOP).graph
    assert [node.op_type for node in graph] == ["Exp", "Transpose", "Scan"]  # Without %d there would be %c.
    (body,) = graph.last.nested_graphs()
    assert [node.op_type for node in body] == ["Transpose", "Reshape", "MatMul", "MatMul", "Add"]
