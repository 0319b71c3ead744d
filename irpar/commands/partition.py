"""irpar partition: a model cut over a mesh, written to a folder."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from irpar.process import SIGNALS
from irpar.sharding import IrparError
from irpar.tables.display import messages, output, print_json

from .options import (
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
from .place_options import Device, DeviceMemoryGb, Host, Place, place_of
from .progress_report import ProgressReport
from .recompute_options import (
    METHOD,
    SECONDS,
    MemoryBudget,
    MemoryBudgetGb,
    Recompute,
    RecomputeMethod,
    RecomputeSeconds,
    recompute_of,
)
from .store_options import Store, store_of

if TYPE_CHECKING:
    from irpar.annotations.onnx_annotations import DecidedShardings
    from irpar.api import Partition
    from irpar.cache.partitions import PartitionCache
    from irpar.ir import Module
    from irpar.output.plan_record import Plan
    from irpar.pass_manager import PassManager, PipelineResult
    from irpar.passes.place import Place as PlacePass
    from irpar.passes.recompute import Recompute as RecomputePass
    from irpar.passes.store import Store as StorePass
    from irpar.passes.zero import Zero as ZeroPass

Output = Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The folder to write.", show_default=False)]
Weights = Annotated[str, typer.Option("--weights", metavar="WHICH", help="copy, or none: plan and programs only.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it holds a partition and nothing else.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Plan anew, and keep nothing for the next time.")]
Collectives = Annotated[
    str,
    typer.Option(
        "--collectives",
        metavar="DOMAIN",
        help="Whose collectives are written: irpar, com.microsoft (ONNX Runtime's of its NCCL builds) or tensorrt.",
    ),
]
Stubs = Annotated[
    bool,
    typer.Option("--stubs", help="With functions that give tools that know no irpar the types of its collectives."),
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
    stubs: Stubs = False,
    annotate: Annotate = None,
    configuration: Configuration = "",
    max_redistribution_mb: MostMoved = None,
    recompute: Recompute = None,
    memory_budget: MemoryBudget = None,
    memory_budget_gb: MemoryBudgetGb = None,
    recompute_method: RecomputeMethod = METHOD,
    recompute_seconds: RecomputeSeconds = SECONDS,
    place: Place = None,
    host: Host = None,
    device: Device = None,
    device_memory_gb: DeviceMemoryGb = None,
    store: Store = None,
    dump_ir: DumpIr = None,
    print_ir_before: PrintIrBefore = None,
    print_ir_after: PrintIrAfter = None,
    print_ir_after_all: PrintIrAfterAll = False,
    print_ir_after_change: PrintIrAfterChange = False,
    verify_each: VerifyEach = False,
    timing: Timing = False,
    statistics: Statistics = False,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Shard a model over a mesh of devices and write a program for each, with explicit communication."""
    given = locals()
    passes: Any = {
        "recompute_pass": recompute_of(given),
        "place_pass": place_of(given),
        "store_pass": store_of(given),
    }
    asked = replace(Asked.of(given), **passes)
    sources = checked_sources(asked, model, shardings)
    made = write_partition(
        asked,
        sources,
        lambda: _annotated_model(model, bind, set_, configuration, mesh, shardings),
        cache=cache_of("partition", asked, given),
    )
    report(asked, made)


@dataclass(frozen=True)
class Asked:
    """What `irpar partition`, and every other command that writes a partition, is asked for besides the model.

    Attributes:
        zero_pass, recompute_pass, place_pass, store_pass: what the default pipeline has beside what the model asks for.
    """

    out: Path
    pipeline: str | None
    network: str | None
    weights: str
    force: bool
    collectives: str
    stubs: bool
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
    no_cache: bool
    as_json: bool
    zero_pass: "ZeroPass | None" = None
    recompute_pass: "RecomputePass | None" = None
    place_pass: "PlacePass | Literal[False] | None" = None
    store_pass: "StorePass | None" = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Asked":
        """These options of a command, of all that it has, by the names of its arguments."""
        options = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        lists = {name: tuple(options[name] or ()) for name in ("print_ir_before", "print_ir_after")}
        return cls(**{**options, **lists})


@dataclass(frozen=True)
class Made:
    """A partition that was written.

    Attributes:
        plan: its plan.
        passes: what the passes did, as plain data.
        annotated: how many annotations the model had.
        notes: lines about what it was made of.
        told: what the annotated model says.
    """

    plan: "Plan"
    passes: Sequence[Mapping[str, Any]]
    annotated: int
    notes: Sequence[str] = ()
    told: Sequence[str] = ()


class Read(NamedTuple):
    """A model that was read.

    Attributes:
        module: it, on its mesh.
        annotated: how many annotations it has.
        files: the files that it was read from, external data included.
        notes: lines about what was made of it.
    """

    module: "Module"
    annotated: int
    files: Sequence[Path]
    notes: Sequence[str] = ()


def write_partition(
    asked: Asked,
    sources: list[Path],
    read: Callable[[], Read],
    evaluation: "Callable[[Plan], Module] | None" = None,
    cache: "PartitionCache | None" = None,
) -> Made:
    """Shard a model and write its programs, or write those in the cache.

    Args:
        asked: the options.
        sources: the files that are read, from `checked_sources`.
        read: gives the model.
        evaluation: gives the evaluation program of a training step, for its plan.
        cache: where the partition is kept, from `cache_of`.

    Raises:
        IrparError: the model, an annotation or the target does not fit.
    """
    with ProgressReport(is_shown=not asked.as_json) as progress:
        found = None
        if cache is not None:
            found = cache.restore(asked.out, force=asked.force, sources=sources, progress=progress.bytes)
        if found is not None:
            return Made(found.plan, **found.report)
        from irpar.ir.collector import collector_off, collector_off_for_good

        with collector_off_for_good() if SIGNALS.ends else collector_off():
            return _write_new(asked, sources, read, evaluation, cache, progress)


def _write_new(
    asked: Asked,
    sources: list[Path],
    read: Callable[[], Read],
    evaluation: "Callable[[Plan], Module] | None",
    cache: "PartitionCache | None",
    progress: ProgressReport,
) -> Made:
    """Shard a model, write its programs and keep them."""
    from irpar.annotations.named import infer_undeclared_types
    from irpar.annotations.onnx_annotations import DecidedShardings
    from irpar.api import partition
    from irpar.module_pipeline import default_pipeline
    from irpar.output.target import EVALUATION
    from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE

    from .annotated import check_annotate, write_annotated

    kept: Any = asked.weights
    said: dict[str, Any] = {"collectives": asked.collectives, "stubs": asked.stubs}
    decided = DecidedShardings()
    manager = _manager(asked, progress, None if asked.annotate is None else decided)
    if asked.annotate is not None:
        check_annotate(asked.annotate, asked.out, sources, manager.passes, asked.force)
    module, annotated, files, notes = read()
    if asked.pipeline is not None and annotated:
        infer_undeclared_types(module)  # A pipeline of the user's own need not begin with it.
    added: Any = {
        "zero": asked.zero_pass,
        "recompute": asked.recompute_pass,
        "place": asked.place_pass,
        "store": asked.store_pass,
    }
    if asked.pipeline is None and (chosen := default_pipeline(module, **added)) != DEFAULT_PIPELINE:
        manager = _manager(replace(asked, pipeline=chosen), progress, None if asked.annotate is None else decided)
    made = partition(module, pipeline=manager, network=asked.network, max_redistribution_mb=asked.max_redistribution_mb)
    beside = None if evaluation is None else _evaluation(evaluation(made.plan), made.plan.memory_limit, asked)
    made.save(asked.out, weights=kept, force=asked.force, progress=progress.bytes, evaluation=beside, **said)
    told = write_annotated(asked.annotate, module, made, decided) if asked.annotate is not None else []
    assert made.passes is not None
    if not asked.as_json:
        print_tables(made.passes, asked.timing, asked.statistics)
    passes = passes_json(made.passes)
    if cache is not None:
        from irpar.cache.partitions import Written

        written = [Written("", made, asked.weights == "copy")]
        if beside is not None:
            written.append(Written(EVALUATION, beside, True))
        cache.store(asked.out, written, {"passes": passes, "annotated": annotated, "notes": list(notes)}, files)
    return Made(made.plan, passes, annotated, notes, told)


def _evaluation(program: "Module", limit: int | None, asked: Asked) -> "Partition":
    """The evaluation program of a step, partitioned as that is.

    What lies or runs elsewhere for the step does so for its evaluation, which lacks what only trains.

    Args:
        program: it.
        limit: bytes that ranks may hold, as the step was planned.
        asked: the options.
    """
    from irpar.api import partition
    from irpar.module_pipeline import default_pipeline

    if asked.store_pass is not None:
        program.memory_limit = limit
    place = replace(asked.place_pass, unmatched="skipped") if asked.place_pass else asked.place_pass
    pipeline = default_pipeline(program, place=place, store=asked.store_pass)
    return partition(program, pipeline=pipeline, network=asked.network)


def _manager(asked: Asked, progress: ProgressReport, decided: "DecidedShardings | None") -> "PassManager":
    """The pipeline that is asked for, watched as that is."""
    from irpar.pass_manager import Instrumentation, PassManager
    from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE

    watch = Instrumentation(
        print_ir_before=asked.print_ir_before,
        print_ir_after=asked.print_ir_after,
        print_ir_after_all=asked.print_ir_after_all,
        print_ir_after_change=asked.print_ir_after_change,
        dump_ir=asked.dump_ir,
        verify_each=asked.verify_each,
        progress=progress.passes,
        observe=None if decided is None else decided.observe,
    )
    return PassManager.parse(DEFAULT_PIPELINE if asked.pipeline is None else asked.pipeline, watch)


_WITHOUT_BF16 = "ONNX Runtime has no bfloat16 on CPUs: --engine numpy has, and cupy on GPUs"
_NOT_IN_KEY = ("out", "force", "no_cache", "as_json")
"""Options on which what is written does not depend."""
_WATCHED = (
    "annotate",
    "dump_ir",
    "print_ir_before",
    "print_ir_after",
    "print_ir_after_all",
    "print_ir_after_change",
    "verify_each",
    "timing",
    "statistics",
)
"""Options that ask for more than what is kept: nothing is taken from the cache."""


def cache_of(command: str, asked: Asked, given: Mapping[str, Any]) -> "PartitionCache | None":
    """Where the partition that a command makes is kept; None where it is to be made in any case.

    Args:
        command: the name of the command.
        asked: its options that all commands have which write a partition.
        given: all of its options, by the names of its arguments.

    Raises:
        IrparError: the environment variable for the size of the cache cannot be read.
    """
    if asked.no_cache or any(getattr(asked, name) for name in _WATCHED):
        return None
    from irpar.cache.partitions import PartitionCache

    options = {name: value for name, value in given.items() if name not in (*_NOT_IN_KEY, *_WATCHED)}
    values = [text.partition("=")[2] for text in given["set_"] or ()]
    named = [given["shardings"], given["network"], *values]
    return PartitionCache.of(command, options, given["model"], [Path(name) for name in named if _is_file(name)])


def _is_file(name: str | Path | None) -> bool:
    """Whether an option names a file."""
    try:
        return bool(name) and Path(name or "").is_file()
    except (OSError, ValueError):  # A name that no file can have.
        return False


def report(asked: Asked, made: Made, by: str = "--shardings FILE") -> None:
    """Say what was written; `by`: how tensors can be annotated."""
    if asked.as_json:
        _print_json(made, asked.out)
    else:
        _print(made, asked.out, by)


def checked_sources(asked: Asked, model: Path, shardings: Path | None) -> list[Path]:
    """The files that are read. What is wrong with options or the target is reported before the model is read.

    Raises:
        IrparError: see there.
    """
    from irpar.api_arguments import check_collectives
    from irpar.output.target import check_target

    check_collectives(asked.collectives, asked.stubs)
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
) -> Read:
    """The model, and how many annotations it has from its own file and from --shardings."""
    from irpar.output.target import source_files

    from .loading import annotate_by, load_model, shardings_of

    file, agreed = shardings_of(mesh, shardings)
    module = load_model(model, bind, set_=set_, configuration=configuration, mesh=agreed)
    refuse_parts(module, model)
    annotated = len(module.annotated) + annotate_by(module, file, agreed)
    return Read(module, annotated, source_files(module))


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


def _print_json(made: Made, out: Path) -> None:
    entries = asdict(made.plan)
    del entries["values"]
    print_json({"out": str(out), "annotations": made.annotated, "passes": made.passes, **entries})


def _print(made: Made, out: Path, by: str) -> None:
    from irpar.output.tables import print_summary

    plan, console = made.plan, output()
    for note in made.notes:
        console.print(note, highlight=False, soft_wrap=True)
    print_summary(console, plan, f"irpar explain {shlex.quote(str(out))}")
    console.print()
    for record in made.passes:
        for note in record["notes"]:
            console.print(f"{record['name']}: {note}")
    is_zero = plan.training is not None and "zero" in plan.training
    if not made.annotated and not is_zero and plan.mesh_of_ranks.size > 1:
        console.print(f"no tensor was annotated ({by}), so nothing asked for a sharding")
    folder = shlex.quote(str(out))
    has_weights = all(part["weights"] is not None for part in plan.parts)
    is_bf16 = any(each["dtype"] == "bf16" for each in (*plan.inputs, *plan.outputs, *plan.collectives)) or (
        plan.training is not None and plan.training["settings"].get("precision") == "bf16"
    )
    engine = " --engine numpy" if is_bf16 else ""
    verify = f"irpar verify {folder}{engine}, " if has_weights else ""
    run = f", irpar run {folder}{engine} --data DATA --steps N" if has_weights and plan.training is not None else ""
    console.print(f"written to {folder}; next: {verify}irpar explain {folder}{run}", soft_wrap=True)
    if verify and is_bf16:
        console.print(_WITHOUT_BF16)
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
