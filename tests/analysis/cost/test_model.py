"""One cost model: what the search minimises for a program is what plan.json predicts for it."""

from dataclasses import replace
from pathlib import Path

import pytest

import irpar
from irpar import models
from irpar.advice.suggestion.result import Suggestion
from irpar.analysis.completion.flow import Flow, completed_flow
from irpar.analysis.completion.fused_refinement import cost_of_program, refine_for_program
from irpar.analysis.completion.moves import placements_of
from irpar.analysis.completion.placement import Placement
from irpar.analysis.completion.refinement import refine
from irpar.analysis.completion.situation import local_work, running_cost
from irpar.analysis.cost.device import node_seconds
from irpar.analysis.cost.model import FEMTOSECONDS, CostModel, add_keys
from irpar.analysis.cost.network import BYTES
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.node import Work, node_bytes, node_flops
from irpar.ir import Module, Node, parse_module
from irpar.output.parts import parts_of
from irpar.output.plan import make_plan
from irpar.output.plan_record import Plan
from irpar.pass_manager import Instrumentation, PassManager
from irpar.pass_manager.default_pipeline import COMPLETE, MOVES, NORMALISE
from irpar.sharding import Axis, Mesh
from tests.budget import every, pairs

MESHES = ({"tp": 2}, {"dp": 2, "tp": 4}, {"x": 3})


def run(module: Module, pipeline: str) -> None:
    PassManager.parse(pipeline, Instrumentation(reproducer=None)).run(module)


def suggested(folder: Path, name: str, mesh: dict[str, int]) -> tuple[Path, Suggestion]:
    """A model, and what is suggested for it."""
    path = folder / f"{name}.onnx"
    models.save(path, name)
    return path, irpar.suggest(path, mesh)


def completed(path: Path, suggestion: Suggestion, network: str) -> Module:
    """A model, annotated so, with a sharding for every tensor."""
    module = irpar.load(path)
    suggestion.apply(module)
    module.network = network_of(network).text
    run(module, f"{NORMALISE},{COMPLETE}")
    return module


def searched(module: Module) -> tuple[tuple[int, int], dict[Node, Placement]]:
    """What the search comes to, and how nodes run then."""
    network, annotated = network_of(module.network), module.annotated
    flow = completed_flow(module, "insert-redistribution")
    placements = refine_for_program(flow, placements_of(flow, network), network, annotated)
    return cost_of_program(flow, placements, network, annotated), placements


def planned(module: Module) -> Plan:
    run(module, f"{MOVES},localize,fuse-communication")
    return make_plan(module, module.mesh, parts_of(module, module.mesh), pipeline="", source={}, original={})


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case[0] == "resnet"))
        for case in pairs(["mlp", "gpt", "bert", "recurrent", "resnet", "dlrm"], MESHES)
    ],
    ids=str,
)
def test_what_is_searched_for_is_what_is_predicted(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    path, suggestion = suggested(tmp_path, name, mesh)
    for network in every(2, ("bytes", "a100-pcie", "cpu-ethernet")):
        module = completed(path, suggestion, network)
        (amount, launches), _ = searched(module)
        plan = planned(module)
        assert launches == plan.totals["collectives"]
        if plan.predicted is None:
            assert amount == plan.totals["sent_bytes"]
        else:
            assert amount / FEMTOSECONDS == pytest.approx(plan.predicted["step_seconds"], rel=1e-6)


@pytest.mark.parametrize(("name", "mesh"), [("moe", {"tp": 2}), ("moe", {"dp": 2, "tp": 4})])
def test_local_programs_compute_what_is_not_searched_for(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    """The nodes that these consist of are in the prediction alone; what is sent is in both."""
    module = completed(*suggested(tmp_path, name, mesh), "cpu-ethernet")
    (amount, launches), _ = searched(module)
    plan = planned(module)
    device = network_of("cpu-ethernet").device
    assert plan.predicted is not None
    assert device is not None
    assert launches == plan.totals["collectives"]
    more = plan.predicted["step_seconds"] - amount / FEMTOSECONDS
    assert more > 0
    # Starts alone, little beside what starting a node takes.
    assert more == pytest.approx(round(more / device.launch) * device.launch, rel=2e-3)


def test_what_is_sent_together_leads_to_a_faster_program(tmp_path: Path) -> None:
    """One launch gathers three weights, and then each device computes its part of the batch: what it sums it scatters."""
    module = completed(*suggested(tmp_path, "dlrm", {"tp": 2}), "a100-pcie")
    network, annotated = network_of("a100-pcie"), module.annotated
    flow = completed_flow(module, "insert-redistribution")
    apart = refine(flow, placements_of(flow, network), network, annotated)
    together = refine_for_program(flow, placements_of(flow, network), network, annotated)
    assert cost_of_program(flow, apart, network, annotated)[1] == 4
    assert cost_of_program(flow, together, network, annotated)[1] == 2
    plan = planned(module)
    assert plan.predicted is not None
    assert plan.totals["collectives"] == 2
    assert plan.predicted["step_seconds"] < 0.109e-3


# -- one node -------------------------------------------------------------------------------------------------------


def placed(text: str, mesh: str, network: str) -> tuple[Node, Placement, Module]:
    """The only node of a graph, and how it runs."""
    module = parse_module(f"mesh @m = [{mesh}]\ngraph @g{text}")
    node = module.graph.first
    assert node is not None
    flow = Flow(module.graph, module.mesh)
    return node, flow.place(node, lambda _: True, network_of(network)), module


def test_a_share_of_a_node_is_its_largest_block() -> None:
    """10 rows over 4 devices are 3, 3, 3 and 1; the weights are read whole by each."""
    text = "(%a: f32[10@x, 64], %b: f32[64, 32]) -> (%c) opset 21 { %c = MatMul(%a, %b) : f32[10@x, 32] }"
    node, placement, module = placed(text, '"x"=4', "a100-pcie")
    assert placement.largest_share(module.mesh) == 0.3
    work = local_work(node, placement, module.mesh)
    assert work == Work(2 * 3 * 64 * 32, [4 * 3 * 64, 4 * 64 * 32], [4 * 3 * 32])


def test_a_launch_is_not_divided_among_devices() -> None:
    text = "(%a: f32[8@x]) -> (%c) opset 21 { %c = Relu(%a) : f32[8@x] }"
    node, placement, module = placed(text, '"x"=8', "a100-pcie")
    network = network_of("a100-pcie")
    assert network.device is not None
    spent, launches = running_cost(node, Flow(module.graph, module.mesh).rule(node), placement, network)
    assert launches == 0
    assert spent >= network.device.launch * FEMTOSECONDS
    assert spent == CostModel(network).node(node, Work(1, [4], [4]))


def test_a_whole_node_is_all_of_its_work() -> None:
    text = "(%a: f32[10, 64], %b: f32[64, 32]) -> (%c) opset 21 { %c = MatMul(%a, %b) : f32[10, 32] }"
    node, placement, module = placed(text, '"x"=4', "a100-pcie")
    network = network_of("a100-pcie")
    assert network.device is not None
    work = local_work(node, placement, module.mesh)
    assert (work.flops, sum(work.operands) + sum(work.results)) == (node_flops(node), node_bytes(node))
    assert CostModel(network).node(node, work) == round(node_seconds(node, network.device) * FEMTOSECONDS)
    assert CostModel(BYTES).node(node, work) == 0


# -- redistributions, and what is compared --------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["bytes", "a100-pcie"])
def test_a_redistribution_is_the_sum_of_its_collectives(network: str) -> None:
    cost, mesh = CostModel(network_of(network)), Mesh({"x": 4, "y": 2})
    steps = [("all_gather", [Axis("x")], 1000), ("all_to_all", [Axis("y")], 4000)]
    each = [cost.collective(*step, mesh) for step in steps]
    assert cost.redistribution(steps, mesh) == add_keys(*each)
    assert cost.redistribution([], mesh) == cost.nothing
    assert each[0][-2:] == (3000, 1)


def test_equal_amounts_are_told_apart_by_launches_and_then_by_work() -> None:
    few, shared = CostModel.scalar((100, -1, 1), 1e-6), CostModel.scalar((100, -4, 1), 1e-6)
    assert CostModel.scalar((99, -1, 9), 1e-6) < shared < few < CostModel.scalar((100, -4, 2), 1e-6)


def test_what_does_not_fit_costs_more_than_what_does() -> None:
    room = replace(network_of("a100-pcie"), room=1000)
    assert CostModel(room).excess(1000) == 0
    assert CostModel(room).excess(1001) > FEMTOSECONDS * 1e-3
    assert CostModel(BYTES).excess(1 << 60) == 0
