"""What a training step of every family allocates for arrays, against what the plan says."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.ir import Node
from irpar.models import FAMILIES, build
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE, with_recompute, with_zero
from irpar.runtime.engines.arrays import Arrays
from irpar.runtime.engines.operation import Environment
from tests.models.test_partitioned_gradients import annotated
from tests.models.test_training import CLASSES, Array, batches

MOST_BEYOND = 1 << 20
"""Bytes that a step may allocate beyond its plan."""
QUICK = "mlp"
LARGER: dict[str, dict[str, Any]] = {
    "mlp": {"width": 256, "hidden": 1024, "batch": 64},
    "gpt": {"hidden": 256, "vocab": 1000, "seq": 64},
    "llama": {"hidden": 256, "vocab": 1000, "seq": 64},
    "bert": {"hidden": 192, "seq": 64},
    "vit": {"hidden": 192, "image": 32, "batch": 8},
    "t5": {"hidden": 192, "seq": 64},
    "moe": {"hidden": 192, "seq": 64},
    "resnet": {"width": 48, "batch": 8},
    "dlrm": {"rows": 10000, "hidden": 256, "batch": 64},
    "unet": {"width": 48, "batch": 8},
    "recurrent": {"hidden": 192, "vocab": 4000, "batch": 16},
    "control": {"width": 256, "hidden": 1024, "batch": 64, "kind": "loop"},
}
"""Sizes at which gradients, activations and scratch take some MB each: what lies where it is not planned would show."""
EACH = [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in FAMILIES]


def objects_bytes() -> int:
    """What Python's objects take, the numbers of arrays apart."""
    outside = tracemalloc.DomainFilter(False, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([outside]).traces)


class Watch:
    """The most that is allocated while each node runs; and what objects take at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most: list[int] = []
        self.objects = 0
        self.look_at: int | None = None
        kernel = Arrays.kernel

        def watched_kernel(arrays: Arrays, node: Node, *arguments: Any) -> Any:
            run = kernel(arrays, node, *arguments)

            def watched(inputs: list[Any], environment: Environment) -> Sequence[Any]:
                tracemalloc.reset_peak()
                results = run(inputs, environment)
                self.most.append(tracemalloc.get_traced_memory()[1])
                if len(self.most) - 1 == self.look_at:
                    self.objects = objects_bytes()
                return results

            return watched

        monkeypatch.setattr(Arrays, "kernel", watched_kernel)


def allocated(partition: irpar.Partition, data: Sequence[dict[str, Array]], watch: Watch) -> int:
    """The most bytes of arrays in a step, its state and inputs among them."""
    tracemalloc.start()
    try:
        with partition.session(engine="numpy") as session:
            begin = tracemalloc.get_traced_memory()[0] - objects_bytes()
            for number, batch in enumerate(data):
                if number == len(data) - 1:
                    watch.look_at = int(np.argmax(watch.most))
                watch.most.clear()
                session.run({name: array.copy() for name, array in batch.items()})
    finally:
        tracemalloc.stop()
    assert watch.look_at is not None
    return watch.most[watch.look_at] - watch.objects - begin


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_larger", [False, True])
def test_a_step_allocates_what_was_planned(
    is_larger: bool, micro_batches: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = "cross_entropy" if family in CLASSES else "mse"
    model = build(family, preset="tiny", **(LARGER[family] if is_larger else {}))
    step = irpar.train_step(model, loss=loss, optimizer="adamw", micro_batches=micro_batches)
    partition = irpar.partition(step, "d=1")
    # The first step cannot write over the state that it begins with.
    found = allocated(partition, batches(step, 3), Watch(monkeypatch))
    (rank,), (part,) = partition.plan.ranks, partition.plan.parts
    assert found <= rank["arena_bytes"] + part["weight_bytes"] + MOST_BEYOND


ZERO = "zero{stage=3, threshold-kb=0}"
IN_EACH = {"micro_batches": 2, "reduce_gradients": "micro-batch", "gather_parameters": "micro-batch"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "as annotated": (DEFAULT_PIPELINE, {}),
    "zero": (with_zero(ZERO), {}),
    "zero, micro-batches, recompute": (with_recompute("recompute{match=[*]}", ZERO), {"micro_batches": 2}),
    "zero in each micro-batch, recompute": (with_recompute("recompute{match=[*]}", ZERO), IN_EACH),
}
"""Pipelines, and options of the step, by what they do."""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["mlp", "gpt", "resnet"])
def test_a_step_of_mixed_precision_allocates_what_was_planned(
    family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = "cross_entropy" if family in CLASSES else "mse"
    scale = {"loss_scale": "dynamic"} if precision == "fp16" else {}
    model = build(family, preset="tiny", **LARGER[family])
    step = irpar.train_step(model, loss=loss, optimizer="adamw", precision=precision, **scale)
    partition = irpar.partition(step, "d=1")
    found = allocated(partition, batches(step, 3), Watch(monkeypatch))
    (rank,), (part,) = partition.plan.ranks, partition.plan.parts
    assert found <= rank["arena_bytes"] + part["weight_bytes"] + MOST_BEYOND


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_of_a_process_allocate_what_was_planned(way: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, mesh = irpar.load(build(family, preset="tiny", **LARGER[family])), {"dp": 2, "tp": 2}
    module.set_mesh(irpar.Mesh(mesh))
    annotated(module, family, mesh)
    loss = "cross_entropy" if family in CLASSES else "mse"
    pipeline, options = WAYS[way]
    step = irpar.train_step(module, loss=loss, optimizer="adamw", **options)
    partition = irpar.partition(step, pipeline=pipeline)
    found = allocated(partition, batches(step, 3), Watch(monkeypatch))
    ranks, parts = partition.plan.ranks, partition.plan.parts
    planned = sum(rank["arena_bytes"] for rank in ranks) + sum(part["weight_bytes"] for part in parts)
    assert found <= planned + MOST_BEYOND * len(ranks)
