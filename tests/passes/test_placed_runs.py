"""Programs that `place` made: their numbers, what they copy, and what the device holds."""

from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.placement.of_program import host_refusal
from irpar.ir import Module
from irpar.ops.memory_copies import copies_of
from irpar.pass_manager import Pass, PassManager, PassResult
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE, composed
from irpar.passes.place import Place
from tests.training.programs import batch, classifier

STEPS = 3


@dataclass(frozen=True)
class PlaceAtRandom(Pass):
    """Pin every other node that may be on the host to it."""

    name: ClassVar[str] = "place-at-random"
    seed: int = 0

    def run(self, module: Module) -> PassResult:
        random = Random(self.seed)
        names = [
            node.results[0].source_name
            for graph in module.graphs
            for node in graph
            if node.results and host_refusal(node) is None
        ]
        chosen = [name for name in dict.fromkeys(names) if random.random() < 0.5]
        # What begins a sum is with its loop.
        return Place(tuple(chosen), (), "device", unmatched="skipped").run(module)


def _scattered(family: str, mesh: str, seed: int) -> irpar.Partition:
    passes = [*PassManager.parse(DEFAULT_PIPELINE).passes]
    manager = PassManager([*passes[:-2], PlaceAtRandom(seed), *passes[-2:]])
    return irpar.partition(models.build(family), mesh, pipeline=manager)


def _check(partition: irpar.Partition) -> None:
    partition.verify(engine="numpy").check()
    log = partition.executor("numpy").log.copies
    assert log.differences(partition.plan.copies) == []
    assert log.copied_bytes == partition.plan.totals["copied_bytes"]


@pytest.mark.parametrize(("family", "mesh"), [("mlp", "tp=2"), ("dlrm", "tp=1")])
def test_nodes_on_the_host_compute_what_the_original_does(family: str, mesh: str) -> None:
    partition = _scattered(family, mesh, 0)
    assert {(entry["from"], entry["to"]) for entry in partition.plan.copies} == {("device", "host"), ("host", "device")}
    _check(partition)


@pytest.mark.slow
@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_all_families_with_nodes_on_the_host(family: str, seed: int) -> None:
    _check(_scattered(family, "tp=2", seed))


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_step_with_its_optimizer_on_the_host_learns_the_same(precision: str) -> None:
    states = []
    for passes in ([], ["place{host=[*.m], rest=device}"]):
        step = classifier(optimizer="adamw", precision=precision)
        made = irpar.partition(step, "d=1", pipeline=composed(programs=passes))
        with made.session(engine="numpy") as session:
            losses = [
                session.run({**batch(number), "learning_rate": np.float32(0.01)})["loss"] for number in range(STEPS)
            ]
            states.append({entry["name"]: session.read(entry["name"]) for entry in made.plan.state})
        states[-1]["loss"] = np.array(losses)
        if passes:
            assert {entry["memory"] for entry in made.plan.state if entry["kind"] == "moment"} == {"host"}
            assert made.plan.totals["copied_bytes"] > 0
            assert made.executor("numpy").log.copies.differences(made.plan.copies) == []
    plain, placed = states
    assert plain.keys() == placed.keys()
    for name, array in plain.items():
        np.testing.assert_allclose(
            placed[name].astype(np.float64), array.astype(np.float64), rtol=1e-2 if "bf16" in precision else 1e-5
        )


@pytest.mark.slow
def test_micro_batches_run_on_the_device_beside_an_optimizer_on_the_host() -> None:
    """What the loop reads of the optimizer's parameters is copied once, before it."""
    ids = np.random.default_rng(0).integers(0, 64, (2, 2, 8))
    losses = []
    for passes in ([], ["place{host=[*.m], rest=device}"]):
        step = irpar.train_step(
            irpar.load(models.build("gpt", hidden=32, layers=1, heads=2, vocab=64, batch=2, seq=8)),
            optimizer="adamw",
            micro_batches=2,
        )
        made = irpar.partition(step, "d=1", pipeline=composed(programs=passes))
        (loop,) = (node for node in made.module.graph if node.op_type in ("Scan", "Loop"))
        assert loop.place is None
        names = [value.name for value in made.module.graph.inputs if value not in made.module.graph.states]
        feeds = {name: np.float32(0.01) if name == "learning_rate" else ids for name in names}
        with made.session(engine="numpy") as session:
            losses.append([session.run(feeds)["loss"] for _ in range(STEPS)])
        if passes:
            parameters = {entry["name"] for entry in made.plan.state if entry["kind"] == "parameter"}
            brought = [entry for entry in made.plan.copies if entry["value"] in parameters]
            assert len(brought) == len({entry["value"] for entry in brought}) > 0
            assert {(entry["to"], entry["times"]) for entry in brought} == {("device", 1)}
            assert all(node.graph is made.module.graph for node in copies_of(made.module.graph))
            assert made.executor("numpy").log.copies.differences(made.plan.copies) == []
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_pin_that_names_what_communicates_tells_of_the_loop_beside_it() -> None:
    step = irpar.train_step(models.build("mlp"), loss="mse", optimizer="adamw", micro_batches=2)
    zero = "zero{stage=1, threshold-kb=0}"
    nodes = irpar.partition(step, "dp=2", pipeline=composed(zero)).module.graph
    name = next(node.result.source_name for node in nodes if node.op_type == "AllGather")
    with pytest.raises(irpar.IrparError) as told:
        irpar.partition(step, "dp=2", pipeline=composed(zero, [str(Place((name,), (), "device"))]))
    assert "communicates, and its operands are on the device" in str(told.value)
    assert "the loop over micro-batches, runs where the node does" in str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"micro_batches": 2}], ids=["plain", "clip", "micro"])
@pytest.mark.parametrize(
    ("mesh", "passes"),
    [
        ("dp=2", ["zero{stage=2, axes=[dp], threshold-kb=0}"]),
        ("dp=2", ["zero{stage=3, axes=[dp], threshold-kb=0}"]),
        ("dp=2,tp=2", ["recompute{match=[h.*/mlp*]}"]),
        ("tp=2", []),
    ],
)
def test_steps_that_are_sharded_and_recomputed_have_nodes_on_the_host(
    mesh: str, passes: list[str], options: dict[str, Any]
) -> None:
    step = irpar.train_step(
        irpar.load(models.build("gpt", hidden=32, layers=1, heads=2, vocab=64, batch=4, seq=8)), **options
    )
    if "dp" in mesh and "micro_batches" not in options:
        step.shard("input_ids", ["dp", None])
    zero = [each for each in passes if each.startswith("zero")]
    again = [each for each in passes if each not in zero]
    known = [*PassManager.parse(composed(*zero or [None], again)).passes]
    manager = PassManager([*known[:-2], PlaceAtRandom(1), *known[-2:]])
    partition = irpar.partition(step, mesh, pipeline=manager)
    assert partition.plan.copies
    _check(partition)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["run", "train"])
def test_a_gpt_with_a_third_of_the_memory(mode: str) -> None:
    def model() -> Module:
        module = irpar.load(models.build("gpt", hidden=256, layers=2, heads=4, vocab=512, batch=1, seq=64))
        return module if mode == "run" else irpar.train_step(module, optimizer="adamw")

    plain = irpar.partition(model(), "d=1")
    needed = plain.plan.ranks[0]["peak_bytes"]
    limit = 0.3 * needed
    made = irpar.partition(model(), "d=1", pipeline=composed(programs=[f"place{{limit-gb={limit / 1e9:.9f}}}"]))
    assert made.plan.ranks[0]["peak_bytes"] <= limit
    assert made.plan.ranks[0]["host_bytes"] > 0
    _check(made)
