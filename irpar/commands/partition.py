"""irpar partition: a model cut over a mesh, written to a folder."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
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
    from irpar.annotations.onnx_annotations import DecidedShardings
    from irpar.api import partition
    from irpar.pass_manager import Instrumentation, PassManager
    from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE

    from .annotated import check_annotate, write_annotated

    choice("--collectives", collectives, COLLECTIVES)
    kept: Any = choice("--weights", weights, ("copy", "none"))
    sources = _checked_sources(model, shardings, network, out, force)
    with ProgressReport(is_shown=not as_json) as report:
        decided = DecidedShardings()
        watch = Instrumentation(
            print_ir_before=print_ir_before or (),
            print_ir_after=print_ir_after or (),
            print_ir_after_all=print_ir_after_all,
            print_ir_after_change=print_ir_after_change,
            dump_ir=dump_ir,
            verify_each=verify_each,
            progress=report.passes,
            observe=None if annotate is None else decided.observe,
        )
        manager = PassManager.parse(DEFAULT_PIPELINE if pipeline is None else pipeline, watch)
        if annotate is not None:
            check_annotate(annotate, out, sources, manager.passes, force)
        module, annotated = _annotated_model(model, bind, set_, configuration, mesh, shardings)
        made = partition(module, pipeline=manager, network=network, max_redistribution_mb=max_redistribution_mb)
        made.save(out, weights=kept, force=force, progress=report.bytes)
        told = write_annotated(annotate, module, made, decided) if annotate is not None else []
    assert made.passes is not None
    if as_json:
        _print_json(made.plan, out, made.passes, annotated)
    else:
        print_tables(made.passes, timing, statistics)
        _print(made.plan, out, made.passes, annotated, told)


def _checked_sources(model: Path, shardings: Path | None, network: str | None, out: Path, force: bool) -> list[Path]:
    """The files that are read. What is wrong with the network or the target is reported before the model is read."""
    from irpar.output.target import check_target

    if network is not None:
        from irpar.analysis.cost.network_file import find_network

        find_network(network)
    sources = [path for path in (model, shardings, network and Path(network)) if path]
    check_target(out, force, sources)
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
    _refuse_parts(module, model)
    return module, len(module.annotated) + annotate_by(module, file, agreed)


def _refuse_parts(module: "Module", path: Path) -> None:
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


def _print(plan: "Plan", out: Path, passes: "PipelineResult", annotated: int, told: Sequence[str]) -> None:
    from irpar.output.tables import print_summary

    console = output()
    print_summary(console, plan, f"irpar explain {shlex.quote(str(out))}")
    console.print()
    for note in passes.notes:
        console.print(note)
    if not annotated:
        console.print("no tensor was annotated (--shardings FILE), so nothing asked for a sharding")
    folder = shlex.quote(str(out))
    console.print(f"written to {folder}; next: irpar verify {folder}, irpar explain {folder}", soft_wrap=True)
    for line in told:
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
