"""Placement of a step of training of many equal layers."""

from pathlib import Path

import pytest

import irpar
from irpar import models
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.memory.liveness import peak, value_bytes
from irpar.analysis.placement import simulate, solve
from irpar.analysis.placement.of_program import PlaceableProgram, of_program
from irpar.analysis.recompute.costs import Costs
from irpar.ir import Module
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import COMPLETE, LOCAL, MOVES, NORMALISE

NETWORK = "h100-nvlink-ib"
LAYERS = 24
SHARE = 0.4
"""Of the state, that the device may hold."""


def _step(
    folder: Path, layers: int, width: int, batch: int, seq: int, precision: str, optimizer: str = "adamw"
) -> Module:
    path = folder / "gpt.onnx"
    models.save(
        path, "gpt", weights="none", layers=layers, hidden=width, heads=width // 64, vocab=8192, batch=batch, seq=seq
    )
    step = irpar.train_step(irpar.load(path), optimizer=optimizer, precision=precision)
    step.set_mesh("d=1")
    PassManager.parse(f"{NORMALISE},{COMPLETE},{MOVES},{LOCAL}").run(step)
    return step


def _program(step: Module) -> PlaceableProgram:
    network = network_of(NETWORK)
    return of_program(step.graph, Costs(step, network).of_node, network)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "batch", "seq", "precision", "optimizer"),
    [
        (1024, 1, 128, "bf16", "adamw"),
        (1024, 1, 128, "f32", "adamw"),
        (1024, 4, 256, "f32", "adamw"),
        (256, 2, 64, "f32", "adamw"),
        (1024, 1, 128, "bf16", "lamb"),
        (512, 2, 256, "bf16", "adamw"),
        # Room for an eighth of what it holds: few of the largest values of each layer, and part of the loss.
        (768, 8, 256, "f32", "adamw"),
    ],
)
def test_a_gpt_of_24_layers_with_less_than_half_of_its_state(
    tmp_path: Path, width: int, batch: int, seq: int, precision: str, optimizer: str
) -> None:
    step = _step(tmp_path, LAYERS, width, batch, seq, precision, optimizer)
    graph = _program(step).graph
    all_near = tuple(unit.device is not None for unit in graph.units)
    assert simulate(graph, all_near).peak == peak(step.graph).total_bytes
    limit = int(SHARE * sum(map(value_bytes, step.graph.states)))
    found = solve(graph, limit, seconds=30)  # 5 s of a core of its own are enough.
    assert found.outcome == simulate(graph, found.on_device)
    assert found.outcome.peak <= limit
    assert found.gap < 0.01
    # No worse than to have the whole optimizer on the host.
    assert found.outcome.cost < solve(graph, limit // 2, "linear", seconds=10).outcome.cost


@pytest.mark.slow
def test_equal_layers_of_a_small_step(tmp_path: Path) -> None:
    step = _step(tmp_path, 1, 64, 1, 128, "bf16")
    graph = _program(step).graph
    all_near = tuple(unit.device is not None for unit in graph.units)
    assert simulate(graph, all_near).peak == peak(step.graph).total_bytes
    limit = peak(step.graph).total_bytes // 2
    found = solve(graph, limit, "linear", seconds=1)
    assert found.outcome.peak <= limit
    assert found.bound <= found.outcome.cost
