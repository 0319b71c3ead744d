"""How to draw nodes that move or index data, attention, convolutions, and operators without a sharding rule."""

import math

import numpy as np
import onnx
from onnx import helper

from .random_graphs import BOOL, F32, FLOATS, I32, I64, INTS, U8, GraphMaker, Tensor, UnfitError


def with_axes(m: GraphMaker, op: str, data: Tensor, axes: list[int] | None, since: int, **attributes: int) -> None:
    """Axes as an operand from opset `since` on, as an attribute before."""
    if axes is None:
        m.node(op, [data], **attributes)
    elif m.opset >= since:
        m.node(op, [data, m.const(axes)], **attributes)
    else:
        m.node(op, [data], axes=axes, **attributes)


# -- moving data ----------------------------------------------------------------------------------------------------

ANY = (*FLOATS, I64, I32, BOOL)


def transpose(m: GraphMaker) -> None:
    data = m.tensor(dtypes=ANY, least=1)
    order = np.random.default_rng(m.number(0, 30)).permutation(len(data.shape)).tolist()
    m.node("Transpose", [data], **({"perm": order} if m.number(0, 3) else {}))


def reshape(m: GraphMaker) -> None:
    """Merges and splits dims at random; some of the sizes are then written as 0 or -1."""
    data = m.tensor(dtypes=ANY)
    if not data.array.size:
        raise UnfitError
    target = list(data.shape)
    for _ in range(m.number(1, 4)):
        kind = m.number(0, 3)
        place = m.number(0, max(len(target) - 1, 0))
        if kind == 0 and len(target) > 1 and place + 1 < len(target):
            target[place : place + 2] = [target[place] * target[place + 1]]
        elif kind == 1 and target:
            part = m.one_of([size for size in range(1, target[place] + 1) if target[place] % size == 0])
            target[place : place + 1] = [part, target[place] // part]
        elif kind == 2:
            target.insert(place, 1)
        elif kind == 3 and target and m.number(0, 3) == 0:
            target = target[::-1]
    if len(target) > 6:
        raise UnfitError
    numbers = [
        0 if place < len(data.shape) and data.shape[place] == size and m.number(0, 2) == 0 else size
        for place, size in enumerate(target)
    ]
    if numbers and m.number(0, 2) == 0:
        numbers[m.number(0, len(numbers) - 1)] = -1
    m.node("Reshape", [data, m.const(numbers)])


def flatten(m: GraphMaker) -> None:
    data = m.tensor()
    m.node("Flatten", [data], axis=m.number(-len(data.shape), len(data.shape)))


def squeeze(m: GraphMaker) -> None:
    data = m.tensor(fits=lambda shape: 1 in shape)
    rank = len(data.shape)
    axes = [axis - rank if m.coin() else axis for axis, size in enumerate(data.shape) if size == 1 and m.coin()]
    with_axes(m, "Squeeze", data, axes or None, 13)


def unsqueeze(m: GraphMaker) -> None:
    data = m.tensor(most=4, dtypes=ANY)
    least = -1 if m.opset >= 11 else 0  # ONNX counts none from the end before, and infers another shape.
    axes = [axis for axis in range(len(data.shape) + 1) if m.number(0, 2) == 0] or [max(m.number(-1, 0), least)]
    with_axes(m, "Unsqueeze", data, axes, 13)


def concat(m: GraphMaker) -> None:
    data = m.tensor(least=1, dtypes=ANY)
    axis = m.axis(len(data.shape))
    parts = [data]
    for _ in range(m.number(0, 2)):
        shape = list(data.shape)
        shape[axis] = shape[axis] if m.coin() else m.size()
        parts.append(m.of_shape(shape, data.dtype))
    m.node("Concat", parts[::-1] if m.coin() else parts, axis=axis)


def split(m: GraphMaker) -> None:
    data = m.tensor(least=1)
    axis = m.axis(len(data.shape))
    size = data.shape[axis]
    if size < 2:
        raise UnfitError
    count = m.number(2, min(size, 4))
    if m.coin():
        first = m.number(1, size - 1)
        sizes = [first, size - first]
        if m.opset >= 13:
            m.node("Split", [data, m.const(sizes)], 2, axis=axis)
        else:
            m.node("Split", [data], 2, axis=axis, split=sizes)
    elif m.opset >= 18:
        m.node("Split", [data], count, axis=axis, num_outputs=count)
    else:
        m.node("Split", [data], count, axis=axis)


def cut(m: GraphMaker) -> None:
    data = m.tensor(least=1, dtypes=ANY)
    axes = m.axes(len(data.shape))
    starts, ends, steps = [], [], []
    for axis in axes:
        size = data.shape[axis]
        if m.number(0, 3) == 0:
            cut = (0, m.one_of([size, 2**31 - 1, 2**63 - 1]), 1)
        else:
            cut = (m.number(-size - 1, size), m.number(-size - 1, size + 1), m.one_of([1, 1, 2, 3, -1, -2]))
        for numbers, number in zip((starts, ends, steps), cut, strict=True):
            numbers.append(number)
    m.node("Slice", [data, *map(m.const, (starts, ends, axes, steps))])


def pad(m: GraphMaker) -> None:
    data = m.tensor(least=1)
    mode = m.one_of(["constant", "constant", "reflect", "edge"])
    low = -1 if mode == "constant" and m.number(0, 3) == 0 else 0
    pads = [m.number(low, 2) if m.coin() else 0 for _ in range(2 * len(data.shape))]
    value = [m.const(m.one_of([0, 1.5]), data.dtype)] if m.coin() else []
    m.node("Pad", [data, m.const(pads), *value], mode=mode)


def tile(m: GraphMaker) -> None:
    data = m.tensor(least=1)
    m.node("Tile", [data, m.const([m.one_of([1, 1, 2, 3]) for _ in data.shape])])


def expand(m: GraphMaker) -> None:
    data = m.tensor(dtypes=ANY)
    target = [m.size() if size == 1 and m.coin() else m.one_of([size, 1]) for size in data.shape]
    more = [m.size() for _ in range(m.number(0, max(4 - len(target), 0)))]
    if not more and m.coin():
        target = target[m.number(0, len(target)) :]
    m.node("Expand", [data, m.const([*more, *target])])


def shape_arithmetic(m: GraphMaker) -> None:
    """What exporters write: a tensor of constants as large as some dims of another."""
    data = m.tensor(least=1)
    (shape,) = m.node("Shape", [data])
    axes = m.axes(len(data.shape))
    (target,) = m.node("Gather", [shape, m.const(axes)], axis=0)
    m.node("ConstantOfShape", [target], value=onnx.numpy_helper.from_array(np.asarray([0.75], np.float32)))


def trilu(m: GraphMaker) -> None:
    data = m.tensor(least=2)
    m.node("Trilu", [data, *([m.const(m.number(-2, 2))] if m.coin() else [])], upper=m.number(0, 1))


def depth_to_space(m: GraphMaker) -> None:
    data = m.of_shape([m.size(), 4 * m.number(1, 3), m.size(), m.number(1, 3)])
    m.node("DepthToSpace", [data], blocksize=2, mode=m.one_of(["DCR", "CRD"]))


def space_to_depth(m: GraphMaker) -> None:
    m.node("SpaceToDepth", [m.of_shape([m.size(), m.number(1, 3), 2 * m.number(1, 3), 4])], blocksize=2)


# -- indexing -------------------------------------------------------------------------------------------------------


def _indices(m: GraphMaker, shape: tuple[int, ...], size: int, dtype: np.dtype = I64) -> Tensor:
    """Indices below `size`, some counted from the end."""
    if size == 0:
        raise UnfitError
    return m.of_shape(shape, dtype, -size if m.coin() else 0, size - 1)


def gather(m: GraphMaker) -> None:
    data = m.tensor(least=1, dtypes=(*FLOATS, *INTS, BOOL, U8))
    axis = m.axis(len(data.shape))
    m.node("Gather", [data, _indices(m, m.shape(0, 2), data.shape[axis], m.one_of(INTS))], axis=axis)


def gather_elements(m: GraphMaker) -> None:
    data = m.tensor(least=1)
    axis = m.axis(len(data.shape))
    shape = [m.number(1, size) if m.number(0, 3) == 0 else size for size in data.shape]
    shape[axis] = m.size()
    m.node("GatherElements", [data, _indices(m, tuple(shape), data.shape[axis])], axis=axis)


def gather_nd(m: GraphMaker) -> None:
    data = m.tensor(least=2)
    batch = m.number(0, 1)
    depth = m.number(1, len(data.shape) - batch)
    shape = (*data.shape[:batch], *m.shape(0, 2), depth)
    size = min(data.shape[batch : batch + depth])
    m.node("GatherND", [data, _indices(m, shape, size)], batch_dims=batch)


def one_hot(m: GraphMaker) -> None:
    depth = m.size()
    indices = _indices(m, m.shape(0, 3), depth)
    values = m.fresh([2])
    m.node("OneHot", [indices, m.const(depth), values], axis=m.number(-len(indices.shape) - 1, len(indices.shape)))


def _different(m: GraphMaker, shape: list[int], axis: int, size: int) -> Tensor:
    """Indices along an axis of which no two are the same in one row."""
    random = np.random.default_rng(len(m.tensors))
    rows = random.permuted(np.broadcast_to(np.arange(size), (*shape[:axis], *shape[axis + 1 :], size)), axis=-1)
    return m.given(np.moveaxis(rows, -1, axis).take(range(shape[axis]), axis).astype(np.int64), m.coin())


def _scattered(m: GraphMaker) -> dict[str, str]:
    """How updates are combined with what is there."""
    return (
        {}
        if m.opset < 16
        else {"reduction": m.one_of(["none", "add", "add", *["mul", "max", "min"][: 3 * (m.opset > 17)]])}
    )


def scatter_elements(m: GraphMaker) -> None:
    data = m.tensor(least=1, fits=lambda shape: 0 not in shape)
    axis = m.number(0, len(data.shape) - 1)
    shape = [m.number(1, size) if m.coin() else size for size in data.shape]
    indices = _different(m, shape, axis, data.shape[axis])
    reduction = _scattered(m)
    m.node("ScatterElements", [data, indices, m.of_shape(shape, data.dtype)], axis=axis, **reduction)


def scatter_nd(m: GraphMaker) -> None:
    data = m.tensor(least=1, fits=lambda shape: 0 not in shape)
    depth = m.number(1, len(data.shape))
    places = np.stack(np.unravel_index(np.arange(math.prod(data.shape[:depth])), data.shape[:depth]), -1)
    count = m.number(1, len(places))
    chosen = np.random.default_rng(m.number(0, 9)).permutation(len(places))[:count]
    indices = m.given(places[chosen].astype(np.int64), m.coin())
    reduction = _scattered(m)
    m.node("ScatterND", [data, indices, m.of_shape([count, *data.shape[depth:]], data.dtype)], **reduction)


def tensor_scatter(m: GraphMaker) -> None:
    cache = m.tensor(least=3, fits=lambda shape: 0 not in shape)
    count = m.number(1, cache.shape[-2])
    update = m.of_shape([*cache.shape[:-2], count, cache.shape[-1]], cache.dtype)
    starts = [_indices(m, cache.shape[:1], cache.shape[-2] - count + 1)] if m.coin() else []
    if starts and (starts[0].array < 0).any():
        raise UnfitError
    m.node("TensorScatter", [cache, update, *starts])


# -- attention, convolution -----------------------------------------------------------------------------------------


def attention(m: GraphMaker) -> None:
    batch, heads, group, queries, keys, size = (m.number(1, most) for most in (4, 3, 2, 5, 6, 4))
    causal = {"is_causal": m.number(0, 1)}
    mask = [m.broadcasting([batch, heads * group, queries, keys], F32)] if m.number(0, 2) == 0 else []
    if mask and len(mask[0].shape) < 2:
        raise UnfitError
    if m.coin():
        q, k, v = (
            m.of_shape([batch, count, places, size])
            for count, places in ((heads * group, queries), (heads, keys), (heads, keys))
        )
        m.node("Attention", [q, k, v, *mask], **causal)
        return
    q, k, v = (
        m.of_shape([batch, places, count * size])
        for count, places in ((heads * group, queries), (heads, keys), (heads, keys))
    )
    m.node("Attention", [q, k, v, *mask], q_num_heads=heads * group, kv_num_heads=heads, **causal)


def rotary(m: GraphMaker) -> None:
    batch, heads, places, half = (m.number(1, most) for most in (4, 4, 6, 3))
    caches = [m.fresh([9, half]), m.fresh([9, half])]
    ids = m.of_shape([batch, places], I64, 0, 8)
    if m.coin():
        m.node("RotaryEmbedding", [m.of_shape([batch, heads, places, 2 * half]), *caches, ids])
    else:
        m.node("RotaryEmbedding", [m.of_shape([batch, places, heads * 2 * half]), *caches, ids], num_heads=heads)


def conv(m: GraphMaker) -> None:
    data = m.tensor(least=3, dtypes=(F32,), fits=lambda shape: 0 not in shape)
    channels, places = data.shape[1], data.shape[2:]
    group = m.one_of([count for count in range(1, channels + 1) if channels % count == 0])
    kernel = [m.number(1, min(size, 3)) for size in places]
    weight = m.of_shape([group * m.number(1, 4), channels // group, *kernel])
    bias = [m.of_shape([weight.shape[0]])] if m.coin() else []
    pads = [m.number(0, 1) for _ in range(2 * len(places))]
    strides = [m.number(1, 2) for _ in places]
    m.node("Conv", [data, weight, *bias], group=group, pads=pads, strides=strides)


def conv_transpose(m: GraphMaker) -> None:
    data = m.tensor(least=3, dtypes=(F32,), fits=lambda shape: 0 not in shape)
    channels, places = data.shape[1], data.shape[2:]
    group = m.one_of([count for count in range(1, channels + 1) if channels % count == 0])
    weight = m.of_shape([channels, m.number(1, 4), *(m.number(1, 3) for _ in places)])
    bias = [m.of_shape([weight.shape[1] * group])] if m.coin() else []
    m.node("ConvTranspose", [data, weight, *bias], group=group, strides=[m.number(1, 2) for _ in places])


def resize(m: GraphMaker) -> None:
    data = m.tensor(least=3, dtypes=(F32,), fits=lambda shape: 0 not in shape and len(shape) <= 4)
    modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if m.coin():
        scales = [1, 1, *(m.number(1, 3) for _ in data.shape[2:])]
        m.node("Resize", [data, None, m.const(scales, F32)], **modes)
    else:
        sizes = [*data.shape[:2], *(size * m.number(1, 2) for size in data.shape[2:])]
        m.node("Resize", [data, None, None, m.const(sizes)], **modes)


def recurrent(op: str, m: GraphMaker) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    data = m.tensor(least=3, dtypes=(F32,), fits=lambda shape: len(shape) == 3 and 0 not in shape)
    hidden, both = m.number(1, 3), m.number(1, 2)
    weights = [m.of_shape([both, gates * hidden, size]) for size in (data.shape[2], hidden)]
    direction = "bidirectional" if both == 2 else m.one_of(["forward", "reverse"])
    m.node(op, [data, *weights], hidden_size=hidden, direction=direction)


def pool(op: str, m: GraphMaker) -> None:
    data = m.tensor(least=3, dtypes=(F32,), low=0.25 if op == "LpPool" else -40, fits=lambda shape: 0 not in shape)
    places = data.shape[2:]
    kernel = [m.number(1, min(size, 3)) for size in places]
    m.node(op, [data], kernel_shape=kernel, strides=[m.number(1, 2) for _ in places])


def global_pool(op: str, m: GraphMaker) -> None:
    m.node(op, [m.tensor(least=3, dtypes=(F32,))])


# -- without a rule -------------------------------------------------------------------------------------------------


def non_zero(m: GraphMaker) -> None:
    m.node("NonZero", [m.tensor(dtypes=(*FLOATS, *INTS, BOOL), exact=True, least=1)])


def compress(m: GraphMaker) -> None:
    data = m.tensor(least=1)
    axis = m.axis(len(data.shape))
    m.node("Compress", [data, m.of_shape([data.shape[axis]], BOOL)], axis=axis)


def reverse_sequence(m: GraphMaker) -> None:
    data = m.tensor(least=2, fits=lambda shape: 0 not in shape)
    m.node("ReverseSequence", [data, m.of_shape([data.shape[1]], I64, 1, data.shape[0])], batch_axis=1, time_axis=0)


def if_body(m: GraphMaker) -> None:
    """Both branches read values from outside; the predicate may be a weight."""
    data = m.tensor()
    other = m.of_shape(data.shape, data.dtype)
    predicate = m.of_shape([], BOOL)
    number = len(m.nodes)
    bodies = [
        helper.make_graph(
            [helper.make_node(op, [data.name, other.name], [f"{op}{number}"])],
            op,
            [],
            [
                helper.make_tensor_value_info(
                    f"{op}{number}", int(helper.np_dtype_to_tensor_dtype(data.dtype)), data.shape
                )
            ],
        )
        for op in ("Add", "Sub")
    ]
    proto = helper.make_node("If", [predicate.name], [f"if{number}"], then_branch=bodies[0], else_branch=bodies[1])
    m.append(proto, [predicate, data, other])


def loop(m: GraphMaker) -> None:
    """A body that adds a value from outside to a carried one, and collects what it has at each trip."""
    data = m.tensor(low=-10, high=10)
    other = m.of_shape(data.shape, data.dtype)
    trips = m.const(m.number(1, 3))
    kind, number = int(helper.np_dtype_to_tensor_dtype(data.dtype)), len(m.nodes)
    trip, go, going, carried, result, collected = (
        f"{part}{number}" for part in ("trip", "go", "going", "in", "out", "all")
    )
    body = helper.make_graph(
        [
            helper.make_node("Identity", [go], [going]),
            helper.make_node("Add", [carried, other.name], [result]),
            helper.make_node("Identity", [result], [collected]),
        ],
        "body",
        [
            helper.make_tensor_value_info(trip, onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info(go, onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info(carried, kind, data.shape),
        ],
        [
            helper.make_tensor_value_info(going, onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info(result, kind, data.shape),
            helper.make_tensor_value_info(collected, kind, data.shape),
        ],
    )
    proto = helper.make_node("Loop", [trips.name, "", data.name], [f"loop{number}", f"trips{number}"], body=body)
    m.append(proto, [trips, data, other])


def scan(m: GraphMaker) -> None:
    """A body that adds a product of each slice with a weight from outside to a state, and collects what it has."""
    rows, inner, columns, trips = (m.number(1, 4) for _ in range(4))
    slices = m.fresh([trips, rows, inner], low=-1, high=1)
    state = m.of_shape([rows, columns], low=-2, high=2)
    factor = m.fresh([inner, columns], low=-1, high=1)
    kind, number = int(helper.np_dtype_to_tensor_dtype(state.dtype)), len(m.nodes)
    before, each, product, after, collected = (
        f"{part}{number}" for part in ("before", "each", "product", "after", "every")
    )
    body = helper.make_graph(
        [
            helper.make_node("MatMul", [each, factor.name], [product]),
            helper.make_node("Add", [before, product], [after]),
            helper.make_node("Identity", [after], [collected]),
        ],
        "body",
        [
            helper.make_tensor_value_info(before, kind, [rows, columns]),
            helper.make_tensor_value_info(each, kind, [rows, inner]),
        ],
        [
            helper.make_tensor_value_info(after, kind, [rows, columns]),
            helper.make_tensor_value_info(collected, kind, [rows, columns]),
        ],
    )
    names = [f"scan{number}", f"scanned{number}"]
    proto = helper.make_node("Scan", [state.name, slices.name], names, body=body, num_scan_inputs=1)
    m.append(proto, [state, slices, factor])
