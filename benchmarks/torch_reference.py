"""ONNX models run by PyTorch, so that its autograd gives their gradients: a reference that shares nothing with irpar.

    values = Interpreter(torch.float64).run(model, inputs, leaves)     # name to tensor; leaves have gradients

All floats are of one dtype. Operators are written with torch.nn.functional where it has them; an operator that is not
in the table is a KeyError that names it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, inliner, numpy_helper
from torch.nn import functional

Tensor = torch.Tensor
Values = dict[str, Any]

_FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}


class Interpreter:
    """Runs models in one dtype.

    Args:
        dtype: of all floats.
        trains: whether BatchNormalization takes the statistics of its batch.
    """

    def __init__(self, dtype: torch.dtype, trains: bool = False) -> None:
        self.dtype = dtype
        self.trains = trains

    def tensor(self, array: Any) -> Tensor:
        """An array, floats in the interpreter's dtype."""
        array = np.asarray(array)
        if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
            return torch.from_numpy(array.astype(np.float64)).to(self.dtype)
        return torch.from_numpy(np.array(array))

    def run(self, model: onnx.ModelProto, inputs: Mapping[str, Any], leaves: Mapping[str, Tensor]) -> Values:
        """All values of the main graph by name.

        Args:
            model: with or without functions.
            inputs: arrays by name.
            leaves: tensors that stand for initializers or inputs.
        """
        model = inliner.inline_local_functions(model)
        values: Values = {"": None}
        for initializer in model.graph.initializer:
            values[initializer.name] = self.tensor(numpy_helper.to_array(initializer))
        values |= {name: self.tensor(array) for name, array in inputs.items()}
        values |= leaves
        self.graph(model.graph, values)
        return values

    def graph(self, graph: onnx.GraphProto, values: Values) -> list[Any]:
        """Run the nodes of a graph; its results."""
        for initializer in graph.initializer:
            values.setdefault(initializer.name, self.tensor(numpy_helper.to_array(initializer)))
        for node in graph.node:
            attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            if node.op_type in _BODIES:
                found = _BODIES[node.op_type](self, node, attributes, values)
            elif node.op_type == "Constant":
                found = self._constant(**attributes)
            elif node.op_type == "ConstantOfShape":
                found = self._constant_of_shape(values[node.input[0]], attributes.get("value"))
            elif node.op_type == "Cast":
                found = self._cast(values[node.input[0]], attributes["to"])
            else:
                operands = [values[name] for name in node.input]
                if node.op_type == "BatchNormalization":
                    attributes["training_mode"] = int(self.trains)
                found = _OPERATORS[node.op_type](*operands, **_decoded(attributes))
            found = found if isinstance(found, (tuple, list)) and node.op_type not in _LISTS else (found,)
            values.update(zip(node.output, found, strict=False))
        return [values[output.name] for output in graph.output]

    def _constant(self, **given: Any) -> Tensor:
        ((name, value),) = given.items()
        return self.tensor(numpy_helper.to_array(value) if name == "value" else np.asarray(value))

    def _constant_of_shape(self, shape: Tensor, value: Any) -> Tensor:
        number = self.tensor(np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value))
        return number.reshape(()).expand(_ints(shape)).clone()

    def _cast(self, x: Tensor, to: int) -> Tensor:
        if to in _FLOATS:
            return x.to(self.dtype)
        return x.to(getattr(torch, np.dtype(helper.tensor_dtype_to_np_dtype(to)).name))


def _decoded(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}


def _ints(value: Tensor | None) -> list[int]:
    return [] if value is None else [int(number) for number in value.reshape(-1)]


# -- bodies ---------------------------------------------------------------------------------------------------------


def _if(on: Interpreter, node: onnx.NodeProto, attributes: dict[str, Any], values: Values) -> list[Any]:
    branch = attributes["then_branch" if bool(values[node.input[0]]) else "else_branch"]
    return on.graph(branch, dict(values))


def _loop(on: Interpreter, node: onnx.NodeProto, attributes: dict[str, Any], values: Values) -> list[Any]:
    body = attributes["body"]
    most = values[node.input[0]]
    goes_on = values[node.input[1]]
    carried = [values[name] for name in node.input[2:]]
    collected: list[list[Tensor]] = [[] for _ in body.output[1 + len(carried) :]]
    trip = 0
    while (goes_on is None or bool(goes_on)) and (most is None or trip < int(most)):
        names = [value.name for value in body.input]
        given = [torch.tensor(trip), torch.tensor(True) if goes_on is None else goes_on, *carried]
        goes_on, *rest = on.graph(body, {**values, **dict(zip(names, given, strict=True))})
        carried = rest[: len(carried)]
        for rows, row in zip(collected, rest[len(carried) :], strict=True):
            rows.append(row)
        trip += 1
    return [*carried, *map(torch.stack, collected)]


def _scan(on: Interpreter, node: onnx.NodeProto, attributes: dict[str, Any], values: Values) -> list[Any]:
    body, count = attributes["body"], attributes["num_scan_inputs"]
    given = [values[name] for name in node.input]
    states, scanned = given[: len(given) - count], given[len(given) - count :]
    collected: list[list[Tensor]] = [[] for _ in body.output[len(states) :]]
    scanned = [
        torch.flip(each.movedim(axis, 0), [0] if turned else [])
        for each, axis, turned in zip(
            scanned,
            _each(attributes, "scan_input_axes", count),
            _each(attributes, "scan_input_directions", count),
            strict=True,
        )
    ]
    for step in range(len(scanned[0])):
        names = [value.name for value in body.input]
        inside = dict(zip(names, [*states, *(one[step] for one in scanned)], strict=True))
        found = on.graph(body, {**values, **inside})
        states = found[: len(states)]
        for rows, row in zip(collected, found[len(states) :], strict=True):
            rows.append(row)
    axes = _each(attributes, "scan_output_axes", len(collected))
    turns = _each(attributes, "scan_output_directions", len(collected))
    stacked = [
        torch.stack(rows[::-1] if turned else rows, axis)
        for rows, axis, turned in zip(collected, axes, turns, strict=True)
    ]
    return [*states, *stacked]


def _each(attributes: Mapping[str, Any], name: str, count: int) -> list[int]:
    return list(attributes.get(name, [0] * count))


_BODIES = {"If": _if, "Loop": _loop, "Scan": _scan}
_LISTS = {"SequenceEmpty", "SequenceInsert"}


# -- operators ------------------------------------------------------------------------------------------------------


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(x: Tensor, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        dims = list(axes) if isinstance(axes, (list, tuple)) else _ints(axes)
        if not dims and noop_with_empty_axes:
            return x
        return function(x, dim=dims or list(range(x.dim())), keepdim=bool(keepdims))

    return apply


def _reduce_max(x: Tensor, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    dims = list(axes) if isinstance(axes, (list, tuple)) else _ints(axes)
    return torch.amax(x, dim=dims or list(range(x.dim())), keepdim=bool(keepdims))


def _reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    sizes = _ints(shape)
    return x.reshape([x.shape[at] if size == 0 and not allowzero else size for at, size in enumerate(sizes)])


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    first, last = _ints(starts), _ints(ends)
    for place, axis in enumerate(_ints(axes) or range(len(first))):
        step = _ints(steps)[place] if steps is not None else 1
        at = range(x.shape[axis])[first[place] : last[place] : step]
        x = x.index_select(axis, torch.tensor(list(at), dtype=torch.int64))
    return x


def _split(x: Tensor, split: Tensor | None = None, *, axis: int = 0, num_outputs: int = 0) -> Any:
    return torch.split(x, _ints(split), axis) if split is not None else torch.chunk(x, num_outputs, axis)


def _gather(x: Tensor, index: Tensor, *, axis: int = 0) -> Tensor:
    axis %= x.dim()
    flat = x.index_select(axis, (index.reshape(-1) % x.shape[axis]).long())
    return flat.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


def _gather_nd(x: Tensor, index: Tensor, *, batch_dims: int = 0) -> Tensor:
    assert not batch_dims
    return x[tuple(index.movedim(-1, 0).long())]


def _scatter_elements(x: Tensor, index: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    if reduction == "add":
        return x.scatter_add(axis, index, updates)
    return x.scatter(axis, index, updates)


def _one_hot(index: Tensor, depth: Tensor, values: Tensor, *, axis: int = -1) -> Tensor:
    hot = functional.one_hot(index % int(depth), int(depth)).bool()
    return torch.where(hot.movedim(-1, axis), values[1], values[0])


def _pads(pads: Any, rank: int) -> tuple[list[int], bool]:
    flat = list(pads) if pads else [0] * (2 * rank)
    return [flat[side * rank + at] for at in reversed(range(rank)) for side in (0, 1)], any(flat)


def _conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    pads: Any = (),
    strides: Any = 1,
    dilations: Any = 1,
    group: int = 1,
    kernel_shape: Any = (),
    auto_pad: str = "NOTSET",
) -> Tensor:
    assert auto_pad in ("NOTSET", "VALID")
    around, _ = _pads(pads, w.dim() - 2)
    function = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}[w.dim()]
    return function(functional.pad(x, around), w, b, strides, 0, dilations, group)


def _conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    pads: Any = (),
    strides: Any = 1,
    dilations: Any = 1,
    group: int = 1,
    kernel_shape: Any = (),
    output_padding: Any = 0,
    auto_pad: str = "NOTSET",
) -> Tensor:
    assert auto_pad in ("NOTSET", "VALID")
    rank = w.dim() - 2
    flat = list(pads) if pads else [0] * (2 * rank)
    assert flat[:rank] == flat[rank:]
    function = {3: functional.conv_transpose1d, 4: functional.conv_transpose2d, 5: functional.conv_transpose3d}[w.dim()]
    return function(x, w, b, strides, flat[:rank], output_padding, group, dilations)


def _max_pool(x: Tensor, *, kernel_shape: Any, pads: Any = (), strides: Any = None, **rest: Any) -> Tensor:
    assert not rest.get("ceil_mode")
    around, _ = _pads(pads, len(kernel_shape))
    return functional.max_pool2d(functional.pad(x, around, value=-np.inf), kernel_shape, strides)


def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    made = functional.layer_norm(x, x.shape[axis % x.dim() :], eps=epsilon) * scale
    return made if bias is None else made + bias


def _rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    return functional.rms_norm(x, x.shape[axis % x.dim() :], eps=epsilon) * scale


def _group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    repeats = x.shape[1] // len(scale)
    return functional.group_norm(
        x, num_groups, scale.repeat_interleave(repeats), bias.repeat_interleave(repeats), epsilon
    )


def _batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    training_mode: int = 0,
    **rest: Any,
) -> Tensor:
    if training_mode:
        return functional.batch_norm(x, None, None, scale, bias, True, 0.0, epsilon)
    around = (-1, *[1] * (x.dim() - 2))
    made = (x - mean.reshape(around)) / torch.sqrt(var.reshape(around) + epsilon)
    return made * scale.reshape(around) + bias.reshape(around)


def _trilu(x: Tensor, k: Tensor | None = None, *, upper: int = 1) -> Tensor:
    return (torch.triu if upper else torch.tril)(x, 0 if k is None else int(k))


def _cumsum(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    assert not exclusive
    assert not reverse
    return torch.cumsum(x, int(axis))


def _top_k(x: Tensor, k: Tensor, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> Any:
    return torch.topk(x, int(k), axis, bool(largest), bool(sorted))


def _resize(
    x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None, *, mode: str = "nearest", **rest: Any
) -> Tensor:
    target = (
        _ints(sizes)[2:]
        if sizes is not None
        else [int(s * n) for s, n in zip(scales.tolist()[2:], x.shape[2:], strict=True)]
    )
    modes = {"nearest": "nearest", "linear": "bilinear", "cubic": "bicubic"}
    return functional.interpolate(
        x, target, mode=modes[mode], **({} if mode == "nearest" else {"align_corners": False})
    )


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: int = 0,
    scale: float | None = None,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    **rest: Any,
) -> Tensor:
    assert not any(rest.values())
    is_flat = q.dim() == 3
    if is_flat:
        q, k, v = (
            each.reshape(*each.shape[:2], heads, -1).transpose(1, 2)
            for each, heads in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
        )
    made = functional.scaled_dot_product_attention(q, k, v, mask, 0.0, bool(is_causal), scale=scale, enable_gqa=True)
    return made.transpose(1, 2).flatten(2) if is_flat else made


def _rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    assert not interleaved
    assert not rotary_embedding_dim
    assert x.dim() == 4
    if ids is not None:
        cos, sin = cos[ids], sin[ids]
    a, b = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _assert_default(rest: Mapping[str, Any]) -> None:
    """Refuse activations that torch's layers do not have."""
    names = {name.decode() for name in rest.get("activations", ())}
    assert names <= {"Sigmoid", "Tanh"}
    assert not any(value for name, value in rest.items() if name != "activations")


def _lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lens: Any = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    p: Any = None,
    *,
    direction: str = "forward",
    hidden_size: int = 0,
    **rest: Any,
) -> Any:
    _assert_default(rest)
    assert lens is None
    assert p is None
    return _recurrent("lstm", x, w, r, b, (h0, c0), direction)


def _gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lens: Any = None,
    h0: Tensor | None = None,
    *,
    direction: str = "forward",
    hidden_size: int = 0,
    linear_before_reset: int = 0,
    **rest: Any,
) -> Any:
    _assert_default(rest)
    assert lens is None
    if linear_before_reset:
        return _recurrent("gru", x, w, r, b, (h0,), direction)
    ways = {"forward": [1], "reverse": [-1], "bidirectional": [1, -1]}[direction]
    runs = [
        _gru_early(x, w[d], r[d], None if b is None else b[d], None if h0 is None else h0[d], step)
        for d, step in enumerate(ways)
    ]
    return [torch.stack([rows for rows, _ in runs], 1), torch.stack([last for _, last in runs], 0)]


def _gru_early(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, h: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
    """One direction that resets the state before its product, which torch's layer does not."""
    size = r.shape[1]
    bias_x, bias_h = torch.zeros(6 * size, dtype=x.dtype).chunk(2) if b is None else b.chunk(2)
    h = torch.zeros(x.shape[1], size, dtype=x.dtype) if h is None else h
    rows = []
    for given in list(x)[::step]:
        z, reset, n = (given @ w.T + bias_x).chunk(3, -1)
        z_h, reset_h, _ = (h @ r.T + bias_h).chunk(3, -1)
        z, reset = torch.sigmoid(z + z_h), torch.sigmoid(reset + reset_h)
        n = torch.tanh(n + (reset * h) @ r[2 * size :].T + bias_h[2 * size :])
        h = (1 - z) * n + z * h
        rows.append(h)
    return torch.stack(rows[::step]), h


def _recurrent(kind: str, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, starts: Any, direction: str) -> Any:
    """By torch's own layers; their gates stand in another order."""
    hidden = r.shape[2]
    order = {"lstm": [0, 2, 3, 1], "gru": [1, 0, 2]}[kind]
    starts = [torch.zeros(len(w), x.shape[1], hidden, dtype=x.dtype) if start is None else start for start in starts]

    def turned(value: Tensor) -> Tensor:
        parts = value.reshape(-1, hidden, *value.shape[1:])
        return parts[order].reshape(value.shape)

    weights = []
    for d in range(len(w)):
        halves = torch.zeros(2 * w.shape[1], dtype=x.dtype) if b is None else b[d]
        first, second = halves.chunk(2)
        weights += [turned(w[d]), turned(r[d]), turned(first), turned(second)]
    is_double = direction == "bidirectional"
    given = torch.flip(x, [0]) if direction == "reverse" else x
    function = torch.lstm if kind == "lstm" else torch.gru
    states = tuple(starts) if kind == "lstm" else starts[0]
    y, *last = function(given, states, weights, True, 1, 0.0, False, is_double, False)
    y = y.reshape(*y.shape[:2], len(w), hidden).transpose(1, 2)
    return [torch.flip(y, [0]) if direction == "reverse" else y, *last]


def _div(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Rows without any number that is not -inf have no gradient; torch's own would be NaN there."""
    return torch.softmax(x, axis)


def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze(_ints(axes)) if axes is not None else x.squeeze()


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    dims = _ints(axes)
    for axis in sorted(axis % (x.dim() + len(dims)) for axis in dims):
        x = x.unsqueeze(axis)
    return x


def _shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


def _einsum(*operands: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *operands)


def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    made = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return made if c is None else made + beta * c


def _arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return torch.argmax(x, axis, bool(keepdims))


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return torch.clamp(x, low, high)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Add": torch.add,
    "And": torch.logical_and,
    "ArgMax": _arg_max,
    "Attention": _attention,
    "BatchNormalization": _batch_norm,
    "CastLike": lambda x, like, **_: x.to(like.dtype),
    "Clip": _clip,
    "Concat": lambda *values, axis: torch.cat(values, axis),
    "ConcatFromSequence": lambda values, axis, new_axis=0: (torch.stack if new_axis else torch.cat)(values, axis),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Cos": torch.cos,
    "CumSum": _cumsum,
    "Div": _div,
    "Einsum": _einsum,
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Expand": lambda x, shape: (
        x * torch.ones(_ints(shape), dtype=x.dtype)
        if x.dtype != torch.bool
        else x | torch.zeros(_ints(shape), dtype=torch.bool)
    ),
    "Flatten": lambda x, axis=1: x.reshape(int(np.prod(x.shape[:axis])), -1),
    "GRU": _gru,
    "Gather": _gather,
    "GatherElements": lambda x, index, axis=0: torch.gather(x, axis, index % x.shape[axis]),
    "GatherND": _gather_nd,
    "Gelu": lambda x, approximate="none": functional.gelu(x, approximate=approximate),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda x: x.mean(dim=list(range(2, x.dim())), keepdim=True),
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "GroupNormalization": _group_norm,
    "Identity": lambda x: x,
    "InstanceNormalization": lambda x, s, b, epsilon=1e-5: functional.instance_norm(x, weight=s, bias=b, eps=epsilon),
    "IsNaN": torch.isnan,
    "LSTM": _lstm,
    "LayerNormalization": _layer_norm,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "LogSoftmax": lambda x, axis=-1: torch.log_softmax(x, axis),
    "MatMul": torch.matmul,
    "Max": torch.maximum,
    "MaxPool": _max_pool,
    "Min": torch.minimum,
    "Mod": lambda a, b, fmod=0: torch.fmod(a, b) if fmod else torch.remainder(a, b),
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "OneHot": _one_hot,
    "Or": torch.logical_or,
    "Pow": torch.pow,
    "RMSNormalization": _rms_norm,
    "Range": lambda start, limit, delta: torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype),
    "Reciprocal": torch.reciprocal,
    "ReduceMax": _reduce_max,
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "Relu": torch.relu,
    "Reshape": _reshape,
    "Resize": _resize,
    "RotaryEmbedding": _rotary,
    "ScatterElements": _scatter_elements,
    "SequenceEmpty": lambda **_: [],
    "SequenceInsert": lambda values, x, place=None: [*values, x],
    "Shape": _shape,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Slice": _slice,
    "Softmax": _softmax,
    "Softplus": functional.softplus,
    "Split": _split,
    "Sqrt": torch.sqrt,
    "Squeeze": _squeeze,
    "Sub": torch.sub,
    "Tanh": torch.tanh,
    "Tile": lambda x, repeats: x.repeat(_ints(repeats)),
    "TopK": _top_k,
    "Transpose": lambda x, perm=None: x.permute(perm or list(reversed(range(x.dim())))),
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": torch.where,
    "Xor": torch.logical_xor,
}
