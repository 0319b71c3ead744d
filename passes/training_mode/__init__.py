"""training-mode: a model as it is trained, with statistics of the batch and with dropout."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from irpar.errors import IrparError
from irpar.ir import Module, Node, Value
from irpar.ops.facts import int_attribute
from irpar.pass_manager import Pass, PassResult
from irpar.passes.optimizer.names import NEXT
from irpar.sharding import option

from .dropout import add_dropout
from .inference import use_statistics

_MEAN, _VARIANCE = 3, 4
"""Operands of BatchNormalization."""


class TrainingModeError(IrparError):
    """A model that cannot be trained so."""


@dataclass(frozen=True)
class TrainingMode(Pass):
    """Let each BatchNormalization take the statistics of its batch and keep running ones, and drop elements.

    Before: global view, types are inferred, no function is called, ONNX's operators are of opset 18 or newer. After:
    each BatchNormalization of the main graph is in training mode, its running mean and variance are state of the kind
    statistic; of a model in which some were before, these alone. Elements are dropped where it was asked for, by masks
    of counters: equal under every sharding, and when computed again.

    Attributes:
        freeze_statistics: let BatchNormalization compute with the statistics of the model.
        seed: what the masks begin with; state.
        dropout: name or glob of values to the share of their elements that are dropped. Dropout nodes of the model drop
            what they say; a name that is the result of one goes before that.
    """

    name = "training-mode"
    freeze_statistics: bool = False
    seed: int = 0
    dropout: Mapping[str, float] = field(default_factory=dict)

    def run(self, module: Module) -> PassResult:
        """Change the main graph.

        Raises:
            TrainingModeError: a BatchNormalization is in a body, or its statistics are no initializers; a name of
                `dropout` matches nothing, a share is none, or a Dropout is in a body.
        """
        notes: tuple[str, ...] = ()
        if self.freeze_statistics:
            count = use_statistics(module)
        else:
            nodes = statistics_nodes(module)
            trained = [node for node in nodes if int_attribute(node, "training_mode", 0)] or nodes
            if len(trained) < len(nodes):
                frozen = len(nodes) - len(trained)
                notes = (f"{frozen} of {len(nodes)} BatchNormalization keep their statistics, as the model has them",)
            count = sum(_train(module, node) for node in trained)
        dropped = add_dropout(module, self.dropout, self.seed)
        return PassResult(bool(count or dropped), notes, {"statistics": count, "dropout": dropped})


def statistics_nodes(module: Module) -> list[Node]:
    """The BatchNormalization nodes of the main graph and its bodies."""
    return [node for node in module.graph.walk() if node.identity == ("", "BatchNormalization")]


def running_statistics(module: Module) -> set[Value]:
    """The running means and variances of a model, which are no parameters."""
    return {node.inputs[index] for node in statistics_nodes(module) for index in (_MEAN, _VARIANCE)}


def _train(module: Module, node: Node) -> bool:
    """Set a node to training mode; whether it was not in it yet."""
    graph = module.graph
    if node.graph is not graph:
        raise TrainingModeError(
            "a BatchNormalization in a body of a loop or a branch cannot be set to training mode",
            where=f"node {node.label}",
            do=f"freeze the statistics ({option('freeze_statistics')}), or move it out of the body",
        )
    running = [node.inputs[index] for index in (_MEAN, _VARIANCE)]
    for value in running:
        if value in graph.states:
            raise TrainingModeError(
                f"two BatchNormalization share the running statistic {value.source_name}",
                do=f"freeze the statistics: {option('freeze_statistics')}",
            )
        if not value.is_constant:
            raise TrainingModeError(
                f"the running statistic {value.source_name} is computed by the model: nothing can replace it",
                where=f"node {node.label}",
                do=f"freeze the statistics: {option('freeze_statistics')}",
            )
    is_new = not int_attribute(node, "training_mode", 0)
    node.set_attribute("training_mode", 1)
    results = list(node.results)
    for value in running[len(results) - 1 :]:
        results.append(node.add_result(Value(f"{value.name}{NEXT}", value.type)))
    for value, result in zip(running, results[1:], strict=True):
        name = value.source_name + NEXT
        graph.set_outputs([*graph.outputs, result], [*graph.output_names, name])
        module.add_state(value.source_name, name, kind="statistic")
    return is_new
