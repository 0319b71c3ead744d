"""Which operators carry partial values: what they give for parts of an operand are parts of what they give for it.

p = MatMul(a : [8@dp, 256@tp], w : [256@tp, 64]) : [8, 64] partial(sum: tp)
q = MatMul(b, v)                                 : [8, 64] partial(sum: tp)
y = Add(p, q)                                    : [8, 64] partial(sum: tp)      one reduction instead of two
"""

import math
from collections.abc import Callable, Hashable

import numpy as np

from irpar.ir import DType, LazyTensor, Node, Value
from irpar.sharding import Reduction

from .facts import int_attribute, is_at_hand, operand, origin_of, text_attribute
from .op_def import traits

Carriers = tuple[tuple[int, ...], ...]
"""Sets of operands that may be partial together; the result then is partial in the same way."""

_JOINTLY: dict[Reduction, frozenset[str]] = {
    "sum": frozenset({"Add", "Sub", "Sum"}),
    "max": frozenset({"Max"}),
    "min": frozenset({"Min"}),
    "prod": frozenset({"Mul"}),
    "and": frozenset({"And"}),
    "or": frozenset({"Or"}),
}
"""Operators that carry a reduction if all of their operands are partial."""

_MOST_ELEMENTS = 64
"""Of a constant whose numbers are looked at."""

_MOST_BACK = 8
"""Nodes that a number is followed back through, to see that it is ordinary."""


def carriers(node: Node, reduce: Reduction, *, in_runs: bool = True) -> Carriers:
    """The sets of operands of a node that may be partial together.

    Integers wrap around and are linear all the same; a division of integers rounds, and is not.

    Args:
        node: it.
        reduce: what parts are parts of.
        in_runs: also what is worth it only where something smaller follows: products with weights and gates.
    """
    if node.callee is not None or not node.operands:
        return ()
    if node.domain:
        find = _MICROSOFT.get(node.op_type) if node.domain == "com.microsoft" and reduce == "sum" else None
        return () if find is None else find(node)
    if traits(node).moves_elements:
        return ((0,),)  # Parts in the sense of any reduction stay what they are.
    everyone = tuple(range(len(node.operands)))
    if node.op_type == "Concat" or node.op_type in _JOINTLY[reduce]:
        return (everyone,)
    if reduce != "sum":
        return ()
    finds = (_SUMS.get(node.op_type), _PRODUCTS.get(node.op_type) if in_runs else None)
    return tuple(dict.fromkeys(places for find in finds if find is not None for places in find(node)))


def carrying(node: Node) -> Hashable:
    """What of a node's operands says which of them may be partial: equal for nodes that carry the same parts on."""
    if not all(value.is_static for value in (*node.inputs, *node.results)):
        return None  # It has no rule, nor parts.
    return carriers(node, "sum"), tuple(map(is_addend, node.operands))


def is_addend(value: Value | None) -> bool:
    """Whether a value may always be parts beside others: devices have all of it, and one of them lets it count.

    A constant, what repeats a number, and what is looked up in a table for nothing else, as biases of experts are.

    p : partial(sum: tp), b a constant     Add(p, b) is partial too, with b on the first device and zeros on the others
    """
    for _ in range(_MOST_BACK):
        if value is None or value.is_constant:
            return value is not None
        node = value.node
        if node is None or node.domain:
            return False
        if node.op_type in _FILLED and all(read.is_constant for read in node.inputs):
            return True
        if not traits(node).moves_elements or not node.operands or value.use_count != 1:
            return False
        value = node.operands[0]
    return False


def scaled_operand(node: Node) -> int | None:
    """Which operand a node does the same with element by element, so that it may as well do it with a sum; or None.

    A Cast to wider floats, a product with one number. The result has the shape of the operand, and lies as that does.
    """
    if node.domain or node.op_type not in _ELEMENTWISE or not all(value.is_static for value in node.inputs):
        return None
    places = next((places for places in carriers(node, "sum") if len(places) == 1), None)
    if places is None:
        return None
    others = [value for index, value in enumerate(node.operands) if index != places[0] and value is not None]
    return None if any(value.shape for value in others) else places[0]


def _first(node: Node) -> Carriers:
    return ((0,),)


def _first_of_floats(node: Node) -> Carriers:
    return ((0,),) if _is_float(node.operands[0]) else ()


def _scaled(node: Node) -> Carriers:
    """A product with known, finite numbers; others could be infinite, and the sum of infinite parts is no number."""
    return tuple((index,) for index in (0, 1) if _is_scale(node.operands[1 - index]) or _is_of_gradient(node))


def _weighed(node: Node) -> Carriers:
    """A product with gates. Tables of weights and angles make no less of what they are multiplied with."""
    return tuple((index,) for index in (0, 1) if _is_beside_ordinary(node, index, may_be_weights=False))


def _multiplied(node: Node) -> Carriers:
    """A sum of products with weights, or with numbers that are bounded by how they are computed.

    Only one that gives less than it takes: an attention gives as much as it takes of values, and that is of no use.
    """
    places = range(len(node.operands))
    return tuple((n,) for n in places if _gives_less(node, n) and _is_beside_ordinary(node, n))


def _multiplied_alone(node: Node) -> Carriers:
    """The same, if nothing is added to it: that would be added on every device."""
    return _multiplied(node) if all(value is None for value in node.operands[2:]) else ()


def _scattered(node: Node) -> Carriers:
    return ((0, 2),) if text_attribute(node, "reduction", "none") == "add" else ()


def _padded(node: Node) -> Carriers:
    """What is put beside the elements is another of them, or zero: another number would be added on each device."""
    value = operand(node, 2)
    is_filled = value is not None and text_attribute(node, "mode", "constant") == "constant"
    return () if is_filled and not _is_zero(value) else ((0,),)


def _is_zero(value: Value | None) -> bool:
    if value is None or value.data is None or not _is_at_hand(value):
        return False
    return not value.data.base.numpy().astype(np.float64).any()


def _divided(node: Node) -> Carriers:
    is_safe = _is_scale(node.operands[1], may_be_zero=False) or _is_of_gradient(node)
    return ((0,),) if is_safe and _is_float(node.operands[0]) else ()


def _is_of_gradient(node: Node) -> bool:
    """Whether a node of a backward pass computes in a type in which parts are as finite as what they add up to.

    Where the other number is infinite, the gradient is of no use either way.
    """
    return node.phase == "backward" and node.results[0].dtype in _WIDE


def _gives_less(node: Node, index: int) -> bool:
    value, result = node.operands[index], node.results[0]
    is_known = value is not None and value.is_static and result.is_static
    return is_known and value is not None and math.prod(result.shape) < math.prod(value.shape)


def _is_beside_ordinary(node: Node, index: int, *, may_be_weights: bool = True) -> bool:
    """Whether parts of an operand are multiplied with ordinary numbers alone, in a type in which these stay finite."""
    if node.results[0].dtype not in _WIDE:
        return False
    others = (value for place, value in enumerate(node.operands) if place != index)
    return all(_is_ordinary(value, _MOST_BACK, may_be_weights=may_be_weights) for value in others)


def _is_ordinary(value: Value | None, back: int, *, may_be_weights: bool) -> bool:
    """Whether numbers are known to be finite, or none at all (NaN): gates of experts, one-hot rows, weights.

    A model whose weights are infinite is of no use either way. Where few numbers are in memory these are looked at.
    """
    if value is None:
        return False
    value = origin_of(value)
    if not value.dtype.is_float:
        return value.dtype is DType.BOOL or value.dtype.is_integer
    if value.is_constant:
        return _is_finite(value) if _is_at_hand(value) else may_be_weights and value.dtype in _WIDE
    node = value.node
    if node is None or node.domain or not back:
        return False
    if node.op_type in _BOUNDED or _is_share(node, back):
        return True
    places = (0, 1) if traits(node).moves_elements else _ORDINARY.get(node.op_type, ())
    read = node.operands[slice(*places)] if places else ()
    return bool(read) and all(_is_ordinary(each, back - 1, may_be_weights=may_be_weights) for each in read)


def _is_share(node: Node, back: int) -> bool:
    """Whether a node divides numbers, none of which is below zero, by what they add up to: 0 / 0 is no number."""
    if node.op_type != "Div":
        return False
    shared, total = map(origin_of, node.inputs)
    while (maker := total.node) is not None and _adds_little(maker):
        total = origin_of(maker.inputs[0])
    if maker is None or maker.domain or maker.op_type != "ReduceSum" or not int_attribute(maker, "keepdims", 1):
        return False
    return origin_of(maker.inputs[0]) is shared and _is_no_less_than_zero(shared, back)


def _adds_little(node: Node) -> bool:
    """Whether a node makes a total no smaller, such as one that keeps it from being zero, or repeats it."""
    if node.domain or node.op_type not in ("Add", "Clip", "Expand"):
        return False
    if node.op_type == "Add":
        more = node.inputs[1]
        return _is_finite(more) and more.data is not None and bool((more.data.base.numpy() >= 0).all())
    return node.op_type == "Expand" or operand(node, 2) is None


def _is_no_less_than_zero(value: Value, back: int) -> bool:
    node = origin_of(value).node
    if node is None or node.domain or not back:
        return False
    if node.op_type in ("Softmax", "Sigmoid"):
        return True
    is_moved = traits(node).moves_elements or node.op_type in ("Cast", "TopK")
    return is_moved and _is_no_less_than_zero(node.inputs[0], back - 1)


def _branches(node: Node) -> Carriers:
    return ((1, 2),)


def _widened(node: Node) -> Carriers:
    """A Cast that keeps every number."""
    before, after = node.operands[0], node.results[0]
    if before is None:
        return ()
    return ((0,),) if (before.dtype, after.dtype) in _WIDER else ()


def _is_float(value: Value | None) -> bool:
    return value is not None and value.dtype.is_float


def _is_scale(value: Value | None, *, may_be_zero: bool = True) -> bool:
    """The same, of a model as it was parsed one number: vectors are weights there, which are short in small models."""
    is_weight = value is not None and isinstance(value.data, LazyTensor) and value.data.size > 1
    return not is_weight and _is_finite(value, may_be_zero=may_be_zero)


def _is_finite(value: Value | None, *, may_be_zero: bool = True) -> bool:
    """True for small constants of ordinary numbers that are in memory; no file is read to plan."""
    if value is None or value.data is None or not _is_at_hand(value):
        return False
    numbers = value.data.base.numpy().astype(np.float64)
    return bool(np.isfinite(numbers).all() and (may_be_zero or numbers.all()))


def _is_at_hand(value: Value) -> bool:
    """Whether a constant has few numbers, in memory or out of the model as it was parsed."""
    # All of it, so that a block says what it did.
    return value.data is not None and is_at_hand(value.data.base, _MOST_ELEMENTS)


_ELEMENTWISE = frozenset({"Cast", "Div", "Identity", "Mul", "Neg"})

_FILLED = frozenset({"ConstantOfShape", "Expand"})
"""Operators that repeat a number."""

_BOUNDED = frozenset({"Erf", "HardSigmoid", "Sigmoid", "Softmax", "Softsign", "Tanh"})
"""Operators that give numbers between -1 and 1, or none. Not Cos and Sin: angles make no less of what they turn."""

_ORDINARY: dict[str, tuple[int | None, ...]] = {
    **dict.fromkeys(("Cast", "Neg", "Abs", "TopK", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"), (0, 1)),
    **dict.fromkeys(("Add", "Sub", "Mul", "DequantizeLinear"), (None,)),
    "Where": (1, 3),
    "OneHot": (2, 3),
}
"""Operators that give ordinary numbers for such: which operands these are."""

_WIDE = {DType.BF16, DType.F32, DType.F64}
"""Floats that do not overflow where numbers are ordinary."""

_WIDER = {
    *((DType.F16, DType.F32), (DType.BF16, DType.F32), (DType.F16, DType.F64), (DType.BF16, DType.F64)),
    (DType.F32, DType.F64),
}

_SUMS: dict[str, Callable[[Node], Carriers]] = {
    "Neg": _first,
    "Trilu": _first,
    "ReduceSum": _first,
    "CumSum": _first,
    "ReduceMean": _first_of_floats,
    "GlobalAveragePool": _first_of_floats,
    "AveragePool": _first_of_floats,
    "Mul": _scaled,
    "ScatterElements": _scattered,
    "ScatterND": _scattered,
    "Div": _divided,
    "Where": _branches,
    "Cast": _widened,
    "DFT": _first,
    "STFT": _first,
    "Col2Im": _first,
    "MaxUnpool": _first,
    "CenterCropPad": _first,
    "Pad": _padded,
}
"""Operators that are linear in some operands.

Of products of a forward pass only those with numbers that are known to be ordinary: where one is infinite, or f16
overflows, parts of the other give no number where the whole gives one.
"""

_PRODUCTS: dict[str, Callable[[Node], Carriers]] = {
    "Mul": _weighed,
    "MatMul": _multiplied,
    "Einsum": _multiplied,
    "Gemm": _multiplied_alone,
}
"""Products of a forward pass that are linear in some operands."""

_MICROSOFT: dict[str, Callable[[Node], Carriers]] = {
    "ExpandDims": _first,
    "GatherND": _first,
    "Trilu": _first,
    "UnfoldTensor": _first,
    "Rfft": _first,
    "Irfft": _first,
}
"""Operators of com.microsoft that are linear in some operands."""
