"""Steps of fewer samples than their micro-batches take: what is missing is padded, and does not count."""

from collections.abc import Sequence

import numpy as np

from irpar.errors import IrparError
from irpar.ir import DType, Module, TensorType, Value, tensor_type
from irpar.ir.added_input import add_named_input
from irpar.ops.training_batch_norm import trains
from irpar.sharding import option

from .independence import where_samples_meet
from .micro_batches import SAMPLE_COUNT
from .settings import Settings


class DependentSamplesError(IrparError):
    """Samples of which none can be left out, since others depend on them."""


def require_independent(model: Module, inputs: Sequence[str], settings: Settings) -> None:
    """Refuse a model in which samples meet: what pads a batch would change what is computed of the others.

    Args:
        model: what the step is made of; it is overwritten.
        inputs: those of which each micro-batch reads its own samples.
        settings: of the step.

    Raises:
        DependentSamplesError: naming the operator.
        IrparError: sizes are not known.
    """
    from irpar.differentiation import NORMALISE, OPEN, lift_weights
    from irpar.pass_manager import PassManager
    from irpar.passes.add_loss import CROSS_ENTROPY, output_of
    from irpar.passes.training_mode import TrainingMode

    _forget_shardings(model)
    PassManager.parse(OPEN).run(model)
    lift_weights(model)
    TrainingMode(settings.freeze_statistics, settings.seed, settings.dropout).run(model)
    PassManager.parse(NORMALISE).run(model)
    for value in model.graph.inputs:
        _require_static(value)
    output = output_of(model.graph, settings.output)
    _require_static(output)
    is_classes = settings.loss == CROSS_ENTROPY and settings.class_axis % len(output.shape) == 0
    node = where_samples_meet(model, inputs, output, int(is_classes))
    if node is None:
        return
    raise DependentSamplesError(
        f"samples of a batch meet in {node.title}: what pads a short batch would change what it makes of the others",
        do=f"leave out {option('short_batches')}, and give whole batches"
        + (f", or use the statistics of the model: {option('freeze_statistics')}" if trains(node) else ""),
    )


def count_samples(module: Module) -> None:
    """Let a step take how many of its samples count, in place of which of them do: so many from the first on."""
    from irpar.ops.gradients.writer import GradientWriter
    from irpar.passes.add_loss import MASK

    graph = module.graph
    mask = graph.value(MASK)
    count = add_named_input(graph, SAMPLE_COUNT, TensorType(DType.I64, ()))
    writer = GradientWriter(graph, module.opsets, before=graph.first)
    writer.phase = "forward"
    shape = mask.tensor_type.static_shape
    numbers = writer.constant(np.arange(np.prod(shape, dtype=np.int64)).reshape(shape), "sample_numbers")
    mask.replace_uses(writer.op("Less", [numbers, count]))
    graph.remove_input(mask)


def _require_static(value: Value) -> None:
    """Refuse what has sizes that nobody knows.

    Raises:
        DependentSamplesError: see there.
    """
    found = tensor_type(value.type)
    if found is None or not found.is_static:
        raise DependentSamplesError(
            f"{value.source_name} is {value.type}: whether samples depend on each other is not known without its sizes",
            do=f"bind them ({option('bind', {'batch': '8'})}), or leave out {option('short_batches')}",
        )


def _forget_shardings(module: Module) -> None:
    """Take away what says how a model is to be sharded."""
    module.annotations.clear()
    module.annotated.clear()
    module.run_as_said.clear()
    module.meshes.clear()
    module.memory_limit = None
    for graph in module.graphs:
        for node in graph.walk():
            node.strategy = None
        for body in graph.graphs():
            for value in body.values():
                value.sharding = None
