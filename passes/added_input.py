"""Inputs that passes of training add to a graph, by names that runs know them by."""

from irpar.errors import IrparError
from irpar.ir import Graph, TensorType, Value


class TakenNameError(IrparError):
    """A name that training adds, and that the model has."""


def add_named_input(graph: Graph, name: str, type_: TensorType) -> Value:
    """A new input of that name.

    Raises:
        TakenNameError: the model has an input or an initializer of that name.
    """
    if any(value.source_name == name for value in (*graph.inputs, *graph.constants)):
        raise TakenNameError(
            f'the model has a tensor called "{name}" already, which is what training adds', do="rename it"
        )
    return graph.add_input(name, type_, name)
