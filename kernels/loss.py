"""Losses of classifiers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .faults import FAULTS
from .normalization import log_softmax_of, softmax_scratch, softmax_temporaries
from .operands import compute_dtype, fitting, narrow, one_of, widen, written
from .registry import Array, ArrayModule, Shaped, kernel


def _negative_log_likelihood(
    xp: ArrayModule, log_probability: Array, target: Array, weight: Array | None, reduction: str, ignored: int | None
) -> Array:
    """The loss from log-probabilities (batch, classes, *dims) in their compute dtype."""
    one_of("reduction", reduction, ("none", "sum", "mean"))
    classes = log_probability.shape[1]
    counted = xp.ones(target.shape, dtype=bool) if ignored is None else target != ignored
    label = xp.where(counted, target, xp.zeros_like(target))
    if label.size:
        FAULTS.refuse((label < 0) | (label >= classes), f"a target is outside [0, {classes - 1}]")
    picked = xp.take_along_axis(log_probability, xp.expand_dims(label, 1).astype(np.int64), axis=1)
    share = counted.astype(log_probability.dtype)
    if weight is not None:
        share = share * xp.take(widen(weight), label, axis=0)
    losses = -picked.reshape(target.shape) * share
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / share.sum()


def _temporary_bytes(
    operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]
) -> int:
    """For what is made of each target, and the log-probabilities where they are no result."""
    scores, target = operands[0], operands[1]
    if scores is None or target is None:
        return 0
    beside = 0 if len(results) > 1 else scores.elements * compute_dtype(scores.dtype).itemsize
    beside += softmax_temporaries(operands, results, attributes, axis=1)
    return 7 * target.elements * np.dtype(np.int64).itemsize + beside


@kernel("NegativeLogLikelihoodLoss", since=12, temporaries=_temporary_bytes)
def negative_log_likelihood_loss(
    xp: ArrayModule,
    x: Array,
    target: Array,
    weight: Array | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    out: Array | None = None,
) -> Array:
    """Weighted negative log-likelihood; the mean is over the weights of targets that are not ignored."""
    loss = _negative_log_likelihood(xp, widen(x), target, weight, reduction, ignore_index)
    return written(xp, narrow(xp.asarray(loss), x.dtype), out)


@kernel("SoftmaxCrossEntropyLoss", since=12, scratch=softmax_scratch, temporaries=_temporary_bytes)
def softmax_cross_entropy_loss(
    xp: ArrayModule,
    scores: Array,
    labels: Array,
    weight: Array | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    outs: Sequence[Array | None] = (),
) -> tuple[Array, Array]:
    """Cross-entropy of softmax(scores) over dim 1; gives the loss and the log-probabilities."""
    of_loss, of_log, *_ = (*outs, None, None)
    log_probability = log_softmax_of(xp, widen(scores), 1, fitting(of_log, scores.dtype, scores))
    loss = _negative_log_likelihood(xp, log_probability, labels, weight, reduction, ignore_index)
    return (
        written(xp, narrow(xp.asarray(loss), scores.dtype), of_loss),
        written(xp, narrow(log_probability, scores.dtype), of_log),
    )
