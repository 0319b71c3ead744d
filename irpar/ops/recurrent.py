"""RNN, GRU and LSTM: the batch passes; steps follow each other, and each needs the whole state."""

from collections.abc import Sequence

from irpar.ir import Node, Type

from .facts import CannotTellError, dims_of, int_attribute, operand, shape_of, tensor_of
from .gradients.recurrent import decompose_recurrent
from .gradients.refused import ROUNDS
from .local_programs.directions import DIRECTIONS
from .microsoft import microsoft
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_FLOPS_PER_GATE = 4
"""Bias, activation and update of one element of a gate, by irpar's convention."""


def _sizes(node: Node) -> tuple[int, int, int, int, int]:
    """Steps, batch, input size, directions, hidden size."""
    first, second, inputs = shape_of(node, 0)
    steps, batch = (second, first) if int_attribute(node, "layout", 0) else (first, second)
    directions, _, hidden = shape_of(node, 2)
    return steps, batch, inputs, directions, hidden


def _infer_recurrent(node: Node) -> Sequence[Type]:
    data, weights = dims_of(node, 0), dims_of(node, 2)
    if len(data) != 3 or len(weights) != 3:
        raise CannotTellError("operands of another rank")
    directions, _, hidden = weights
    if int_attribute(node, "layout", 0):
        batch, steps, _ = data
        sequence, state = (batch, steps, directions, hidden), (batch, directions, hidden)
    else:
        steps, batch, _ = data
        sequence, state = (steps, directions, batch, hidden), (directions, batch, hidden)
    of = tensor_of(node, 0)
    return [of.with_shape(sequence), of.with_shape(state), of.with_shape(state)][: len(node.results)]


def _rule_recurrent(node: Node) -> FactorRule:
    """`([s,b,i],[d,g,i],[d,g,h],[d,g],[b],[d,b,h],..)->([s,d,b,h],[d,b,h],..)`: b passes; with layout 1 it comes first.

    Two directions may be sharded by their local program, which turns the steps around for one of them.
    """
    steps, size, inputs, directions, hidden = _sizes(node)
    batch_first = bool(int_attribute(node, "layout", 0))
    rule = RuleBuilder()
    (batch,) = rule.dims([size])
    step, inside, direction, state = rule.dims([steps, inputs, directions, hidden], Kind.REPLICATE)

    def around(before: list[DimFactors], after: DimFactors) -> list[DimFactors]:
        """The dims of a tensor with the batch where the layout has it."""
        return [batch, *before, after] if batch_first else [*before, batch, after]

    initial = around([direction], state)
    operands: list[list[DimFactors]] = [around([step], inside)]
    for index in range(1, len(node.operands)):
        if operand(node, index) is None:
            operands.append([])
        elif index == 4:
            operands.append([batch])
        elif index in (5, 6):
            operands.append(initial)
        else:
            operands.append([direction, *whole(len(shape_of(node, index)) - 1)])
    results = [around([step, direction], state), initial, initial]
    return rule.done(operands, results[: len(node.results)])


def _cost_recurrent(node: Node) -> int:
    """For each step, row and direction: the products of input and state with their weights, and the gates."""
    steps, batch, inputs, directions, hidden = _sizes(node)
    gates = GATES[node.op_type] * hidden
    return steps * batch * directions * gates * (2 * (inputs + hidden) + _FLOPS_PER_GATE)


for _name in GATES:
    define(
        OpDef(
            "",
            _name,
            _infer_recurrent,
            _rule_recurrent,
            _cost_recurrent,
            local_program=DIRECTIONS,
            decompose=decompose_recurrent,
        )
    )


# -- quantised -----------------------------------------------------------------------------------------------------


def _infer_quantized(node: Node) -> Sequence[Type]:
    """`(x [s,b,i], w [d,i,4h], r [d,h,4h], ..)`: the weights are transposed, all else is as for LSTM."""
    data, weights = dims_of(node, 0), dims_of(node, 2)
    if len(data) != 3 or len(weights) != 3:
        raise CannotTellError("operands of another rank")
    (steps, batch, _), (directions, hidden, _) = data, weights
    of = tensor_of(node, 0)
    state = of.with_shape((directions, batch, hidden))
    return [of.with_shape((steps, directions, batch, hidden)), state, state][: len(node.results)]


def _cost_quantized(node: Node) -> int:
    """As of an LSTM."""
    (steps, batch, inputs), (directions, hidden, gates) = shape_of(node, 0), shape_of(node, 2)
    return steps * batch * directions * gates * (2 * (inputs + hidden) + _FLOPS_PER_GATE)


microsoft("DynamicQuantizeLSTM", _infer_quantized, flops=_cost_quantized, gradient=ROUNDS)
