"""Gradients of Fourier transforms: linear maps, whose adjoint is the transform back but for its scale."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import Node, Value

from ..facts import (
    CannotTellError,
    axis_attribute,
    axis_of,
    dims_of,
    int_attribute,
    ints_operand,
    needed,
    needed_ints,
    operand,
)
from .fused import cut
from .writer import GradientWriter, NoGradientError, Of


def _transformed(value: Value, axis: int, w: GradientWriter, *, inverse: bool = False, onesided: bool = False) -> Value:
    """A DFT of the opset that is written."""
    attributes = {"inverse": int(inverse), "onesided": int(onesided)}
    if w.opsets[""] < 20:
        return w.op("DFT", [value], {**attributes, "axis": axis})
    return w.op("DFT", [value, None, w.constant(np.int64(axis), "axis")], attributes)


def _resized(value: Value, axis: int, before: int, after: int, w: GradientWriter) -> Value:
    """The first elements along an axis, or zeros behind them."""
    if before == after:
        return value
    return cut(value, axis, 0, after, w) if after < before else w.pad(value, {axis: (0, after - before)})


def _static(node: Node, axis: int) -> int:
    size = dims_of(node, 0)[axis]
    if not isinstance(size, int):
        raise NoGradientError("because the length of its transform is symbolic")
    return size


def _is_complex(value: Value, w: GradientWriter) -> bool:
    """Whether the last dim has an imaginary part.

    Raises:
        NoGradientError: its size is not known.
    """
    parts = w.dims(value)[-1]
    if not isinstance(parts, int):
        raise NoGradientError("because nothing tells whether it is of complex numbers")
    return parts == 2


def of_dft(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The inverse transform times the length, or the transform by it; half a spectrum gets zeros behind it."""
    x, g = needed(node, 0), of[0]
    assert g is not None
    rank = len(w.dims(x))
    found = ints_operand(node, 2) if node.version >= 20 else None
    axis = axis_attribute(node, rank, 1) if node.version < 20 else axis_of(-2 if found is None else found[0], rank)
    size, given = _static(node, axis), ints_operand(node, 1)
    inverse, onesided = (bool(int_attribute(node, name, 0)) for name in ("inverse", "onesided"))
    if inverse and onesided:
        raise NoGradientError("because it gives a real signal from half of its spectrum")
    if given is None and operand(node, 1) is not None:
        raise NoGradientError("because the length of its transform is computed")
    length, is_complex = given[0] if given is not None else size, _is_complex(x, w)

    def signal() -> Value:
        whole = _resized(g, axis, length // 2 + 1, length, w) if onesided else g
        back = _transformed(whole, axis, w, inverse=not inverse)
        scaled = w.div(back, float(length)) if inverse else w.mul(back, float(length))
        parts = scaled if is_complex else cut(scaled, rank - 1, 0, 1, w)
        return w.shaped_as(_resized(parts, axis, length, size, w), x)

    return w.each(signal)


def decompose_stft(node: Node, w: GradientWriter) -> list[Value]:
    """A DFT of frames, which are picked by their places.

    Raises:
        NoGradientError: a size is symbolic.
    """
    signal, window = needed(node, 0), operand(node, 2)
    (step,), given = needed_ints(node, 1), ints_operand(node, 3)
    length = given[0] if given is not None else None if window is None else w.dims(window)[0]
    total = _static(node, 1)
    if not isinstance(length, int):
        raise NoGradientError("because the length of its frames is symbolic")
    places = np.arange((total - length) // step + 1)[:, None] * step + np.arange(length)
    frames = w.op("Gather", [signal, w.constant(places.astype(np.int64), "places")], {"axis": 1})
    if len(w.dims(signal)) == 2:
        frames = w.unsqueeze(frames, [3])
    if window is not None:
        frames = w.mul(frames, w.unsqueeze(window, [1]))
    is_half = bool(int_attribute(node, "onesided", 1)) and not _is_complex(frames, w)
    return [_transformed(frames, 2, w, onesided=is_half)]


def _check_one_dim(node: Node) -> None:
    """What com.microsoft's transforms are defined for."""
    count = int_attribute(node, "signal_ndim", 1)
    if count != 1 or not int_attribute(node, "onesided", 1) or int_attribute(node, "normalized", 0):
        raise CannotTellError("a transform over several dims")


def decompose_rfft(node: Node, w: GradientWriter) -> list[Value]:
    """A one-sided DFT of the last dim."""
    _check_one_dim(node)
    x = needed(node, 0)
    rank = len(w.dims(x))
    return [_transformed(w.unsqueeze(x, [rank]), rank - 1, w, onesided=True)]


def decompose_irfft(node: Node, w: GradientWriter) -> list[Value]:
    """The real part of an inverse DFT of the whole spectrum, whose other half is the conjugate of the first."""
    _check_one_dim(node)
    x = needed(node, 0)
    rank = len(w.dims(x))
    half = _static(node, rank - 2)
    mirrored = w.op("Gather", [x, w.ints(range(half - 2, 0, -1))], {"axis": rank - 2})
    conjugate = w.mul(mirrored, w.constant(np.asarray([1, -1], x.dtype.numpy), "conjugate"))
    whole = w.op("Concat", [x, conjugate], {"axis": rank - 2})
    return [w.squeeze(cut(_transformed(whole, rank - 2, w, inverse=True), rank - 1, 0, 1, w), [rank - 1])]
