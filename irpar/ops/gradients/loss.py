"""Gradients of losses of classification."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import DType, Node, TensorType, Value

from ..facts import int_attribute, needed, operand, text_attribute
from .writer import GradientWriter, Of


def of_loss(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each row's weight times (softmax - one_hot), of log-probabilities times -one_hot; none of ignored rows.

    The weight of a class gets the terms of its rows, of a mean less the mean itself, divided as the mean is.
    """
    scores, labels, weights = needed(node, 0), needed(node, 1), operand(node, 2)
    is_softmax = node.op_type == "SoftmaxCrossEntropyLoss"

    def data() -> Value:
        parts = []
        softmax = _softmax(node, scores, w) if is_softmax else None
        if of[0] is not None:
            hot = _one_hot(scores, labels, w)
            slope = w.neg(hot) if softmax is None else w.sub(softmax, hot)
            each = _Rows(node, scores, labels, w).weighted(of[0])
            parts.append(w.mul(slope, w.unsqueeze(each, [1])))
        if len(of) > 1 and of[1] is not None and softmax is not None:
            parts.append(w.sub(of[1], w.mul(softmax, w.sum(of[1], [1]))))
        return parts[0] if len(parts) == 1 else w.add(*parts)

    def of_weights() -> Value | None:
        assert weights is not None
        if of[0] is None:
            return None
        rows = _Rows(node, scores, labels, w)
        logs = w.op("LogSoftmax", [scores], {"axis": 1}) if is_softmax else scores
        index = w.unsqueeze(rows.labels, [1])
        terms = w.neg(w.squeeze(w.op("GatherElements", [logs, index], {"axis": 1}), [1]))
        if rows.reduction == "mean":
            terms = w.sub(terms, node.results[0])
        terms = w.mul(terms, rows.share(of[0]))
        if rows.counted is not None:
            terms = w.mul(terms, rows.counted)
        flat, places = w.reshape(terms, [-1]), w.reshape(w.cast(rows.labels, DType.I64), [-1])
        return w.scattered("ScatterElements", w.shape_of(weights), places, flat, {"axis": 0}, type=weights.type)

    return w.each(data, None, of_weights if weights is not None else None)


def _softmax(node: Node, scores: Value, w: GradientWriter) -> Value:
    """From the log-probabilities, which the loss has computed: they become a result of it."""
    if len(node.results) == 1:
        node.add_result(Value("log_probabilities", scores.type))
    return w.op("Exp", [node.results[1]])


def _one_hot(scores: Value, labels: Value, w: GradientWriter) -> Value:
    # ONNX has none of bfloat16, ONNX Runtime none of float64.
    counted = DType.I64 if scores.dtype is DType.F64 else w.wide(scores.dtype)
    ends = w.constant(np.asarray([0, 1]).astype(counted.numpy), "off_on")
    type_ = TensorType(counted, scores.tensor_type.shape)
    return w.cast(w.op("OneHot", [labels, w.size_of(scores, 1), ends], {"axis": 1}, type=type_), scores.dtype)


class _Rows:
    """What the rows of a loss count.

    Attributes:
        reduction: none, sum or mean.
        labels: those of ignored rows replaced by one that there is.
        counted: 0 for ignored rows, 1 for others; None where none is ignored.
        each: the weight of each row; None where all count 1.
    """

    def __init__(self, node: Node, scores: Value, labels: Value, w: GradientWriter) -> None:
        self.reduction = text_attribute(node, "reduction", "mean")
        self.labels, self.counted, self.w = labels, None, w
        if "ignore_index" in node.attributes:
            ignored = w.op("Equal", [labels, w.cast(w.constant(int_attribute(node, "ignore_index")), labels.dtype)])
            self.labels = w.where(ignored, w.cast(w.constant(0), labels.dtype), labels)
            self.counted = w.where(ignored, w.number(0, scores), w.number(1, scores))
        self.each: Value | None = self.counted
        weights = operand(node, 2)
        if weights is not None:
            self.each = w.op("Gather", [weights, self.labels])
            if self.counted is not None:
                self.each = w.mul(self.each, self.counted)

    def share(self, g: Value) -> Value:
        """The gradient of the loss as each row's term gets it, before its weight."""
        w = self.w
        if self.reduction != "mean":
            return g
        if self.each is not None:
            return w.share(g, w.op("ReduceSum", [w.widened(self.each)], {"keepdims": 0}))
        if self.labels.is_static:
            return w.share(g, float(np.prod(self.labels.shape)))
        return w.share(g, w.op("Size", [self.labels]))

    def weighted(self, g: Value) -> Value:
        """The same with its weight: of the shape of the labels."""
        share = self.share(g)
        if self.each is not None:
            return self.w.mul(self.each, share)
        return share if self.reduction == "none" else self.w.op("Expand", [share, self.w.shape_of(self.labels)])
