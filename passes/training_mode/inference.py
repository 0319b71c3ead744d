"""A model as it is used: nothing is dropped, and BatchNormalization computes with the statistics that it has."""

from irpar.ir import Module
from irpar.ops.training_batch_norm import trains

_MODE = 2
"""Which operand of Dropout says that it drops."""


def use_statistics(module: Module) -> int:
    """Let each BatchNormalization that takes the statistics of its batch take those that it has; returns how many."""
    found = [node for node in module.graph.walk() if trains(node)]
    for node in found:
        # It passes on what it reads: running statistics stay.
        for before, after in zip(node.inputs[-2:], node.results[1:], strict=False):
            after.replace_uses(before)
        node.set_results(node.results[:1])
        node.set_attribute("training_mode", None)
    return len(found)


def drop_nothing(module: Module) -> None:
    """Let each Dropout pass on what it reads."""
    for node in module.graph.walk():
        if node.identity == ("", "Dropout"):
            node.set_operands(node.operands[:_MODE])
