"""A redistribution stands where the tensor is smallest, and is shared."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import irpar
from irpar import models
from irpar.analysis.completion import refinement
from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.moves import placements_of
from irpar.analysis.completion.placement import Placement
from irpar.analysis.cost.network import BYTES
from irpar.ir import Node
from irpar.onnx_io import to_module
from irpar.ops import FactorRule
from irpar.ops.collectives import FREE
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import composed
from irpar.training.step import train_step
from tests.passes.golden import read, run

HEAD = 'mesh @m = ["tp"=4]\n'


def moved(text: str, pipeline: str = "insert-redistribution") -> list[tuple[str, str]]:
    """The collectives that send, and what they send."""
    module = run(pipeline, HEAD + text)
    nodes = [node for node in module.graph if node.domain == "irpar" and node.op_type not in FREE]
    return [(node.op_type, node.inputs[0].name) for node in nodes]


def test_a_gather_stands_behind_a_cast_to_a_narrower_type_and_what_is_before_it() -> None:
    """As completion leaves it where annotations hold it: every value but the first is whole."""
    text = """graph @g(%x: f32[8, 64@tp]) -> (%y) opset 21 {
  %a = Relu(%x) : f32[8, 64] replicated
  %b = Neg(%a) : f32[8, 64] replicated
  %c = Cast(%b) {to=10} : f16[8, 64] replicated
  %y = Abs(%c) : f16[8, 64] replicated
}
"""
    ((op_type, name),) = moved(text)
    assert op_type == "AllGather"
    assert name in ("c", "y")
    ((op_type, name),) = moved(text, "insert-redistribution{refine=false}")
    assert name in ("x", "a")


def test_a_gather_stands_before_a_cast_to_a_wider_type() -> None:
    text = """graph @g(%x: f16[8, 64@tp]) -> (%y) opset 21 {
  %a = Cast(%x) {to=1} : f32[8, 64@tp]
  %b = Neg(%a) : f32[8, 64@tp]
  %y = Relu(%b) : f32[8, 64] replicated
}
"""
    assert moved(text) == [("AllGather", "x")]


def test_a_gather_stands_before_a_broadcast() -> None:
    text = """graph @g(%x: f32[1, 64@tp]) -> (%y) opset 21 {
  %shape = constant : i64[2] replicated [32, 64]
  %a = Neg(%x) : f32[1, 64@tp]
  %b = Expand(%a, %shape) : f32[32, 64@tp]
  %y = Relu(%b) : f32[32, 64] replicated
}
"""
    ((op_type, name),) = moved(text)
    assert op_type == "AllGather"
    assert name in ("x", "a")


def test_a_gather_stands_behind_a_slice() -> None:
    text = """graph @g(%x: f32[32, 64@tp]) -> (%y) opset 21 {
  %zero = constant : i64[1] replicated [0]
  %two = constant : i64[1] replicated [2]
  %axes = constant : i64[1] replicated [0]
  %a = Neg(%x) : f32[32, 64] replicated
  %b = Slice(%a, %zero, %two, %axes) : f32[2, 64] replicated
  %y = Relu(%b) : f32[2, 64] replicated
}
"""
    ((op_type, name),) = moved(text)
    assert op_type == "AllGather"
    assert name in ("b", "y")


def test_one_gather_serves_elementwise_users() -> None:
    text = """graph @g(%x: f32[8, 64@tp]) -> (%y, %u) opset 21 {
  %y = NonZero(%x) : i64[2, n] replicated
  %a = Neg(%x) : f32[8, 64@tp]
  %b = Transpose(%a) {perm=[1, 0]} : f32[64@tp, 8]
  %u = Abs(%b) : f32[64, 8] replicated
}
"""
    assert moved(text) == [("AllGather", "x")]
    assert len(moved(text, "insert-redistribution{refine=false}")) == 2


def test_parts_are_scattered_before_what_computes_on_blocks() -> None:
    text = """graph @g(%a: f32[16, 64@tp], %w: f32[64@tp, 8]) -> (%y) opset 21 {
  %p = MatMul(%a, %w) : f32[16, 8] replicated
  %b = Exp(%p) : f32[16, 8] replicated
  %c = Neg(%b) : f32[16, 8] replicated
  %y = Relu(%c) : f32[16@tp, 8]
}
"""
    assert moved(text) == [("ReduceScatter", "p")]


SUMS = """graph @g(%a: f32[16, 64@tp], %w: f32[64@tp, 32], %v: f32[32, 2]) -> (%y) opset 21 {
  %zero = constant : i64[1] [0]
  %one = constant : i64[1] [1]
  %both = constant : i64[2] [0, 1]
  %p = MatMul(%a, %w) : f32[16, 32]
  BEHIND
}
"""
FOLLOWING = {
    "a sum": (["%e = Exp(%p) : f32[16, 32]", "%y = ReduceSum(%e, %one) {keepdims=0} : f32[16]"], [("AllGather", "y")]),
    "a mean of all": (
        ["%e = Gelu(%p) : f32[16, 32]", "%y = ReduceMean(%e, %both) : f32[1, 1]"],
        [("AllReduce", "y")],
    ),
    "a maximum behind a Transpose": (
        [
            "%e = Tanh(%p) : f32[16, 32]",
            "%t = Transpose(%e) {perm=[1, 0]} : f32[32, 16]",
            "%y = ReduceMax(%t, %zero) {keepdims=0} : f32[16]",
        ],
        [("AllGather", "y")],
    ),
    "a product with a small matrix": (
        ["%e = Tanh(%p) : f32[16, 32]", "%y = MatMul(%e, %v) : f32[16, 2]"],
        [("AllGather", "y")],
    ),
    "a search": (["%y = ArgMax(%p) {axis=1, keepdims=0} : i64[16]"], [("AllGather", "y")]),
    "a Slice": (
        ["%e = Tanh(%p) : f32[16, 32]", "%y = Slice(%e, %zero, %one, %zero) : f32[1, 32]"],
        [("AllGather", "y")],
    ),
    "a Cast to a narrower type": (
        ["%e = Tanh(%p) : f32[16, 32]", "%y = Cast(%e) {to=10} : f16[16, 32]"],
        [("AllGather", "y")],
    ),
}


@pytest.mark.parametrize("what", FOLLOWING)
def test_sums_are_scattered_where_something_smaller_follows(what: str) -> None:
    """Half of what an all_reduce sends, what follows on blocks, and then what it gives."""
    nodes, after = FOLLOWING[what]
    text = SUMS.replace("BEHIND", "\n  ".join(nodes) + " replicated")
    assert moved(text, "complete-sharding,insert-redistribution") == [("ReduceScatter", "p"), *after]


def test_sums_are_reduced_where_nothing_smaller_follows() -> None:
    """A reduce_scatter and an all_gather of as much would be two launches for one."""
    text = SUMS.replace("BEHIND", "%y = Tanh(%p) : f32[16, 32] replicated")
    assert moved(text, "complete-sharding,insert-redistribution") == [("AllReduce", "p")]


def test_a_sum_is_reduced_before_a_broadcast() -> None:
    text = """graph @g(%a: f32[1, 64@tp], %w: f32[64@tp, 32]) -> (%y) opset 21 {
  %s = constant : i64[2] [128, 32]
  %p = MatMul(%a, %w) : f32[1, 32]
  %e = Expand(%p, %s) : f32[128, 32]
  %y = Tanh(%e) : f32[128, 32] replicated
}
"""
    assert moved(text, "complete-sharding,insert-redistribution") == [("AllReduce", "p")]


def test_one_gather_serves_transposes() -> None:
    text = """graph @g(%a: f32[32@tp, 64]) -> (%y, %z, %u) opset 21 {
  %p = Tanh(%a) : f32[32, 64]
  %t = Transpose(%p) {perm=[1, 0]} : f32[64, 32]
  %r = Neg(%t) : f32[64, 32]
  %y = NonZero(%p) : i64[2, n]
  %z = NonZero(%t) : i64[2, k]
  %u = NonZero(%r) : i64[2, l]
}
"""
    ((op_type, name),) = moved(text, "complete-sharding,insert-redistribution")
    assert op_type == "AllGather"
    assert name in ("a", "p")


def test_two_sums_that_are_added_are_reduced_once() -> None:
    text = """graph @g(%a: f32[16, 64@tp], %w: f32[64@tp, 8], %b: f32[16, 64@tp], %v: f32[64@tp, 8]) -> (%y) opset 21 {
  %p = MatMul(%a, %w) : f32[16, 8] replicated
  %q = MatMul(%b, %v) : f32[16, 8] replicated
  %y = Add(%p, %q) : f32[16, 8] replicated
}
"""
    assert moved(text) == [("AllReduce", "y")]


def test_what_was_annotated_lies_so() -> None:
    text = """graph @g(%x: f32[8, 64@tp]) -> (%y) opset 21 {
  %a = Relu(%x) : f32[8, 64] replicated
  %y = Cast(%a) {to=10} : f16[8, 64] replicated
}
"""
    module = read(HEAD + text)
    module.shard("a", [None, None])
    PassManager.parse("insert-redistribution").run(module)
    (gather,) = [node for node in module.graph if node.domain == "irpar"]
    assert (gather.op_type, gather.result.source_name) == ("AllGather", "a")
    assert [node.op_type for node in gather.result.users] == ["Cast"]


def test_every_rule_of_a_node_is_tried_however_many_ways_the_first_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "MOST_WAYS", 1)
    types = "%q: f32[4, 8, 64@tp, 16], %k: f32[4, 8, 64@tp, 16], %v: f32[4, 8, 64@tp, 16]"
    text = f"""graph @g({types}) -> (%y) opset 24 {{
  %y = Attention(%q, %k, %v) : f32[4, 8, 64, 16] replicated
}}
"""
    module = run("", HEAD + text)
    flow = Flow(module.graph, module.mesh)
    node = module.graph.first
    assert node is not None
    seen: list[FactorRule | None] = []

    class Counting(refinement.Refinement):
        def _ways(self, node: Node, change: refinement.Change) -> Iterator[Placement]:
            for placement in super()._ways(node, change):
                seen.append(placement.rule)
                yield placement

    Counting(flow, placements_of(flow, BYTES), BYTES, ()).run()
    view = flow.rule(node)
    assert view is not None
    assert len(view.ways) > 1
    assert set(seen) == {way.rule for way in view.ways}


def test_an_annotated_constant_is_not_taken_for_one_that_each_reader_may_have_as_it_needs_it() -> None:
    text = """graph @g(%x: f32[8, 64@tp]) -> (%y, %z) opset 21 {
  %v = constant : f32[64@tp, 64] data("w.bin", 0, 16384)
  %w = constant : f32[64@tp, 64] data("w.bin", 16384, 16384)
  %y = MatMul(%x, %v) : f32[8, 64] replicated
  %z = MatMul(%x, %w) : f32[8, 64] replicated
}
"""
    module = read(HEAD + text)
    flow = Flow(module.graph, module.mesh)
    nodes = [node for node in module.graph if node.op_type == "MatMul"]

    def looks(pinned: tuple[str, ...]) -> int:
        refinement_of = refinement.Refinement(flow, placements_of(flow, BYTES), BYTES, pinned)
        return len({refinement_of._look(node, 0) for node in nodes})

    assert looks(()) == 1
    assert looks(("w",)) == 2


def test_products_that_are_added_take_rows_as_they_lie_and_are_reduced_once() -> None:
    """To bring q to rows, and a to every rank, costs less for one product than its sum; not for three."""
    text = """graph @g(
    %q: f32[128, 64@tp], %k: f32[128, 64@tp], %v: f32[128, 64@tp],
    %a: f32[64@tp, 96], %b: f32[64@tp, 96], %c: f32[64@tp, 96]
) -> (%y) opset 21 {
  %d = MatMul(%q, %a) : f32[128@tp, 96]
  %e = MatMul(%k, %b) : f32[128@tp, 96]
  %f = MatMul(%v, %c) : f32[128@tp, 96]
  %s = Add(%d, %e) : f32[128@tp, 96]
  %y = Add(%s, %f) : f32[128@tp, 96]
}
"""
    assert moved(text) == [("ReduceScatter", "y")]


BACKWARD = """graph @g(%a: f32[64, 32@tp], %w: f32[32@tp, 64], %x: f32[64, 64]) -> (%y, %z) opset 21 {
  %zero = constant : i64[1] [0]
  %p = MatMul(%a, %w) FACTS : f32[64, 64]
  %m = Mul(%p, %x) FACTS : f32[64, 64]
  %y = ReduceSum(%m, %zero) {keepdims=0 | FACT} : f32[64] replicated
  %z = ReduceSum(%p, %zero) {keepdims=0 | FACT} : f32[64] replicated
}
"""


def test_a_gradient_that_is_read_for_two_vectors_is_not_reduced_but_they_are() -> None:
    text = BACKWARD.replace("FACTS", "{| phase=backward}").replace("| FACT", "| phase=backward")
    assert moved(text, "complete-sharding,insert-redistribution") == [("AllReduce", "y"), ("AllReduce", "z")]


def test_parts_of_a_forward_pass_are_not_multiplied_with_what_may_be_infinite() -> None:
    found = moved(BACKWARD.replace("FACTS ", "").replace(" | FACT", ""), "complete-sharding,insert-redistribution")
    assert "p" in [name for _, name in found]


def test_rows_are_gathered_where_what_they_are_added_to_is_larger() -> None:
    text = """graph @g(%rows: f32[16@tp, 8], %ids: i64[16@tp, 1]) -> (%y) opset 21 {
  %table = constant : f32[4096, 8] replicated data("w.bin", 0, 131072)
  %y = ScatterND(%table, %ids, %rows) {reduction="add" | phase=backward} : f32[4096, 8] replicated
}
"""
    found = moved(text, "complete-sharding,insert-redistribution")
    assert sorted(found) == [("AllGather", "ids"), ("AllGather", "rows")]


PRODUCT = """graph @g(%x: f32[8@tp, 256], %d: f32[8@tp, 512]) -> (%y) opset 21 {
  %t = Transpose(%x) {perm=[1, 0] FACT} : f32[256, 8]
  %g = MatMul(%t, %d) FACTS : f32[256, 512]
  %y = Neg(%g) FACTS : f32[256, 512] replicated
}
"""


def test_the_gradient_of_a_weight_is_made_in_blocks_where_what_it_is_made_of_is_smaller() -> None:
    text = PRODUCT.replace("FACTS", "{| phase=backward}").replace("FACT", "| phase=backward")
    kinds = [kind for kind, _ in moved(text, "complete-sharding,insert-redistribution")]
    assert sorted(kinds) == ["AllGather", "AllGather", "AllToAll"]


def test_a_product_of_a_forward_pass_is_reduced_at_once() -> None:
    text = PRODUCT.replace("FACTS ", "").replace("FACT", "")
    assert moved(text, "complete-sharding,insert-redistribution") == [("AllReduce", "g")]


def test_a_product_of_a_backward_pass_is_not_repeated_to_send_less() -> None:
    """Both operands together are smaller than the gradient, which is summed over dp all the same."""
    text = """mesh @m = ["dp"=2, "tp"=2]
graph @g(%x: f32[26, 8@dp], %d: f32[8@dp, 64@tp]) -> (%g) opset 21 {
  %g = MatMul(%x, %d) {| phase=backward} : f32[26, 64]
}
"""
    module = run("complete-sharding,insert-redistribution", text)
    (node,) = [node for node in module.graph if node.op_type == "MatMul"]
    parts = [module.mesh.group_size(value.sharding.all_axes) for value in node.inputs if value.sharding is not None]
    assert max(parts) == 4 or {"dp"} == {axis.name for axis in node.result.sharding.partial}


@pytest.mark.parametrize("zero", [None, "zero{stage=3, threshold-kb=1}"])
def test_the_norm_of_all_gradients_asks_of_none_what_all_others_are_made_of(
    zero: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of all makes all gradients neighbours: 24,000 changes were tried of a step that has 3,000 without it."""
    tried: list[int] = []
    run = refinement.Refinement.run

    def counted(chosen: refinement.Refinement, *begin: Any) -> Any:
        found = run(chosen, *begin)
        tried.append(chosen.tried)
        return found

    monkeypatch.setattr(refinement.Refinement, "run", counted)
    totals = []
    for clip_norm in (None, 1.0):
        step = train_step(to_module(models.build("gpt", layers=4)), clip_norm=clip_norm)
        irpar.annotate(step, models.annotations("gpt", layers=4))
        irpar.partition(step, "dp=4,tp=2", pipeline=composed(zero))
        totals.append(sum(tried))
        tried.clear()
    without, clipped = totals
    assert 0 < clipped < 2 * without


def test_a_sum_of_three_stays_in_parts_once_all_of_them_are() -> None:
    text = """graph @g(%a: f32[64, 8@tp], %b: f32[64, 8@tp], %c: f32[64, 8@tp], %w: f32[8@tp, 64]) -> (%y) opset 21 {
  %p = MatMul(%a, %w) : f32[64, 64]
  %q = MatMul(%b, %w) : f32[64, 64]
  %r = MatMul(%c, %w) : f32[64, 64]
  %y = Sum(%p, %q, %r) : f32[64, 64]
}
"""
    pipeline = "complete-sharding,insert-redistribution,simplify-collectives"
    assert moved(text, pipeline) == [("ReduceScatter", "y")]


@pytest.mark.parametrize("rows", [200, 201, 203])
def test_sizes_that_do_not_divide_move_as_those_that_do(rows: int) -> None:
    """Columns become rows, of which ranks have not equally many; all that follows is computed by rows."""
    weights = {f"w{n}": (32, 64) for n in range(3)} | {f"v{n}": (64, 8) for n in range(3)}
    nodes = [helper.make_node("Sum", ["o0", "o1", "o2"], ["y"])]
    for n in range(3):
        nodes.insert(0, helper.make_node("MatMul", [f"r{n}", f"v{n}"], [f"o{n}"]))
        nodes.insert(0, helper.make_node("Relu", [f"h{n}"], [f"r{n}"]))
        nodes.insert(0, helper.make_node("MatMul", ["x", f"w{n}"], [f"h{n}"]))
    random = np.random.default_rng(0)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, 8])],
        [numpy_helper.from_array(random.standard_normal(dims, np.float32), name) for name, dims in weights.items()],
    )
    module = to_module(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    module.shard("x", [None, "tp"])
    module.shard("y", [None, None])
    made = irpar.partition(module, "tp=4")
    assert {kind: told["collectives"] for kind, told in made.plan.totals["by_kind"].items()} == {
        "all_to_all": 1,
        "all_gather": 1,
    }
    made.verify(engine="numpy").check()
