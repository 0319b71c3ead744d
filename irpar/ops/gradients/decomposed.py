"""Nodes that become what they are made of, where they stand."""

from collections.abc import Callable, Mapping, Sequence

from irpar.ir import Node, Type, Value

from ..facts import CannotTellError
from ..op_def import definition
from .writer import GradientWriter, NoGradientError

Infer = Callable[[Node], Sequence[Type]]


def take_apart(node: Node, opsets: Mapping[str, int], infer: Infer | None = None) -> list[Node]:
    """Put the decomposition of a node (`OpDef.decompose`) in its place.

    Args:
        node: of an operator that has one.
        opsets: domain to version for the new nodes; ONNX's own of 18 or later.
        infer: finds result types where the definition of an operator does not.

    Returns:
        The new nodes; none where it cannot be decomposed, and stays.
    """
    assert node.graph is not None
    writer = GradientWriter(node.graph, opsets, before=node, like=node, infer=infer)
    values = _parts(node, writer)
    if values is None:
        return []
    names = [value.name for value in node.results]
    for value, old in zip(values, node.results, strict=True):
        if value.node in writer.made:
            value.type = old.type
    node.replace(values)
    for value, name in zip(values, names, strict=True):
        if value.node in writer.made:
            value.rename(name)
    return writer.made


def has_parts(node: Node, opsets: Mapping[str, int]) -> bool:
    """Whether `take_apart` would replace a node; nothing is left of the question."""
    assert node.graph is not None
    writer = GradientWriter(node.graph, opsets, before=node, like=node)
    if _parts(node, writer) is None:
        return False
    take_back(writer)
    return True


def _parts(node: Node, writer: GradientWriter) -> list[Value] | None:
    """What stands for the results of a node, of nodes that are written; None, and nothing is left, where that fails."""
    known = definition(node)
    assert known is not None
    assert known.decompose is not None
    try:
        return list(known.decompose(node, writer))
    except (CannotTellError, NoGradientError):
        take_back(writer)
        return None


def take_back(writer: GradientWriter) -> None:
    """Erase what was written."""
    for made in reversed(writer.made):
        made.erase_forced()
