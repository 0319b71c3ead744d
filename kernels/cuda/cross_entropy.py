"""Cross-entropy for training, which reads scores once in each direction; see `irpar.kernels.cross_entropy`."""

from collections.abc import Sequence

from ..cross_entropy import rows_of
from ..operands import FLOAT32, contiguous_result
from ..registry import Array
from .copies import in_order
from .gpu import Gpu
from .losses import Rows, launch_gradient, launch_losses
from .registry import cuda_kernel


@cuda_kernel("CrossEntropyForward", since=1, domain="irpar")
def cross_entropy_forward(
    gpu: Gpu,
    scores: Array,
    labels: Array,
    weight: Array | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    outs: Sequence[Array | None] = (),
) -> tuple[Array, ...] | None:
    """The loss, and the norms of rows whose elements lie next to each other."""
    rows = Rows.of(scores, labels)
    if rows is None:
        return None
    of_loss, of_norms, *_ = (*outs, None, None)
    return launch_losses(gpu, rows, weight, ignore_index, reduction, of_loss, FLOAT32, of_norms)


@cuda_kernel("CrossEntropyGradient", since=1, domain="irpar")
def cross_entropy_gradient(
    gpu: Gpu,
    scores: Array,
    labels: Array,
    norms: Array,
    factors: Array,
    *,
    length: int = 0,
    out: Array | None = None,
) -> Array | None:
    """The gradient of scores whose elements lie next to each other."""
    rows = Rows.of(scores, labels)
    if rows is None or norms.dtype != FLOAT32 or factors.dtype != FLOAT32:
        return None
    shape = (*labels.shape, length or scores.shape[-1])
    gradient = contiguous_result(out, shape, scores.dtype, gpu)
    of_rows = in_order(gpu, rows_of(gpu.module, factors, labels))
    launch_gradient(gpu, rows, in_order(gpu, norms), of_rows, gradient)
    return gradient
