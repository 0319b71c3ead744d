"""Operators that are differentiated as what they are made of: these nodes take their place first."""

from collections.abc import Iterable, Mapping

from irpar.ir import Graph, Node, Value
from irpar.ir.graph import captured_or_read
from irpar.ops import definition
from irpar.ops.effects import schema_of
from irpar.ops.facts import CannotTellError
from irpar.ops.gradients.decomposed import Infer, take_apart, take_back
from irpar.ops.gradients.writer import GradientWriter, NoGradientError

from .dependence import is_flat, reached


def decompose(
    graph: Graph, opsets: Mapping[str, int], wanted: Iterable[Value], infer: Infer, *, straight_through: bool = False
) -> int:
    """Replace the nodes that depend on wanted values and have a decomposition instead of a gradient.

    Those in bodies are replaced where the node that holds them depends on such values. Operators that ONNX has not are
    replaced wherever they stand, so that what is differentiated is plain ONNX.

    Returns:
        How many.
    """
    found = set(wanted)
    count = 0
    for node in tuple(graph):
        known = definition(node)
        is_flat_here = is_flat(node, straight_through=straight_through)
        if is_flat_here or not any(value in found for value in captured_or_read(node)):
            if known is not None and known.decompose is not None and _is_foreign(node):
                count += bool(take_apart(node, opsets, infer))
            continue
        made = [node]
        if known is not None and known.decompose is not None and known.gradient is None:
            made = take_apart(node, opsets, infer)
            count += bool(made)
        for nested in node.nested_graphs():
            count += decompose_all(nested, opsets, infer)
        found.update(value for each in made or [node] for value in reached(each))
    return count


def _is_foreign(node: Node) -> bool:
    """Whether ONNX has no such operator."""
    return schema_of(node.domain, node.op_type, node.version) is None


def decompose_all(graph: Graph, opsets: Mapping[str, int], infer: Infer) -> int:
    """The same of all nodes of a body."""
    count = 0
    for node in tuple(graph):
        known = definition(node)
        if known is not None and known.decompose is not None and known.gradient is None:
            count += bool(take_apart(node, opsets, infer))
            continue
        for nested in node.nested_graphs():
            count += decompose_all(nested, opsets, infer)
    return count


def why_not(node: Node, opsets: Mapping[str, int], infer: Infer) -> str:
    """Why a node that has a decomposition was not replaced by it, as part of a sentence."""
    known = definition(node)
    assert node.graph is not None
    assert known is not None
    assert known.decompose is not None
    writer = GradientWriter(node.graph, opsets, before=node, like=node, infer=infer)
    try:
        known.decompose(node, writer)
    except CannotTellError as error:
        return f"its parts take what is not known of it: {error}"
    except NoGradientError as error:
        return str(error)
    finally:
        take_back(writer)
    return "its parts have none"
