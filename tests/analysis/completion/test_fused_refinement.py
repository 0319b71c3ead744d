"""What fuse-communication merges is chosen with that in view."""

import pytest

from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.fused_moves import cost_beside_others, saved_together
from irpar.analysis.completion.fused_refinement import cost_of_program, refine_for_program
from irpar.analysis.completion.moves import cost_of_placements, cost_of_value, placements_of
from irpar.analysis.completion.refinement import refine
from irpar.analysis.cost.network_lookup import network_of
from irpar.ir import Module
from irpar.sharding import Sharding
from tests.passes.golden import read, run

A100 = network_of("a100-pcie")


def layers(count: int, size: int = 384, network: str = "a100-pcie") -> str:
    """Layers one after the other, each of which sums over the axis that its weight is cut by."""
    lines, inputs = [], [f"%h0: f32[8, {size}] replicated"]
    for number in range(count):
        inputs.append(f"%w{number}: f32[{size}@tp, {size}]")
        lines.append(f"  %p{number} = MatMul(%h{number}, %w{number}) : f32[8, {size}] replicated")
        lines.append(f"  %h{number + 1} = Relu(%p{number}) : f32[8, {size}] replicated")
    head = f'module {{network="{network}"}}\nmesh @m = ["tp"=2]\ngraph @g({", ".join(inputs)}) -> (%h{count}) opset 21 '
    return head + "{\n" + "\n".join(lines) + "\n}\n"


def sent(text: str, pipeline: str = "insert-redistribution,localize,fuse-communication") -> list[str]:
    """The collectives of the programs."""
    module = run(pipeline, text)
    return [node.op_type for node in module.graphs[0] if node.domain == "irpar"]


SUMS = ["ReduceScatter", "ReduceScatter", "AllReduce"]
"""Of three layers that all sum: the first two leave to each device the part of the sum that its weight meets next."""


def test_one_weight_is_dearer_than_a_sum_and_three_are_cheaper_than_three_sums() -> None:
    assert sent(layers(1)) == ["AllReduce"]
    assert sent(layers(3)) == ["AllGather"]


def test_without_the_pass_that_merges_each_is_priced_alone() -> None:
    assert sent(layers(3), "insert-redistribution{together=false},localize") == SUMS


def test_where_bytes_count_nothing_is_sent_for_fewer_launches() -> None:
    assert sent(layers(3, network="bytes")) == SUMS


def test_large_weights_stay_where_they_are() -> None:
    assert sent(layers(3, size=4096)) == SUMS


def test_weights_whose_blocks_differ_are_not_sent_together() -> None:
    assert sent(layers(3, size=385)) == SUMS


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_program_never_costs_more_than_by_each_collective_alone(count: int) -> None:
    module = read(layers(count))
    flow, annotated = Flow(module.graph, module.mesh), module.annotated
    placements = placements_of(flow, A100)
    chosen = refine_for_program(flow, placements, A100, annotated)
    alone = refine(flow, placements, A100, annotated)
    assert cost_of_program(flow, chosen, A100, annotated) <= cost_of_program(flow, alone, A100, annotated)


PARALLEL = """
module {network="a100-pcie"}
mesh @m = ["tp"=2]
graph @g(%x: f32[8, 64@tp], %u: f32[64@tp, 32], %v: f32[64@tp, 32]) -> (%y, %z) opset 21 {
  %p = MatMul(%x, %u) : f32[8, 32] replicated
  %q = MatMul(%x, %v) : f32[8, 32] replicated
  %y = Relu(%p) : f32[8, 32] replicated
  %z = Relu(%READ) : f32[8, 32] replicated
}
"""


def saved(module: Module) -> tuple[int, int]:
    flow = Flow(module.graph, module.mesh)
    return saved_together(flow, placements_of(flow, A100), A100, module.annotated)


def test_sums_that_wait_for_the_same_save_a_launch() -> None:
    module = read(PARALLEL.replace("%READ", "%q"))
    seconds, launches = saved(module)
    assert launches == 1
    assert seconds > 0
    flow = Flow(module.graph, module.mesh)
    placements = placements_of(flow, A100)
    whole = cost_of_placements(flow, placements, A100, lambda value: False)
    assert cost_of_program(flow, placements, A100, ()) == (whole[0] - seconds, whole[1] - 1)


def test_sums_that_wait_for_each_other_save_none() -> None:
    text = layers(2)
    assert saved(read(text)) == (0, 0)


def test_a_network_that_knows_no_seconds_merges_nothing() -> None:
    module = read(PARALLEL.replace("%READ", "%q"))
    flow, bytes_ = Flow(module.graph, module.mesh), network_of("bytes")
    assert saved_together(flow, placements_of(flow, bytes_), bytes_, ()) == (0, 0)


def test_beside_others_a_launch_costs_nothing_and_bytes_what_they_cost() -> None:
    module = read(layers(1))
    weight = module.graph.inputs[1]
    assert weight.sharding is not None
    whole = {Sharding.replicated(module.mesh, 2)}
    alone = cost_of_value(weight, weight.sharding, None, whole, A100)
    beside = cost_beside_others(weight, weight.sharding, whole, A100)
    assert (alone[1], beside[1]) == (1, 0)
    sent_bytes = 384 * 384 * 4 // 2
    assert sent_bytes / 32e9 < beside[0] / 1e15 < sent_bytes / 32e9 + 2e-6
    assert alone[0] > beside[0] + 10e9
