"""Fourier transforms: the transformed axis and the two parts of a complex number are whole, other dims pass."""

from collections.abc import Sequence
from math import prod

from irpar.ir import Dim, Node, Type
from irpar.ir.dims import floordiv

from .facts import (
    CannotTellError,
    axis_attribute,
    axis_of,
    dims_of,
    int_attribute,
    ints_operand,
    needed_ints,
    operand,
    result_shape,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients.signal import decompose_irfft, decompose_rfft, decompose_stft, of_dft
from .microsoft import microsoft
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

# -- DFT ------------------------------------------------------------------------------------------------------------


def _scalar_of(node: Node, index: int) -> int | None:
    """The number of a constant operand of one element; None where it is left out."""
    found = ints_operand(node, index)
    if found is None:
        return None
    if len(found) != 1:
        raise CannotTellError("several numbers for one")
    return found[0]


def _dft_axis(node: Node, rank: int) -> int:
    if node.version < 20:
        return axis_attribute(node, rank, 1)
    found = _scalar_of(node, 2)
    return axis_of(-2 if found is None else found, rank)


def _bins(length: int, is_onesided: int) -> int:
    """Frequencies of a spectrum: of a real signal half of them say all."""
    return length // 2 + 1 if is_onesided else length


def _infer_dft(node: Node) -> Sequence[Type]:
    dims = list(dims_of(node, 0))
    axis = _dft_axis(node, len(dims))
    length: Dim = _scalar_of(node, 1)
    onesided, inverse = int_attribute(node, "onesided", 0), int_attribute(node, "inverse", 0)
    if onesided and inverse:
        raise CannotTellError("a real signal from half of its spectrum")
    if length is None:
        length = dims[axis]
    if length is None:
        raise CannotTellError("the length of the transform")
    dims[axis] = floordiv(length, 2) + 1 if onesided else length
    dims[-1] = 2
    return [tensor_of(node, 0).with_shape(tuple(dims))]


def _rule_dft(node: Node) -> FactorRule:
    """`([b,n,c],[],[])->([b,m,2])`: b passes."""
    shape = shape_of(node, 0)
    inside = {_dft_axis(node, len(shape)), len(shape) - 1}
    return _rule_outside(node, inside)


def _rule_outside(node: Node, inside: set[int]) -> FactorRule:
    """Dims pass but for those inside the transform; operands after the first are whole."""
    rule = RuleBuilder()
    shape = shape_of(node, 0)
    dims = [rule.dims([size], Kind.REPLICATE if dim in inside else Kind.PASS)[0] for dim, size in enumerate(shape)]
    others = [() if other is None else whole(len(other)) for other in shapes_of(node)[1:]]
    passes: list[DimFactors] = [() if dim in inside else factors for dim, factors in enumerate(dims)]
    rank = len(result_shape(node))
    return rule.done([dims, *others], [[*passes, *[()] * rank][:rank]])


def _cost_dft(node: Node) -> int:
    """5 n log2 n for each transform of n complex numbers, as fast Fourier transforms are counted."""
    shape = shape_of(node, 0)
    return _fft_flops(prod(shape) // shape[-1], shape[_dft_axis(node, len(shape))])


def _fft_flops(elements: int, length: int) -> int:
    return 5 * elements * max(length - 1, 1).bit_length()


define(OpDef("", "DFT", _infer_dft, _rule_dft, _cost_dft, gradient=of_dft))


# -- STFT -----------------------------------------------------------------------------------------------------------


def _frame(node: Node) -> int:
    """The length of a frame."""
    found = _scalar_of(node, 3)
    if found is not None:
        return found
    if operand(node, 2) is None:
        raise CannotTellError("the length of a frame")
    size = dims_of(node, 2)[0]
    if not isinstance(size, int):
        raise CannotTellError("the length of a frame")
    return size


def _infer_stft(node: Node) -> Sequence[Type]:
    batch, length, *_ = dims_of(node, 0)
    (step,) = needed_ints(node, 1)
    frame = _frame(node)
    if length is None or step <= 0:
        raise CannotTellError("the number of frames")
    bins = _bins(frame, int_attribute(node, "onesided", 1))
    return [tensor_of(node, 0).with_shape((batch, floordiv(length - frame, step) + 1, bins, 2))]


def _rule_stft(node: Node) -> FactorRule:
    """`([b,n,c],[],[w],[])->([b,f,m,2])`: b passes; frames overlap."""
    return _rule_outside(node, set(range(1, len(shape_of(node, 0)))))


def _cost_stft(node: Node) -> int:
    batch, frames = result_shape(node)[:2]
    return _fft_flops(batch * frames * _frame(node), _frame(node))


define(OpDef("", "STFT", _infer_stft, _rule_stft, _cost_stft, decompose=decompose_stft))


# -- com.microsoft: Rfft, Irfft over the last dims ------------------------------------------------------------------


def _signal_dims(node: Node) -> int:
    count = int_attribute(node, "signal_ndim", 1)
    if count != 1 or not int_attribute(node, "onesided", 1) or int_attribute(node, "normalized", 0):
        raise CannotTellError("a transform over several dims")
    return count


def _infer_rfft(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    count = _signal_dims(node)
    if node.op_type == "Rfft":
        length = dims[-1]
        shape: tuple[Dim, ...] = (*dims[:-count], None if length is None else floordiv(length, 2) + 1, 2)
    else:
        length = dims[-2]
        shape = (*dims[: -count - 1], None if length is None else (length - 1) * 2)
    return [tensor_of(node, 0).with_shape(shape)]


def _rule_rfft(node: Node) -> FactorRule:
    """`([b,n])->([b,m,2])` and back: b passes."""
    rank = len(shape_of(node, 0))
    inside = _signal_dims(node) + (node.op_type == "Irfft")
    return _rule_outside(node, set(range(rank - inside, rank)))


def _cost_rfft(node: Node) -> int:
    shape = shape_of(node, 0) if node.op_type == "Rfft" else result_shape(node)
    return _fft_flops(prod(shape), shape[-1])


for _name, _decompose in (("Rfft", decompose_rfft), ("Irfft", decompose_irfft)):
    microsoft(_name, _infer_rfft, _rule_rfft, _cost_rfft, decompose=_decompose)
