"""What a scope, a node or a value of the model stands for, of which nothing is to be held."""

from collections.abc import Set

from irpar.ir import Node

from .of_program import Program
from .saved_sets import on_demand


def names_of(node: Node) -> list[str]:
    """What a node is known by: its scope, its name in the model, and those of its results."""
    return [name for name in (node.scope, node.source, *(value.source_name for value in node.results)) if name]


def schedule_without(program: Program, chosen: Set[str]) -> list[int]:
    """The schedule that holds no result of what is known by some names until the backward pass."""
    nodes = enumerate(program.nodes)
    return on_demand(
        program.graph, {place for place, node in nodes if node is None or chosen.isdisjoint(names_of(node))}
    )
