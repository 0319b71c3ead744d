"""Cross-entropy of rows of scores, without the copies that its parts make of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..faults import FAULTS
from ..operands import FLOAT32, contiguous_result, is_view
from ..registry import Array
from .copies import in_order
from .gpu import Gpu, strides_of
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

_PLACES = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}
_KINDS = {"none": 0, "sum": 1, "mean": 2}
_THREADS = 256
_SIDE = 32
_BLOCKS_EACH = 4
_MOST_BLOCKS = 65535


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
    if scores.ndim < 2 or labels.shape != (scores.shape[0], *scores.shape[2:]):
        return None
    rows = Rows.of(scores.transpose((0, *range(2, scores.ndim), 1)), labels)
    of_loss, of_logs, *_ = (*outs, None, None)
    made = None if rows is None else launch_losses(gpu, rows, weight, ignore_index, reduction, of_loss, scores.dtype)
    if rows is None or made is None or n_outputs == 1:
        return None if made is None else made[:1]
    loss, norms = made
    logs = contiguous_result(of_logs, scores.shape, scores.dtype, gpu)
    _launch_logarithms(gpu, rows, norms, logs)
    return loss, logs


@dataclass(frozen=True)
class Rows:
    """Scores as batch, place and class, where the last lie next to each other and places evenly apart; with labels."""

    scores: Array
    labels: Array

    @classmethod
    def of(cls, scores: Array, labels: Array) -> "Rows | None":
        """Scores whose classes are the last dim; None where the kernels do not take them as they are."""
        if ELEMENTS.get(scores.dtype, 3) == 3 or labels.dtype not in _PLACES or not scores.size or scores.ndim < 2:
            return None
        if labels.shape != scores.shape[:-1] or labels.size >= 2**31:
            return None
        if scores.strides[-1] != scores.dtype.itemsize and scores.shape[-1] > 1:
            return None
        shape = (scores.shape[0], math.prod(scores.shape[1:-1]), scores.shape[-1])
        return cls(scores.reshape(shape), labels) if is_view(scores, shape) else None

    @property
    def size(self) -> int:
        """How many rows there are."""
        return int(self.scores.shape[0] * self.scores.shape[1])

    @property
    def sizes(self) -> tuple[np.uint32, ...]:
        """How many batches, places and classes."""
        return tuple(map(np.uint32, self.scores.shape))

    @property
    def strides(self) -> Sequence[np.int64]:
        """From batch to batch, and from place to place."""
        return strides_of(self.scores)[:2]

    def program(self, is_weighted: bool = False, is_wide: bool = False) -> Program:
        """What is launched for them; see losses.cu."""
        return _program(ELEMENTS[self.scores.dtype], _PLACES[self.labels.dtype], is_weighted, is_wide)


def launch_losses(
    gpu: Gpu,
    rows: Rows,
    weight: Array | None,
    ignored: int | None,
    reduction: str,
    out: Array | None,
    dtype: "np.dtype[Any]",
    norms: Array | None = None,
) -> tuple[Array, Array] | None:
    """The loss, as wide as weights are, and what makes logarithms of scores; None where this is not ours."""
    scores, labels = rows.scores, rows.labels
    classes = scores.shape[-1]
    word = FAULTS.word(f"a target is outside [0, {classes - 1}]")
    if word is None or reduction not in _KINDS:
        return None
    if weight is not None and (weight.dtype != dtype or weight.shape != (classes,)):
        return None
    count = rows.size
    loss = contiguous_result(out, labels.shape if reduction == "none" else (), dtype, gpu)
    losses, shares = (gpu.empty((count,), FLOAT32) for _ in range(2))
    norms = contiguous_result(norms, (2, *labels.shape), FLOAT32, gpu)
    program = rows.program(weight is not None, dtype != scores.dtype)
    arguments = (
        *(scores, in_order(gpu, labels), np.uint64(0) if weight is None else in_order(gpu, weight)),
        *(losses, shares, norms, word, np.uint32(count), *rows.sizes[1:], *rows.strides),
        *(np.int64(ignored or 0), np.int32(ignored is not None)),
    )
    gpu.launch(program, "cross_entropy", min(count, _MOST_BLOCKS), _THREADS, arguments, 8 * _THREADS)
    kind = _KINDS[reduction]
    blocks = 1 if kind else -(-count // _THREADS)
    gpu.launch(
        program, "reduced", blocks, _THREADS, (losses, shares, loss, np.uint32(count), np.int32(kind)), 16 * _THREADS
    )
    return loss, norms


def launch_gradient(gpu: Gpu, rows: Rows, norms: Array, factors: Array, gradient: Array) -> None:
    """Write the gradient of scores, in rows that may be longer."""
    arguments = (
        *(rows.scores, in_order(gpu, rows.labels), norms, factors, gradient, np.uint32(rows.size), *rows.sizes[1:]),
        *(np.uint32(gradient.shape[-1]), *rows.strides),
    )
    blocks = min(rows.size, _MOST_BLOCKS)
    gpu.launch(rows.program(), "cross_entropy_gradient", blocks, _THREADS, arguments)


def _launch_logarithms(gpu: Gpu, rows: Rows, norms: Array, logs: Array) -> None:
    """Write the logarithms in the order of batch, class and place."""
    scores, program = rows.scores, rows.program()
    batches, places, classes = scores.shape
    blocks, most = batches * -(-places // _SIDE) * -(-classes // _SIDE), _BLOCKS_EACH * gpu.multiprocessors
    if places == 1:
        arguments = (scores, norms, logs, np.uint32(batches), np.uint32(classes), rows.strides[0])
        gpu.launch(program, "logarithms_of_rows", min(batches, most), _THREADS, arguments)
        return
    shared = 4 * _SIDE * (_SIDE + 1)
    arguments = (scores, norms, logs, *rows.sizes, *rows.strides)
    gpu.launch(program, "logarithms", min(blocks, 4 * most), _THREADS, arguments, shared)


def _program(element: int, place: str, is_weighted: bool, is_wide: bool) -> Program:
    return Program.file(
        "losses.cu", ELEMENT=element, PLACE=place, WEIGHTED=int(is_weighted), WIDE=int(is_wide and element > 0)
    )


def all_programs() -> Iterator[Program]:
    """Every program that is launched here, each element with one type of labels."""
    for element, place in ((0, "long long"), (1, "int"), (2, "long long")):
        for is_weighted in (False, True):
            yield _program(element, place, is_weighted, False)
        yield _program(element, place, False, True)
