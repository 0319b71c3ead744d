"""extract-communication: equal subgraphs of communication become functions, and come back to the name."""

import pytest

from irpar.ir import VerifyError, verify
from irpar.sharding import IrparError

from .golden import body, check, read, run_pipeline

FUSED = """
module {network="h100-nvlink-ib"}
mesh @m = ["tp"=2]
graph local @g(%a: f32[4] of [8@tp], %b: f32[2, 6] of [4@tp, 6]) -> (%x, %y) opset 21 ranks [0, 1] {
  %p = Neg(%a) : f32[4]
  %q = Abs(%b) : f32[2, 6]
  %c = irpar.AllReduce(%p) {axes=["tp"], reduce="sum", id=0} : f32[4] for "one" doc "of one"
  %d = irpar.AllReduce(%q) {axes=["tp"], reduce="sum", id=1} : f32[2, 6] for "two" as "d"
  %p2 = Relu(%c) : f32[4]
  %q2 = Relu(%d) : f32[2, 6]
  %c2 = irpar.AllReduce(%p2) {axes=["tp"], reduce="sum", id=2} : f32[4] for "three" scope "layer" doc "of three"
  %d2 = irpar.AllReduce(%q2) {axes=["tp"], reduce="sum", id=3} : f32[2, 6] for "four"
  %x = Relu(%c2) : f32[4]
  %y = Relu(%d2) : f32[2, 6]
}
"""
TWO = """
mesh @m = ["tp"=2]
graph local @g(%a: f32[4] of [8@tp]) -> (%y) opset 21 ranks [0, 1] {
  %b = irpar.AllReduce(%a) {axes=["tp"], reduce="sum", id=0} : f32[4] for "one" doc "why"
  %c = Relu(%b) : f32[4]
  %d = irpar.AllReduce(%c) {axes=["tp"], reduce="sum", id=1} : f32[4] for "two"
  %y = irpar.AllReduce(%d) {axes=["tp"], reduce="max", id=2} : f32[4] for "three"
}
"""
STARTED = """
mesh @m = ["tp"=2]
graph local @g(%a: f32[4] of [8@tp]) -> (%y) opset 21 ranks [0, 1] {
  %s = irpar.AllReduceStart(%a) {axes=["tp"], reduce="sum", id=0} : inflight<f32[4]>
  %n = Neg(%a) : f32[4]
  %b = irpar.Wait(%s) {id=0} : f32[4]
  %c = Add(%b, %n) : f32[4]
  %t = irpar.AllReduceStart(%c) {axes=["tp"], reduce="sum", id=1} : inflight<f32[4]>
  %m = Neg(%c) : f32[4]
  %d = irpar.Wait(%t) {id=1} : f32[4]
  %y = Add(%d, %m) : f32[4]
}
"""


def test_equal_collectives_become_calls_with_ids_of_their_own() -> None:
    check(
        "extract-communication",
        TWO,
        """
        mesh @m = ["tp"=2]
        function @irpar.communication.all_reduce_0(%a: f32[4]) -> (%b) attributes {id} opset 21, "irpar" 1 body local @all_reduce_0 {
          %b = irpar.AllReduce(%a) {axes=["tp"], reduce="sum", id=ref("id", int)} : f32[4]
        }
        graph local @g(%a: f32[4] of [8@tp]) -> (%y) opset 21 ranks [0, 1] {
          %b = call @irpar.communication.all_reduce_0(%a) {id=0} : f32[4] for "one" doc "why"
          %c = Relu(%b) : f32[4]
          %d = call @irpar.communication.all_reduce_0(%c) {id=1} : f32[4] for "two"
          %y = irpar.AllReduce(%d) {axes=["tp"], reduce="max", id=2} : f32[4] for "three"
        }
        """,
    )


def test_what_packs_comes_along() -> None:
    module = read(FUSED)
    run_pipeline("fuse-communication,extract-communication", module)
    (function,) = module.functions.values()
    assert [node.op_type for node in function.graph] == [
        "Reshape",
        "Reshape",
        "Concat",
        "AllReduce",
        "Split",
        "Reshape",
        "Reshape",
    ]
    assert [node.op_type for node in module.graph] == [
        "Neg",
        "Abs",
        "all_reduce_0",
        "Relu",
        "Relu",
        "all_reduce_0",
        "Relu",
        "Relu",
    ]
    assert not module.graph.constants
    run_pipeline("group-segments", module)
    assert [node.attributes["id"] for node in module.graph if node.callee is not None] == [0, 1]


def test_collectives_alone_leave_the_packing_in_the_graph() -> None:
    module = read(FUSED)
    run_pipeline("fuse-communication,extract-communication{take=collectives}", module)
    (function,) = module.functions.values()
    assert [node.op_type for node in function.graph] == ["AllReduce"]
    assert len(module.graph.constants) == 10


def test_a_start_becomes_a_call_that_a_wait_outside_waits_for() -> None:
    module = read(STARTED)
    run_pipeline("extract-communication", module)
    assert list(module.functions) == [("irpar.communication", "all_reduce_start_0", "")]
    before = [node.op_type for node in module.graph]
    run_pipeline("group-segments", module)
    assert [node.op_type for node in module.graph] == before


@pytest.mark.parametrize("text", [TWO, FUSED, STARTED])
@pytest.mark.parametrize("first", ["", "fuse-communication,"])
@pytest.mark.parametrize("take", ["packing", "collectives"])
def test_inline_functions_gives_the_graph_back_to_the_letter(text: str, first: str, take: str) -> None:
    module = read(text)
    if first:
        run_pipeline(first.rstrip(","), module)
    before = body(module)
    run_pipeline(f"extract-communication{{take={take}, match=[*]}}", module)
    assert module.functions
    run_pipeline("inline-functions", module)
    assert body(module) == before


def test_a_glob_makes_functions_of_single_ones() -> None:
    module = read(TWO)
    run_pipeline("extract-communication{match=[thr*]}", module)
    assert [key[1] for key in module.functions] == ["all_reduce_0", "all_reduce_1"]


def test_refusals() -> None:
    with pytest.raises(IrparError, match='match "twoo" names no collective') as caught:
        run_pipeline("extract-communication{match=[twoo]}", read(TWO))
    assert "two" in str(caught.value)
    with pytest.raises(IrparError, match="needs the local view"):
        run_pipeline("extract-communication", read("graph @g(%x: f32[2]) -> (%x) opset 21 {\n}"))


def test_two_calls_of_one_id_are_refused() -> None:
    module = read(TWO)
    run_pipeline("extract-communication", module)
    calls = [node for node in module.graph if node.callee is not None]
    calls[1].set_attribute("id", 0)
    with pytest.raises(VerifyError, match="has id 0, which"):
        verify(module)


ORDER = """
mesh @m = ["x"=2, "y"=2]
graph local @g(%a: f32[4]) -> (%{last}) opset 21 ranks [0, 1] {{
  %b = irpar.AllReduce(%a) {{axes=["{first}"], reduce="sum", id={one}}} : f32[4]
  %c = irpar.AllReduce(%b) {{axes=["{second}"], reduce="sum", id={two}}} : f32[4]
}}
graph local @h(%a: f32[4]) -> (%c) opset 21 ranks [2, 3] {{
  %b = irpar.AllReduce(%a) {{axes=["x"], reduce="sum", id=0}} : f32[4]
  %c = irpar.AllReduce(%b) {{axes=["{other}"], reduce="sum", id=1}} : f32[4]
}}
"""


@pytest.mark.parametrize("pipeline", ["", "extract-communication{match=[*]}"])
def test_the_order_of_a_group_must_be_one(pipeline: str) -> None:
    module = read(ORDER.format(last="c", first="x", one=0, second="x", two=1, other="x"))
    if pipeline:
        run_pipeline(pipeline, module)
    nodes = list(module.graphs[0])
    for node, number in zip(nodes, (1, 0), strict=True):
        node.set_attribute("id", number)
    with pytest.raises(VerifyError, match=r"@g and @h come to collectives over x in different orders: id=1, and id=0"):
        verify(module)


def test_groups_that_wait_for_each_other_are_refused() -> None:
    """Ranks 0 and 1 run over y first, ranks 2 and 3 over x: each group has one order, all together have none."""
    module = read(ORDER.format(last="c", first="x", one=0, second="y", two=1, other="y"))
    nodes = list(module.graphs[0])
    for node, number, axes in zip(nodes, (1, 0), ("y", "x"), strict=True):
        node.set_attribute("id", number)
        node.set_attribute("axes", [axes])
    with pytest.raises(VerifyError, match="have no common order of collectives"):
        verify(module)
