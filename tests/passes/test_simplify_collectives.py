import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irpar
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.redistribution import redistribution
from irpar.analysis.redistribution.trees import attributes_of, trees
from irpar.ir import Builder, Conflict, Decision, DType, Module, TensorType, Value, clone_module
from irpar.ir.verifier import verify
from irpar.ops.collectives import FREE, number_collectives, sent_bytes
from irpar.pass_manager import PassManager
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh, Sharding, ceil_shape
from tests.test_explanations import check_explained
from tests.written import model_of_text

from .golden import check, read, run

MESH = 'mesh @m = ["x"=2, "y"=2]\n'


def numbers(module: Module, pipeline: str, seed: int = 0) -> dict[str, Any]:
    """What all ranks compute after a pipeline that localizes, from seeded inputs."""
    work = clone_module(module)
    PassManager.parse(pipeline).run(work)
    verify(work)
    draw = np.random.default_rng(seed)
    executor = Executor(work, work.mesh, engine="numpy")
    inputs = {spec.name: draw.standard_normal(spec.shape).astype(np.float32) for spec in executor.inputs}
    return executor.run(inputs, check_replicas=True)


def check_same(before: str, pipeline: str = "simplify-collectives,localize,simplify-collectives") -> None:
    """The program computes the same with the pass as without it."""
    module = read(before)
    expected, got = numbers(module, "localize"), numbers(module, pipeline)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5)


def check_both(before: str, after: str) -> None:
    """The pass makes one text of the other, in global view, and the numbers stay."""
    check("simplify-collectives", MESH + before, MESH + after)
    check_same(MESH + before)
    assert not PassManager.parse("simplify-collectives").run(read(MESH + after)).changed


def test_an_all_reduce_and_a_slice_are_a_reduce_scatter() -> None:
    check_both(
        """graph @g(%a: f32[8, 16@x], %b: f32[16@x, 4]) -> (%y) opset 21 {
  %s = MatMul(%a, %b) : f32[8, 4] partial(sum: x)
  %r = irpar.AllReduce(%s) {axes=["x"], reduce="sum", id=0} : f32[8, 4] replicated doc "a sum"
  %t = irpar.AllSlice(%r) {axes=["x"], dim=0} : f32[8@x, 4] doc "rows"
  %y = Relu(%t) : f32[8@x, 4]
}
""",
        """graph @g(%a: f32[8, 16@x], %b: f32[16@x, 4]) -> (%y) opset 21 {
  %s = MatMul(%a, %b) : f32[8, 4] partial(sum: x)
  %t = irpar.ReduceScatter(%s) {axes=["x"], dim=0, reduce="sum", id=0} : f32[8@x, 4] doc "a sum; rows"
  %y = Relu(%t) : f32[8@x, 4]
}
""",
    )


def test_an_all_gather_and_a_slice_are_an_all_to_all() -> None:
    check_both(
        """graph @g(%a: f32[8@x, 16]) -> (%y) opset 21 {
  %g = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[8, 16] replicated
  %t = irpar.AllSlice(%g) {axes=["x"], dim=1} : f32[8, 16@x]
  %y = Relu(%t) : f32[8, 16@x]
}
""",
        """graph @g(%a: f32[8@x, 16]) -> (%y) opset 21 {
  %t = irpar.AllToAll(%a) {axes=["x"], split_dim=1, concat_dim=0, id=0} : f32[8, 16@x]
  %y = Relu(%t) : f32[8, 16@x]
}
""",
    )


def test_what_is_gathered_and_cut_again_as_it_was_is_not_moved() -> None:
    check_both(
        """graph @g(%a: f32[8@x, 16]) -> (%y) opset 21 {
  %g = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[8, 16] replicated
  %t = irpar.AllSlice(%g) {axes=["x"], dim=0} : f32[8@x, 16]
  %y = Relu(%t) : f32[8@x, 16]
}
""",
        """graph @g(%a: f32[8@x, 16]) -> (%y) opset 21 {
  %y = Relu(%a) : f32[8@x, 16]
}
""",
    )


def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce() -> None:
    check_both(
        """graph @g(%a: f32[8, 16@x], %b: f32[16@x, 4]) -> (%y) opset 21 {
  %s = MatMul(%a, %b) : f32[8, 4] partial(sum: x)
  %r = irpar.ReduceScatter(%s) {axes=["x"], dim=0, reduce="sum", id=0} : f32[8@x, 4] doc "a sum"
  %t = irpar.AllGather(%r) {axes=["x"], dim=0, id=1} : f32[8, 4] replicated doc "a sum"
  %y = Relu(%t) : f32[8, 4] replicated
}
""",
        """graph @g(%a: f32[8, 16@x], %b: f32[16@x, 4]) -> (%y) opset 21 {
  %s = MatMul(%a, %b) : f32[8, 4] partial(sum: x)
  %t = irpar.AllReduce(%s) {axes=["x"], reduce="sum", id=0} : f32[8, 4] replicated doc "a sum"
  %y = Relu(%t) : f32[8, 4] replicated
}
""",
    )


def test_blocks_and_whole_of_a_sum_take_one_launch() -> None:
    check_both(
        """graph @g(%a: f32[8, 16@x], %b: f32[16@x, 4]) -> (%y, %z) opset 21 {
  %s = MatMul(%a, %b) : f32[8, 4] partial(sum: x)
  %r = irpar.ReduceScatter(%s) {axes=["x"], dim=0, reduce="sum", id=0} : f32[8@x, 4]
  %z = Neg(%r) : f32[8@x, 4]
  %t = irpar.AllGather(%r) {axes=["x"], dim=0, id=1} : f32[8, 4] replicated
  %y = Relu(%t) : f32[8, 4] replicated
}
""",
        """graph @g(%a: f32[8, 16@x], %b: f32[16@x, 4]) -> (%y, %z) opset 21 {
  %s = MatMul(%a, %b) : f32[8, 4] partial(sum: x)
  %t = irpar.AllReduce(%s) {axes=["x"], reduce="sum", id=0} : f32[8, 4] replicated
  %r = irpar.AllSlice(%t) {axes=["x"], dim=0} : f32[8@x, 4]
  %z = Neg(%r) : f32[8@x, 4]
  %y = Relu(%t) : f32[8, 4] replicated
}
""",
    )


def test_permutes_compose() -> None:
    check_both(
        """graph @g(%a: f32[8@x, 16@y]) -> (%y) opset 21 {
  %p = irpar.CollectivePermute(%a) {axes=["x", "y"], pairs=[0, 0, 1, 2, 2, 1, 3, 3], id=0} : f32[8@y, 16@x]
  %q = irpar.CollectivePermute(%p) {axes=["x", "y"], pairs=[0, 0, 1, 2, 2, 1, 3, 3], id=1} : f32[8@x, 16@y]
  %y = Relu(%q) : f32[8@x, 16@y]
}
""",
        """graph @g(%a: f32[8@x, 16@y]) -> (%y) opset 21 {
  %y = Relu(%a) : f32[8@x, 16@y]
}
""",
    )


def test_duplicates_merge_where_the_first_reader_stands() -> None:
    check_both(
        """graph @g(%a: f32[8@x, 16]) -> (%y, %z) opset 21 {
  %g1 = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[8, 16] replicated doc "one"
  %y = Relu(%g1) : f32[8, 16] replicated
  %g2 = irpar.AllGather(%a) {axes=["x"], dim=0, id=1} : f32[8, 16] replicated doc "two"
  %z = Neg(%g2) : f32[8, 16] replicated
}
""",
        """graph @g(%a: f32[8@x, 16]) -> (%y, %z) opset 21 {
  %g1 = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[8, 16] replicated doc "one"
  %y = Relu(%g1) : f32[8, 16] replicated
  %z = Neg(%g1) : f32[8, 16] replicated
}
""",
    )


def test_two_readers_share_the_way_as_far_as_it_is_one() -> None:
    check_both(
        """graph @g(%a: f32[8@x, 16@y]) -> (%y, %z) opset 21 {
  %g1 = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[8, 16@y]
  %g2 = irpar.AllGather(%g1) {axes=["y"], dim=1, id=1} : f32[8, 16] replicated
  %y = Relu(%g2) : f32[8, 16] replicated
  %g3 = irpar.AllGather(%a) {axes=["y"], dim=1, id=2} : f32[8@x, 16]
  %z = Neg(%g3) : f32[8@x, 16]
}
""",
        """graph @g(%a: f32[8@x, 16@y]) -> (%y, %z) opset 21 {
  %g3 = irpar.AllGather(%a) {axes=["y"], dim=1, id=0} : f32[8@x, 16]
  %g2 = irpar.AllGather(%g3) {axes=["x"], dim=0, id=1} : f32[8, 16] replicated
  %y = Relu(%g2) : f32[8, 16] replicated
  %z = Neg(%g3) : f32[8@x, 16]
}
""",
    )


def test_what_a_body_reads_is_moved_once_before_it() -> None:
    before = """graph @g(%a: f32[8@x, 16], %c: bool[] replicated) -> (%y) opset 21 {
  %g1 = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[8, 16] replicated
  %g2 = irpar.AllGather(%a) {axes=["x"], dim=0, id=1} : f32[8, 16] replicated
  %y = If(%c) {
    then_branch=graph @t() -> (%p) {
      %p = Relu(%g1) : f32[8, 16] replicated
    },
    else_branch=graph @e() -> (%q) {
      %q = Neg(%g2) : f32[8, 16] replicated
    }
  } : f32[8, 16] replicated
}
"""
    module = run("simplify-collectives", MESH + before)
    assert [node.op_type for node in module.graph] == ["AllGather", "If"]


LOOP = """graph @g(%a: f32[8@x, 16], %s: f32[8, 16] replicated) -> (%y) opset 21 {
  %n = constant : i64[] replicated 3
  %y = Loop(%n, _, %s) {
    body=graph @b(%i: i64[] replicated, %c: bool[] replicated, %h: f32[8, 16] replicated) -> (%d, %k) {
      %w = constant : f32[8@x, 16] data("w", 0, 512)
      %d = Identity(%c) : bool[] replicated
      %g = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[8, 16] replicated
      %v = irpar.AllToAll(%w) {axes=["x"], split_dim=1, concat_dim=0, id=1} : f32[8, 16@x]
      %u = irpar.AllGather(%v) {axes=["x"], dim=1, id=2} : f32[8, 16] replicated
      %t = irpar.AllSlice(%h) {axes=["x"], dim=0} : f32[8@x, 16]
      %r = irpar.AllGather(%t) {axes=["x"], dim=0, id=3} : f32[8, 16] replicated
      %e = Add(%g, %u) : f32[8, 16] replicated
      %f = Add(%e, %r) : f32[8, 16] replicated
      %k = Tanh(%f) : f32[8, 16] replicated
    }
  } : f32[8, 16] replicated
}
"""


def test_collectives_on_what_a_loop_reads_leave_it() -> None:
    """Those on a constant of the body and on what they give too; those on what a trip makes stay, here to no end."""
    check(
        "simplify-collectives",
        MESH + LOOP,
        MESH
        + """graph @g(%a: f32[8@x, 16], %s: f32[8, 16] replicated) -> (%y) opset 21 {
  %n = constant : i64[] replicated 3
  %w = constant : f32[8@x, 16] data("w", 0, 512)
  %g = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[8, 16] replicated
  %u = irpar.AllGather(%w) {axes=["x"], dim=0, id=1} : f32[8, 16] replicated
  %y = Loop(%n, _, %s) {body=graph @b(%i: i64[] replicated, %c: bool[] replicated, %h: f32[8, 16] replicated) -> (%d, %k) {
    %d = Identity(%c) : bool[] replicated
    %e = Add(%g, %u) : f32[8, 16] replicated
    %f = Add(%e, %h) : f32[8, 16] replicated
    %k = Tanh(%f) : f32[8, 16] replicated
  }} : f32[8, 16] replicated
}
""",
    )


def test_what_left_a_loop_gives_the_same_numbers() -> None:
    inline = LOOP.replace('data("w", 0, 512)', 'data("#w", 0, 512)').replace(
        "%a: f32[8@x, 16]", "%a: f32[8@x, 16], %w: f32[8@x, 16]"
    )
    inline = "\n".join(line for line in inline.splitlines() if "%w = constant" not in line)
    check_same(MESH + inline)


BRANCH = """graph @g(%a: f32[8@x, 16], %p: bool[] replicated) -> (%y) opset 21 {
  %y = If(%p) {
    then_branch=graph @t() -> (%l) {
      %n = constant : i64[] replicated 2
      %z = Neg(%a) : f32[8@x, 16]
      %o = irpar.AllGather(%z) {axes=["x"], dim=0, id=0} : f32[8, 16] replicated
      %l = Loop(%n, _, %o) {
        body=graph @b(%i: i64[] replicated, %c: bool[] replicated, %h: f32[8, 16] replicated) -> (%d, %k) {
          %d = Identity(%c) : bool[] replicated
          %g = irpar.AllGather(%a) {axes=["x"], dim=0, id=1} : f32[8, 16] replicated
          %k = Add(%g, %h) : f32[8, 16] replicated
        }
      } : f32[8, 16] replicated
    },
    else_branch=graph @e() -> (%q) {
      %q = irpar.AllGather(%a) {axes=["x"], dim=0, id=2} : f32[8, 16] replicated
    }
  } : f32[8, 16] replicated
}
"""


def test_a_branch_keeps_what_left_a_loop_in_it() -> None:
    module = run("simplify-collectives", MESH + BRANCH)
    assert [node.op_type for node in module.graph] == ["If"]
    then = next(module.graph.first.nested_graphs())
    assert [node.op_type for node in then] == ["Neg", "AllGather", "AllGather", "Loop"]


def test_local_programs_leave_loops_alike() -> None:
    """Blocks of 4, 4 and 2 rows: two programs, and in both the gather stands before the loop."""
    text = LOOP.replace("8", "10").replace('data("w", 0, 512)', 'data("w", 0, 640)')
    text = "\n".join(line for line in text.splitlines() if not any(f"%{name} =" in line for name in "wvu"))
    text = 'mesh @m = ["x"=3]\n' + text.replace("Add(%g, %u)", "Add(%g, %g)")
    module = run("localize", text)
    assert len(module.graphs) == 2
    for graph in module.graphs:
        assert not any(node.op_type == "AllGather" for node in graph)
    PassManager.parse("simplify-collectives").run(module)
    verify(module)
    for graph in module.graphs:
        assert [node.attributes["id"] for node in graph if node.op_type == "AllGather"] == [0]
        inside = [node for node in graph.walk() if node.op_type == "AllGather" and node.graph is not graph]
        assert [node.attributes["id"] for node in inside] == [1]
    check_same(text, "localize,simplify-collectives")


SUM = """graph @g(%a: f32[8, 16@x], %b: f32[16@x, 4], %c: f32[16@x, 4]) -> (%y) opset 21 {
  %half = constant : f32[] replicated 0.5
  %p = MatMul(%a, %b) : f32[8, 4] partial(sum: x)
  %q = MatMul(%a, %c) : f32[8, 4] partial(sum: x)
  %p1 = irpar.AllReduce(%p) {axes=["x"], reduce="sum", id=0} : f32[8, 4] replicated doc "one"
  %q1 = irpar.AllReduce(%q) {axes=["x"], reduce="sum", id=1} : f32[8, 4] replicated doc "two"
  %h = Mul(%q1, %half) : f32[8, 4] replicated
  %y = Sub(%p1, %h) : f32[8, 4] replicated
}
"""


def test_a_difference_of_two_sums_is_reduced_once() -> None:
    check_both(
        SUM,
        """graph @g(%a: f32[8, 16@x], %b: f32[16@x, 4], %c: f32[16@x, 4]) -> (%y_1 as "y") opset 21 {
  %half = constant : f32[] replicated 0.5
  %p = MatMul(%a, %b) : f32[8, 4] partial(sum: x)
  %q = MatMul(%a, %c) : f32[8, 4] partial(sum: x)
  %h = Mul(%q, %half) : f32[8, 4] partial(sum: x)
  %y = Sub(%p, %h) : f32[8, 4] partial(sum: x)
  %y_1 = irpar.AllReduce(%y) {axes=["x"], reduce="sum", id=0} : f32[8, 4] replicated doc "one; two"
}
""",
    )


def test_of_a_long_sum_what_is_reduced_alike_is_added_first() -> None:
    inputs = "%p: f32[3] partial(sum: x), %q: f32[3] partial(sum: x), %r: f32[3] partial(sum: y), %s: f32[3] replicated"
    reduced = """%p1 = irpar.AllReduce(%p) {axes=["x"], reduce="sum", id=0} : f32[3] replicated doc "one"
  %q1 = irpar.AllReduce(%q) {axes=["x"], reduce="sum", id=1} : f32[3] replicated doc "two"
  %r1 = irpar.AllReduce(%r) {axes=["y"], reduce="sum", id=2} : f32[3] replicated doc "three"
"""
    check(
        "simplify-collectives",
        f"""{MESH}graph @g({inputs}) -> (%y) opset 21 {{
  {reduced}  %y = Sum(%p1, %r1, %s, %q1) : f32[3] replicated
}}
""",
        f"""{MESH}graph @g({inputs}) -> (%y) opset 21 {{
  %r1 = irpar.AllReduce(%r) {{axes=["y"], reduce="sum", id=0}} : f32[3] replicated doc "three"
  %v_1 = Sum(%p, %q) : f32[3] partial(sum: x)
  %v_1_1 = irpar.AllReduce(%v_1) {{axes=["x"], reduce="sum", id=1}} : f32[3] replicated doc "one; two"
  %y = Sum(%r1, %s, %v_1_1) : f32[3] replicated
}}
""",
    )


@pytest.mark.parametrize("read_by_others", ["%p1", "%q1"])
def test_of_a_long_sum_what_others_read_is_not_added_first(read_by_others: str) -> None:
    inputs = "%p: f32[3] partial(sum: x), %q: f32[3] partial(sum: x), %s: f32[3] replicated"
    text = f"""{MESH}graph @g({inputs}) -> (%y, {read_by_others}) opset 21 {{
  %p1 = irpar.AllReduce(%p) {{axes=["x"], reduce="sum", id=0}} : f32[3] replicated
  %q1 = irpar.AllReduce(%q) {{axes=["x"], reduce="sum", id=1}} : f32[3] replicated
  %y = Sum(%p1, %s, %q1) : f32[3] replicated
}}
"""
    assert not PassManager.parse("simplify-collectives").run(read(text)).changed


def test_steps_of_a_local_program_between_sums_say_of_no_sharding() -> None:
    inputs = "%p: f32[1] of [1] partial(sum: x), %q: f32[1] of [1] partial(sum: x)"
    check(
        "simplify-collectives",
        f"""
        mesh @m = ["x"=2]
        graph local @g({inputs}) -> (%y) opset 21 ranks [0, 1] {{
          %none = constant : i64[0] []
          %p1 = irpar.AllReduce(%p) {{axes=["x"], reduce="sum", id=0}} : f32[1] of [1] replicated doc "one"
          %q1 = irpar.AllReduce(%q) {{axes=["x"], reduce="sum", id=1}} : f32[1] of [1] replicated doc "two"
          %r = Reshape(%p1, %none) : f32[]
          %s = Reshape(%q1, %none) : f32[]
          %y = Add(%r, %s) : f32[] of [] replicated
        }}
        """,
        f"""
        mesh @m = ["x"=2]
        graph local @g({inputs}) -> (%y_1 as "y") opset 21 ranks [0, 1] {{
          %none = constant : i64[0] []
          %r = Reshape(%p, %none) : f32[]
          %s = Reshape(%q, %none) : f32[]
          %y = Add(%r, %s) : f32[] of [] partial(sum: x)
          %y_1 = irpar.AllReduce(%y) {{axes=["x"], reduce="sum", id=0}} : f32[] of [] replicated doc "one; two"
        }}
        """,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('%q) {axes=["x"], reduce="sum"', '%q) {axes=["x"], reduce="max"', id="another reduction"),
        pytest.param("Sub(%p1, %h)", "Mul(%p1, %h)", id="a product"),
        pytest.param("Mul(%q1, %half)", "Pow(%q1, %half)", id="a power"),
        pytest.param("-> (%y)", "-> (%y, %p1)", id="read by others"),
        pytest.param("0.5", "inf", id="parts that are no numbers"),
    ],
)
def test_other_sums_stay(old: str, new: str) -> None:
    text = (MESH + SUM).replace(old, new)
    if "max" in new:
        text = text.replace("%q = MatMul(%a, %c) : f32[8, 4] partial(sum: x)", "%q = Neg(%b) : f32[16@x, 4]")
        text = text.replace(
            "%q = Neg(%b) : f32[16@x, 4]", "%q = ReduceMax(%c) {keepdims=1} : f32[1, 1] partial(max: x)"
        )
        text = text.replace('f32[8, 4] replicated doc "two"', 'f32[1, 1] replicated doc "two"')
        text = text.replace("%h = Mul(%q1, %half) : f32[8, 4]", "%h = Mul(%q1, %half) : f32[1, 1]")
    assert not PassManager.parse("simplify-collectives").run(read(text)).changed


def test_a_sum_that_is_larger_than_what_is_added_stays() -> None:
    text = """graph @g(%a: f32[8, 1@y, 16@x], %b: f32[1@y, 8, 16@x]) -> (%y) opset 21 {
  %axes = constant : i64[1] replicated [2]
  %p = ReduceSum(%a, %axes) {keepdims=0} : f32[8, 1@y] partial(sum: x)
  %q = ReduceSum(%b, %axes) {keepdims=0} : f32[1@y, 8] partial(sum: x)
  %p1 = irpar.AllReduce(%p) {axes=["x"], reduce="sum", id=0} : f32[8, 1@y]
  %q1 = irpar.AllReduce(%q) {axes=["x"], reduce="sum", id=1} : f32[1@y, 8]
  %y = Add(%p1, %q1) : f32[8, 8] replicated
}
""".replace("@y", "")
    assert not PassManager.parse("simplify-collectives").run(read(MESH + text)).changed


TWICE = """graph @g(%a: f32[5, 10@x]) -> (%y, %z) opset 21 {
  %y = Softmax(%a) : f32[5, 10@x]
  %z = LogSoftmax(%a) : f32[5, 10@x]
}
"""


def test_equal_steps_of_local_programs_merge() -> None:
    before = run("localize", MESH + TWICE)
    after = run("localize,simplify-collectives", MESH + TWICE)
    count = [sum(node.domain == "irpar" for node in module.graph) for module in (before, after)]
    assert count == [4, 2]
    assert [node.attributes["id"] for node in after.graph if node.domain == "irpar"] == [0, 1]
    check_same(MESH + TWICE)


def _conflict(name: str, *, rematerialized: bool = False) -> Conflict:
    return Conflict(name, "[@x]", "annotated", "node", "[_]", "", rematerialized, "do")


def test_what_merges_tells_all_reasons() -> None:
    text = """graph local @g(%a: f32[4] of [8@x]) -> (%y, %z) opset 21 ranks [0, 1, 2, 3] {
  %b = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[8] of [8] replicated doc "one"
  %c = irpar.AllGather(%a) {axes=["x"], dim=0, id=1} : f32[8] of [8] replicated doc "two"
  %y = Relu(%b) : f32[8] of [8] replicated
  %z = Neg(%c) : f32[8] of [8] replicated
}
"""
    module = read(MESH + text)
    module.conflicts.update(b=_conflict("b"), c=_conflict("c", rematerialized=True))
    PassManager.parse("simplify-collectives").run(module)
    (gather,) = (node for node in module.graph if node.domain == "irpar")
    assert gather.doc == "one; two"
    assert module.conflicts == {"b": _conflict("b; c", rematerialized=True)}


@pytest.mark.parametrize(("kind", "gathers"), [("Identity", 2), ("Relu", 2), ("Transpose", 1)])
def test_what_passes_read_a_view_of_each_they_gather_each(kind: str, gathers: int) -> None:
    """As in the trips of a step that gathers parameters again; how a weight is turned tells nothing of that."""
    text = f"""graph local @g(%w: f32[4] of [8@x]) -> (%y, %z) opset 21 ranks [0, 1, 2, 3] {{
  %first = {kind}(%w) {{| phase=forward}} : f32[4] of [8@x]
  %b = irpar.AllGather(%first) {{axes=["x"], dim=0, id=0 | phase=forward}} : f32[8] of [8] replicated
  %y = Exp(%b) {{| phase=forward}} : f32[8] of [8] replicated
  %again = {kind}(%w) {{| phase=backward}} : f32[4] of [8@x]
  %c = irpar.AllGather(%again) {{axes=["x"], dim=0, id=1 | phase=backward}} : f32[8] of [8] replicated
  %z = Neg(%c) {{| phase=backward}} : f32[8] of [8] replicated
}}
"""
    module = read(MESH + text)
    assert PassManager.parse("simplify-collectives").run(module).changed == (gathers == 1)
    assert sum(node.domain == "irpar" for node in module.graph) == gathers


def test_a_sum_that_is_reduced_once_tells_all_conflicts() -> None:
    module = read(MESH + SUM)
    module.conflicts.update(p1=_conflict("p"), q1=_conflict("q"))
    PassManager.parse("simplify-collectives").run(module)
    (reduced,) = (node for node in module.graph if node.op_type == "AllReduce")
    assert module.conflicts == {reduced.result.name: _conflict("p; q")}


def test_all_programs_merge_alike() -> None:
    """Blocks of 4, 4 and 2: the last rank's program is its own."""
    text = 'mesh @m = ["x"=3]\n' + TWICE
    module = run("localize,simplify-collectives", text)
    assert len(module.graphs) == 2
    lists = [
        [(node.op_type, node.attributes["id"], node.attributes["axes"]) for node in graph if node.domain == "irpar"]
        for graph in module.graphs
    ]
    assert lists[0] == lists[1]
    assert len(lists[0]) == 2
    check_same(text)


def test_what_merges_in_one_program_only_stays() -> None:
    """Two reductions over slices that are the same on some ranks and not on others."""
    head = 'mesh @m = ["x"=2]\n'
    graph = """graph local @g.%d(%%a: f32[4] of [4] replicated) -> (%%y, %%z) opset 21 ranks [%d] {
  %%p = constant : f32[] of [] replicated 1.0
  %%q = constant : f32[] of [] replicated %s
  %%b = Mul(%%a, %%p) : f32[4]
  %%c = Mul(%%a, %%q) : f32[4]
  %%y = irpar.AllReduce(%%b) {axes=["x"], reduce="sum", id=0} : f32[4] of [4] replicated
  %%z = irpar.AllReduce(%%c) {axes=["x"], reduce="sum", id=1} : f32[4] of [4] replicated
}
"""
    module = read(head + graph % (0, 0, "1.0") + graph % (1, 1, "2.0"))
    assert not PassManager.parse("simplify-collectives").run(module).changed
    module = read(head + graph % (0, 0, "1.0") + graph % (1, 1, "1.0"))
    assert PassManager.parse("simplify-collectives").run(module).changed
    assert [len(list(graph)) for graph in module.graphs] == [2, 2]


def test_the_log_follows_what_is_there() -> None:
    module = read(
        MESH
        + """graph @g(%a: f32[8@x, 16]) -> (%y) opset 21 {
  %g = irpar.AllGather(%a) {axes=["x"], dim=0, id=0} : f32[8, 16] replicated
  %t = irpar.AllSlice(%g) {axes=["x"], dim=1} : f32[8, 16@x]
  %y = Relu(%t) : f32[8, 16@x]
}
"""
    )
    module.decide("a", Decision('annotated "a"', None, ("x",)))
    module.decide("y", Decision('annotated "y"', None, ("x",)))
    module.decide("t", Decision("AllSlice of %g, beside %y at Relu", "y", ("x",)))
    module.decide("g", Decision("AllGather of %a", "a"))
    PassManager.parse("simplify-collectives").run(module)
    assert [(name, step.why) for name, step in module.chain("t", "x")] == [
        ("t", "AllToAll of %a"),
        ("a", 'annotated "a"'),
    ]
    assert "g" not in module.decisions


WEIGHT = """graph @g(%a: f32[8, 16]) -> (%y) opset 21 {
  %w = constant : f32[16@x, 4] data("w", 0, 256)
  %v = irpar.AllToAll(%w) {axes=["x"], split_dim=1, concat_dim=0, id=0} : f32[16, 4@x]
  %y = MatMul(%a, %v) : f32[8, 4@x]
}
"""


def test_a_constant_is_written_as_it_is_read() -> None:
    check(
        "simplify-collectives",
        MESH + WEIGHT,
        MESH
        + """graph @g(%a: f32[8, 16]) -> (%y) opset 21 {
  %w = constant : f32[16, 4@x] data("w", 0, 256)
  %y = MatMul(%a, %w) : f32[8, 4@x]
}
""",
    )


def test_a_constant_of_which_devices_would_hold_more_stays() -> None:
    whole = WEIGHT.replace("AllToAll", "AllGather").replace("split_dim=1, concat_dim=0", "dim=0").replace("4@x", "4")
    twice = (
        WEIGHT.replace("-> (%y)", "-> (%y, %z)").replace('}\n"', "").rstrip()[:-1]
        + "  %z = Neg(%w) : f32[16@x, 4]\n}\n"
    )
    for text in (whole, twice):
        assert not PassManager.parse("simplify-collectives").run(read(MESH + text)).changed


def test_a_constant_is_written_in_each_way_that_it_is_read() -> None:
    """Twice 4 kB beside a table of 64 kB. The gather of a vector goes too, that of the table stays."""
    check(
        "simplify-collectives",
        MESH
        + """graph @g(%a: f32[8, 64], %b: f32[8, 32@x]) -> (%y, %z, %u) opset 21 {
  %t = constant : f32[512@x, 64] data("w", 0, 131072) from "table"
  %w = constant : f32[64@x, 32] data("w", 131072, 8192) from "w"
  %s = constant : f32[32@x] data("w", 139264, 128) from "s"
  %v = irpar.AllToAll(%w) {axes=["x"], split_dim=1, concat_dim=0, id=0} : f32[64, 32@x]
  %p = MatMul(%a, %v) : f32[8, 32@x]
  %q = Add(%p, %s) : f32[8, 32@x]
  %y = Neg(%q) : f32[8, 32@x]
  %r = irpar.AllGather(%s) {axes=["x"], dim=0, id=1} : f32[32] replicated
  %z = Add(%w, %r) : f32[64@x, 32]
  %m = irpar.AllGather(%t) {axes=["x"], dim=0, id=2} : f32[512, 64] replicated
  %u = Relu(%m) : f32[512, 64] replicated
}
""",
        MESH
        + """graph @g(%a: f32[8, 64], %b: f32[8, 32@x]) -> (%y, %z, %u) opset 21 {
  %t = constant : f32[512@x, 64] data("w", 0, 131072) from "table"
  %w = constant : f32[64@x, 32] data("w", 131072, 8192) from "w"
  %s = constant : f32[32@x] data("w", 139264, 128) from "s"
  %v = constant : f32[64, 32@x] data("w", 131072, 8192) from "w"
  %r = constant : f32[32] replicated data("w", 139264, 128) from "s"
  %p = MatMul(%a, %v) : f32[8, 32@x]
  %q = Add(%p, %s) : f32[8, 32@x]
  %y = Neg(%q) : f32[8, 32@x]
  %z = Add(%w, %r) : f32[64@x, 32]
  %m = irpar.AllGather(%t) {axes=["x"], dim=0, id=0} : f32[512, 64] replicated
  %u = Relu(%m) : f32[512, 64] replicated
}
""",
    )


def test_what_all_constants_take_more_is_bounded() -> None:
    """Of eight equal weights that are read in two ways, one may be written in both: an eighth more."""
    lines = []
    for number in range(8):
        lines += [
            f'  %w{number} = constant : f32[64@x, 64] data("w", {number * 16384}, 16384)',
            f'  %v{number} = irpar.AllToAll(%w{number}) {{axes=["x"], split_dim=1, concat_dim=0, id={number}}} : f32[64, 64@x]',
            f"  %y{number} = Relu(%v{number}) : f32[64, 64@x]",
            f"  %z{number} = Relu(%w{number}) : f32[64@x, 64]",
        ]
    outputs = ", ".join(f"%{name}{number}" for number in range(8) for name in "yz")
    module = run("simplify-collectives", MESH + f"graph @g() -> ({outputs}) opset 21 {{\n" + "\n".join(lines) + "\n}\n")
    assert [node.inputs[0].name for node in module.graph if node.op_type == "AllToAll"] == [
        f"w{n}" for n in range(1, 8)
    ]
    assert len(module.graph.constants) == 9


def test_what_small_constants_take_more_is_bounded() -> None:
    """Of forty vectors that are read whole each takes little more so, but all of them more than an eighth of the constants."""
    lines = ['  %big = constant : f32[16, 18] data("w", 0, 1152)', "  %y = Neg(%big) : f32[16, 18]"]
    for number in range(40):
        lines += [
            f'  %w{number} = constant : f32[16@x] data("w", {1152 + number * 64}, 64)',
            f'  %v{number} = irpar.AllGather(%w{number}) {{axes=["x"], dim=0, id={number}}} : f32[16] replicated',
            f"  %y{number} = Neg(%v{number}) : f32[16] replicated",
        ]
    outputs = ", ".join(["%y", *(f"%y{number}" for number in range(40))])
    text = MESH + f"graph @g() -> ({outputs}) opset 21 {{\n" + "\n".join(lines) + "\n}\n"
    before = 1152 + 40 * 32
    module = run("simplify-collectives", text)
    held = sum(
        math.prod(ceil_shape(v.sharding, v.shape) if v.sharding else v.shape) * 4 for v in module.graph.constants
    )
    assert before / 64 >= 32
    assert before < held <= before * (1 + 1 / 8)
    assert any(node.domain == "irpar" for node in module.graph)


def test_a_weight_that_is_read_in_two_ways_gives_the_same_numbers(tmp_path: Path) -> None:
    text = """g (float[8, 16] x, float[64, 128] big, float[16, 16] w, float[16] s) => (float[8, 16] y, float[16, 16] z, float[64, 128] b) {
      p = MatMul(x, w)  y = Add(p, s)  z = Mul(w, s)  b = Relu(big) }"""
    onnx.save(model_of_text(text, ["w", "s", "big"]), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    rows, columns = ["tp", None], [None, "tp"]
    irpar.annotate(module, {"x": [None, None], "y": columns, "z": rows, "big": rows, "b": rows})
    partition = irpar.partition(module, {"tp": 4})
    assert partition.plan.totals["collectives"] == 0
    held = [entry["sharding"] for entry in partition.plan.values if entry["source"] == "w"]
    assert sorted(held, key=str) == [[None, ["tp"]], [["tp"], None]]
    check_explained(partition.plan)
    partition.verify().check()
    partition.save(tmp_path / "out")
    irpar.Partition.open(tmp_path / "out").verify(engine="numpy").check()
    irpar.annotate(module, {"w": rows, "s": ["tp"]})
    # A device holds no more of what is annotated.
    assert irpar.partition(module, {"tp": 4}).plan.totals["collectives"] == 2


def test_a_weight_laid_out_anew_gives_the_same_numbers(tmp_path: Path) -> None:
    text = "g (float[8, 64] x, float[64, 32] w) => (float[8, 32] y) { y = MatMul(x, w) }"
    onnx.save(model_of_text(text, ["w"]), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    irpar.annotate(module, {"w": ["tp", None], "x": [None, None], "y": [None, "tp"]})
    partition = irpar.partition(module, {"tp": 4})
    partition.verify().check()
    assert partition.plan.totals["sent_bytes"] <= 8 * 32 * 4
    assert all(entry["value"] != "w" for entry in partition.plan.collectives)
    partition.save(tmp_path / "out")
    irpar.Partition.open(tmp_path / "out").verify().check()


def random_tree(draw: random.Random) -> Module:
    """An input that is moved by random ways to random shardings, each read by a Relu or Neg."""
    mesh = Mesh(draw.choice([{"x": 2, "y": 2}, {"x": 4}, {"x": 2, "y": 3}]))
    shape = draw.choice([(8, 12), (5, 7), (12, 4, 6)])
    names = list(mesh.axis_names)

    def sharding() -> Sharding:
        dims: list[list[str]] = [[] for _ in shape]
        for name in draw.sample(names, draw.randint(0, len(names))):
            draw.choice(dims).append(name)
        return Sharding.of_spec(mesh, [dim or None for dim in dims])

    module = Module(opsets={"": 21})
    module.set_mesh(mesh)
    graph = module.graph
    type_ = TensorType(DType.F32, shape)
    first = graph.add_input("a", type_)
    first.sharding = sharding()
    values = [first]
    builder = Builder(graph, module.opsets)
    outputs: list[Value] = []
    for number in range(draw.randint(2, 4)):
        value = draw.choice(values)
        assert value.sharding is not None
        for step in redistribution(value.sharding, sharding(), shape, 32).steps:
            attributes = attributes_of(step, value.sharding)
            value = builder.op(step.op, [value], attributes, type=type_, domain="irpar")
            value.sharding = step.after
            values.append(value)
        if number or draw.random() < 0.5:
            outputs.append(builder.op(draw.choice(["Relu", "Neg"]), [value], type=type_, name=f"y{number}"))
            outputs[-1].sharding = value.sharding
    graph.set_outputs(outputs)
    number_collectives(graph)
    return module


def sent(module: Module) -> tuple[int, int]:
    """Bytes, and collectives."""
    nodes = [node for node in module.graph.walk() if node.domain == "irpar" and node.op_type not in FREE]
    return sum(sent_bytes(node, module.mesh) for node in nodes), len(nodes)


def test_random_trees() -> None:
    better = 0
    for seed in range(60):
        module = random_tree(random.Random(seed))
        verify(module)
        after = clone_module(module)
        PassManager.parse("simplify-collectives").run(after)
        verify(after)
        assert sent(after) <= sent(module)
        better += sent(after) < sent(module)
        assert not PassManager.parse("simplify-collectives").run(clone_module(after)).changed
        expected, got = numbers(module, "localize", seed), numbers(after, "localize", seed)
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array)
    assert better > 20


def test_it_is_the_cheapest_for_one_reader() -> None:
    for seed in range(100, 140):
        module = random_tree(random.Random(seed))
        PassManager.parse("simplify-collectives").run(module)
        for tree in trees(module.graph):
            if len(tree.read) == 1:
                (lies,) = tree.read
                least = redistribution(tree.lies, lies, tree.root.shape, 32).key
                assert tree.key(network_of("bytes")) == least


def test_readers_that_differ_only_in_an_axis_of_one_device_read_one_value() -> None:
    mesh = 'mesh @m = ["x"=1, "y"=3]\n'
    before = (
        mesh
        + """graph @g(%a: f32[6, 4@y], %b: f32[6@x, 4]) -> (%y, %z) opset 21 {
  %c = irpar.AllGather(%a) {axes=["y"], dim=1, id=0} : f32[6@x, 4] doc "for the first"
  %y = Add(%c, %b) : f32[6@x, 4]
  %d = irpar.AllGather(%a) {axes=["y"], dim=1, id=1} : f32[6, 4] replicated doc "for the second"
  %z = Relu(%d) : f32[6, 4] replicated
}
"""
    )
    after = (
        mesh
        + """graph @g(%a: f32[6, 4@y], %b: f32[6@x, 4]) -> (%y, %z) opset 21 {
  %c = irpar.AllGather(%a) {axes=["y"], dim=1, id=0} : f32[6, 4] replicated doc "for the first"
  %y = Add(%c, %b) : f32[6@x, 4]
  %z = Relu(%c) : f32[6, 4] replicated
}
"""
    )
    check("simplify-collectives", before, after)
    check_same(before)


def test_moves_before_and_behind_an_annotated_value_are_planned_apart() -> None:
    """Its readers want it as it is sharded, and in two other ways."""
    text = """graph @g(%a: f32[8, 16@x], %b: f32[16@x, 4@y]) -> (%y, %z, %v) opset 21 {
  %p = MatMul(%a, %b) : f32[8, 4@y]
  %y = Relu(%p) : f32[8@x, 4]
  %z = Neg(%p) : f32[8, 4@x]
  %v = Tanh(%p) : f32[8, 4@y]
}
"""
    module = read(MESH + text)
    module.shard("p", [None, "y"])
    PassManager.parse("insert-redistribution").run(module)
    held = module.graph.value("p")
    assert held.node is not None
    assert held.node.op_type == "AllReduce"
    expected = numbers(module, "localize")
    PassManager.parse("simplify-collectives").run(module)
    verify(module)
    held = module.graph.value("p")
    assert [str(held.sharding), held.node and held.node.op_type] == ["[_, @y]", "AllReduce"]
    readers = {value for node in module.graph if node.domain != "irpar" for value in node.inputs} - set(
        module.graph.inputs
    )
    for value in readers:
        while value is not held:
            assert value.node is not None
            assert value.node.domain == "irpar"
            (value,) = value.node.inputs
    for name, array in numbers(module, "localize").items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-5)


def test_values_that_are_annotated_stay_reduced() -> None:
    text = """graph @g(%p: f32[8, 16@x], %q: f32[16@x, 4]) -> (%y) opset 21 {
  %a = MatMul(%p, %q) : f32[8, 4] replicated
  %b = MatMul(%p, %q) : f32[8, 4] replicated
  %y = Sub(%a, %b) : f32[8, 4] replicated
}
"""

    def reduced(*names: str) -> list[str]:
        module = read(MESH + text)
        for name in names:
            module.shard(name, [None, None])
        PassManager.parse("insert-redistribution{refine=false},simplify-collectives").run(module)
        return [repr(node) for node in module.graph if node.domain == "irpar"]

    assert reduced() == ["%y_1 = AllReduce(%y)"]
    assert reduced("y") == ["%y = AllReduce(%y_1)"]
    assert len(reduced("a")) == 2


def test_blocks_that_change_places_within_a_sharding_stay_so() -> None:
    text = (
        MESH
        + """graph @g(%a: f32[8] replicated) -> (%r, %c) opset 21 {
      %k = constant : f32[4@x] [1, 2, 3, 4]
      %s = irpar.AllSlice(%a) {axes=["x"], dim=0} : f32[8@x]
      %m = irpar.CollectivePermute(%s) {axes=["x"], pairs=[0, 1, 1, 0], id=0} : f32[8@x]
      %r = irpar.AllGather(%m) {axes=["x"], dim=0, id=1} : f32[8] replicated
      %t = irpar.CollectivePermute(%k) {axes=["x"], pairs=[0, 1, 1, 0], id=2} : f32[4@x]
      %c = irpar.AllGather(%t) {axes=["x"], dim=0, id=3} : f32[4] replicated
    }
    """
    )
    module = read(text)
    for pipeline in ("localize", "fold-constants,simplify-collectives,localize"):
        found = numbers(module, pipeline)
        first, last = np.split(np.random.default_rng(0).standard_normal(8).astype(np.float32), 2)
        np.testing.assert_array_equal(found["r"], [*last, *first])
        np.testing.assert_array_equal(found["c"], [3, 4, 1, 2])


def test_programs_of_which_some_send_to_each_other_keep_ids_that_agree() -> None:
    begin = """%p = irpar.AllReduce(%u) {axes=["x"], reduce="sum", id=0} : f32[4] of [4]
      %o = irpar.AllReduce(%u) {axes=["x"], reduce="sum", id=1} : f32[4] of [4]"""
    end = """%q = irpar.AllReduce(%c) {axes=["x"], reduce="max", id=3} : f32[4] of [4]
      %s = Sum(%p, %o, %q) : f32[4] of [4]"""
    between = (
        """%b = irpar.Recv() {channel=3, pairs=[1, 0], dtype="f32", shape=[4], id=2} : f32[4] of [4]
      %c = Neg(%b) : f32[4] of [4] partial(max: x)""",
        """irpar.Send(%p) {channel=3, pairs=[1, 0], id=2}
      %c = Neg(%u) : f32[4] of [4] partial(max: x)""",
        "%c = Neg(%u) : f32[4] of [4] partial(max: x)",
    )
    programs = [
        f"""graph local @g{rank}(%a: f32[4] of [4]) -> (%s) opset 21 ranks [{rank}] {{
      %u = Exp(%a) : f32[4] of [4] partial(sum: x)
      {begin}
      {inner}
      {end}
    }}
    """
        for rank, inner in enumerate(between)
    ]
    module = run("simplify-collectives", 'mesh @m = ["x"=3]\n    ' + "".join(programs))
    numbers = np.linspace(-1, 1, 4).astype(np.float32)
    with Executor(module, module.mesh, engine="numpy") as executor:
        found = executor.run({"a": numbers})["s"]
        assert [record.kind for record in executor.log].count("all_reduce") == 2
    np.testing.assert_allclose(found, 5 * np.exp(numbers), rtol=1e-6)
