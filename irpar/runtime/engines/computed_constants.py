"""What nodes make of constants alone, computed once: weights in the order in which a device reads them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from irpar.ir import Graph, LazyTensor, Node, Value, plain_attribute
from irpar.kernels import Kernel, lookup
from irpar.ops.effects import is_compute, is_deterministic

Array = np.ndarray[Any, Any]
Read = Callable[[Value], Array]
"""Gives the numbers of a constant."""


@dataclass(frozen=True, eq=False)
class _Step:
    """A node of constants.

    Attributes:
        number: its place among them.
    """

    number: int
    kernel: Kernel
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]
    attributes: Mapping[str, Any]

    def run(self, known: dict[Value, Array]) -> None:
        """Compute the results."""
        operands = [None if value is None else known[value] for value in self.operands]
        made = self.kernel(np, operands, self.attributes, len(self.results))
        known.update(zip(self.results, made, strict=True))


def take_computed(graph: Graph, read: Read) -> list[Value]:
    """Let constants take the place of what nodes make of constants alone, where it is no larger than all of these.

    Their numbers are computed when they are asked for. Gives these constants.

    Args:
        graph: of which nodes go.
        read: gives the numbers of its constants.
    """
    step_of: dict[Value, _Step] = {}
    nodes: list[Node] = []
    for node in graph:
        step = _step(node, step_of, len(nodes))
        if step is not None:
            nodes.append(node)
            step_of.update(dict.fromkeys(node.results, step))
    gone = {*nodes}
    found = []
    for value in step_of:
        uses = [use for use in value.uses if use[0] not in gone]
        steps = _steps_for(value, step_of) if uses and not value.is_output else []
        if not steps or value.tensor_type.nbytes > sum(one.tensor_type.nbytes for one in _roots(steps, step_of)):
            continue
        load = partial(_computed, value, steps, tuple(_roots(steps, step_of)), read)
        made = graph.add_constant(LazyTensor(value.dtype, value.shape, load), value.name)
        value.replace_uses(made, uses)
        found.append(made)
    for node in reversed(nodes):
        if not any(value.has_uses for value in node.results):
            node.erase()
    return found


def _step(node: Node, step_of: Mapping[Value, _Step], number: int) -> _Step | None:
    """A node as a step, if it computes something of known type of constants alone."""
    is_fixed = node.inputs and all(value.is_constant or value in step_of for value in node.inputs)
    if not is_fixed or node.callee is not None or node.holds_graphs or not is_compute(node):
        return None
    kernel = lookup(node.domain, node.op_type, node.version)
    if kernel is None or not is_deterministic(node) or not all(value.is_static for value in node.results):
        return None
    attributes = {name: plain_attribute(value) for name, value in node.attributes.items()}
    return _Step(number, kernel, node.operands, node.results, attributes)


def _steps_for(value: Value, step_of: Mapping[Value, _Step]) -> list[_Step]:
    """The steps that lead to a value, in order."""
    needed: set[_Step] = set()
    waiting = [step_of[value]]
    while waiting:
        step = waiting.pop()
        if step not in needed:
            needed.add(step)
            waiting += [step_of[operand] for operand in step.operands if operand is not None and operand in step_of]
    return sorted(needed, key=lambda step: step.number)


def _roots(steps: Sequence[_Step], step_of: Mapping[Value, _Step]) -> dict[Value, None]:
    """The constants that steps read."""
    read = (value for step in steps for value in step.operands)
    return dict.fromkeys(value for value in read if value is not None and value not in step_of)


def _computed(value: Value, steps: Sequence[_Step], roots: Sequence[Value], read: Read) -> Array:
    known = {root: read(root) for root in roots}
    for step in steps:
        step.run(known)
    return np.ascontiguousarray(known[value])
