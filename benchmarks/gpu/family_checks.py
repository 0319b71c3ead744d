"""Families and exports, partitioned and run on one device with all ranks in this process, against ONNX Runtime."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import irpar

from .findings import Context, Findings, markdown_table, problem_text

MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp": 2, "tp": 2})


@dataclass(frozen=True)
class Subject:
    """A model over a mesh.

    Attributes:
        name: of the model.
        mesh: axes and sizes.
        make: partitions it in a folder; gives inputs too, or None where random ones do.
        tolerance: as `Partition.verify` takes it.
    """

    name: str
    mesh: dict[str, int]
    make: Callable[[Path], tuple[irpar.Partition, Mapping[str, Any] | None]]
    tolerance: float | None

    def __str__(self) -> str:
        return f"{self.name} over {','.join(f'{axis}={size}' for axis, size in self.mesh.items())}"


def families() -> Iterator[tuple[str, Callable[[dict[str, int], Path], irpar.Partition], float]]:
    """Every builder of irpar.models, as it is and in the settings that tests verify: name, partitioner, tolerance."""
    from tests.test_families import CASES, PLANNED, partitioned

    for case in dict.fromkeys((*PLANNED, *CASES)):
        yield str(case), lambda mesh, folder, case=case: partitioned(case, mesh, folder), case.tolerance


def subjects() -> Iterator[Subject]:
    """Families and exports over all meshes."""
    for name, partition, tolerance in families():
        for mesh in MESHES:
            yield Subject(name, mesh, lambda folder, make=partition, mesh=mesh: (make(mesh, folder), None), tolerance)
    yield from _exports()


def _exports() -> Iterator[Subject]:
    from tests.test_exports import EXPORTS, TOLERANCE, model_of, numbers_of, partitioned

    for export in EXPORTS:
        for mesh in MESHES:
            yield Subject(
                export,
                mesh,
                lambda folder, export=export, mesh=mesh: (partitioned(export, mesh), numbers_of(export)[0]),
                TOLERANCE.get(model_of(export), 1e-4),
            )


def run(context: Context) -> Findings:
    """Verify this process's share of the models."""
    found = Findings(figures={"models": {}, "fallbacks": {}})
    left = []
    for number, subject in enumerate(subjects()):
        if not context.mine(number):
            continue
        if context.is_late:
            left.append(str(subject))
            continue
        folder = context.scratch / str(number)
        folder.mkdir()
        try:
            problem = _verify(subject, folder, context.engine, found)
        except Exception as error:
            problem = problem_text(error)
        found.check(f"{subject}: {problem}" if problem else None)
    if left:
        found.failures.append(f"out of time: {len(left)} models were not run: {', '.join(left[:5])} ...")
    return found


def _verify(subject: Subject, folder: Path, engine: Any, found: Findings) -> str | None:
    """Run a partition and compare outputs, and its log with its plan; says what is wrong."""
    partition, inputs = subject.make(folder)
    with partition:
        verified = partition.verify(inputs, engine=engine, tolerance=subject.tolerance)
        executor = partition.executor(engine)
        notes = tuple(getattr(executor, "notes", ()))
        others = executor.log.differences(partition.plan.collectives)
        worst = max((difference.relative for difference in verified.differences), default=0.0)
        found.figures["models"][str(subject)] = {
            "relative": worst,
            "collectives": len(executor.log),
            "on_host": len(notes),
        }
    for note in notes:
        lines = found.figures["fallbacks"].setdefault(note.rsplit(" (node ", 1)[0], [])
        lines.append(str(subject))
    if not verified.is_equal:
        return f"differs from ONNX Runtime: {'; '.join(str(verified).splitlines()[1:4])}"
    return f"the log is not the plan: {'; '.join(others[:3])}" if others else None


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures for the report."""
    models = figures.get("models", {})
    rows = [(name, row["relative"], row["collectives"], row["on_host"] or "") for name, row in sorted(models.items())]
    made = [
        f"{len(models)} partitions verified against ONNX Runtime on the original, their logs equal to their plans. "
        "The difference is the largest |a - b| / (1 + |b|) of an output.",
        "",
        *markdown_table(("model", "difference", "collectives executed", "operators on the host"), rows),
    ]
    fallbacks = figures.get("fallbacks", {})
    if fallbacks:
        rows = [(note, len(where), where[0]) for note, where in sorted(fallbacks.items())]
        made += ["", "On the host:", "", *markdown_table(("what", "models", "the first"), rows)]
    return made
