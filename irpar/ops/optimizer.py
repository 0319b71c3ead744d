"""Optimizer steps of ai.onnx.preview.training: elementwise for each tensor and what is kept beside it."""

from collections.abc import Sequence
from math import prod

from irpar.ir import Node, Type

from .facts import CannotTellError, needed, shape_of, shapes_of
from .gradients.refused import OPTIMIZER
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, RuleBuilder, whole

KEPT = {"Adagrad": 1, "Momentum": 1, "Adam": 2}
"""Tensors that a step keeps beside each parameter: the sum of squares, the velocity, two moments."""
_FLOPS = {"Adagrad": 8, "Momentum": 6, "Adam": 14}
"""For each element of a parameter, by irpar's convention."""


def _count(node: Node) -> int:
    """How many parameters a step changes: operands are rate, count, parameters, gradients, and what is kept."""
    parts = 2 + KEPT[node.op_type]
    count, rest = divmod(len(node.operands) - 2, parts)
    if rest:
        raise CannotTellError("operands that are no whole number of parameters")
    return count


def _kept(node: Node) -> list[int]:
    """For each result the operand that it replaces: parameters first, then what is kept."""
    count = _count(node)
    return [*range(2, 2 + count), *range(2 + 2 * count, 2 + (2 + KEPT[node.op_type]) * count)]


def _infer_step(node: Node) -> Sequence[Type]:
    return [needed(node, index).type for index in _kept(node)][: len(node.results)]


def _rule_step(node: Node) -> FactorRule:
    """`([],[],[i,j],[i,j],[i,j])->([i,j],[i,j])` for one parameter: every dim passes."""
    count = _count(node)
    rule = RuleBuilder()
    parameters = [rule.dims(shape_of(node, 2 + index)) for index in range(count)]
    rest: list[list[DimFactors]] = parameters * (2 + KEPT[node.op_type])
    results = parameters * (1 + KEPT[node.op_type])
    scalars = [whole(len(shape or ())) for shape in shapes_of(node)[:2]]
    # Elementwise, so that one parameter may be empty beside others that are not.
    return rule.done([*scalars, *rest], results[: len(node.results)], runs_empty=range(len(rule.sizes)))


def _cost_step(node: Node) -> int:
    return _FLOPS[node.op_type] * sum(prod(shape_of(node, 2 + index)) for index in range(_count(node)))


for _name in KEPT:
    define(OpDef("ai.onnx.preview.training", _name, _infer_step, _rule_step, _cost_step, gradient=OPTIMIZER))
