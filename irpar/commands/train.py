"""irpar train: a training step of a model, partitioned and written to a folder."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpar.errors import IrparError
from irpar.units import gigabytes

from .model_target import check_model_target, require_folder
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
    NoCache,
    Read,
    Stubs,
    Weights,
    cache_of,
    checked_sources,
    refuse_parts,
    report,
    write_partition,
)
from .place_options import Device, DeviceMemoryGb, Host, Place, place_of
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
from .train_options import (
    AlsoTrainable,
    Betas,
    ClassAxis,
    ClipNorm,
    DatasetSharding,
    Dropout,
    Eps,
    Freeze,
    FreezeStatistics,
    GatherParameters,
    IgnoreIndex,
    LabelSmoothing,
    LearningRate,
    Loss,
    LossOutput,
    LossScale,
    LrScale,
    MemoryLimitGb,
    MicroBatches,
    Momentum,
    Nesterov,
    NoDecay,
    OptimizerName,
    Output,
    Precision,
    ReduceGradients,
    Seed,
    ShortBatches,
    Trainable,
    Undivided,
    WeightDecay,
    Zero,
    ZeroAxes,
    ZeroPrefetch,
    ZeroRegather,
    ZeroThreshold,
)

if TYPE_CHECKING:
    from irpar.annotations.shardings_file import ShardingsFile
    from irpar.ir import Module, Value
    from irpar.output.plan_record import Plan
    from irpar.passes.zero import Zero as ZeroPass
    from irpar.sharding import Axis, Mesh
    from irpar.training.settings import Settings

ONE = "one"
"""A mesh of one device."""
_ZERO_OPTIONS = ("zero_axes", "zero_threshold_kb", "zero_regather", "zero_prefetch")
"""Options that only say how --zero does it."""
_GATHERS = ("zero_regather", "zero_prefetch")
"""Those that are about parameters of which a rank holds a share."""
DATASET = ("inputs", "data_parallel", "full_batch")


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
    class_axis: ClassAxis = -1,
    ignore_index: IgnoreIndex = None,
    label_smoothing: LabelSmoothing = 0.0,
    momentum: Momentum = None,
    nesterov: Nesterov = False,
    betas: Betas = None,
    eps: Eps = None,
    weight_decay: WeightDecay = None,
    no_decay: NoDecay = None,
    lr_scale: LrScale = None,
    clip_norm: ClipNorm = None,
    loss_scale: LossScale = "",
    precision: Precision = "f32",
    trainable: Trainable = None,
    also_trainable: AlsoTrainable = None,
    freeze: Freeze = None,
    freeze_statistics: FreezeStatistics = False,
    dropout: Dropout = None,
    seed: Seed = 0,
    zero: Zero = 0,
    zero_axes: ZeroAxes = "dp",
    zero_threshold_kb: ZeroThreshold = 64,
    zero_regather: ZeroRegather = True,
    zero_prefetch: ZeroPrefetch = 1,
    micro_batches: MicroBatches = 1,
    undivided: Undivided = None,
    reduce_gradients: ReduceGradients = "auto",
    gather_parameters: GatherParameters = "auto",
    memory_limit_gb: MemoryLimitGb = None,
    short_batches: ShortBatches = False,
    dataset_sharding: DatasetSharding = "inputs",
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
    """Make a training step of a model, shard it over a mesh and write a program for each device.

    The step takes the model's inputs, target and learning_rate, gives the loss, and replaces the parameters and what
    the optimizer keeps of them, which stay on their ranks. --mesh one, the default, makes the step of one device; where
    OUT ends in .onnx, that is one model for any ONNX runtime.
    """
    given = locals()
    passes: Any = {
        "zero_pass": _zero(given),
        "recompute_pass": recompute_of(given),
        "place_pass": place_of(given),
        "store_pass": store_of(given),
    }
    asked = replace(Asked.of(given), **passes)
    settings = _settings(given)
    choice("--dataset-sharding", dataset_sharding, DATASET)
    limit = _memory_limit(given)
    from .loading import shardings_of

    file, agreed = shardings_of(f"{ONE}=1" if mesh == ONE else mesh, shardings)
    step_of = _Maker(model, bind, set_, configuration, settings, dataset_sharding, limit)
    if out.suffix == ".onnx":
        _write_model(step_of, asked, agreed)
        return
    sources = checked_sources(asked, model, shardings)
    made = write_partition(
        asked,
        sources,
        lambda: _with_shares(step_of.annotated(file, agreed), settings, asked),
        step_of.evaluation,
        cache_of("train", asked, given),
    )
    report(asked, made, "--shardings FILE, or --dataset-sharding data_parallel")


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
        settings: "Settings",
        dataset_sharding: str,
        memory_limit: int | None,
    ) -> None:
        self.model = model
        self.bind = bind
        self.set = set_
        self.configuration = configuration
        self.settings = settings
        self.dataset_sharding = dataset_sharding
        self.memory_limit = memory_limit
        self.notes: tuple[str, ...] = ()
        self._module: Module | None = None

    def plain(self, mesh: "Mesh | None" = None, file: "ShardingsFile | None" = None) -> "tuple[Module, int]":
        """The step, and how many annotations the model has; those of a file that name tensors of the model are set."""
        from irpar.training.step import make_step

        from .loading import load_model

        module = load_model(self.model, self.bind, set_=self.set, configuration=self.configuration, mesh=mesh)
        refuse_parts(module, self.model)
        if mesh is not None:
            module.set_mesh(mesh)
        if file is not None:
            file.annotate(module)
        self._module = module
        made, self.notes = make_step(module, self.settings, bind_of(self.bind))
        made.memory_limit = self.memory_limit
        return made, len(made.annotated)

    def evaluation(self, plan: "Plan") -> "Module":
        """The evaluation program of the step, once that is partitioned."""
        from irpar.training.evaluation import make_evaluation

        assert self._module is not None
        return make_evaluation(self._module, self.settings, plan)

    def annotated(self, file: "ShardingsFile", mesh: "Mesh | None") -> Read:
        """The step on its mesh, annotated; and how many annotations there are."""
        from irpar.output.target import source_files
        from irpar.sharding import Mesh

        mesh = mesh or Mesh({ONE: 1})
        of_model, of_step = _of_model_and_step(file)
        module, count = self.plain(mesh, of_model)
        _with_dim_of_micro_batches(of_step, module).annotate(module)
        assert self._module is not None
        count += file.entries + _shard_samples(module, self.dataset_sharding)
        return Read(module, count, source_files(self._module), self.notes)


def _zero(given: Mapping[str, Any]) -> "ZeroPass | None":
    """The pass `zero`, where it is asked for.

    Raises:
        IrparError: the options contradict each other.
    """
    if not given["zero"]:
        for flag in _flags_given(given, _ZERO_OPTIONS):
            raise IrparError(f"{flag} without --zero 1, 2 or 3", do="give one of these, or leave it out")
        return None
    if given["zero"] in (1, 2):
        for flag in _flags_given(given, _GATHERS):
            raise IrparError(
                f"{flag} is about parameters that --zero 3 shards, and there are none",
                do="give --zero 3, or leave it out",
            )
    from irpar.passes.zero import Zero as ZeroPass

    if given["out"].suffix == ".onnx":
        raise IrparError("an .onnx file holds the step of one device", do="give a folder, or leave out --zero")
    if given["mesh"] in (None, ONE) and given["shardings"] is None:
        raise IrparError("--zero shards over ranks, and there is one", do="give a mesh: --mesh dp=4")
    if given["pipeline"] is not None:
        raise IrparError(
            "--zero and --pipeline both say what runs",
            do=f"write zero{{stage={given['zero']}}} into the pipeline, and leave out --zero",
        )
    axes = tuple(axis.strip() for axis in given["zero_axes"].split(",") if axis.strip())
    return ZeroPass(given["zero"], axes, given["zero_threshold_kb"], given["zero_regather"], given["zero_prefetch"])


def _flags_given(given: Mapping[str, Any], options: Iterable[str]) -> Iterator[str]:
    """Those options, as a user writes them, that say something else than they do by themselves."""
    known = signature(train_command).parameters
    for option in options:
        if given[option] != known[option].default:
            yield f"--{'no-' if given[option] is False else ''}{option.replace('_', '-')}"


def _with_shares(read: Read, settings: "Settings", asked: Asked) -> Read:
    """A step, if ranks hold shares of what it was asked to send once or in each micro-batch.

    Raises:
        IrparError: ranks hold all of it.
    """
    from irpar.analysis.training_facts import facts_of
    from irpar.module_pipeline import zero_said

    if asked.pipeline is not None:
        return read  # What its passes shard is known once they have run.
    graph = read.module.graph
    facts = facts_of(read.module.metadata)
    samples = {value for value in graph.inputs if facts is not None and value.source_name in facts["inputs"]}
    axes = {axis.name for value in samples for axis in _axes(value)}
    is_annotated = any(axis.name in axes for value in graph.states for axis in _axes(value))
    zero_pass = asked.zero_pass or zero_said(read.module)
    stage = 0 if zero_pass is None else zero_pass.stage
    for name, what, is_shared, zero in (
        ("reduce_gradients", "gradients of which ranks hold shares", stage >= 1 or is_annotated, "--zero 2"),
        ("gather_parameters", "parameters that --zero 3 shards", stage == 3, "--zero 3"),
    ):
        when = getattr(settings, name)
        if when != "auto" and not is_shared:
            raise IrparError(
                f"--{name.replace('_', '-')} {when} is about {what}, and there are none",
                do=f"add {zero}, or leave it out",
            )
    return read


def _axes(value: "Value") -> "tuple[Axis, ...]":
    return () if value.sharding is None else value.sharding.all_axes


def _memory_limit(given: Mapping[str, Any]) -> int | None:
    """The bytes that a rank may hold; None where nothing is said.

    Raises:
        IrparError: they are none, or there is nothing that could keep to them.
    """
    limit = given["memory_limit_gb"]
    if limit is None:
        return None
    if not 0 < limit < math.inf:
        raise IrparError(f"--memory-limit-gb {limit:g}", do="give a number of GB above 0")
    require_folder(given["out"], "--memory-limit-gb")
    return gigabytes(limit)


def _of_model_and_step(file: "ShardingsFile") -> "tuple[ShardingsFile, ShardingsFile]":
    """The entries that name tensors which a step adds (`w.m`, `grad.w`, `target`), apart from those of the model."""
    from irpar.training.names import is_added

    own = tuple(entry for entry in file.tensors if not is_added(entry.pattern))
    added = tuple(entry for entry in file.tensors if is_added(entry.pattern))
    return replace(file, tensors=own), replace(file, tensors=added, others=(), ops=(), layout=None)


def _with_dim_of_micro_batches(file: "ShardingsFile", module: "Module") -> "ShardingsFile":
    """A file, written for a batch, with a dim that counts micro-batches in the entries of inputs that have it."""
    from irpar.analysis.training_facts import facts_of
    from irpar.training.micro_batches import stacked_inputs

    _, names = stacked_inputs(facts_of(module.metadata))
    ranks = {value.source_name: value.tensor_type.rank or 0 for value in module.graph.inputs}
    tensors = tuple(
        replace(entry, spec=(None, *entry.spec))
        if entry.pattern in names and len(entry.spec) == ranks[entry.pattern] - 1
        else entry
        for entry in file.tensors
    )
    return replace(file, tensors=tensors)


def _shard_samples(module: "Module", how: str) -> int:
    """Annotate the inputs that are samples, but for "inputs": these say it themselves; returns how many.

    Raises:
        IrparError: an annotation says it already.
    """
    from irpar.analysis.training_facts import facts_of
    from irpar.training.micro_batches import stacked_inputs

    facts = facts_of(module.metadata)
    assert facts is not None
    _, stacked = stacked_inputs(facts)
    axes = list(module.mesh.axes)
    named = {value.source_name: value for value in module.graph.inputs}
    names = facts["inputs"] if how != "inputs" else ()
    for name in names:
        value = named[name]
        rank = value.tensor_type.rank or 0
        if value.sharding is not None:
            raise IrparError(
                f"--dataset-sharding {how} and an annotation both say how {name} is sharded",
                do="leave out one of the two",
            )
        spec: list[Any] = [None] * rank
        place = int(name in stacked)
        if how == "data_parallel" and rank > place:
            spec[place] = axes
        module.shard(name, spec)
    return len(names)


def _write_model(maker: _Maker, asked: Asked, mesh: "Mesh | None") -> None:
    """Write the step of one device as one model."""
    import shlex

    from irpar.analysis.training_facts import facts_of
    from irpar.onnx_io import save
    from irpar.tables.display import output, print_json

    out = asked.out
    if mesh is not None and mesh.size > 1:
        raise IrparError(
            f"an .onnx file holds the step of one device, and the mesh is {mesh}",
            where=str(out),
            do="give a folder, or --mesh one",
        )
    check_model_target(out, maker.model, "the step", asked.force)
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


def _settings(given: Mapping[str, Any]) -> "Settings":
    """What the step is to be, of all options of the command.

    Raises:
        IrparError: one cannot be read.
    """
    from irpar.passes.optimizer import require_read
    from irpar.training.arguments import settings_of
    from irpar.training.settings import Settings

    options = {field.name: given.get(field.name) for field in fields(Settings)}
    options["learning_rate"] = given["lr"]
    options["betas"] = None if given["betas"] is None else _pair("--betas", given["betas"])
    options["lr_scale"] = _factors("--lr-scale", given["lr_scale"])
    options["dropout"] = _factors("--dropout", given["dropout"])
    options["loss_scale"] = given["loss_scale"] or ("dynamic" if given["precision"] == "fp16" else "none")
    told = {name: option for name, option in options.items() if option is not None}
    settings = settings_of(told)
    require_read(settings.optimizer, [name for name, given in told.items() if given])
    return settings


def _pair(option: str, text: str) -> tuple[float, float]:
    """Two numbers with a comma between.

    Raises:
        IrparError: they are none, or not two.
    """
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise IrparError(f'cannot read {option} "{text}"', do=f"write two numbers: {option} 0.9,0.999") from None
    return first, second


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
