"""irpar partition: a model cut over a mesh, written to a folder."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpar.sharding import IrparError
from irpar.tables.display import messages, output, print_json

from .options import (
    COLLECTIVES,
    Bind,
    DumpIr,
    Json,
    MeshText,
    ModelFile,
    Network,
    Pipeline,
    PrintIrAfter,
    PrintIrAfterAll,
    PrintIrAfterChange,
    PrintIrBefore,
    Set,
    Shardings,
    Statistics,
    Timing,
    VerifyEach,
    choice,
)
from .progress_report import ProgressReport

if TYPE_CHECKING:
    from irpar.api import Partition
    from irpar.ir import Module
    from irpar.output.plan import Plan
    from irpar.pass_manager import PipelineResult

Output = Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The folder to write.", show_default=False)]
Weights = Annotated[str, typer.Option("--weights", metavar="WHICH", help="copy, or none: plan and programs only.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it holds a partition and nothing else.")]
Collectives = Annotated[
    str, typer.Option("--collectives", metavar="DOMAIN", help="Whose collectives are written: irpar.")
]
MostMoved = Annotated[
    float | None,
    typer.Option(
        "--max-redistribution-mb",
        metavar="MB",
        help="Refuse a partition in which a device sends more for any one redistribution; reductions are none.",
        show_default=False,
    ),
]
Annotate = Annotated[
    Path | None,
    typer.Option(
        "--annotate",
        metavar="FILE",
        help="Also write the whole model with ONNX's multi-device annotations, as an .onnx file.",
        show_default=False,
    ),
]
Configuration = Annotated[
    str,
    typer.Option(
        "--configuration",
        metavar="NAME",
        help="The device configuration whose annotations in MODEL are read, where it has several; none: do not read "
        "any.",
        show_default=False,
    ),
]


def partition_command(
    model: ModelFile,
    out: Output,
    mesh: MeshText = None,
    shardings: Shardings = None,
    bind: Bind = None,
    set_: Set = None,
    pipeline: Pipeline = None,
    network: Network = None,
    weights: Weights = "copy",
    force: Force = False,
    collectives: Collectives = "irpar",
    annotate: Annotate = None,
    configuration: Configuration = "",
    max_redistribution_mb: MostMoved = None,
    dump_ir: DumpIr = None,
    print_ir_before: PrintIrBefore = None,
    print_ir_after: PrintIrAfter = None,
    print_ir_after_all: PrintIrAfterAll = False,
    print_ir_after_change: PrintIrAfterChange = False,
    verify_each: VerifyEach = False,
    timing: Timing = False,
    statistics: Statistics = False,
    as_json: Json = False,
) -> None:
    """Shard a model over a mesh of devices and write a program for each, with explicit communication."""
    asked = Asked.of(locals())
    sources = checked_sources(asked, model, shardings)
    made = write_partition(asked, sources, lambda: _annotated_model(model, bind, set_, configuration, mesh, shardings))
    report(asked, made)


@dataclass(frozen=True)
class Asked:
    """What `irpar partition`, and every other command that writes a partition, is asked for besides the model."""

    out: Path
    pipeline: str | None
    network: str | None
    weights: str
    force: bool
    collectives: str
    annotate: Path | None
    max_redistribution_mb: float | None
    dump_ir: Path | None
    print_ir_before: tuple[str, ...]
    print_ir_after: tuple[str, ...]
    print_ir_after_all: bool
    print_ir_after_change: bool
    verify_each: bool
    timing: bool
    statistics: bool
    as_json: bool

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Asked":
        """These options of a command, of all that it has, by the names of its arguments."""
        options = {field.name: given[field.name] for field in fields(cls)}
        lists = {name: tuple(options[name] or ()) for name in ("print_ir_before", "print_ir_after")}
        return cls(**{**options, **lists})


@dataclass(frozen=True)
class Made:
    """A partition that was written.

    Attributes:
        partition: it.
        annotated: how many annotations the model had.
        told: what the annotated model says.
    """

    partition: "Partition"
    annotated: int
    told: Sequence[str]


def write_partition(
    asked: Asked,
    sources: list[Path],
    read: "Callable[[], tuple[Module, int]]",
    evaluation: "Callable[[Plan], Module] | None" = None,
) -> Made:
    """Shard a model and write its programs.

    Args:
        asked: the options.
        sources: the files that are read, from `checked_sources`.
        read: gives the module, on its mesh, and how many annotations it has.
        evaluation: gives the evaluation program of a training step, for its plan.

    Raises:
        IrparError: the model, an annotation or the target does not fit.
    """
    from irpar.annotations.onnx_annotations import DecidedShardings
    from irpar.api import partition
    from irpar.ir.collector import collector_off
    from irpar.pass_manager import Instrumentation, PassManager
    from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE

    from .annotated import check_annotate, write_annotated

    kept: Any = asked.weights
    with collector_off(), ProgressReport(is_shown=not asked.as_json) as progress:
        decided = DecidedShardings()
        watch = Instrumentation(
            print_ir_before=asked.print_ir_before,
            print_ir_after=asked.print_ir_after,
            print_ir_after_all=asked.print_ir_after_all,
            print_ir_after_change=asked.print_ir_after_change,
            dump_ir=asked.dump_ir,
            verify_each=asked.verify_each,
            progress=progress.passes,
            observe=None if asked.annotate is None else decided.observe,
        )
        manager = PassManager.parse(DEFAULT_PIPELINE if asked.pipeline is None else asked.pipeline, watch)
        if asked.annotate is not None:
            check_annotate(asked.annotate, asked.out, sources, manager.passes, asked.force)
        module, annotated = read()
        made = partition(
            module, pipeline=manager, network=asked.network, max_redistribution_mb=asked.max_redistribution_mb
        )
        beside = None if evaluation is None else partition(evaluation(made.plan), network=asked.network)
        made.save(asked.out, weights=kept, force=asked.force, progress=progress.bytes, evaluation=beside)
        told = write_annotated(asked.annotate, module, made, decided) if asked.annotate is not None else []
    return Made(made, annotated, told)


def report(asked: Asked, made: Made, notes: Sequence[str] = (), by: str = "--shardings FILE") -> None:
    """Say what was written, after some lines of what it was made of; `by`: how tensors can be annotated."""
    plan, passes = made.partition.plan, made.partition.passes
    assert passes is not None
    if asked.as_json:
        _print_json(plan, asked.out, passes, made.annotated)
        return
    print_tables(passes, asked.timing, asked.statistics)
    _print(plan, asked.out, passes, made, notes, by)


def checked_sources(asked: Asked, model: Path, shardings: Path | None) -> list[Path]:
    """The files that are read. What is wrong with options or the target is reported before the model is read.

    Raises:
        IrparError: see there.
    """
    from irpar.output.target import check_target

    choice("--collectives", asked.collectives, COLLECTIVES)
    choice("--weights", asked.weights, ("copy", "none"))
    if asked.network is not None:
        from irpar.analysis.cost.network_file import find_network

        find_network(asked.network)
    sources = [path for path in (model, shardings, asked.network and Path(asked.network)) if path]
    check_target(asked.out, asked.force, sources)
    return sources


def _annotated_model(
    model: Path,
    bind: Sequence[str] | None,
    set_: Sequence[str] | None,
    configuration: str,
    mesh: str | None,
    shardings: Path | None,
) -> "tuple[Module, int]":
    """The model, and how many annotations it has from its own file and from --shardings."""
    from .loading import annotate_by, load_model, shardings_of

    file, agreed = shardings_of(mesh, shardings)
    module = load_model(model, bind, set_=set_, configuration=configuration, mesh=agreed)
    refuse_parts(module, model)
    return module, len(module.annotated) + annotate_by(module, file, agreed)


def refuse_parts(module: "Module", path: Path) -> None:
    """Refuse a model that communicates already.

    Raises:
        IrparError: saying by what.
    """
    from irpar.ops.effects import is_compute

    node = next((node for graph in module.all_graphs() for node in graph if not is_compute(node)), None)
    if module.is_local or node is not None:
        raise IrparError(
            "the model is a part of a partition already, not a whole model",
            where=str(path) if node is None else f"{path}, node {node.label}: {node.operator}",
            do="give the model that was partitioned; plan.json beside the part's folder names it as its source",
        )


def _print_json(plan: "Plan", out: Path, passes: "PipelineResult", annotated: int) -> None:
    entries = asdict(plan)
    del entries["values"]
    print_json({"out": str(out), "annotations": annotated, "passes": passes_json(passes), **entries})


def _print(plan: "Plan", out: Path, passes: "PipelineResult", made: Made, notes: Sequence[str], by: str) -> None:
    from irpar.output.tables import print_summary

    console = output()
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    print_summary(console, plan, f"irpar explain {shlex.quote(str(out))}")
    console.print()
    for note in passes.notes:
        console.print(note)
    if not made.annotated and plan.mesh_of_ranks.size > 1:
        console.print(f"no tensor was annotated ({by}), so nothing asked for a sharding")
    folder = shlex.quote(str(out))
    run = f", irpar run {folder} --data DATA --steps N" if plan.training is not None else ""
    console.print(f"written to {folder}; next: irpar verify {folder}, irpar explain {folder}{run}", soft_wrap=True)
    for line in made.told:
        console.print(line, soft_wrap=True)


def passes_json(result: "PipelineResult") -> list[dict[str, Any]]:
    """What the passes did, as plain data."""
    return [asdict(record) for record in result.records]


def print_tables(result: "PipelineResult", timing: bool, statistics: bool) -> None:
    """The tables of --timing and --statistics, on standard error."""
    for is_wanted, table in ((timing, result.timings), (statistics, result.statistics)):
        if is_wanted:
            messages().print(table())
            messages().print()
