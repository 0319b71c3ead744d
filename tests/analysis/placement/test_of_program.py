"""The placement graph of a program against what liveness says of it."""

import pytest

from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.memory.liveness import peak
from irpar.analysis.placement import simulate
from irpar.analysis.placement.of_program import of_program
from irpar.analysis.recompute.costs import Costs
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import COMPLETE, LOCAL, MOVES, NORMALISE
from tests.training.programs import classifier


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_all_on_the_device_holds_what_liveness_says(precision: str) -> None:
    step = classifier(optimizer="adamw", precision=precision)
    step.set_mesh("d=1")
    PassManager.parse(f"{NORMALISE},{COMPLETE},{MOVES},{LOCAL}").run(step)
    network = network_of("h100-nvlink-ib")
    program = of_program(step.graph, Costs(step, network).of_node, network)
    assert simulate(program.graph, [True] * len(program.graph.units)).peak == peak(step.graph).total_bytes
    # What is updated together is one unit, its state included.
    names = program.names()
    kept = [name for name in ("w.master", "w.m", "w.v") if name in names]
    assert len(kept) == 2 + (precision == "bf16")
    assert all(names[name] == names["w"] for name in kept)
