"""Cross-entropy of rows of scores, without the copies that its parts make of them."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..faults import FAULTS
from ..registry import Array
from .copies import in_order
from .gpu import Gpu
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

_PLACES = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}
_KINDS = {"none": 0, "sum": 1, "mean": 2}
_THREADS = 512
_BLOCKS_EACH = 4


@cuda_kernel("SoftmaxCrossEntropyLoss", since=12)
def softmax_cross_entropy_loss(
    gpu: Gpu,
    scores: Array,
    labels: Array,
    weight: Array | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    n_outputs: int,
    outs: Sequence[Array | None] = (),
) -> tuple[Array, ...] | None:
    """Cross-entropy of softmax(scores) over dim 1, which must be the last but for dims of one element."""
    element = ELEMENTS.get(scores.dtype, 3)
    if element == 3 or labels.dtype not in _PLACES or reduction not in _KINDS or scores.ndim < 2 or not scores.size:
        return None
    rows, classes = scores.shape[:2]
    if math.prod(scores.shape[2:]) != 1 or labels.shape != (rows, *scores.shape[2:]) or scores.size >= 2**40:
        return None
    if weight is not None and (weight.dtype != scores.dtype or weight.shape != (classes,)):
        return None
    word = FAULTS.word(f"a target is outside [0, {classes - 1}]")
    if word is None:
        return None
    of_loss, of_logs, *_ = (*outs, None, None)
    shape = labels.shape if reduction == "none" else ()
    loss = of_loss if _fits(of_loss, shape, scores.dtype) else gpu.empty(shape, scores.dtype)
    logs = None
    if n_outputs > 1:
        logs = of_logs if _fits(of_logs, scores.shape, scores.dtype) else gpu.empty(scores.shape, scores.dtype)
    losses, shares = (gpu.empty((rows,), np.dtype(np.float32)) for _ in range(2))
    program = _program(element, _PLACES[labels.dtype], weight is not None, logs is not None)
    nowhere = np.uint64(0)
    arguments = (
        *(in_order(gpu, scores), in_order(gpu, labels), nowhere if weight is None else in_order(gpu, weight)),
        *(losses, shares, nowhere if logs is None else logs, word, np.uint32(rows), np.uint32(classes)),
        *(np.int64(ignore_index or 0), np.int32(ignore_index is not None)),
    )
    blocks = min(rows, _BLOCKS_EACH * gpu.multiprocessors)
    gpu.launch(program, "cross_entropy", blocks, _THREADS, arguments, 8 * _THREADS)
    kind = _KINDS[reduction]
    blocks = 1 if kind else -(-rows // _THREADS)
    gpu.launch(
        program, "reduced", blocks, _THREADS, (losses, shares, loss, np.uint32(rows), np.int32(kind)), 16 * _THREADS
    )
    return (loss,) if logs is None else (loss, logs)


def _fits(out: Array | None, shape: tuple[int, ...], dtype: "np.dtype[np.generic]") -> bool:
    return out is not None and out.shape == shape and out.dtype == dtype and bool(out.flags.c_contiguous)


def _program(element: int, place: str, is_weighted: bool, has_logs: bool) -> Program:
    return Program.file("losses.cu", ELEMENT=element, PLACE=place, WEIGHTED=int(is_weighted), LOGS=int(has_logs))


def all_programs() -> Iterator[Program]:
    """Every program that is launched here, each element with one type of labels."""
    for element, place in ((0, "long long"), (1, "int"), (2, "long long")):
        for number in range(4):
            yield _program(element, place, bool(number & 1), bool(number & 2))
