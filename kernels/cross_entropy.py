"""Cross-entropy for training: what it keeps for its gradient instead of all logarithms, and the gradient.

Rows of scores are those of all dims but the last, which is that of the classes.
"""

from collections.abc import Sequence

from .loss import softmax_cross_entropy_loss
from .operands import compute_dtype, narrow, widen, written
from .registry import Array, ArrayModule, kernel


@kernel("CrossEntropyForward", since=1, domain="irpar")
def cross_entropy_forward(
    xp: ArrayModule,
    scores: Array,
    labels: Array,
    weight: Array | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    outs: Sequence[Array | None] = (),
) -> tuple[Array, Array]:
    """The loss, as ONNX's SoftmaxCrossEntropyLoss, and what its gradient needs, both as wide as they are computed.

    That is for each row its greatest score, and the logarithm of the sum of the exponentials of its scores less that.
    """
    wide = widen(scores)
    by_classes = xp.moveaxis(wide, -1, 1)
    loss, _ = softmax_cross_entropy_loss(xp, by_classes, labels, weight, ignore_index=ignore_index, reduction=reduction)
    most = wide.max(axis=-1)
    rest = xp.log(xp.exp(wide - most[..., None]).sum(axis=-1))
    of_loss, of_norms, *_ = (*outs, None, None)
    return written(xp, xp.asarray(loss), of_loss), written(xp, xp.stack((most, rest)), of_norms)


def rows_of(xp: ArrayModule, factors: Array, labels: Array) -> Array:
    """Factors that broadcast to scores whose classes are dim 1, as one for each label."""
    batch, *inner = labels.shape
    return xp.broadcast_to(factors, (batch, 1, *inner)).reshape(labels.shape)


@kernel("CrossEntropyGradient", since=1, domain="irpar")
def cross_entropy_gradient(
    xp: ArrayModule,
    scores: Array,
    labels: Array,
    norms: Array,
    factors: Array,
    *,
    length: int = 0,
    out: Array | None = None,
) -> Array:
    """(softmax(scores) - one_hot(labels)) * factors, in the scores' dtype.

    Args:
        xp: the array module.
        scores, labels: as `CrossEntropyForward` had them; a label counts from the end where it is negative, and one
            that is outside is none.
        norms: what that gave.
        factors: of rows; see `rows_of`.
        length: of rows of the result, zeros behind the classes; 0: as many as classes.
        out: what the result is written to, where it has its shape and dtype.
    """
    classes, kind = scores.shape[-1], compute_dtype(scores.dtype)
    most, rest = (each[..., None].astype(kind) for each in norms)
    label, places = labels[..., None], xp.arange(classes)
    hot = (places == label) | (places == label + classes)
    each = rows_of(xp, factors, labels)[..., None].astype(kind)
    found = narrow((xp.exp(widen(scores) - most - rest) - hot.astype(kind)) * each, scores.dtype)
    if length > classes:
        found = xp.pad(found, [*((0, 0) for _ in labels.shape), (0, length - classes)])
    return written(xp, found, out)
