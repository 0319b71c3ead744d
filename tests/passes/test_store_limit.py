"""A third of the memory: what the device holds in a run, and that the numbers are those of a run that has all of it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.memory.liveness import constant_bytes, peak
from irpar.ir import Module
from irpar.pass_manager import Pass
from irpar.pass_manager.default_pipeline import composed
from irpar.passes.place import Place
from irpar.passes.recompute import Recompute
from irpar.passes.store import Store
from irpar.runtime.executor import Executor
from tests.runtime.test_spaces import Watch

SHARE = 0.3
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 32, "heads": 2, "vocab": 128, "batch": 2, "seq": 16},
    "gpt-2": {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "batch": 1, "seq": 64},
}
WAYS: dict[str, tuple[Sequence[Pass], Pass | None]] = {
    "store": ((), None),
    "recompute and store": ((Recompute(match=("h.*/*",)),), None),
    "place": ((), Place()),
}


def limited(module: Module, *before: Any, by: Pass | None = None) -> tuple[irpar.Partition, irpar.Partition, float]:
    """A module for one device, that with a limit which store keeps, or another pass, and the limit in bytes."""
    plain = irpar.partition(module, "d=1")
    assert plain.module is not None
    limit = SHARE * peak(plain.module.graph).total_bytes
    keeps = replace(by or Store(auto=True, seconds=0), limit_gb=limit / 1e9)
    return plain, irpar.partition(module, "d=1", pipeline=composed(None, [*before, keeps])), limit


def measured(made: irpar.Partition, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """The most that the device holds in a run, as the rank that runs has it."""
    assert made.module is not None
    graph = made.module.graph
    with monkeypatch.context() as patched:
        watch = Watch(graph, patched)
        with Executor(made.module, made.plan.mesh_of_ranks, engine="numpy") as executor:
            executor.run(inputs)
            assert executor.log.copies.differences(made.plan.copies) == []
            assert executor.log.copies.copied_bytes == made.plan.totals["copied_bytes"] > 0
    return constant_bytes(graph) + max(held["device"] for held in watch.held.values())


def samples(config: dict[str, Any]) -> dict[str, Any]:
    random = np.random.default_rng(0)
    shape = config["batch"], config["seq"]
    return {name: random.integers(0, config["vocab"], shape) for name in ("input_ids", "target")}


@pytest.mark.parametrize(
    ("size", "by"),
    [
        ("tiny", None),
        pytest.param("gpt-2", None, marks=pytest.mark.slow),
        pytest.param("gpt-2", Place(), marks=pytest.mark.slow, id="gpt-2-place"),
    ],
)
def test_inference(size: str, by: Pass | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SIZES[size]
    _, made, limit = limited(irpar.load(models.build("gpt", **config)), by=by)
    inputs = {"input_ids": samples(config)["input_ids"]}
    assert made.verify(inputs, engine="numpy")
    assert 0 < measured(made, inputs, monkeypatch) <= limit


@pytest.mark.parametrize(
    ("size", "way"),
    [
        ("tiny", "store"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product(["gpt-2"], WAYS)),
    ],
)
def test_training(size: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SIZES[size]
    step = irpar.train_step(models.build("gpt", **config), optimizer="adam", learning_rate=1e-3)
    before, by = WAYS[way]
    plain, made, limit = limited(step, *before, by=by)
    inputs = {**samples(config), "learning_rate": np.float32(1e-3)}
    losses: list[list[float]] = []
    for partition in (plain, made):
        with partition.session(engine="numpy") as session:
            losses.append([float(session.run(inputs)["loss"]) for _ in range(2)])
        partition.executor(engine="numpy").close()
    # ONNX Runtime computes on the host, and rounds otherwise.
    assert losses[1] == (losses[0] if by is None else pytest.approx(losses[0], rel=1e-5))
    assert 0 < measured(made, inputs, monkeypatch) <= limit
