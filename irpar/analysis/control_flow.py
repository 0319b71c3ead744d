"""Type inference of If, Loop and Scan: bodies get the types of what flows in, results those of what flows out."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from irpar.ir import UNKNOWN, Dim, DType, Graph, Ints, Node, TensorType, Type, Value

if TYPE_CHECKING:
    from .inference import Inference

MAX_ROUNDS = 8
"""Rounds after which the dims of a loop's carried values are given up; each round makes at least one dim unknown."""

INT = TensorType(DType.I64, ())
FLAG = TensorType(DType.BOOL, ())


def infer_if(inference: "Inference", node: Node) -> Sequence[Type]:
    """What holds for the results of both branches."""
    from .inference import TypeInferenceError, common

    branches = list(node.nested_graphs())
    for branch in branches:
        inference.visit(branch)
    found = []
    for index, pair in enumerate(zip(*(branch.outputs for branch in branches), strict=True)):
        try:
            found.append(common([value.type for value in pair]))
        except TypeInferenceError as error:
            raise TypeInferenceError(
                f"result {index} is {error.what}: the branches differ", where=f"node {node.label}", do=error.do
            ) from None
    return found


def _stable(inference: "Inference", node: Node, body: Graph, carried: Sequence[Value], types: list[Type]) -> list[Type]:
    """Types that the carried values keep from round to round: those of the start, less what a round changes.

    The start gives f32[1, 4]; a round that appends a row gives f32[2, 4]; what holds for both is f32[_, 4]; that stays.
    """
    from .inference import TypeInferenceError, common

    declared = {value: value.type for graph in body.graphs() for value in graph.values() if value.data is None}
    shift = len(body.outputs) - len(declared)
    for _ in range(MAX_ROUNDS):
        for value, type_ in zip(carried, types, strict=True):
            value.type = type_
        inference.graph(body)
        first = 1 if node.op_type == "Loop" else 0
        after = [value.type for value in body.outputs[first : first + len(carried)]]
        try:
            wider = [common([before, then]) for before, then in zip(types, after, strict=True)]
        except TypeInferenceError as error:
            raise TypeInferenceError(
                f"a carried value of {node.op_type} is {error.what}: it changes from round to round",
                where=f"node {node.label}",
                do=error.do,
            ) from None
        if wider == types:
            return types
        # The types inside follow from an assumption that did not hold.
        for value, type_ in declared.items():
            value.type = type_
        types = wider
    raise AssertionError(shift)
