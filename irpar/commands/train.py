"""irpar train: a training step of a model, partitioned and written to a folder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpar.errors import IrparError

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
    bind_of,
    choice,
)
from .partition import (
    Annotate,
    Asked,
    Collectives,
    Configuration,
    Force,
    MostMoved,
    Weights,
    checked_sources,
    refuse_parts,
    report,
    write_partition,
)

if TYPE_CHECKING:
    from irpar.annotations.shardings_file import ShardingsFile
    from irpar.ir import Module
    from irpar.output.plan import Plan
    from irpar.sharding import Mesh

_LOSS, _UPDATE, _WHAT = "The loss", "The update", "What is trained"
ONE = "one"
"""A mesh of one device."""
DATASET = ("inputs", "data_parallel", "full_batch")

Output = Annotated[
    Path,
    typer.Option("-o", "--out", metavar="OUT", help="The folder to write; or an .onnx file.", show_default=False),
]
Loss = Annotated[
    str,
    typer.Option("--loss", metavar="LOSS", help="cross_entropy, mse, bce, or output:NAME.", rich_help_panel=_LOSS),
]
LossOutput = Annotated[
    str,
    typer.Option(
        "--output",
        metavar="NAME",
        help="The output that the loss is taken of; the first of floats if none is named.",
        rich_help_panel=_LOSS,
        show_default=False,
    ),
]
ClassAxis = Annotated[
    int,
    typer.Option("--class-axis", metavar="DIM", help="Where classes are, of cross_entropy.", rich_help_panel=_LOSS),
]
IgnoreIndex = Annotated[
    int | None,
    typer.Option(
        "--ignore-index",
        metavar="CLASS",
        help="Targets of this class do not count.",
        rich_help_panel=_LOSS,
        show_default=False,
    ),
]
LabelSmoothing = Annotated[
    float,
    typer.Option(
        "--label-smoothing", metavar="X", help="How much of each target all classes share.", rich_help_panel=_LOSS
    ),
]
OptimizerName = Annotated[
    str,
    typer.Option("--optimizer", metavar="NAME", help="sgd, momentum, adam, adamw or lamb.", rich_help_panel=_UPDATE),
]
LearningRate = Annotated[
    float,
    typer.Option("--lr", metavar="X", help="The learning rate; irpar run can change it.", rich_help_panel=_UPDATE),
]
Momentum = Annotated[
    float, typer.Option("--momentum", metavar="X", help="Of the optimizer momentum.", rich_help_panel=_UPDATE)
]
Nesterov = Annotated[bool, typer.Option("--nesterov", help="Momentum looks ahead.", rich_help_panel=_UPDATE)]
Betas = Annotated[str, typer.Option("--betas", metavar="X,X", help="Of adam, adamw and lamb.", rich_help_panel=_UPDATE)]
Eps = Annotated[
    float | None,
    typer.Option(
        "--eps",
        metavar="X",
        help="What keeps divisors from 0; 1e-8 if not given, of lamb 1e-6.",
        rich_help_panel=_UPDATE,
        show_default=False,
    ),
]
WeightDecay = Annotated[
    float | None,
    typer.Option(
        "--weight-decay",
        metavar="X",
        help="If not given 0.01 of adamw and lamb, beside the gradient; else 0, added to it.",
        rich_help_panel=_UPDATE,
        show_default=False,
    ),
]
NoDecay = Annotated[
    list[str] | None,
    typer.Option(
        "--no-decay",
        metavar="GLOB",
        help="Parameters without weight decay. May be repeated.",
        rich_help_panel=_UPDATE,
    ),
]
LrScale = Annotated[
    list[str] | None,
    typer.Option(
        "--lr-scale",
        metavar="GLOB=X",
        help="What the learning rate of some parameters is multiplied by. May be repeated; the last that fits counts.",
        rich_help_panel=_UPDATE,
    ),
]
ClipNorm = Annotated[
    float | None,
    typer.Option(
        "--clip-norm",
        metavar="X",
        help="The most that the norm of all gradients together may be.",
        rich_help_panel=_UPDATE,
        show_default=False,
    ),
]
LossScale = Annotated[
    str,
    typer.Option(
        "--loss-scale",
        metavar="HOW",
        help="none, or dynamic: a factor that keeps small gradients from becoming 0. fp16 has it by default.",
        rich_help_panel=_UPDATE,
        show_default=False,
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="DTYPE",
        help="What matmuls and convolutions compute in: f32, bf16 or fp16; parameters have a float32 master then.",
        rich_help_panel=_UPDATE,
    ),
]
Trainable = Annotated[
    list[str] | None,
    typer.Option(
        "--trainable",
        metavar="GLOB",
        help="Initializers and inputs that are trained; all initializers of floats but single numbers and running "
        "statistics if none is named. May be repeated.",
        rich_help_panel=_WHAT,
    ),
]
Freeze = Annotated[
    list[str] | None,
    typer.Option("--freeze", metavar="GLOB", help="Those that are not. May be repeated.", rich_help_panel=_WHAT),
]
FreezeStatistics = Annotated[
    bool,
    typer.Option(
        "--freeze-statistics", help="BatchNormalization keeps the statistics of the model.", rich_help_panel=_WHAT
    ),
]
Dropout = Annotated[
    list[str] | None,
    typer.Option(
        "--dropout",
        metavar="GLOB=SHARE",
        help="Values of which each step drops a share of the elements, such as h.*.mlp.out=0.1. May be repeated.",
        rich_help_panel=_WHAT,
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="What the masks of dropout begin with.", rich_help_panel=_WHAT)
]
DatasetSharding = Annotated[
    str,
    typer.Option(
        "--dataset-sharding",
        metavar="HOW",
        help="How samples are sharded: as the inputs are (inputs), along their first dim over all ranks "
        "(data_parallel), or not at all (full_batch).",
        rich_help_panel=_WHAT,
    ),
]


def train_command(
    model: ModelFile,
    out: Output,
    loss: Loss = "cross_entropy",
    output: LossOutput = "",
    optimizer: OptimizerName = "adamw",
    lr: LearningRate = 1e-3,
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
    class_axis: ClassAxis = -1,
    ignore_index: IgnoreIndex = None,
    label_smoothing: LabelSmoothing = 0.0,
    momentum: Momentum = 0.9,
    nesterov: Nesterov = False,
    betas: Betas = "0.9,0.999",
    eps: Eps = None,
    weight_decay: WeightDecay = None,
    no_decay: NoDecay = None,
    lr_scale: LrScale = None,
    clip_norm: ClipNorm = None,
    loss_scale: LossScale = "",
    precision: Precision = "f32",
    trainable: Trainable = None,
    freeze: Freeze = None,
    freeze_statistics: FreezeStatistics = False,
    dropout: Dropout = None,
    seed: Seed = 0,
    dataset_sharding: DatasetSharding = "inputs",
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
    """Make a training step of a model, shard it over a mesh and write a program for each device.

    The step takes the model's inputs, target and learning_rate, gives the loss, and replaces the parameters and what
    the optimizer keeps of them, which stay on their ranks. --mesh one, the default, makes the step of one device; where
    OUT ends in .onnx, that is one model for any ONNX runtime.
    """
    asked = Asked(
        out=out,
        pipeline=pipeline,
        network=network,
        weights=weights,
        force=force,
        collectives=collectives,
        annotate=annotate,
        max_redistribution_mb=max_redistribution_mb,
        dump_ir=dump_ir,
        print_ir_before=tuple(print_ir_before or ()),
        print_ir_after=tuple(print_ir_after or ()),
        print_ir_after_all=print_ir_after_all,
        print_ir_after_change=print_ir_after_change,
        verify_each=verify_each,
        timing=timing,
        statistics=statistics,
        as_json=as_json,
    )
    options: dict[str, Any] = {
        "loss": loss,
        "output": output,
        "optimizer": optimizer,
        "learning_rate": lr,
        "class_axis": class_axis,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "momentum": momentum,
        "nesterov": nesterov,
        "betas": _numbers("--betas", betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "no_decay": no_decay or [],
        "lr_scale": _factors("--lr-scale", lr_scale),
        "clip_norm": clip_norm,
        "loss_scale": loss_scale or ("dynamic" if precision == "fp16" else "none"),
        "precision": precision,
        "trainable": trainable or [],
        "freeze": freeze or [],
        "freeze_statistics": freeze_statistics,
        "dropout": _factors("--dropout", dropout),
        "seed": seed,
    }
    choice("--dataset-sharding", dataset_sharding, DATASET)
    from .loading import shardings_of

    file, agreed = shardings_of(f"{ONE}=1" if mesh == ONE else mesh, shardings)
    step_of = _Maker(model, bind, set_, configuration, options, dataset_sharding)
    if out.suffix == ".onnx":
        _write_model(step_of, asked, agreed)
        return
    sources = checked_sources(asked, model, shardings)
    made = write_partition(asked, sources, lambda: step_of.annotated(file, agreed), step_of.evaluation)
    report(asked, made, step_of.notes)


class _Maker:
    """Makes the step of a model.

    Attributes:
        notes: lines about it.
    """

    def __init__(
        self,
        model: Path,
        bind: Sequence[str] | None,
        set_: Sequence[str] | None,
        configuration: str,
        options: dict[str, Any],
        dataset_sharding: str,
    ) -> None:
        self.model = model
        self.bind = bind
        self.set = set_
        self.configuration = configuration
        self.options = options
        self.dataset_sharding = dataset_sharding
        self.notes: tuple[str, ...] = ()
        self._module: Module | None = None

    def plain(self, mesh: "Mesh | None" = None, file: "ShardingsFile | None" = None) -> "tuple[Module, int]":
        """The step, and how many annotations the model has; those of a file that name tensors of the model are set."""
        from irpar.training.arguments import settings_of
        from irpar.training.step import make_step

        from .loading import load_model

        module = load_model(self.model, self.bind, set_=self.set, configuration=self.configuration, mesh=mesh)
        refuse_parts(module, self.model)
        if mesh is not None:
            module.set_mesh(mesh)
        if file is not None:
            file.annotate(module)
        self._module = module
        made, self.notes = make_step(module, settings_of(self.options), bind_of(self.bind))
        return made, len(made.annotated)

    def evaluation(self, plan: "Plan") -> "Module":
        """The evaluation program of the step, once that is partitioned."""
        from irpar.training.arguments import settings_of
        from irpar.training.evaluation import make_evaluation

        assert self._module is not None
        return make_evaluation(self._module, settings_of(self.options), plan)

    def annotated(self, file: "ShardingsFile", mesh: "Mesh | None") -> "tuple[Module, int]":
        """The step on its mesh, annotated; and how many annotations there are."""
        from irpar.sharding import Mesh

        mesh = mesh or Mesh({ONE: 1})
        of_model, of_step = _apart(file, self.model)
        module, count = self.plain(mesh, of_model)
        of_step.annotate(module)
        _shard_samples(module, self.dataset_sharding)
        return module, count + file.entries


def _apart(file: "ShardingsFile", model: Path) -> "tuple[ShardingsFile, ShardingsFile]":
    """The entries that name tensors which a step adds (`w.m`, `grad.w`, `target`), apart from those of the model."""
    from irpar.training.names import is_added

    own = tuple(entry for entry in file.tensors if not is_added(entry.pattern))
    added = tuple(entry for entry in file.tensors if is_added(entry.pattern))
    return replace(file, tensors=own), replace(file, tensors=added, others=(), ops=(), layout=None)


def _shard_samples(module: "Module", how: str) -> None:
    """Annotate the inputs that are samples."""
    from irpar.output.training_facts import facts_of

    facts = facts_of(module.metadata)
    assert facts is not None
    axes = list(module.mesh.axes)
    named = {value.source_name: value for value in module.graph.inputs}
    for name in facts["inputs"] if how != "inputs" else ():
        value = named[name]
        rank = value.tensor_type.rank or 0
        if value.sharding is not None:
            raise IrparError(
                f"--dataset-sharding {how} and an annotation both say how {name} is sharded",
                do="leave out one of the two",
            )
        first = [axes] if how == "data_parallel" and rank else [None] * min(rank, 1)
        module.shard(name, [*first, *[None] * (rank - 1)])


def _write_model(maker: _Maker, asked: Asked, mesh: "Mesh | None") -> None:
    """Write the step of one device as one model."""
    import shlex

    from irpar.files.atomic import check_file
    from irpar.onnx_io import data_file, save
    from irpar.output.training_facts import facts_of
    from irpar.tables.display import output, print_json

    out = asked.out
    if mesh is not None and mesh.size > 1:
        raise IrparError(
            f"an .onnx file holds the step of one device, and the mesh is {mesh}",
            where=str(out),
            do="give a folder, or --mesh one",
        )
    check_file(out, "the step")
    if maker.model.exists() and out.resolve() == maker.model.resolve():
        raise IrparError("the step would replace the model", where=str(out), do="give another file")
    for target in (out, data_file(out)):
        check_file(target, "the step")
        if target.exists() and not asked.force:
            raise IrparError("the file exists", where=str(target), do="give another file, or --force")
    module, _ = maker.plain()
    save(module, out)
    facts = facts_of(module.metadata)
    inputs = [
        f"{value.source_name} : {value.type}" for value in module.graph.inputs if value not in module.graph.states
    ]
    if asked.as_json:
        print_json({"model": str(out), "training": facts, "states": len(module.graph.states)})
        return
    for note in maker.notes:
        output().print(note, highlight=False, soft_wrap=True)
    output().print(f"inputs: {', '.join(inputs)}; states: {len(module.graph.states)}", highlight=False, soft_wrap=True)
    output().print(f"written: {shlex.quote(str(out))}", soft_wrap=True)


def _numbers(option: str, text: str) -> list[float]:
    """Numbers with commas between.

    Raises:
        IrparError: they are none.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise IrparError(f'cannot read {option} "{text}"', do=f"write two numbers: {option} 0.9,0.999") from None


def _factors(option: str, texts: Sequence[str] | None) -> dict[str, float]:
    """Globs with numbers.

    Raises:
        IrparError: a text has another form.
    """
    found: dict[str, float] = {}
    for text in texts or ():
        glob, equals, number = text.rpartition("=")
        try:
            found[glob] = float(number)
        except ValueError:
            equals = ""
        if not equals or not glob:
            raise IrparError(f'cannot read {option} "{text}"', do=f"write a glob and a number: {option} 'h.*=0.1'")
    return found
