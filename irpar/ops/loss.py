"""Losses of classification: batch and places may be sharded; classes too, by a local program."""

from collections.abc import Sequence
from math import prod

import numpy as np

from irpar.ir import Builder, Node, Type, Value

from .facts import dims_of, operand, result_shape, shape_of, tensor_of
from .gradients.loss import of_loss
from .local import typed_like
from .local_programs.loss import LOCAL_PROGRAM, loss_reduction, needs_all_rows
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder

_FLOPS_PER_SCORE = {"NegativeLogLikelihoodLoss": 0, "SoftmaxCrossEntropyLoss": 5}
"""The softmax, as in normalization.FLOPS_PER_ELEMENT."""


def _infer_loss(node: Node) -> Sequence[Type]:
    scores, labels = tensor_of(node, 0), dims_of(node, 1)
    loss = scores.with_shape(labels if loss_reduction(node) == "none" else ())
    return [loss, scores][: len(node.results)]


def _rule_loss(node: Node) -> FactorRule:
    """`([b,c,s],[b,s],[c])->([b,s],[b,c,s])`: b and s pass, or give partial sums of a loss that is one number.

    Whole are b and s of a mean in which rows count differently, and where the log-probabilities are a result too: that
    one would be sharded and the loss partial.
    """
    shape = shape_of(node, 0)
    reduction = loss_reduction(node)
    kind = Kind.PASS if reduction == "none" else Kind.REDUCE
    if needs_all_rows(node):
        kind = Kind.REPLICATE
    rule = RuleBuilder()
    (batch,) = rule.dims(shape[:1], kind)
    (classes,) = rule.dims(shape[1:2], Kind.REPLICATE)
    places = rule.dims(shape[2:], kind)
    scores: list[DimFactors] = [batch, classes, *places]
    labels: list[DimFactors] = [batch, *places]
    operands: list[Sequence[DimFactors]] = [scores, labels]
    if len(node.operands) > 2:
        operands.append([] if operand(node, 2) is None else [classes])
    loss = labels if reduction == "none" else []
    return rule.done(operands, [loss, scores][: len(node.results)])


def _localize_loss(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """The mean over a block is scaled by the block's share of the rows, so that the sum over blocks is the mean."""
    total, count = (prod(shape_of(node, 1)) for node in (whole_node, local))
    if loss_reduction(whole_node) != "mean" or count == total:
        return None
    result = local.result
    mean = typed_like(result, local.op_type, local.operands, local.attributes, builder)
    share = builder.constant(np.asarray(count / total, dtype=result.dtype.numpy), "share")
    return [typed_like(result, "Mul", [mean, share], None, builder)]


def _cost_loss(node: Node) -> int:
    """What the softmax needs, and an add for each row."""
    rows = prod(shape_of(node, 1))
    return _FLOPS_PER_SCORE[node.op_type] * prod(shape_of(node, 0)) + rows * (not result_shape(node))


for _name in _FLOPS_PER_SCORE:
    define(OpDef("", _name, _infer_loss, _rule_loss, _cost_loss, _localize_loss, LOCAL_PROGRAM, gradient=of_loss))
