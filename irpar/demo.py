"""The demo: a GPT-like model, cut over a few ranks as Megatron does, written, read again, run and verified."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from irpar.analysis.plan import Plan
from irpar.models import annotations, save
from irpar.sharding import IrparError, Mesh

from .api import Partition, load, partition
from .shardings_file import read_shardings
from .verification import Verification

SETTINGS: dict[str, object] = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 2048, "seq": 64, "batch": 4}
"""A GPT of about 4 million parameters: large enough to have something to cut, small enough for any machine."""
AXES = ("dp", "tp")
"""Mesh axes that the demo's annotations know: dp cuts the batch, tp heads, feed-forward and vocabulary."""


@dataclass(frozen=True)
class Demo:
    """What the demo made.

    Attributes:
        model, shardings, out: where the model, its annotations and the partition lie.
        parameters: how many the model has.
        annotations: tensor name or glob to its sharding, as in the --shardings file.
        plan: of the partition.
        verification: against ONNX Runtime.
        is_log_as_planned: True where the executed collectives are those of the plan.
    """

    model: Path
    shardings: Path
    out: Path
    parameters: int
    annotations: dict[str, list[list[str] | None]]
    plan: Plan
    verification: Verification
    is_log_as_planned: bool


def run_demo(folder: Path, mesh: Mesh, tell: Callable[[str], None]) -> Demo:
    """Make the model, partition it, and verify what was written.

    Args:
        folder: where everything goes; what an earlier demo left there is replaced.
        mesh: with axes dp, tp or both.
        tell: called with a line before each step.

    Raises:
        IrparError: the mesh has other axes, or the folder holds something else.
    """
    unknown = [axis for axis in mesh.axes if axis not in AXES]
    if unknown:
        raise IrparError(
            f"the demo knows no mesh axis {unknown[0]}", do="use the axes dp (batch) and tp (weights): --mesh dp=2,tp=2"
        )
    folder.mkdir(parents=True, exist_ok=True)
    model, shardings, out = folder / "gpt.onnx", folder / "gpt.shardings.json", folder / "partition"
    options = " ".join(f"--{name} {value}" for name, value in SETTINGS.items())
    tell(f"python -m irpar.models gpt {options} -o {model}")
    size = save(model, "gpt", **SETTINGS)  # type: ignore[arg-type]
    dp, tp = (axis if axis in mesh.axes else None for axis in AXES)
    tensors = annotations("gpt", dp, tp, **SETTINGS)  # type: ignore[arg-type]
    shardings.write_text(json.dumps({"mesh": dict(mesh.axes), "tensors": tensors}, indent=2) + "\n", encoding="utf-8")
    tell(f"irpar partition {model} --shardings {shardings} -o {out}")
    module = load(model)
    module.set_mesh(mesh)
    read_shardings(shardings).annotate(module)
    partition(module).save(out, force=True)
    tell(f"irpar verify {out}")
    written = Partition.open(out)
    verification = written.verify()
    is_as_planned = not written.executor().log.differences(written.plan.collectives)
    return Demo(model, shardings, out, size.parameters, tensors, written.plan, verification, is_as_planned)
