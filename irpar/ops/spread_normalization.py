"""Local programs of Softmax, normalisations and norms: statistics of blocks, reduced over their devices."""

from collections.abc import Callable, Sequence
from math import prod

from irpar.ir import DType, Node, Value

from .facts import axes_of, axis_attribute, float_attribute, int_attribute, ints_attribute, shape_of, tensor_of
from .spread import Cuts, LocalProgram, Sent, Shape, Spread

Dims = Callable[[Node], Sequence[int]]

_NARROW = (DType.F16, DType.BF16)
"""Computed in f32, as ONNX Runtime does, and sent so."""


def _computed(dtype: DType) -> DType:
    return DType.F32 if dtype in _NARROW else dtype


def _is_float(node: Node) -> bool:
    return tensor_of(node, 0).dtype in (DType.F16, DType.BF16, DType.F32, DType.F64)


def _statistics(count: int, dims_of: Dims) -> Callable[[Node, Sequence[Shape | None], Cuts], list[Sent]]:
    """`count` all-reduces of what is left when the dims are reduced."""

    def sends(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
        shape, dims = blocks[0] or (), dims_of(node)
        elements = prod(size for dim, size in enumerate(shape) if dim not in dims)
        return [Sent("all_reduce", elements, _computed(tensor_of(node, 0).dtype).bits)] * count

    return sends


def _softmax_dims(node: Node) -> Sequence[int]:
    rank = len(shape_of(node, 0))
    if node.version >= 13:
        return (axis_attribute(node, rank, -1),)
    return range(axis_attribute(node, rank, 1), rank)


def _trailing_dims(node: Node) -> Sequence[int]:
    rank = len(shape_of(node, 0))
    return range(axis_attribute(node, rank, -1), rank)


def _place_dims(node: Node) -> Sequence[int]:
    return range(2, len(shape_of(node, 0)))


def _last_dim(node: Node) -> Sequence[int]:
    return (axis_attribute(node, len(shape_of(node, 0)), -1),)


def _mean_variance_dims(node: Node) -> Sequence[int]:
    return axes_of(ints_attribute(node, "axes") or (0, 2, 3), len(shape_of(node, 0)))


_DIMS: dict[str, Callable[[Node], Sequence[int]]] = {
    "Softmax": _softmax_dims,
    "LogSoftmax": _softmax_dims,
    "LpNormalization": _last_dim,
    "MeanVarianceNormalization": _mean_variance_dims,
    "LayerNormalization": _trailing_dims,
    "RMSNormalization": _trailing_dims,
    "InstanceNormalization": _place_dims,
}


def _softmax(program: LocalProgram) -> list[Value]:
    """exp(x - m) / sum, with the maximum m and the sum of all blocks; Milakov and Gimelshein (2018) for the two."""
    dtype = program.data.dtype
    data = program.cast(program.data, _computed(dtype))
    most = program.all_reduce(program.reduced("ReduceMax", data, program.dims), "max")
    shifted = program.op("Sub", [data, most])
    exponentials = program.op("Exp", [shifted])
    total = program.all_reduce(program.reduced("ReduceSum", exponentials, program.dims), "sum")
    if program.whole.op_type == "LogSoftmax":
        result = program.op("Sub", [shifted, program.op("Log", [total])])
    else:
        result = program.op("Div", [exponentials, total])
    return [program.cast(result, dtype)]


def _mean(program: LocalProgram, value: Value) -> Value:
    """The mean over all blocks, kept as dims of size 1."""
    count = prod(program.origin.shape[dim] for dim in program.dims)
    total = program.all_reduce(program.reduced("ReduceSum", value, program.dims), "sum")
    return program.op("Mul", [total, program.constant(1 / count, value.dtype)])


def _centred(program: LocalProgram, data: Value) -> tuple[Value, Value, Value]:
    """The mean, what is left without it, and the variance: the mean goes first, so that large means do no harm."""
    mean = _mean(program, data)
    centred = program.op("Sub", [data, mean])
    return mean, centred, _mean(program, program.op("Mul", [centred, centred]))


def _inverse_root(program: LocalProgram, variance: Value, default: float = 1e-5) -> Value:
    epsilon = program.constant(float_attribute(program.whole, "epsilon", default), variance.dtype)
    return program.op("Reciprocal", [program.op("Sqrt", [program.op("Add", [variance, epsilon])])])


def _affine(program: LocalProgram, value: Value, scale: Value | None, shift: Value | None) -> Value:
    for op_type, other in (("Mul", scale), ("Add", shift)):
        if other is not None:
            value = program.op(op_type, [value, program.cast(other, value.dtype)])
    return value


def _layer_normalization(program: LocalProgram) -> list[Value]:
    data = program.cast(program.data, _computed(program.data.dtype))
    operands = (*program.local.operands, None)
    mean, centred, variance = _centred(program, data)
    inverse = _inverse_root(program, variance)
    result = _affine(program, program.op("Mul", [centred, inverse]), operands[1], operands[2])
    made = [result, mean, inverse]
    return [program.cast(value, like.dtype) for value, like in zip(made, program.local.results, strict=False)]


def _rms_normalization(program: LocalProgram) -> list[Value]:
    data = program.cast(program.data, _computed(program.data.dtype))
    inverse = _inverse_root(program, _mean(program, program.op("Mul", [data, data])))
    normal = program.op("Mul", [data, inverse])
    return [program.cast(_affine(program, normal, program.local.operands[1], None), program.local.result.dtype)]


def _instance_normalization(program: LocalProgram) -> list[Value]:
    dtype = program.data.dtype
    data = program.cast(program.data, _computed(dtype))
    _, centred, variance = _centred(program, data)
    normal = program.op("Mul", [centred, _inverse_root(program, variance)])
    places = program.ints(range(1, len(data.shape) - 1))
    sides = [
        program.op("Unsqueeze", [value, places], shape=(*value.shape, *[1] * (len(data.shape) - 2)))
        for value in program.local.inputs[1:]
    ]
    return [program.cast(_affine(program, normal, sides[0], sides[1]), dtype)]


def _mean_variance_normalization(program: LocalProgram) -> list[Value]:
    dtype = program.data.dtype
    data = program.cast(program.data, _computed(dtype))
    _, centred, variance = _centred(program, data)
    root = program.op("Add", [program.op("Sqrt", [variance]), program.constant(1e-9, data.dtype)])
    return [program.cast(program.op("Div", [centred, root]), dtype)]


def _lp_normalization(program: LocalProgram) -> list[Value]:
    dtype = program.data.dtype
    data = program.cast(program.data, _computed(dtype))
    is_first = int_attribute(program.whole, "p", 2) == 1
    sizes = program.op("Abs", [data]) if is_first else program.op("Mul", [data, data])
    total = program.all_reduce(program.reduced("ReduceSum", sizes, program.dims), "sum")
    norm = total if is_first else program.op("Sqrt", [total])
    # What is all zeros stays so.
    zero, one = (program.constant(number, data.dtype) for number in (0, 1))
    is_zero = program.op("Equal", [norm, zero], dtype=DType.BOOL)
    return [program.cast(program.op("Div", [data, program.op("Where", [is_zero, one, norm], dtype=data.dtype)]), dtype)]


_WRITERS: dict[str, tuple[int, Callable[[LocalProgram], list[Value]]]] = {
    "Softmax": (2, _softmax),
    "LogSoftmax": (2, _softmax),
    "LpNormalization": (1, _lp_normalization),
    "MeanVarianceNormalization": (2, _mean_variance_normalization),
    "LayerNormalization": (2, _layer_normalization),
    "RMSNormalization": (1, _rms_normalization),
    "InstanceNormalization": (2, _instance_normalization),
}


# -- norms ----------------------------------------------------------------------------------------------------------


def _norm(program: LocalProgram) -> list[Value]:
    """ReduceL2, ReduceLogSum: a function of the sum of all blocks."""
    data = program.cast(program.data, _computed(program.data.dtype))
    is_length = program.whole.op_type == "ReduceL2"
    terms = program.op("Mul", [data, data]) if is_length else data
    total = program.all_reduce(program.reduced("ReduceSum", terms, program.dims), "sum")
    return [_without_dims(program, program.op("Sqrt" if is_length else "Log", [total]))]


def _log_sum_exp(program: LocalProgram) -> list[Value]:
    """m + log(sum(exp(x - m))) with the maximum m of all blocks, so that no exponential is too large."""
    data = program.cast(program.data, _computed(program.data.dtype))
    most = program.all_reduce(program.reduced("ReduceMax", data, program.dims), "max")
    # A maximum that is infinite would leave inf - inf.
    huge = program.op("IsInf", [most], dtype=DType.BOOL)
    most = program.op("Where", [huge, program.constant(0, data.dtype), most], shape=most.shape, dtype=data.dtype)
    exponentials = program.op("Exp", [program.op("Sub", [data, most])])
    total = program.all_reduce(program.reduced("ReduceSum", exponentials, program.dims), "sum")
    return [_without_dims(program, program.op("Add", [program.op("Log", [total]), most]))]


def _without_dims(program: LocalProgram, value: Value) -> Value:
    value = program.cast(value, program.data.dtype)
    if int_attribute(program.whole, "keepdims", 1):
        return value
    shape = tuple(size for dim, size in enumerate(value.shape) if dim not in program.dims)
    return program.op("Squeeze", [value, program.ints(program.dims)], shape=shape)


def _spread(count: int, write: Callable[[LocalProgram], list[Value]], dims: Dims) -> Spread:
    return Spread(_statistics(count, dims), write, lambda node: dims(node) if _is_float(node) else None)


def reductions(dims: Dims) -> dict[str, Spread]:
    """The local programs of the reductions that do something to a sum; `dims` are those that a node reduces."""
    writers = {"ReduceL2": (1, _norm), "ReduceLogSum": (1, _norm), "ReduceLogSumExp": (2, _log_sum_exp)}
    return {op_type: _spread(count, write, dims) for op_type, (count, write) in writers.items()}


SPREADS = {op_type: _spread(count, write, _DIMS[op_type]) for op_type, (count, write) in _WRITERS.items()}
"""Operator to its local program, over the dims that it normalises."""
