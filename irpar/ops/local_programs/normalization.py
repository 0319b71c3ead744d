"""Local programs of Softmax, normalisations and norms: statistics of blocks, reduced over their devices."""

from collections.abc import Callable, Sequence
from math import prod

from irpar.ir import DType, Node, Value
from irpar.sharding import ceil_div

from ..facts import axes_of, axis_attribute, float_attribute, int_attribute, ints_attribute, shape_of, tensor_of
from .program import FLOATS, Cuts, LocalProgram, ProgramWriter, Sent, Shape, widened

Dims = Callable[[Node], Sequence[int] | None]


def _is_float(node: Node) -> bool:
    return tensor_of(node, 0).dtype in FLOATS


def _statistics(count: int, dims_of: Dims) -> Callable[[Node, Sequence[Shape | None], Cuts], list[Sent]]:
    """`count` all-reduces of what is left when the dims are reduced."""

    def sends(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
        shape, dims = blocks[0] or (), dims_of(node) or ()
        elements = prod(size for dim, size in enumerate(shape) if dim not in dims)
        return [Sent("all_reduce", elements, widened(tensor_of(node, 0).dtype).bits)] * count

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


def _softmax(program: ProgramWriter) -> list[Value]:
    """exp(x - m) / sum, with the maximum m and the sum of all blocks; Milakov and Gimelshein (2018) for the two."""
    dtype = program.data.dtype
    data = program.wide(program.data)
    most = program.all_reduce(program.reduced("ReduceMax", data, program.dims), "max")
    shifted = program.op("Sub", [data, most])
    exponentials = program.op("Exp", [shifted])
    total = program.all_reduce(program.reduced("ReduceSum", exponentials, program.dims), "sum")
    if program.whole.op_type == "LogSoftmax":
        result = program.op("Sub", [shifted, program.op("Log", [total])])
    else:
        result = program.op("Div", [exponentials, total])
    return [program.cast(result, dtype)]


def _mean(program: ProgramWriter, value: Value) -> Value:
    """The mean over all blocks, kept as dims of size 1."""
    count = prod(program.origin.shape[dim] for dim in program.dims)
    total = program.all_reduce(program.reduced("ReduceSum", value, program.dims), "sum")
    return program.op("Mul", [total, program.constant(1 / count, value.dtype)])


def _centred(program: ProgramWriter, data: Value) -> tuple[Value, Value, Value]:
    """The mean, what is left without it, and the variance: the mean goes first, so that large means do no harm."""
    mean = _mean(program, data)
    centred = program.op("Sub", [data, mean])
    return mean, centred, _mean(program, program.op("Mul", [centred, centred]))


def _inverse_root(program: ProgramWriter, variance: Value, default: float = 1e-5) -> Value:
    epsilon = program.constant(float_attribute(program.whole, "epsilon", default), variance.dtype)
    return program.op("Reciprocal", [program.op("Sqrt", [program.op("Add", [variance, epsilon])])])


def _affine(program: ProgramWriter, value: Value, scale: Value | None, shift: Value | None) -> Value:
    for op_type, other in (("Mul", scale), ("Add", shift)):
        if other is not None:
            value = program.op(op_type, [value, program.cast(other, value.dtype)])
    return value


def _layer_normalization(program: ProgramWriter) -> list[Value]:
    data = program.wide(program.data)
    operands = (*program.local.operands, None)
    mean, centred, variance = _centred(program, data)
    inverse = _inverse_root(program, variance)
    result = _affine(program, program.op("Mul", [centred, inverse]), operands[1], operands[2])
    made = [result, mean, inverse]
    return [program.cast(value, like.dtype) for value, like in zip(made, program.local.results, strict=False)]


def _rms_normalization(program: ProgramWriter) -> list[Value]:
    data = program.wide(program.data)
    inverse = _inverse_root(program, _mean(program, program.op("Mul", [data, data])))
    normal = program.op("Mul", [data, inverse])
    result = _affine(program, normal, program.local.operands[1], None)
    made = [result, inverse]  # SimplifiedLayerNormalization has the latter too.
    return [program.cast(value, like.dtype) for value, like in zip(made, program.local.results, strict=False)]


def _skip_normalization(program: ProgramWriter) -> list[Value]:
    """com.microsoft: x and skip are added, and a bias, then normalised; the sum is the last result."""
    local, is_simple = program.local, program.whole.op_type == "SkipSimplifiedLayerNormalization"
    dtype = widened(program.data.dtype)
    data, skip, scale, *others = [None if each is None else program.cast(each, dtype) for each in local.operands]
    shift, bias = (None, *others, None)[:2] if is_simple else (*others, None, None)[:2]
    assert data is not None
    total = _affine(program, program.op("Add", [data, skip]), None, bias)
    mean, centred, variance = _centred(program, total) if not is_simple else (None, total, None)
    if variance is None:
        variance = _mean(program, program.op("Mul", [total, total]))
    inverse = _inverse_root(program, variance, _SKIP_EPSILON)
    result = _affine(program, program.op("Mul", [centred, inverse]), scale, shift)
    made = [result, mean or inverse, inverse, total]
    return [program.cast(value, like.dtype) for value, like in zip(made, local.results, strict=False)]


def _skip_dims(node: Node) -> Sequence[int] | None:
    """None where somebody reads a mean that a node without one has."""
    reads_mean = node.op_type == "SkipSimplifiedLayerNormalization" and any(row.has_uses for row in node.results[1:3])
    return None if reads_mean else (len(shape_of(node, 0)) - 1,)


_SKIP_EPSILON = 1e-12


def _instance_normalization(program: ProgramWriter) -> list[Value]:
    dtype = program.data.dtype
    data = program.wide(program.data)
    _, centred, variance = _centred(program, data)
    normal = program.op("Mul", [centred, _inverse_root(program, variance)])
    return [program.cast(_scaled_and_shifted(program, normal, _of_channel(data)), dtype)]


def _batch_normalization(program: ProgramWriter) -> list[Value]:
    """In training mode: by mean and variance of the batch, of which running ones take their share."""
    dtype = program.data.dtype
    data = program.wide(program.data)
    mean, centred, variance = _centred(program, data)
    normal = program.op("Mul", [centred, _inverse_root(program, variance)])
    results = [program.cast(_scaled_and_shifted(program, normal, _of_channel(data)), dtype)]
    running = program.local.inputs[3:]
    momentum = float_attribute(program.whole, "momentum", 0.9)
    for before, found in zip(running, (mean, variance), strict=True):
        old = program.cast(before, found.dtype)
        now = program.op("Squeeze", [found, program.ints(program.dims)], shape=old.shape)
        kept = program.op("Mul", [old, program.constant(momentum, old.dtype)])
        added = program.op("Mul", [now, program.constant(1 - momentum, old.dtype)])
        results.append(program.cast(program.op("Add", [kept, added]), before.dtype))
    return results[: len(program.local.results)]


def _batch_dims(node: Node) -> Sequence[int]:
    return (0, *range(2, len(shape_of(node, 0))))


def _group_normalization(program: ProgramWriter) -> list[Value]:
    """The statistics of each group; of a group that is sharded, a device has one, and some of its channels."""
    node, dtype = program.whole, program.data.dtype
    batch, channels, *places = program.data.shape
    groups = int_attribute(node, "num_groups")
    inside = program.origin.shape[1] // groups
    cut = program.factors[program.rule.operands[0][1][0]] if groups > 1 else ()
    count = ceil_div(groups, program.mesh.group_size(cut))
    grouped = (batch, count, channels // count * prod(places))
    data = program.op("Reshape", [program.wide(program.data), program.ints(grouped)], shape=grouped)

    def mean(value: Value) -> Value:
        rows = [program.lies.axes[0], cut, ()], (program.origin.shape[0], groups, 1)
        total = program.all_reduce(program.reduced("ReduceSum", value, (2,)), "sum", *rows)
        elements = inside * prod(program.origin.shape[2:])
        return program.op("Mul", [total, program.constant(1 / elements, value.dtype)])

    centred = program.op("Sub", [data, mean(data)])
    variance = mean(program.op("Mul", [centred, centred]))
    normal = program.op("Mul", [centred, _inverse_root(program, variance)])
    of_group = (count, *[1] * (len(grouped) - 2))
    if node.version < 21:
        normal = _scaled_and_shifted(program, normal, of_group)
    normal = program.op("Reshape", [normal, program.ints(program.data.shape)], shape=program.data.shape)
    if node.version >= 21:
        normal = _scaled_and_shifted(program, normal, _of_channel(normal))
    return [program.cast(normal, dtype)]


def _of_channel(value: Value) -> Shape:
    """The shape of numbers for each channel, to be broadcast to a block."""
    return (value.shape[1], *[1] * (len(value.shape) - 2))


def _scaled_and_shifted(program: ProgramWriter, value: Value, shape: Shape) -> Value:
    """By operands 1 and 2, which have an element for each of what the first dim of `shape` counts."""
    sides = [program.op("Reshape", [side, program.ints(shape)], shape=shape) for side in program.local.inputs[1:3]]
    return _affine(program, value, *sides)


def _group_sends(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
    shape, groups = blocks[0] or (), int_attribute(node, "num_groups")
    elements = shape[0] * ceil_div(groups, cuts.get(1, 1))
    return [Sent("all_reduce", elements, widened(tensor_of(node, 0).dtype).bits)] * 2


def _channel_dims(node: Node) -> Sequence[int] | None:
    return range(1, len(shape_of(node, 0))) if _is_float(node) else None


def _mean_variance_normalization(program: ProgramWriter) -> list[Value]:
    dtype = program.data.dtype
    data = program.wide(program.data)
    _, centred, variance = _centred(program, data)
    root = program.op("Add", [program.op("Sqrt", [variance]), program.constant(1e-9, data.dtype)])
    return [program.cast(program.op("Div", [centred, root]), dtype)]


def _lp_normalization(program: ProgramWriter) -> list[Value]:
    dtype = program.data.dtype
    data = program.wide(program.data)
    is_first = int_attribute(program.whole, "p", 2) == 1
    sizes = program.op("Abs", [data]) if is_first else program.op("Mul", [data, data])
    total = program.all_reduce(program.reduced("ReduceSum", sizes, program.dims), "sum")
    norm = total if is_first else program.op("Sqrt", [total])
    # What is all zeros stays so.
    zero, one = (program.constant(number, data.dtype) for number in (0, 1))
    is_zero = program.op("Equal", [norm, zero], dtype=DType.BOOL)
    return [program.cast(program.op("Div", [data, program.op("Where", [is_zero, one, norm], dtype=data.dtype)]), dtype)]


def _global_lp_pool(program: ProgramWriter) -> list[Value]:
    """The root of the sum of powers over all blocks."""
    data, power = program.wide(program.data), int_attribute(program.whole, "p", 2)
    terms = program.op("Abs", [data])
    if power != 1:
        terms = program.op("Pow", [terms, program.constant(power, data.dtype)])
    total = program.all_reduce(program.reduced("ReduceSum", terms, program.dims), "sum")
    if power != 1:
        total = program.op("Pow", [total, program.constant(1 / power, data.dtype)])
    return [program.cast(total, program.data.dtype)]


_DIMS: dict[str, Dims] = {
    "Softmax": _softmax_dims,
    "LogSoftmax": _softmax_dims,
    "LpNormalization": _last_dim,
    "MeanVarianceNormalization": _mean_variance_dims,
    "BatchNormalization": _batch_dims,
    "LayerNormalization": _trailing_dims,
    "RMSNormalization": _trailing_dims,
    "SimplifiedLayerNormalization": _trailing_dims,
    "SkipLayerNormalization": _skip_dims,
    "SkipSimplifiedLayerNormalization": _skip_dims,
    "InstanceNormalization": _place_dims,
    "GlobalLpPool": _place_dims,
}


_WRITERS: dict[str, tuple[int, Callable[[ProgramWriter], list[Value]]]] = {
    "Softmax": (2, _softmax),
    "LogSoftmax": (2, _softmax),
    "LpNormalization": (1, _lp_normalization),
    "MeanVarianceNormalization": (2, _mean_variance_normalization),
    "LayerNormalization": (2, _layer_normalization),
    "RMSNormalization": (1, _rms_normalization),
    "SimplifiedLayerNormalization": (1, _rms_normalization),
    "SkipLayerNormalization": (2, _skip_normalization),
    "SkipSimplifiedLayerNormalization": (1, _skip_normalization),
    "BatchNormalization": (2, _batch_normalization),
    "InstanceNormalization": (2, _instance_normalization),
    "GlobalLpPool": (1, _global_lp_pool),
}


# -- norms ----------------------------------------------------------------------------------------------------------


def _norm(program: ProgramWriter) -> list[Value]:
    """ReduceL2, ReduceLogSum: a function of the sum of all blocks."""
    data = program.wide(program.data)
    is_length = program.whole.op_type == "ReduceL2"
    terms = program.op("Mul", [data, data]) if is_length else data
    total = program.all_reduce(program.reduced("ReduceSum", terms, program.dims), "sum")
    found = program.op("Sqrt" if is_length else "Log", [total])
    return [program.as_reduced(program.cast(found, program.data.dtype))]


def _log_sum_exp(program: ProgramWriter) -> list[Value]:
    """m + log(sum(exp(x - m))) with the maximum m of all blocks, so that no exponential is too large."""
    data = program.wide(program.data)
    most = program.all_reduce(program.reduced("ReduceMax", data, program.dims), "max")
    # A maximum that is infinite would leave inf - inf.
    huge = program.op("IsInf", [most], dtype=DType.BOOL)
    most = program.op("Where", [huge, program.constant(0, data.dtype), most], shape=most.shape, dtype=data.dtype)
    exponentials = program.op("Exp", [program.op("Sub", [data, most])])
    total = program.all_reduce(program.reduced("ReduceSum", exponentials, program.dims), "sum")
    found = program.op("Add", [program.op("Log", [total]), most])
    return [program.as_reduced(program.cast(found, program.data.dtype))]


def _program(
    count: int, write: Callable[[ProgramWriter], list[Value]], dims: Dims, *, reads_elements: bool = True
) -> LocalProgram:
    return LocalProgram(
        _statistics(count, dims),
        write,
        lambda node: dims(node) if _is_float(node) else None,
        reads_elements=reads_elements,
    )


def reductions(dims: Dims) -> dict[str, LocalProgram]:
    """The local programs of the reductions that do something to a sum; `dims` are those that a node reduces."""
    writers = {"ReduceL2": (1, _norm), "ReduceLogSum": (1, _norm), "ReduceLogSumExp": (2, _log_sum_exp)}
    return {op_type: _program(count, write, dims) for op_type, (count, write) in writers.items()}


GROUPS = LocalProgram(_group_sends, _group_normalization, _channel_dims)
"""That of GroupNormalization, over channels of a group and places."""

LOCAL_PROGRAMS = {
    op_type: _program(count, write, _DIMS[op_type], reads_elements=_DIMS[op_type] is _skip_dims)
    for op_type, (count, write) in _WRITERS.items()
}
"""Operator to its local program, over the dims that it normalises."""
