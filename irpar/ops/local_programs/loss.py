"""Local programs of losses over classes that are sharded, and of means whose divisor all rows decide.

loss = SoftmaxCrossEntropyLoss(x : [32, 50000@tp], labels : [32])
                     statistics as in Softmax; each device has the terms of the labels that are among its classes; their
                     sum, and that of the weights that divide a mean: all_reduce(sum) of one or two numbers
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from irpar.ir import DType, Node, Value
from irpar.sharding import Reduction

from ..facts import CannotTellError, int_attribute, needed, operand, shape_of, tensor_of, text_attribute
from .program import FLOATS, Cuts, LocalProgram, ProgramWriter, Sent, Shape, widened

_CLASSES = 1


def loss_reduction(node: Node) -> str:
    """none, sum or mean."""
    found = text_attribute(node, "reduction", "mean")
    if found not in ("none", "sum", "mean"):
        raise CannotTellError("a reduction that ONNX does not have")
    return found


def counts_unevenly(node: Node) -> bool:
    """True where rows count differently in a mean: its divisor is then known only when all rows are."""
    return operand(node, 2) is not None or "ignore_index" in node.attributes


def needs_all_rows(node: Node) -> bool:
    """Whether a device's rows alone tell nothing of the loss; or log-probabilities are a result, of which rows are cut
    where the loss would be partial."""
    reduction = loss_reduction(node)
    return reduction != "none" and ((reduction == "mean" and counts_unevenly(node)) or len(node.results) > 1)


def _dims(node: Node) -> Sequence[int] | None:
    if tensor_of(node, 0).dtype not in FLOATS:
        return None
    return range(len(shape_of(node, 0))) if needs_all_rows(node) else (_CLASSES,)


def _numbers(node: Node) -> int:
    """How many numbers are summed over all devices: the sum, and what divides it."""
    return 2 if loss_reduction(node) == "mean" and counts_unevenly(node) else 1


def _sends(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
    bits = widened(tensor_of(node, 0).dtype).bits
    rows = prod(size for dim, size in enumerate(blocks[0] or ()) if dim != _CLASSES)
    found = []
    if node.op_type == "SoftmaxCrossEntropyLoss" and cuts.get(_CLASSES, 1) > 1:
        found = [Sent("all_reduce", rows, bits, _CLASSES)] * 2
    if loss_reduction(node) == "none":
        return [*found, Sent("all_reduce", rows, bits, _CLASSES)]
    return [*found, Sent("all_reduce", _numbers(node), bits)]


def _log_probabilities(program: ProgramWriter, scores: Value) -> Value:
    if program.whole.op_type == "NegativeLogLikelihoodLoss":
        return scores
    if program.lies.dim_parts(_CLASSES) == 1:
        return program.op("LogSoftmax", [scores], {"axis": _CLASSES})
    most = _over_classes(program, program.reduced("ReduceMax", scores, (_CLASSES,)), "max")
    shifted = program.op("Sub", [scores, most])
    total = program.reduced("ReduceSum", program.op("Exp", [shifted]), (_CLASSES,))
    return program.op("Sub", [shifted, program.op("Log", [_over_classes(program, total, "sum")])])


def _over_classes(program: ProgramWriter, value: Value, reduce: Reduction) -> Value:
    """The reduction of a number for each row over the devices that hold its classes."""
    axes, shape = list(program.lies.axes), list(program.origin.shape)
    over, axes[_CLASSES], shape[_CLASSES] = axes[_CLASSES], (), 1
    return program.all_reduce(value, reduce, axes, shape, over=over)


def _labels(program: ProgramWriter) -> tuple[Value, Value]:
    """The labels relative to the device's classes, 0 where they are not among them or ignored; and where they count."""
    labels = needed(program.local, 1)
    rows = (labels.shape[0], 1, *labels.shape[1:])
    labels = program.op("Unsqueeze", [labels, program.ints([_CLASSES])], shape=rows)
    labels = program.cast(labels, DType.I64)
    zero = program.constant(0, DType.I64)
    relative = labels
    if program.lies.dim_parts(_CLASSES) > 1:
        relative = program.op("Sub", [labels, program.start(_CLASSES)])
    count = program.constant(program.data.shape[_CLASSES], DType.I64)
    tests = [
        program.op("GreaterOrEqual", [relative, zero], dtype=DType.BOOL),
        program.op("Less", [relative, count], dtype=DType.BOOL),
    ]
    if "ignore_index" in program.whole.attributes:
        ignored = program.constant(int_attribute(program.whole, "ignore_index"), DType.I64)
        tests.append(program.op("Not", [program.op("Equal", [labels, ignored], dtype=DType.BOOL)]))
    counts = tests[0]
    for test in tests[1:]:
        counts = program.op("And", [counts, test])
    return program.op("Where", [counts, relative, zero], shape=rows, dtype=DType.I64), counts


def _loss(program: ProgramWriter) -> list[Value]:
    """Each term is made by the device that has the class of its label; the others have zeros."""
    dtype = widened(program.data.dtype)
    known = _log_probabilities(program, program.cast(program.data, dtype))
    label, counts = _labels(program)
    picked = program.op("GatherElements", [known, label], {"axis": _CLASSES}, shape=label.shape)
    weights = operand(program.local, 2)
    zero, one = (program.constant(number, dtype) for number in (0, 1))
    share = one
    if weights is not None:
        weights = program.cast(weights, dtype)
        share = program.op("Gather", [weights, label], {"axis": 0}, shape=label.shape)
        picked = program.op("Mul", [picked, share])
    shape = label.shape
    losses = program.op("Where", [counts, program.op("Neg", [picked]), zero], shape=shape, dtype=dtype)
    shares = program.op("Where", [counts, share, zero], shape=shape, dtype=dtype)
    loss = program.local.results[0]
    results = [program.cast(_reduced(program, losses, shares), loss.dtype)]
    return [*results, *[program.cast(known, like.dtype) for like in program.local.results[1:]]]


def _reduced(program: ProgramWriter, losses: Value, shares: Value) -> Value:
    """The losses of rows as the node reduces them."""
    node, result = program.whole, program.local.results[0]
    reduction = loss_reduction(node)
    if reduction == "none":
        losses = _over_classes(program, losses, "sum")
        return program.op("Squeeze", [losses, program.ints([_CLASSES])], shape=result.shape)
    assert result.sharding is not None
    sums = [_sum(program, value) for value in (losses, shares)[: _numbers(node)]]
    both = sums[0] if len(sums) == 1 else program.op("Concat", sums, {"axis": 0}, shape=(2,))
    both = program.all_reduce(both, "sum", [()], both.shape, pending=result.sharding.partial)
    if len(sums) == 2:
        sum_, divisor = (
            program.op("Gather", [both, program.builder.constant(np.asarray(place, np.int64), "place")], shape=())
            for place in range(2)
        )
        return program.op("Div", [sum_, divisor])
    total = program.op("Reshape", [both, program.ints(())], shape=())
    if reduction == "sum":
        return total
    return program.op("Mul", [total, program.constant(1 / prod(shape_of(node, 1)), total.dtype)])


def _sum(program: ProgramWriter, value: Value) -> Value:
    total = program.reduced("ReduceSum", value, range(len(value.shape)))
    return program.op("Reshape", [total, program.ints([1])], shape=(1,))


LOCAL_PROGRAM = LocalProgram(_sends, _loss, _dims)
"""Over classes; over rows too where all of them decide."""
