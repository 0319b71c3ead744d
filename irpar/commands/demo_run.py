"""The demo: a GPT-like model, cut over a few ranks as Megatron does, written, read again, run and verified."""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from irpar.annotations.shardings_file import read_shardings
from irpar.api import Partition, load, partition
from irpar.files.atomic import new_file
from irpar.models import ModelSize, annotations, save
from irpar.output.plan_record import Plan
from irpar.output.target import check_target
from irpar.sharding import IrparError, Mesh
from irpar.verification import Verification

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
    model, shardings, out = folder / "gpt.onnx", folder / "gpt.shardings.json", folder / "partition"
    _refuse_other_files(model, shardings)
    check_target(out, force=True)
    with _nothing_left(folder, model, shardings):
        size, tensors = _make(mesh, model, shardings, out, tell)
    tell(f"irpar verify {shlex.quote(str(out))}")
    written = Partition.open(out)
    verification = written.verify()
    is_as_planned = not written.executor().log.differences(written.plan.collectives)
    return Demo(model, shardings, out, size.parameters, tensors, written.plan, verification, is_as_planned)


def _make(
    mesh: Mesh, model: Path, shardings: Path, out: Path, tell: Callable[[str], None]
) -> tuple[ModelSize, dict[str, list[list[str] | None]]]:
    """Write the model, its annotations and the partition."""
    options = " ".join(f"--{name} {value}" for name, value in SETTINGS.items())
    tell(f"python -m irpar.models gpt {options} -o {shlex.quote(str(model))}")
    size = save(model, "gpt", **SETTINGS)  # type: ignore[arg-type]
    dp, tp = (axis if axis in mesh.axes else None for axis in AXES)
    tensors = annotations("gpt", dp, tp, **SETTINGS)  # type: ignore[arg-type]
    with new_file(shardings, "the shardings") as fresh:
        facts = {"mesh": dict(mesh.axes), "tensors": tensors}
        fresh.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    tell(shlex.join(["irpar", "partition", str(model), "--shardings", str(shardings), "-o", str(out)]))
    module = load(model)
    module.set_mesh(mesh)
    read_shardings(shardings).annotate(module)
    partition(module).save(out, force=True)
    return size, tensors


def _refuse_other_files(model: Path, shardings: Path) -> None:
    """Refuse to write over a model or annotations that are of no demo.

    Raises:
        IrparError: naming the file.
    """
    for path, mark in ((model, b"irpar.models.family"), (shardings, b'"tensors"')):
        if path.is_file() and mark not in path.read_bytes():
            raise IrparError(
                f"{path} is of no earlier demo, so it is not replaced", do="give another folder, or remove the file"
            )


@contextmanager
def _nothing_left(folder: Path, *files: Path) -> Iterator[None]:
    """Remove the folder and files again that were made before something failed; what was there stays."""
    made = [path for path in (*files, folder) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in made:
            with suppress(OSError):
                path.rmdir() if path == folder else path.unlink(missing_ok=True)
        raise
