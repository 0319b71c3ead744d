"""What a device holds of a training step that is on disk for the rest: no more of a deep model than of a shallow one."""

from pathlib import Path
from typing import Any

import pytest

import irpar
from irpar import models
from irpar.analysis.memory.liveness import peak
from irpar.pass_manager.default_pipeline import composed
from irpar.passes.memory_order import MemoryOrder
from irpar.passes.recompute import Recompute
from irpar.passes.store import Store
from irpar.passes.zero import Zero

RANKS, HIDDEN = 2, 64
SEQUENCE = 8
"""So few tokens that memory-order puts what makes a gradient right before the update: operands are smaller than it."""
LAYER = 12 * HIDDEN**2
"""Parameters of the matrices of a layer."""
NARROW = 2
"""Bytes of a bfloat16."""


def on_device(folder: Path, layers: int, **options: Any) -> int:
    """The bytes that the device of a rank holds at most of a step of which all else is on disk."""
    model = folder / "gpt.onnx"
    models.save(model, "gpt", layers=layers, hidden=HIDDEN, heads=4, seq=SEQUENCE, vocab=64, batch=RANKS)
    step = irpar.train_step(irpar.load(model), **options)
    for name in ("input_ids", "target"):
        step.shard(name, ["dp", None])
    programs = [Recompute(match=("h.*/*",)), MemoryOrder(), Store("disk", "disk", "disk", prefetch=0)]
    made = irpar.partition(step, f"dp={RANKS}", pipeline=composed(Zero(3, threshold_kb=0), programs))
    return max(peak(part.graph, memory="device").total_bytes for part in made.parts)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16", "optimizer": "adam"},
        {"precision": "bf16", "optimizer": "lamb"},
        {"precision": "bf16", "optimizer": "adam", "clip_norm": 1.0},
        {"precision": "fp16", "optimizer": "adam", "loss_scale": "dynamic"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_device_holds_the_gradients_of_no_more_than_a_layer(options: dict[str, Any], tmp_path: Path) -> None:
    few, more = (on_device(tmp_path, layers, **options) for layers in (4, 6))
    assert (more - few) / 2 < LAYER * NARROW / RANKS / 4
