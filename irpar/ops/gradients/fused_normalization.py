"""com.microsoft's normalisations in plain operators."""

from irpar.ir import DType, Node, Value

from ..facts import CannotTellError, axis_attribute, float_attribute, int_attribute, needed, operand, text_attribute
from .fused import swish
from .normalization import normalised
from .writer import GradientWriter, NoGradientError


def _sum(node: Node, places: tuple[int, ...], w: GradientWriter) -> Value:
    """The sum of operands that are given, computed as wide as the normalisation."""
    total: Value | None = None
    for place in places:
        value = operand(node, place)
        if value is not None:
            wide = w.widened(value)
            total = wide if total is None else w.add(total, wide)
    assert total is not None
    return total


def decompose_skip_layer_norm(node: Node, w: GradientWriter) -> list[Value]:
    """LayerNormalization of x + skip + bias, which is the last result."""
    x, gamma, beta = needed(node, 0), needed(node, 2), operand(node, 3)
    total = _sum(node, (0, 1, 4), w)
    operands = [total, w.widened(gamma), *([] if beta is None else [w.widened(beta)])]
    made = w.node(
        "LayerNormalization",
        operands,
        {"axis": -1, "epsilon": _epsilon(node, 1e-12)},
        results=min(3, len(node.results)),
    )
    y, *statistics = made.results
    return [w.cast(y, x.dtype), *statistics, _own(w.cast(total, x.dtype), w)][: len(node.results)]


def decompose_skip_rms_norm(node: Node, w: GradientWriter) -> list[Value]:
    """x + skip + bias with unit root mean square over the last dim; the sum is the last result."""
    x, gamma = needed(node, 0), needed(node, 2)
    total = _sum(node, (0, 1, 3), w)
    found = normalised(total, [len(w.dims(total)) - 1], _epsilon(node, 1e-12), w, is_centred=False)
    y = w.cast(w.mul(found.hat, w.widened(gamma)), x.dtype)
    results = [y]
    if len(node.results) > 1:
        inverse = w.cast(found.inverse, DType.F32)
        results += [w.zeros(inverse), inverse, _own(w.cast(total, x.dtype), w)]
    return results[: len(node.results)]


def _own(value: Value, w: GradientWriter) -> Value:
    """A value that this decomposition makes."""
    return value if value.node in w.made else w.op("Identity", [value])


def _epsilon(node: Node, default: float) -> float:
    return float_attribute(node, "epsilon", default)


def decompose_rms_norm(node: Node, w: GradientWriter) -> list[Value]:
    """Unit root mean square over the dims from an axis on; gives y and 1 / root mean square."""
    x, scale = needed(node, 0), needed(node, 1)
    rank = len(w.dims(x))
    axes = range(axis_attribute(node, rank, -1), rank)
    found = normalised(w.widened(x), axes, _epsilon(node, 1e-5), w, is_centred=False)
    results = [w.cast(w.mul(found.hat, w.widened(scale)), scale.dtype)]
    if len(node.results) > 1:
        results.append(w.cast(found.inverse, DType.F32))
    return results


def decompose_gated_rms_norm(node: Node, w: GradientWriter) -> list[Value]:
    """Each run of as many elements as the scale has gets unit root mean square, times the activated gate."""
    x, scale, gate = needed(node, 0), needed(node, 1), needed(node, 2)
    rank, size, count = len(w.dims(x)), w.dims(x)[-1], w.dims(scale)[0]
    if not isinstance(size, int) or not isinstance(count, int):
        raise CannotTellError("the size of a head")
    apart = w.reshaped(w.widened(x), [*((x, dim) for dim in range(rank - 1)), size // count, count])
    scaled = w.mul(normalised(apart, [rank], _epsilon(node, 1e-5), w, is_centred=False).hat, w.widened(scale))
    joined = w.reshaped(scaled, [(x, dim) for dim in range(rank)])
    wide = w.widened(gate)
    activation = text_attribute(node, "activation", "silu")
    if activation not in ("silu", "swish", "sigmoid"):
        raise NoGradientError(f'because its activation is "{activation}"')
    active = w.op("Sigmoid", [wide]) if activation == "sigmoid" else swish(wide, 1.0, w)
    return [w.cast(w.mul(joined, active), x.dtype)]


def decompose_branch_rms_norm(node: Node, w: GradientWriter) -> list[Value]:
    """Unit root mean square over the last dim of [..., branches, size], or of [..., branches * size]."""
    x, scale = needed(node, 0), operand(node, 1)
    count, rank = int_attribute(node, "num_branches", 0), len(w.dims(x))
    data = w.widened(x)
    if count:
        size = w.dims(x)[-1]
        if not isinstance(size, int):
            raise CannotTellError("the size of a branch")
        data = w.reshaped(data, [*((x, dim) for dim in range(rank - 1)), count, size // count])
    branches, inside = w.dims(data)[-2:]
    made = normalised(data, [len(w.dims(data)) - 1], _epsilon(node, 1e-5), w, is_centred=False).hat
    if scale is not None:
        if not isinstance(branches, int) or not isinstance(inside, int):
            raise CannotTellError("the size of a branch")
        wide = w.widened(scale)
        if w.dims(scale) == (branches * inside,) and branches > 1:
            wide = w.reshape(wide, [branches, inside])
        made = w.mul(made, wide)
    if count:
        made = w.reshaped(made, [(x, dim) for dim in range(rank)])
    return [w.cast(made, x.dtype)]


# -- groups of channels ---------------------------------------------------------------------------------------------


def decompose_group_norm(node: Node, w: GradientWriter) -> list[Value]:
    """GroupNorm and SkipGroupNorm: zero mean and unit variance of groups of channels; then SiLU, if asked for."""
    x = needed(node, 0)
    rank, is_last = len(w.dims(x)), bool(int_attribute(node, "channels_last", 1))
    total = _with_skip(node, w) if node.op_type == "SkipGroupNorm" else w.widened(x)
    channel = rank - 1 if is_last else 1
    count, groups = w.dims(x)[channel], int_attribute(node, "groups")
    if not isinstance(count, int) or count % groups:
        raise CannotTellError("groups of channels")
    sizes = [[groups, count // groups] if dim == channel else [(x, dim)] for dim in range(rank)]
    grouped = w.reshaped(total, [size for each in sizes for size in each])
    inside = channel + 1
    places = range(1, rank - 1) if is_last else range(3, rank + 1)
    hat = normalised(grouped, sorted([inside, *places]), _epsilon(node, 1e-5), w).hat
    y = w.reshaped(hat, [(x, dim) for dim in range(rank)])
    y = w.add(w.mul(y, _per_channel(node, 1, w)), _per_channel(node, 2, w))
    if int_attribute(node, "activation"):
        y = swish(y, 1.0, w)
    return [w.cast(y, x.dtype), _own(w.cast(total, x.dtype), w)][: len(node.results)]


def _per_channel(node: Node, place: int, w: GradientWriter) -> Value:
    """An operand of a number for each channel, as it broadcasts to the data."""
    value = w.widened(needed(node, place))
    behind = len(w.dims(needed(node, 0))) - 2
    return value if int_attribute(node, "channels_last", 1) else w.unsqueeze(value, range(1, 1 + behind))


def _with_skip(node: Node, w: GradientWriter) -> Value:
    """x + skip + bias; the skip has all dims, or only batch and channels."""
    x, skip = needed(node, 0), w.widened(needed(node, 3))
    rank = len(w.dims(x))
    if len(w.dims(skip)) == 2:
        start = 1 if int_attribute(node, "channels_last", 1) else 2
        skip = w.unsqueeze(skip, range(start, start + rank - 2))
    total = w.add(w.widened(x), skip)
    return total if operand(node, 4) is None else w.add(total, _per_channel(node, 4, w))


# -- EmbedLayerNormalization ----------------------------------------------------------------------------------------


def decompose_embed(node: Node, w: GradientWriter) -> list[Value]:
    """LayerNormalization of the sum of rows of tables; the second result counts the mask, the last is the sum."""
    words, segments, mask, ids = needed(node, 0), operand(node, 1), operand(node, 7), operand(node, 8)
    total = w.op("Gather", [needed(node, 2), words], {"axis": 0})
    places = needed(node, 3)
    if ids is not None:
        rows = w.op("Gather", [places, ids], {"axis": 0})
    else:
        rows = w.op("Slice", [places, w.ints([0]), w.size_of(words, 1), w.ints([0])])
        rows.type = places.tensor_type.with_shape((w.dims(words)[1], w.dims(places)[1]))
    total = w.add(total, rows)
    if segments is not None:
        total = w.add(total, w.op("Gather", [needed(node, 4), segments], {"axis": 0}))
    operands = [w.widened(value) for value in (total, needed(node, 5), needed(node, 6))]
    y = w.op("LayerNormalization", operands, {"axis": -1, "epsilon": _epsilon(node, 1e-12)})
    results = [w.cast(y, total.dtype)]
    if len(node.results) > 1:
        zeros = w.op("Mul", [words, w.number(0, words)])
        results.append(w.cast(w.sum(zeros if mask is None else mask, [1], keep=False), DType.I32))
    if len(node.results) > 2:
        results.append(_own(total, w))
    return results
