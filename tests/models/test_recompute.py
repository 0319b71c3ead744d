"""Recompute in training steps of every family: the same bits, and no rank holds more than it may."""

import re

import numpy as np
import pytest

import irpar
from irpar.analysis.memory.liveness import constant_bytes, peak_bytes, value_bytes
from irpar.analysis.recompute import RecomputeError
from irpar.ir import Module, clone_module
from irpar.models import FAMILIES, build
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE, with_recompute, with_zero
from irpar.verification.inputs import random_inputs
from tests.budget import every
from tests.models.test_partitioned_gradients import annotated
from tests.models.test_training import CLASSES, batches, trained
from tests.training.test_state_in_place import Watch, predicted

ONE = {"d": 1}
SHARDED = {"dp": 2, "tp": 2}
ZERO = "zero{stage=3, threshold-kb=0}"
SPECS = ("match=[*]", "budget=0.7", "budget=0.5")
SECONDS = 1
"""Of search; what is found then is held to its budget, how good it is shows elsewhere."""
MORE_SECONDS = 20
"""Of search with the least budget that was found: where time is short, the same is not found each time."""
MICRO_BATCHES = 2


def step_of(family: str, mesh: dict[str, int], micro_batches: int = 1) -> Module:
    """A step of a family, annotated for a mesh."""
    module = irpar.load(build(family, preset="tiny"))
    module.set_mesh(irpar.Mesh(mesh))
    loss = "cross_entropy" if family in CLASSES else "mse"
    annotated(module, family, mesh)
    return irpar.train_step(module, loss=loss, optimizer="momentum", micro_batches=micro_batches)


def recomputed(module: Module, spec: str, zero: str | None) -> irpar.Partition:
    """A partition that recomputes; with the least budget that is possible where the share is too small."""
    try:
        return irpar.partition(
            clone_module(module), pipeline=with_recompute(f"recompute{{{spec}, seconds={SECONDS}}}", zero)
        )
    except RecomputeError as error:
        found = re.search(r"at least ([\d,]+) bytes", str(error))
        assert found is not None
        least = int(found[1].replace(",", ""))
        return irpar.partition(
            clone_module(module),
            pipeline=with_recompute(f"recompute{{budget-gb={least / 1e9!r}, seconds={MORE_SECONDS}}}", zero),
        )


MESHES = {"one rank": (ONE, None), "dp=2 x tp=2": (SHARDED, None), "ZeRO-3": (SHARDED, ZERO)}
QUICK = ("mlp", 1)
EACH = [
    pytest.param(name, count, marks=() if (name, count) == QUICK else pytest.mark.slow)
    for count in (1, MICRO_BATCHES)
    for name in FAMILIES
]


@pytest.mark.parametrize(("family", "count"), EACH)
@pytest.mark.parametrize("mesh", every(2, MESHES))
def test_the_same_bits_in_less_memory(mesh: str, family: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, zero = MESHES[mesh]
    module = step_of(family, sizes, count)
    plain = irpar.partition(clone_module(module), pipeline=DEFAULT_PIPELINE if zero is None else with_zero(zero))
    assert plain.module is not None
    data = batches(module)[:2]
    expected = trained(plain, data, engine="numpy")
    for spec in SPECS:
        made = recomputed(module, spec, zero)
        assert made.module is not None
        limit = made.module.memory_limit
        assert limit is None or peak_bytes(made.module) <= limit
        with monkeypatch.context() as patch:
            watch = Watch(patch)
            graph = watch.look_at(made.executor("numpy"))
            losses, state = trained(made, data, engine="numpy")
        assert losses == expected[0]
        for name, array in expected[1].items():
            np.testing.assert_array_equal(array.view(np.uint8), state[name].view(np.uint8), err_msg=f"{spec} {name}")
        # Inputs that nothing reads stay with the rank.
        unread = sum(value_bytes(value) for value in graph.inputs if not value.has_uses)
        expected_bytes = dict(predicted(graph))
        assert watch.held
        assert all(held <= expected_bytes[node] + unread for node, held in watch.held.items())
        if limit is not None:
            assert max(watch.held.values()) + constant_bytes(graph) <= limit + unread


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == QUICK[0] else pytest.mark.slow) for name in FAMILIES]
)
@pytest.mark.parametrize("budget", [pytest.param("budget=0.7", marks=pytest.mark.slow), "budget=0.5"])
@pytest.mark.parametrize("mesh", [pytest.param("one rank", marks=pytest.mark.slow), "dp=2 x tp=2"])
def test_inference_gives_the_same_bits_in_less_memory(
    mesh: str, budget: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, _ = MESHES[mesh]
    module = irpar.load(build(family, preset="tiny"))
    module.set_mesh(irpar.Mesh(sizes))
    annotated(module, family, sizes)
    plain, made = irpar.partition(clone_module(module)), recomputed(module, budget, None)
    assert plain.module is not None
    assert made.module is not None
    limit = made.module.memory_limit
    assert limit is not None
    assert peak_bytes(made.module) <= min(limit, peak_bytes(plain.module))
    inputs = random_inputs(plain.executor("numpy").inputs, module.graph)
    expected = plain.run(inputs, engine="numpy")
    watch = Watch(monkeypatch)
    graph = watch.look_at(made.executor("numpy"))
    found = made.run(inputs, engine="numpy")
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name
    unread = sum(value_bytes(value) for value in graph.inputs if not value.has_uses)
    foreseen = dict(predicted(graph))
    assert watch.held
    assert all(held <= foreseen[node] + unread for node, held in watch.held.items())
    assert max(watch.held.values()) + constant_bytes(graph) <= limit + unread


@pytest.mark.parametrize("count", [1, pytest.param(MICRO_BATCHES, marks=pytest.mark.slow)])
def test_onnx_runtime_computes_again_what_is_to_be_computed_again(count: int) -> None:
    module = step_of("gpt", ONE, count)
    plain = irpar.partition(clone_module(module))
    data = batches(module)[:2]
    expected = trained(plain, data, engine="ort")
    for spec in ("match=[*]", "budget=0.8, method=chain"):
        losses, state = trained(recomputed(module, spec, None), data, engine="ort")
        assert losses == expected[0]
        assert all(array.tobytes() == state[name].tobytes() for name, array in expected[1].items())
