"""A training step of a model, as one more model."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from irpar.analysis.training_facts import MicroBatchFacts, TrainingFacts, metadata_of
from irpar.errors import IrparError, listed
from irpar.ir import DType, Graph, Module, TensorType, Value
from irpar.ir.state import LOSS
from irpar.sharding import option, spelled

from .micro_batches import SAMPLE_COUNT
from .settings import Settings
from .trained import TrainingError, about_parameters, trained_note, trained_tensors

if TYPE_CHECKING:
    from irpar.onnx_io import Source
    from irpar.passes.optimizer import Optimizer

FULL = "f32"
"""The precision of the model itself."""


def train_step(
    model: "Module | Source",
    *,
    loss: str = "cross_entropy",
    optimizer: str = "adamw",
    bind: Mapping[str, int] | None = None,
    **options: Any,
) -> Module:
    """One step of training as a model: the loss of a batch, its gradients, and the parameters after an update.

    Args:
        model: from `load`, or what `load` takes; it stays as it is.
        loss: cross_entropy, mse, bce, or output:NAME; see the pass `add-loss`.
        optimizer: sgd, momentum, adam, adamw or lamb; see the pass `optimizer`.
        bind: sizes for symbolic dims, as for `load`; without, they stay symbolic.
        output: the output that the loss is taken of; "": the first of floats.
        learning_rate: or lr: what runs take where they are not told otherwise.
        momentum, nesterov, betas, eps, weight_decay, no_decay, lr_scale, clip_norm: of the optimizer.
        trainable: names or globs of the initializers and inputs that are trained; none: all initializers of floats that
            have dims, and are no running statistics, nor buffers as PyTorch's exporter says.
        also_trainable: names or globs of more of them, such as single numbers.
        freeze: names or globs of those that are not.
        freeze_statistics: leave BatchNormalization as it is, with the statistics of the model.
        dropout: name or glob of values to the share of their elements that each step drops.
        seed: what the masks of dropout begin with.
        class_axis, ignore_index, label_smoothing: of cross_entropy.
        loss_scale: "dynamic" for gradients of float16.
        micro_batches: how many batches of the model's size a step adds up the gradients of, one after the other; its
            inputs are [micro_batches, b, ...]. See the pass `accumulate`.
        undivided: names or globs of inputs that all of these read whole.
        reduce_gradients, gather_parameters: once a "step", in each "micro-batch", or as memory allows: "auto".
        short_batches: whether steps may have fewer samples than all micro-batches take. The step gets the input
            `sample_count`; samples behind so many change nothing. Refused where samples of the model meet.

    Returns:
        A module with the model's inputs, `target` and `learning_rate`, the result `loss`, and the parameters and what
        the optimizer keeps of them as state. `irpar.partition` takes it; `irpar.onnx_io.save` writes it.

    Raises:
        IrparError: the model is no valid one, an option does not fit, or an operator on the way has no gradient.
        ArgumentError: an argument has the wrong type.
    """
    from irpar.api import module_of
    from irpar.passes.optimizer import require_read

    from .arguments import settings_of

    settings = settings_of({"loss": loss, "optimizer": optimizer, **options})
    require_read(settings.optimizer, [name for name, given in options.items() if given])
    return make_step(module_of(model, bind), settings, bind or {})[0]


def make_step(model: Module, settings: Settings, bind: Mapping[str, int]) -> tuple[Module, tuple[str, ...]]:
    """As `train_step`, with what there is to say of the step.

    Args:
        model: it stays as it is.
        settings: what is asked for.
        bind: the sizes that its symbolic dims were given.
    """
    from irpar.ir import clone_module
    from irpar.ir.collector import collector_off
    from irpar.pass_manager import without_copies

    def made() -> tuple[Module, tuple[str, ...]]:
        work = clone_module(model)
        return work, tuple(_train_step(work, settings, bind))

    with collector_off():
        return without_copies(made)


def _train_step(module: Module, settings: Settings, bind: Mapping[str, int]) -> list[str]:
    """Make a step of a model, in its place; lines about it."""
    from irpar.differentiation import clean, normalise
    from irpar.ir import clone_module
    from irpar.pass_manager import PassManager
    from irpar.passes.autodiff import Autodiff
    from irpar.passes.training_mode import TrainingMode, running_statistics

    from .short_batches import count_samples, require_independent

    model = clone_module(module) if settings.short_batches else None
    parameters, found = with_loss(module, settings)
    notes = [*found, *about_parameters(module, parameters, running_statistics(module), settings)]
    classes = _classes(module.graph, settings)
    notes += TrainingMode(settings.freeze_statistics, settings.seed, settings.dropout).run(module).notes
    normalise(module, parameters)
    names = tuple(value.source_name for value in parameters)
    differentiate = Autodiff((LOSS,), names, keep_outputs=True, only_reached=True)
    notes += PassManager([differentiate]).run(module).notes
    _require_gradients(module, parameters)
    accumulated, whole = _accumulate(module, settings)
    notes += whole
    if accumulated is not None and model is not None:
        require_independent(model, accumulated["inputs"], settings)
        count_samples(module)
    _seed(module, settings)
    PassManager([_optimizer(settings)]).run(module)
    _write_out_batch_norms(module)
    clean(module)
    facts = _facts(module, settings, classes, bind)
    if accumulated is not None:
        facts["micro_batches"] = accumulated
    module.metadata |= metadata_of(facts)
    return [trained_note(module), *notes]


def with_loss(module: Module, settings: Settings, *, counted: bool = False) -> tuple[list[Value], tuple[str, ...]]:
    """Open a model's functions and give it the loss as its only result; with which share of the targets counts, where
    that is asked for or micro-batches need it, and some may not.

    Returns:
        What is trained; lines about the loss.
    """
    from irpar.differentiation import OPEN, lift_weights
    from irpar.pass_manager import PassManager
    from irpar.passes.add_loss import AddLoss
    from irpar.passes.training_mode import running_statistics

    PassManager.parse(OPEN).run(module)
    lift_weights(module)
    parameters = trained_tensors(module, settings, running_statistics(module))
    loss = AddLoss(
        settings.loss,
        settings.output,
        settings.class_axis,
        settings.ignore_index,
        settings.label_smoothing,
        counted=counted or settings.micro_batches > 1,
        masked=settings.short_batches,
    )
    notes = loss.run(module).notes
    _require_no_state(module.graph)
    _keep_loss(module.graph)
    if settings.precision != FULL:
        from irpar.passes.lower_precision import LowerPrecision

        names = tuple(value.source_name for value in parameters)
        LowerPrecision(settings.precision, names).run(module)  # type: ignore[arg-type]
    return parameters, notes


def _require_no_state(graph: Graph) -> None:
    """Refuse a model that replaces state: of its results only the loss remains.

    Raises:
        TrainingError: it does.
    """
    own = [value.source_name for value, state in graph.states.items() if state.output is not None]
    if own:
        raise TrainingError(
            f"the model replaces state of its own: {listed(own, 5)}",
            do="train a model that takes it as an input and gives it as a result: leave out what says that it is state",
        )


def _keep_loss(graph: Graph) -> None:
    """Give the graph the loss as its only result, with how many targets count where that is told."""
    from irpar.passes.add_loss import COUNTED

    pairs = dict(zip(graph.output_names, graph.outputs, strict=True))
    names = [name for name in (LOSS, COUNTED) if name in pairs]
    graph.set_outputs([pairs[name] for name in names], names)


def _require_gradients(module: Module, parameters: list[Value]) -> None:
    """Refuse a loss that depends on nothing that is trained.

    Raises:
        TrainingError: see there.
    """
    from irpar.passes.autodiff import GRAD

    if not any(name.startswith(GRAD) for name in module.graph.output_names):
        raise TrainingError(
            f"the loss depends on none of the parameters: {listed([value.source_name for value in parameters], 5)}",
            do=spelled("name the output that does: --output NAME", 'name the output that does: output="NAME"'),
        )


def _accumulate(module: Module, settings: Settings) -> tuple[MicroBatchFacts | None, tuple[str, ...]]:
    """Let the step go over micro-batches; what its plan says of them, and lines about them."""
    from irpar.pass_manager import PassManager
    from irpar.passes.accumulate import Accumulate
    from irpar.passes.add_loss import MASK

    if settings.micro_batches == 1:
        _require_several(settings)
        return None, ()
    reduce, gather = settings.reduce_gradients, settings.gather_parameters
    accumulate = Accumulate(settings.micro_batches, settings.undivided, reduce, gather)  # type: ignore[arg-type]
    names = [value.source_name for value in accumulate.samples(module) if value.source_name != MASK]
    PassManager.parse("cse").run(module)  # Gradients that are equal are added up once.
    notes = PassManager([accumulate]).run(module).notes
    facts: MicroBatchFacts = {
        "count": settings.micro_batches,
        "inputs": names,
        "reduce": _when(reduce),
        "gather": _when(gather),
        "why": "",
        "short": settings.short_batches,
    }
    return facts, tuple(notes)


def _when(asked: str) -> str:
    """When something is sent, where nobody knows what ranks have the memory for."""
    return "step" if asked == "auto" else asked


def _require_several(settings: Settings) -> None:
    """Refuse what only several micro-batches have.

    Raises:
        IrparError: see there.
    """
    said = {
        "undivided": ("names what micro-batches share", bool(settings.undivided)),
        "reduce_gradients": ("is about micro-batches", settings.reduce_gradients != "auto"),
        "gather_parameters": ("is about micro-batches", settings.gather_parameters != "auto"),
        "short_batches": ("is about the last of several micro-batches", settings.short_batches),
    }
    for name, (words, is_given) in said.items():
        if is_given:
            raise IrparError(
                f"{option(name)} {words}, and there is one alone",
                do=f"give {option('micro_batches', 4)}, or leave it out",
            )


def _seed(module: Module, settings: Settings) -> None:
    """Let gradients begin with 1, or with the scale of the loss."""
    from irpar.ir.added_input import add_named_input
    from irpar.ops.gradients.writer import GradientWriter
    from irpar.passes.autodiff import GRAD
    from irpar.passes.optimizer.names import SCALE

    graph = module.graph
    seed = graph.value(GRAD + LOSS)
    writer = GradientWriter(graph, module.opsets, before=graph.first)
    if settings.loss_scale == "dynamic":
        scale = add_named_input(graph, SCALE, TensorType(DType.F32, ()))
        begin = writer.cast(scale, seed.dtype)
    else:
        begin = writer.constant(np.ones((), seed.dtype.numpy), "one")
    seed.replace_uses(begin)
    graph.remove_input(seed)


def _optimizer(settings: Settings) -> "Optimizer":
    """The pass that writes the update."""
    from irpar.passes.optimizer import Optimizer

    return Optimizer(
        kind=settings.optimizer,  # type: ignore[arg-type]
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        no_decay=settings.no_decay,
        clip_norm=settings.clip_norm,
        loss_scale=settings.loss_scale,  # type: ignore[arg-type]
        lr_scale=settings.lr_scale,
    )


def _write_out_batch_norms(module: Module) -> None:
    """Say BatchNormalization in training in operators that stock ONNX Runtime has."""
    from irpar.ops.training_batch_norm import trains, write_out

    for node in module.graph.walk():
        if trains(node):
            write_out(node, module.opsets)


def _classes(graph: Graph, settings: Settings) -> int | None:
    """How many classes the loss takes its targets from, where that is known."""
    from irpar.passes.add_loss import CROSS_ENTROPY

    if settings.loss != CROSS_ENTROPY:
        return None
    node = next((node for node in graph if node.op_type == "SoftmaxCrossEntropyLoss"), None)
    found = None if node is None else node.inputs[0].tensor_type.shape
    size = found[1] if found is not None else None
    return size if isinstance(size, int) else None


def _facts(module: Module, settings: Settings, classes: int | None, bind: Mapping[str, int]) -> TrainingFacts:
    """What runs are to know of a step."""
    from irpar.passes.add_loss import TARGET
    from irpar.passes.optimizer.names import LEARNING_RATE

    graph = module.graph
    given = [value for value in graph.inputs if value not in graph.states and value.source_name not in module.fixed]
    names = [value.source_name for value in given if value.source_name not in (LEARNING_RATE, SAMPLE_COUNT)]
    return {
        "loss": settings.loss,
        "optimizer": settings.optimizer,
        "learning_rate": settings.learning_rate,
        "target": TARGET if TARGET in names else None,
        "classes": classes,
        "ignore_index": settings.ignore_index,
        "inputs": names,
        "settings": asdict(settings),
        "bind": dict(bind),
    }
