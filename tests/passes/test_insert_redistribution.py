import pytest

from irpar.pass_manager import PassManager
from irpar.sharding import IrparError

from .golden import check, read, run, run_pipeline


def test_row_parallel_matmul_is_reduced_before_the_bias() -> None:
    check(
        "insert-redistribution",
        """
        mesh @m = ["dp"=2, "tp"=4]
        graph @g(%a: f32[8@dp, 256@tp]) -> (%y) opset 21 {
          %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
          %b = constant : f32[64] replicated data("w.bin", 65536, 256)
          %p = MatMul(%a, %w) : f32[8@dp, 64] from "/fc2/MatMul"
          %y = Add(%p, %b) : f32[8@dp, 64]
        }
        """,
        """
        mesh @m = ["dp"=2, "tp"=4]
        graph @g(%a: f32[8@dp, 256@tp]) -> (%y) opset 21 {
          %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
          %b = constant : f32[64] replicated data("w.bin", 65536, 256)
          %p = MatMul(%a, %w) : f32[8@dp, 64] partial(sum: tp) from "/fc2/MatMul"
          %p_1 = irpar.AllReduce(%p) {axes=["tp"], reduce="sum", id=0} : f32[8@dp, 64] for "/fc2/MatMul" as "p" doc "MatMul /fc2/MatMul sums over tp, which shards %a and %w"
          %y = Add(%p_1, %b) : f32[8@dp, 64]
        }
        """,
    )


FREE_RESULT = """
mesh @m = ["tp"=4]
graph @g(%x: f32[8, 64] replicated) -> (%y) opset 21 {{
  %w = constant : f32[64, 256@tp] data("w.bin", 0, 65536)
  %h = MatMul(%x, %w) : f32[8, 256@tp]
  %y = Relu(%h) : f32[8, 256{}
}}
"""
FREE = 'log free "y" "true"\n'


@pytest.mark.parametrize("options", ["", "{refine=false}"])
def test_a_result_of_which_nobody_said_how_it_leaves_is_left_as_its_node_produces_it(options: str) -> None:
    check(f"insert-redistribution{options}", FREE_RESULT.format("] replicated") + FREE, FREE_RESULT.format("@tp]"))


def test_a_result_that_is_replicated_over_one_axis_is_shared_over_it() -> None:
    """Each rank of tp goes on with half of the rows behind the sum; the result is sharded by dp as it was, and further."""
    check(
        "insert-redistribution",
        """
        mesh @m = ["dp"=2, "tp"=2]
        graph @g(%a: f32[8@dp, 256@tp]) -> (%y) opset 21 {
          %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
          %v = constant : f32[64, 64] replicated data("w.bin", 65536, 16384)
          %p = MatMul(%a, %w) : f32[8@dp, 64]
          %h = Relu(%p) : f32[8@dp, 64]
          %y = MatMul(%h, %v) : f32[8@dp, 64]
        }
        log free "y" "true"
        """,
        """
        mesh @m = ["dp"=2, "tp"=2]
        graph @g(%a: f32[8@dp, 256@tp]) -> (%y) opset 21 {
          %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
          %v = constant : f32[64, 64] replicated data("w.bin", 65536, 16384)
          %p = MatMul(%a, %w) : f32[8@dp, 64] partial(sum: tp)
          %p_1 = irpar.ReduceScatter(%p) {axes=["tp"], dim=0, reduce="sum", id=0} : f32[8@(dp,tp), 64] doc "MatMul of %p sums over tp, which shards %a and %w"
          %h = Relu(%p_1) : f32[8@(dp,tp), 64]
          %y = MatMul(%h, %v) : f32[8@(dp,tp), 64]
        }
        """,
    )


def test_a_result_that_is_said_to_leave_whole_is_gathered() -> None:
    module = run("insert-redistribution", FREE_RESULT.format("] replicated"))
    assert [node.op_type for node in module.graph if node.domain == "irpar"] == ["AllGather"]
    module = read(FREE_RESULT.format("] replicated") + FREE)
    module.shard("y", [None, None])
    run_pipeline("insert-redistribution", module)
    assert [node.op_type for node in module.graph if node.domain == "irpar"] == ["AllGather"]


def test_of_a_result_that_is_produced_whole_the_block_leaves_that_it_is_sharded_to() -> None:
    check(
        "insert-redistribution{refine=false}",
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[8, 64] replicated) -> (%y) opset 21 {
          %y = Hardmax(%x) {axis=0} : f32[8@tp, 64]
        }
        log free "y" "true"
        """,
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[8, 64] replicated) -> (%y_1 as "y") opset 21 {
          %y = Hardmax(%x) {axis=0} : f32[8, 64] replicated
          %y_1 = irpar.AllSlice(%y) {axes=["tp"], dim=0} : f32[8@tp, 64] doc "Hardmax of %y produces %y as [_, _] replicated: Hardmax of %y could work along dim 0 of it, at a greater cost than to bring it together; its readers want [@tp, _]: as %x: not annotated, and no reader needs a block of it"
        }
        """,
    )


def test_a_partial_value_that_is_wanted_cut_is_reduce_scattered() -> None:
    check(
        "insert-redistribution",
        """
        mesh @m = ["tp"=4]
        graph @g(%a: f32[8, 256@tp]) -> (%y) opset 21 {
          %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
          %p = MatMul(%a, %w) : f32[8@tp, 64]
          %y = Relu(%p) : f32[8@tp, 64]
        }
        """,
        """
        mesh @m = ["tp"=4]
        graph @g(%a: f32[8, 256@tp]) -> (%y) opset 21 {
          %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
          %p = MatMul(%a, %w) : f32[8, 64] partial(sum: tp)
          %p_1 = irpar.ReduceScatter(%p) {axes=["tp"], dim=0, reduce="sum", id=0} : f32[8@tp, 64] doc "MatMul of %p sums over tp, which shards %a and %w"
          %y = Relu(%p_1) : f32[8@tp, 64]
        }
        """,
    )


def test_a_sum_that_lies_in_parts_is_reduced_behind_its_maker_not_where_it_is_read() -> None:
    """As a gradient, whose parts no rank should keep until the update reads a block of it."""
    check(
        "insert-redistribution",
        """
        mesh @m = ["tp"=4]
        graph @g(%a: f32[8, 256@tp], %c: f32[8@tp, 64]) -> (%y) opset 21 {
          %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
          %p = MatMul(%a, %w) : f32[8, 64] partial(sum: tp)
          %r = Relu(%c) : f32[8@tp, 64]
          %s = Exp(%r) : f32[8@tp, 64]
          %y = Mul(%p, %s) : f32[8@tp, 64]
        }
        """,
        """
        mesh @m = ["tp"=4]
        graph @g(%a: f32[8, 256@tp], %c: f32[8@tp, 64]) -> (%y) opset 21 {
          %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
          %p = MatMul(%a, %w) : f32[8, 64] partial(sum: tp)
          %p_1 = irpar.ReduceScatter(%p) {axes=["tp"], dim=0, reduce="sum", id=0} : f32[8@tp, 64] doc "Mul of %y needs it as [@tp, _]: it reads %s as [@tp, _]; %p is sharded as [_, _] partial(sum: tp)"
          %r = Relu(%c) : f32[8@tp, 64]
          %s = Exp(%r) : f32[8@tp, 64]
          %y = Mul(%p_1, %s) : f32[8@tp, 64]
        }
        """,
    )


@pytest.mark.parametrize(("behind", "count"), [("", 2), (",simplify-collectives", 1)])
def test_only_what_sums_parts_stands_behind_their_maker(behind: str, count: int) -> None:
    """A block that is gathered again, for a reader far behind, is gathered there."""
    module = run(
        "insert-redistribution{refine=no}" + behind,
        """
        mesh @m = ["dp"=2, "tp"=4]
        graph @g(%a: f32[8@dp, 256@tp], %c: f32[8@dp, 8]) -> (%y, %s, %z) opset 21 {
          %w = constant : f32[256@tp, 8] data("w.bin", 0, 8192)
          %p = MatMul(%a, %w) : f32[8@dp, 8] partial(sum: tp)
          %r = Relu(%c) : f32[8@dp, 8]
          %y = Mul(%p, %r) : f32[8@dp, 8]
          %s = Exp(%r) : f32[8@dp, 8]
          %z = Det(%p) : f32[] replicated
        }
        """,
    )
    kinds = [node.op_type for node in module.graph]
    assert kinds == ["MatMul", *["AllReduce"] * count, "Relu", "Mul", "Exp", "AllGather", "Det"]


def test_a_sum_that_somebody_reads_in_parts_is_reduced_where_it_is_needed_whole() -> None:
    """As it is held until then anyway."""
    module = run(
        "insert-redistribution{refine=no}",
        """
        mesh @m = ["tp"=4]
        graph @g(%a: f32[8, 256@tp], %c: f32[8, 64] replicated) -> (%y, %z) opset 21 {
          %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
          %p = MatMul(%a, %w) : f32[8, 64] partial(sum: tp)
          %n = Neg(%p) : f32[8, 64] partial(sum: tp)
          %z = Relu(%n) : f32[8, 64] replicated
          %y = Mul(%p, %c) : f32[8, 64] replicated
        }
        """,
    )
    kinds = [node.op_type for node in module.graph]
    assert kinds == ["MatMul", "Neg", "AllReduce", "Relu", "AllReduce", "Mul"]


def test_a_value_is_gathered_once_for_all_readers_that_want_it_so() -> None:
    module = run(
        "insert-redistribution",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 6]) -> (%a, %b) opset 21 {
          %a = Softmax(%x) {axis=0} : f32[8, 6] replicated
          %b = LogSoftmax(%x) {axis=0} : f32[8, 6] replicated
        }
        """,
    )
    assert [node.op_type for node in module.graph] == ["AllGather", "Softmax", "LogSoftmax"]


def test_maxima_are_reduced_by_max() -> None:
    check(
        "insert-redistribution",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 6]) -> (%y) opset 21 {
          %axes = constant : i64[1] replicated [0]
          %y = ReduceMax(%x, %axes) {keepdims=0} : f32[6] replicated
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 6]) -> (%y_1 as "y") opset 21 {
          %axes = constant : i64[1] replicated [0]
          %y = ReduceMax(%x, %axes) {keepdims=0} : f32[6] partial(max: tp)
          %y_1 = irpar.AllReduce(%y) {axes=["tp"], reduce="max", id=0} : f32[6] replicated doc "ReduceMax of %y takes the maximum over tp, which shards %x"
        }
        """,
    )


def test_a_whole_constant_is_written_in_blocks_where_blocks_are_read() -> None:
    check(
        "insert-redistribution",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 4]) -> (%y) opset 21 {
          %c = constant : f32[8, 4] replicated data("c.bin", 0, 128)
          %y = Add(%x, %c) : f32[8@tp, 4]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 4]) -> (%y) opset 21 {
          %c_1 = constant : f32[8@tp, 4] data("c.bin", 0, 128)
          %y = Add(%x, %c_1) : f32[8@tp, 4]
        }
        """,
    )


def test_bodies_share_what_is_moved_for_them_before_they_run() -> None:
    module = run(
        "complete-sharding,insert-redistribution",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 4], %p: bool[]) -> (%y) opset 21 {
          %zero = constant : i64[] 0
          %h = Relu(%x) : f32[8, 4]
          %y = If(%p) {
            then_branch=graph() -> (%t) { %t = CumSum(%h, %zero) : f32[8, 4] },
            else_branch=graph() -> (%e) { %e = CumSum(%h, %zero) {reverse=1} : f32[8, 4] }
          } : f32[8, 4]
        }
        """,
    )
    gathers = [node for node in module.graph if node.op_type == "AllGather"]
    assert len(gathers) == 1
    (holder,) = (node for node in module.graph if node.op_type == "If")
    assert {nested.first.inputs[0] for nested in holder.nested_graphs()} == {gathers[0].result}


def test_what_comes_out_of_a_trip_is_brought_to_where_the_next_takes_it() -> None:
    check(
        "insert-redistribution",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[4, 8] replicated, %w: f32[8, 8@tp]) -> (%y) opset 21 {
          %n = constant : i64[] replicated 3
          %y = Loop(%n, _, %x) {body=graph @b(%i: i64[] replicated, %c: bool[] replicated, %a: f32[4, 8] replicated) -> (%d, %o) {
            %d = Identity(%c) : bool[] replicated
            %o = MatMul(%a, %w) : f32[4, 8@tp]
          }} : f32[4, 8] replicated
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[4, 8] replicated, %w: f32[8, 8@tp]) -> (%y) opset 21 {
          %n = constant : i64[] replicated 3
          %y = Loop(%n, _, %x) {body=graph @b(%i: i64[] replicated, %c: bool[] replicated, %a: f32[4, 8] replicated) -> (%d, %o_1 as "o") {
            %d = Identity(%c) : bool[] replicated
            %o = MatMul(%a, %w) : f32[4, 8@tp]
            %o_1 = irpar.AllGather(%o) {axes=["tp"], dim=1, id=0} : f32[4, 8] replicated doc "Loop of %y takes it out of its body as [_, _] replicated, as it lies on the other side; %o is sharded as [_, @tp]"
          }} : f32[4, 8] replicated
        }
        """,
    )


def test_it_needs_complete_shardings_in_global_view() -> None:
    module = read('mesh @m = ["tp"=2]\ngraph @g(%x: f32[8]) -> (%y) opset 21 { %y = Relu(%x) : f32[8] }')
    with pytest.raises(IrparError, match="has no sharding yet"):
        PassManager.parse("insert-redistribution").run(module)
    module = run("complete-sharding,insert-redistribution,localize", str(module))
    with pytest.raises(IrparError, match="needs the global view"):
        PassManager.parse("insert-redistribution").run(module)


CHAIN = """
mesh @m = ["tp"=2]
graph @g(%x: f32[8, 8]) -> (%y) opset 21 {
  %w = constant : f32[8@tp, 8] data("w.bin", 0, 256)
  %a = MatMul(%x, %w) : f32[8, 8]
  %b = MatMul(%a, %w) : f32[8, 8]
  %c = MatMul(%b, %w) : f32[8, 8]
  %y = MatMul(%c, %w) : f32[8, 8]
}
"""


def test_running_it_again_changes_nothing() -> None:
    module = run("complete-sharding,insert-redistribution", CHAIN)
    before = str(module)
    for pipeline in ("insert-redistribution", "complete-sharding", "complete-sharding,insert-redistribution"):
        assert not PassManager.parse(pipeline).run(module).changed
        assert str(module) == before


def test_reasons_do_not_quote_each_other() -> None:
    module = run("complete-sharding,insert-redistribution{refine=false}", CHAIN)
    docs = [node.doc for node in module.graph if node.domain == "irpar"]
    assert len(docs) >= 4
    assert max(map(len, docs)) < 130
    last = [name for name, _ in module.chain("c_1")]
    assert last[:2] == ["c_1", "c"]


@pytest.mark.parametrize(("options", "kinds"), [("", ["AllGather"]), ("{memory-mb=0.001}", [])])
def test_what_a_node_holds_may_be_bounded(options: str, kinds: list[str]) -> None:
    """The rows whole are 1,024 bytes, and as many of the result; in blocks both are 512, and 512 the sums sent."""
    module = run(
        f"insert-redistribution{options}",
        """
        mesh @m = ["p"=4]
        graph @g(%x: f32[64, 4@p]) -> (%y) opset 21 {
          %y = Softmax(%x) : f32[64, 4@p]
        }
        """,
    )
    assert [node.op_type for node in module.graph if node.op_type in ("AllGather", "AllReduce")] == kinds


@pytest.mark.parametrize("most", ["-1", "nan"])
def test_a_bound_is_a_number_of_megabytes(most: str) -> None:
    module = read("""mesh @m = ["p"=4]\ngraph @g(%x: f32[4@p]) -> (%x) opset 21 {\n}""")
    with pytest.raises(IrparError, match="cannot hold"):
        PassManager.parse(f"insert-redistribution{{memory-mb={most}}}").run(module)


@pytest.mark.parametrize("chunk", ["-1", "nan", "inf"])
def test_a_chunk_is_a_number_of_kilobytes(chunk: str) -> None:
    module = read("""mesh @m = ["p"=4]\ngraph @g(%x: f32[4@p]) -> (%x) opset 21 {\n}""")
    with pytest.raises(IrparError, match="a chunk cannot be"):
        PassManager.parse(f"insert-redistribution{{chunk-kb={chunk}}}").run(module)


def test_room_without_end_is_no_bound() -> None:
    module = read("""mesh @m = ["p"=4]\ngraph @g(%x: f32[4@p]) -> (%x) opset 21 {\n}""")
    PassManager.parse("insert-redistribution{memory-mb=inf}").run(module)


HELD = """\
mesh @m = ["x"=2]
graph @g(%a: f32[8, 16@x], %b: f32[16@x, 4]) -> (%y) opset 21 {
  %p = MatMul(%a, %b) : f32[8, 4] replicated
  %y = Relu(%p) : f32[8@x, 4]
}
"""


def inserted(pipeline: str, text: str, **annotations: list[str | None]) -> list[str]:
    module = read(text)
    for name, spec in annotations.items():
        module.shard(name, spec)
    PassManager.parse(pipeline).run(module)
    return [f"{node!r} as {node.results[0].sharding}" for node in module.graph]


def test_a_result_goes_on_from_how_it_is_annotated() -> None:
    scattered = ["%p = MatMul(%a, %b) as [_, _] partial(sum: x)", "%p_1 = ReduceScatter(%p) as [@x, _]"]
    assert inserted("insert-redistribution", HELD) == [*scattered, "%y = Relu(%p_1) as [@x, _]"]
    given = "%p_1 = MatMul(%a, %b) as [_, _] partial(sum: x)"
    for pipeline in ("insert-redistribution", "insert-redistribution,simplify-collectives"):
        assert inserted(pipeline, HELD, p=[None, None]) == [
            given,
            "%p = AllReduce(%p_1) as [_, _] replicated",
            "%p_2 = AllSlice(%p) as [@x, _]",
            "%y = Relu(%p_2) as [@x, _]",
        ]


def test_what_is_given_under_another_name_says_why_it_lies_so() -> None:
    module = read(HELD.replace("[8, 4] replicated", "[8, 4@x]"))
    module.shard("p", [None, "x"])
    PassManager.parse("insert-redistribution").run(module)
    assert [each.why for each in module.decisions["p"]] == ['annotated "p"']
    (given,) = [node.results[0].name for node in module.graph if node.op_type == "MatMul"]
    assert [(each.why, each.follows) for each in module.decisions[given]] == [
        ("MatMul of %p_1 sums over x, which shards %a", "a")
    ]
