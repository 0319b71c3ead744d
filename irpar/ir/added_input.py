"""Inputs that passes of training add to a graph, by names that runs know them by."""

from collections.abc import Collection

from irpar.errors import IrparError

from .graph import Graph
from .types import TensorType
from .value import Value


class TakenNameError(IrparError):
    """A name that training adds, and that the model has."""


def add_named_input(graph: Graph, name: str, type_: TensorType, taken: Collection[str] | None = None) -> Value:
    """A new input of that name.

    Args:
        graph: gets it.
        name: its name.
        type_: its type.
        taken: the names of inputs and initializers, where they are known: who adds many asks once.

    Raises:
        TakenNameError: the model has an input or an initializer of that name.
    """
    if taken is None:
        taken = {value.source_name for value in (*graph.inputs, *graph.constants)}
    if name in taken:
        raise TakenNameError(
            f'the model has a tensor called "{name}" already, which is what training adds', do="rename it"
        )
    return graph.add_input(name, type_, name)
