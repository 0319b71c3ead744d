"""Cross-entropy of rows of scores, without the copies that its parts make of them."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..faults import FAULTS
from ..operands import contiguous_result, is_view
from ..registry import Array
from .copies import in_order
from .gpu import Gpu, strides_of
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

_PLACES = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}
_KINDS = {"none": 0, "sum": 1, "mean": 2}
_THREADS = 512
_SIDE = 32
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
    """Cross-entropy of softmax(scores) over dim 1, whose elements lie next to each other."""
    element = ELEMENTS.get(scores.dtype, 3)
    if element == 3 or labels.dtype not in _PLACES or reduction not in _KINDS or scores.ndim < 2 or not scores.size:
        return None
    if labels.shape != (scores.shape[0], *scores.shape[2:]) or math.prod(labels.shape) >= 2**31:
        return None
    if weight is not None and (weight.dtype != scores.dtype or weight.shape != (scores.shape[1],)):
        return None
    by_rows, word = _by_rows(scores), FAULTS.word(f"a target is outside [0, {scores.shape[1] - 1}]")
    if by_rows is None or word is None:
        return None
    batches, places, classes = by_rows.shape
    rows, strides = batches * places, strides_of(by_rows)[:2]
    of_loss, of_logs, *_ = (*outs, None, None)
    shape = labels.shape if reduction == "none" else ()
    loss = contiguous_result(of_loss, shape, scores.dtype, gpu)
    losses, shares, norms = (gpu.empty((count,), np.dtype(np.float32)) for count in (rows, rows, 2 * rows))
    program = _program(element, _PLACES[labels.dtype], weight is not None)
    arguments = (
        *(by_rows, in_order(gpu, labels), np.uint64(0) if weight is None else in_order(gpu, weight)),
        *(losses, shares, norms, word, np.uint32(rows), np.uint32(places), np.uint32(classes), *strides),
        *(np.int64(ignore_index or 0), np.int32(ignore_index is not None)),
    )
    blocks = min(rows, _BLOCKS_EACH * gpu.multiprocessors)
    gpu.launch(program, "cross_entropy", blocks, _THREADS, arguments, 8 * _THREADS)
    kind = _KINDS[reduction]
    blocks = 1 if kind else -(-rows // _THREADS)
    arguments = (losses, shares, loss, np.uint32(rows), np.int32(kind))
    gpu.launch(program, "reduced", blocks, _THREADS, arguments, 16 * _THREADS)
    if n_outputs == 1:
        return (loss,)
    logs = contiguous_result(of_logs, scores.shape, scores.dtype, gpu)
    _launch_logarithms(gpu, program, by_rows, norms, logs)
    return loss, logs


def _by_rows(scores: Array) -> Array | None:
    """Scores as batch, place and class, where the last lie next to each other and places evenly apart."""
    inner = tuple(range(2, scores.ndim))
    turned = scores.transpose((0, *inner, 1))
    if turned.strides[-1] != scores.dtype.itemsize and scores.shape[1] > 1:
        return None
    places = math.prod(scores.shape[2:])
    shape = (scores.shape[0], places, scores.shape[1])
    return turned.reshape(shape) if is_view(turned, shape) else None


def _launch_logarithms(gpu: Gpu, program: Program, by_rows: Array, norms: Array, logs: Array) -> None:
    """Write the logarithms in the order of batch, class and place."""
    batches, places, classes = by_rows.shape
    strides = strides_of(by_rows)[:2]
    blocks, most = batches * -(-places // _SIDE) * -(-classes // _SIDE), _BLOCKS_EACH * gpu.multiprocessors
    sizes = [np.uint32(size) for size in by_rows.shape]
    if places == 1:
        arguments = (by_rows, norms, logs, np.uint32(batches), np.uint32(classes), strides[0])
        gpu.launch(program, "logarithms_of_rows", min(batches, most), _THREADS, arguments)
        return
    shared = 4 * _SIDE * (_SIDE + 1)
    gpu.launch(program, "logarithms", min(blocks, 4 * most), _THREADS, (by_rows, norms, logs, *sizes, *strides), shared)


def _program(element: int, place: str, is_weighted: bool) -> Program:
    return Program.file("losses.cu", ELEMENT=element, PLACE=place, WEIGHTED=int(is_weighted))


def all_programs() -> Iterator[Program]:
    """Every program that is launched here, each element with one type of labels."""
    for element, place in ((0, "long long"), (1, "int"), (2, "long long")):
        for is_weighted in (False, True):
            yield _program(element, place, is_weighted)
