"""The evaluation program of a training step: the loss of a batch as the model is used, on the state of the step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from irpar.analysis.optimizer_parallel import SAID
from irpar.ir import Module
from irpar.ir.annotate import annotate_further
from irpar.ir.state import MODEL_KINDS
from irpar.ir.state_rules import add_states
from irpar.output.plan_record import Plan
from irpar.sharding import Sharding

from .micro_batches import as_one_batch
from .settings import Settings
from .step import with_loss


def make_evaluation(model: Module, settings: Settings, plan: Plan) -> Module:
    """The program, on the mesh of a training step and sharded as that is.

    Args:
        model: what the step was made of, with its annotations; it stays as it is.
        settings: of the step.
        plan: of the step. What it holds as parameters and statistics is state here, which no result replaces.
    """
    from irpar.ir.collector import collector_off
    from irpar.pass_manager import without_copies

    with collector_off():
        return without_copies(lambda: _evaluation(model, settings, plan))


def _evaluation(model: Module, settings: Settings, plan: Plan) -> Module:
    from irpar.differentiation import clean, normalise
    from irpar.ir import clone_module
    from irpar.passes.training_mode.inference import drop_nothing, use_statistics

    module = clone_module(model)
    module.metadata.pop(SAID, None)  # The step has no optimizer here.
    module.set_mesh(plan.mesh_of_ranks)
    with_loss(module, replace(settings, micro_batches=1, short_batches=False), counted=True)
    use_statistics(module)
    drop_nothing(module)
    graph = module.graph
    held = {entry["name"]: entry for entry in plan.state if entry["kind"] in MODEL_KINDS}
    known = {value.source_name: value for value in (*graph.inputs, *graph.constants)}
    normalise(module, [known[name] for name in held if name in known])
    for value in add_states(module, {name: entry["kind"] for name, entry in held.items() if name in known}):
        # Its numbers are those of the step, which holds them.
        graph.states[value] = replace(graph.states[value], data=None)
    clean(module)
    _shard_as(module, [*held.values(), *(as_one_batch(plan.training, entry) for entry in plan.inputs)])
    return module


def _shard_as(module: Module, entries: Sequence[Mapping[str, Any]]) -> None:
    """Shard inputs as plan.json says of another program."""
    named = {value.source_name: value for value in module.graph.inputs}
    for entry in entries:
        value = named.get(entry["name"])
        if value is not None and entry["sharding"] is not None:
            annotate_further(module, value, Sharding.of_spec(module.mesh, entry["sharding"]), "the training step")
