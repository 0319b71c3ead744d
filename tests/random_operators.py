"""How to draw a node of every operator that has a sharding rule, and of some that have none: a table by name."""

from collections.abc import Callable
from functools import partial

from onnx import helper

from . import random_images, random_moves
from .random_graphs import BOOL, F32, F64, FLOATS, I8, I32, I64, INTS, U8, GraphMaker, Tensor, UnfitError

Grow = Callable[[GraphMaker], object]

# -- elementwise ----------------------------------------------------------------------------------------------------

SMOOTH = (
    "Abs", "Atan", "Asinh", "Celu", "Cos", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Neg",
    "Relu", "Selu", "Sigmoid", "Sin", "Softplus", "Softsign", "Swish", "Tanh", "Identity", "Dropout",
)  # fmt: skip
STEPS = ("Ceil", "Floor", "Round", "Sign", "Shrink", "ThresholdedRelu", "IsInf", "IsNaN")
"""They jump: only numbers without rounding errors go in."""
RANGES = {
    "Acos": (-0.875, 0.875),
    "Asin": (-0.875, 0.875),
    "Atanh": (-0.875, 0.875),
    "Acosh": (1.25, 4.0),
    "Log": (0.25, 40.0),
    "Sqrt": (0.25, 40.0),
    "Reciprocal": (0.25, 40.0),
    "Tan": (-1.0, 1.0),
    "Exp": (-10.0, 2.0),
    "Cosh": (-3.0, 3.0),
    "Sinh": (-3.0, 3.0),
}


def _unary(op: str, m: GraphMaker) -> None:
    low, high = RANGES.get(op, (-40.0, 40.0))
    m.node(op, [m.tensor(low=low, high=high, exact=op in STEPS)])


def _not(m: GraphMaker) -> None:
    m.node("Not", [m.tensor(dtypes=(BOOL,))])


def _bitwise_not(m: GraphMaker) -> None:
    m.node("BitwiseNot", [m.tensor(dtypes=INTS)])


def _either(m: GraphMaker, a: Tensor, b: Tensor) -> list[Tensor]:
    return [a, b] if m.coin() else [b, a]


def _arithmetic(op: str, m: GraphMaker) -> None:
    a = m.tensor(dtypes=(*FLOATS, *INTS))
    m.node(op, _either(m, a, m.broadcasting(a.shape, a.dtype)))


def _div(m: GraphMaker) -> None:
    a = m.tensor()
    m.node("Div", [a, m.broadcasting(a.shape, a.dtype, low=0.25)])


def _mod(m: GraphMaker) -> None:
    a = m.tensor(dtypes=INTS, low=-1000, high=1000)
    m.node("Mod", [a, m.broadcasting(a.shape, a.dtype, low=1, high=1000)], fmod=m.number(0, 1))


def _pow(m: GraphMaker) -> None:
    a = m.tensor(low=0.25, high=4)
    exponent = m.broadcasting(a.shape, a.dtype, low=-2, high=2) if m.coin() else m.const(m.number(0, 3), F32)
    m.node("Pow", [a, exponent])


def _prelu(m: GraphMaker) -> None:
    a = m.tensor(least=1)
    kept = a.shape[m.number(0, len(a.shape)) :]
    m.node("PRelu", [a, m.of_shape([1 if m.number(0, 2) == 0 else size for size in kept], a.dtype)])


def _compare(op: str, m: GraphMaker) -> None:
    a = m.tensor(dtypes=(*FLOATS, *INTS), exact=True)
    b = m.broadcasting(a.shape, a.dtype)
    if not b.is_exact:
        raise UnfitError
    m.node(op, _either(m, a, b))


def _logic(op: str, m: GraphMaker) -> None:
    a = m.tensor(dtypes=(BOOL,))
    m.node(op, _either(m, a, m.broadcasting(a.shape, BOOL)))


def _bitwise(op: str, m: GraphMaker) -> None:
    a = m.tensor(dtypes=INTS)
    m.node(op, _either(m, a, m.broadcasting(a.shape, a.dtype)))


def _shift(m: GraphMaker) -> None:
    a = m.tensor(dtypes=(U8,), low=0, high=255)
    m.node("BitShift", [a, m.broadcasting(a.shape, U8, low=0, high=7)], direction=m.one_of(["LEFT", "RIGHT"]))


def _variadic(op: str, m: GraphMaker) -> None:
    a = m.tensor()
    m.node(op, [a, *(m.broadcasting(a.shape, a.dtype) for _ in range(m.number(0, 2)))])


def _where(m: GraphMaker) -> None:
    a = m.tensor(dtypes=(*FLOATS, *INTS))
    m.node("Where", [m.broadcasting(a.shape, BOOL), *_either(m, a, m.broadcasting(a.shape, a.dtype))])


def _clip(m: GraphMaker) -> None:
    a = m.tensor(dtypes=FLOATS)
    low, high = (m.const(bound, a.dtype) if m.number(0, 3) else None for bound in (-1, 1.5))
    m.node("Clip", [a, low, high])


def _cast(m: GraphMaker) -> None:
    to = m.one_of([F32, F64, I64, I32, BOOL])
    m.node("Cast", [m.tensor(dtypes=(*FLOATS, *INTS, BOOL), exact=True)], to=int(helper.np_dtype_to_tensor_dtype(to)))


def _cast_like(m: GraphMaker) -> None:
    m.node("CastLike", [m.tensor(dtypes=(*INTS, *FLOATS), exact=True), m.tensor(dtypes=(*FLOATS, *INTS, BOOL))])


def _quantize(m: GraphMaker) -> None:
    a = m.tensor(dtypes=(F32,), exact=True, least=1)
    if m.coin():
        m.node("QuantizeLinear", [a, m.const(0.25, F32), m.const(m.number(0, 5), U8)])
        return
    axis = m.axis(len(a.shape))
    size = a.shape[axis]
    if size > 1 and m.coin():
        block, shape = _blocks(m, a.shape, axis)
        m.node(
            "QuantizeLinear", [a, m.fresh(shape, F32, 0.25, 2), m.fresh(shape, U8, 0, 9)], axis=axis, block_size=block
        )
        return
    m.node("QuantizeLinear", [a, m.fresh([size], F32, 0.25, 2), m.fresh([size], U8, 0, 9)], axis=axis)


def _blocks(m: GraphMaker, shape: tuple[int, ...], axis: int) -> tuple[int, list[int]]:
    """A size of blocks along an axis, and the shape of their scales."""
    size = shape[axis]
    block = m.one_of([count for count in range(1, size + 1) if size % count == 0] if m.number(0, 3) else [2, 3])
    scales = list(shape)
    scales[axis] = -(-size // block)
    return block, scales


def _dequantize(m: GraphMaker) -> None:
    a = m.tensor(dtypes=(U8, I8), least=1)
    axis = m.axis(len(a.shape))
    if a.shape[axis] > 1 and m.coin():
        block, scales = _blocks(m, a.shape, axis)
        point = m.of_shape(scales, a.dtype, 0, 9) if m.coin() else None
        m.node("DequantizeLinear", [a, m.of_shape(scales, F32), point], axis=axis, block_size=block)
        return
    shape = [] if m.coin() else [a.shape[axis]]
    zero = m.of_shape(shape, a.dtype, 0, 9) if m.coin() else None
    m.node("DequantizeLinear", [a, m.of_shape(shape, F32), zero], axis=axis)


# -- products -------------------------------------------------------------------------------------------------------


def _matmul(m: GraphMaker) -> None:
    a = m.tensor(least=1, dtypes=(*FLOATS, I32))
    inner = a.shape[-1]
    kind = m.number(0, 3)
    if kind == 0:
        b = m.of_shape([inner], a.dtype)
    elif kind == 1:
        b = m.of_shape([inner, m.size()], a.dtype)
    else:
        batch = [1 if m.number(0, 3) == 0 else size for size in a.shape[m.number(0, max(len(a.shape) - 2, 0)) : -2]]
        more = [m.size()] if len(batch) + 3 <= 4 and m.number(0, 4) == 0 else []
        b = m.of_shape([*more, *batch, inner, m.size()], a.dtype)
    if m.number(0, 4) == 0 and len(a.shape) > 1:
        m.node("MatMul", [m.of_shape([m.size(), a.shape[-2]], a.dtype), a])
    else:
        m.node("MatMul", [a, b])


def _matmul_integer(m: GraphMaker) -> None:
    a = m.tensor(least=2, most=3, dtypes=(U8, I8))
    b = m.fresh([a.shape[-1], m.size()], m.one_of([U8, I8]), -9, 9)
    points = [m.const(m.number(0, 3), a.dtype), m.fresh([b.shape[1]] if m.coin() else [], b.dtype, 0, 3)]
    m.node("MatMulInteger", [a, b, *points[: m.number(0, 2)]])


def _gemm(m: GraphMaker) -> None:
    a = m.tensor(least=2, most=2)
    left, right = m.number(0, 1), m.number(0, 1)
    rows, inner = a.shape[::-1] if left else a.shape
    columns = m.size()
    b = m.of_shape((columns, inner) if right else (inner, columns), a.dtype)
    c = m.one_of([None, [columns], [rows, 1], [rows, columns], [1, columns], [1], []])
    operands = [a, b] if c is None else [a, b, m.of_shape(c, a.dtype)]
    m.node("Gemm", operands, transA=left, transB=right, alpha=m.one_of([1.0, 0.5]), beta=m.one_of([1.0, 0.5, 0.0]))


EQUATIONS = (
    "ij,jk->ik", "bij,bjk->bik", "bhqd,bhkd->bhqk", "ij->ji", "ij->", "ij->j", "ij,i->i", "i,j->ij", "ij,jk,kl->il",
    "ij,jk", "bi,bj->bij", "abc->ca", "ij,ij->", "...ij,jk->...ik", "ii->i", "bij,kj->kbi",
)  # fmt: skip


def _einsum(m: GraphMaker) -> None:
    equation = m.one_of(EQUATIONS)
    terms = equation.split("->")[0].split(",")
    sizes: dict[str, int] = {}
    operands: list[Tensor] = []
    for term in terms:
        letters = term.replace("...", "Z")

        def fits(shape: tuple[int, ...], letters: str = letters) -> bool:
            known = dict(sizes)
            return all(known.setdefault(letter, size) == size for letter, size in zip(letters, shape, strict=True))

        if all(letter in sizes for letter in letters):
            found = m.of_shape([sizes[letter] for letter in letters], operands[0].dtype if operands else F32)
        elif operands:
            found = m.of_shape([sizes.get(letter) or m.size() for letter in letters], operands[0].dtype)
        else:
            found = m.tensor(least=len(letters), most=len(letters), fits=fits)
        sizes.update(zip(letters, found.shape, strict=True))
        operands.append(found)
    m.node("Einsum", operands, equation=equation)


# -- reductions -----------------------------------------------------------------------------------------------------


def _reduce(op: str, m: GraphMaker) -> None:
    low = 0.25 if op == "ReduceLogSum" else -40.0
    dtypes = FLOATS if "Log" in op or op == "ReduceL2" else (*FLOATS, *INTS)
    data = m.tensor(least=1, low=low, high=2 if op == "ReduceProd" else 40, dtypes=dtypes)
    since = 13 if op == "ReduceSum" else 18
    axes = m.axes(len(data.shape)) if m.number(0, 3) else None
    attributes = {"keepdims": m.number(0, 1)}
    if axes is None and m.opset >= since and m.coin():
        attributes["noop_with_empty_axes"] = 1
    random_moves.with_axes(m, op, data, axes, since, **attributes)


def _arg(op: str, m: GraphMaker) -> None:
    data = m.tensor(least=1, exact=True, dtypes=(*FLOATS, *INTS))
    m.node(op, [data], axis=m.axis(len(data.shape)), keepdims=m.number(0, 1), select_last_index=m.number(0, 1))


def _top_k(m: GraphMaker) -> None:
    data = m.tensor(least=1, exact=True, dtypes=(*FLOATS, *INTS))
    axis = m.axis(len(data.shape))
    count = m.const([m.number(1, max(data.shape[axis], 1))])
    m.node("TopK", [data, count], 2, axis=axis, largest=m.number(0, 1))


def _cumulative(op: str, m: GraphMaker) -> None:
    data = m.tensor(least=1, dtypes=(*FLOATS, *INTS))
    axis = m.const(m.axis(len(data.shape)))
    m.node(op, [data, axis], exclusive=m.number(0, 1), reverse=m.number(0, 1))


# -- normalisation --------------------------------------------------------------------------------------------------


def _softmax(op: str, m: GraphMaker) -> None:
    data = m.tensor(least=1, exact=op == "Hardmax")
    m.node(op, [data], axis=m.axis(len(data.shape)))


def _lp_normalization(m: GraphMaker) -> None:
    data = m.tensor(least=1, low=0.25)
    m.node("LpNormalization", [data], axis=m.axis(len(data.shape)), p=m.number(1, 2))


def _layer_norm(m: GraphMaker) -> None:
    data = m.tensor(least=1)
    axis = m.axis(len(data.shape))
    shape = data.shape[axis:]
    shift = [m.of_shape(shape, data.dtype)] if m.coin() else []
    results = m.one_of([1, 1, 3])
    m.node("LayerNormalization", [data, m.of_shape(shape, data.dtype), *shift], results, axis=axis, epsilon=1e-3)


def _rms_norm(m: GraphMaker) -> None:
    data = m.tensor(least=1)
    axis = m.axis(len(data.shape))
    m.node("RMSNormalization", [data, m.of_shape(data.shape[axis:], data.dtype)], axis=axis, epsilon=1e-3)


def _group_norm(m: GraphMaker) -> None:
    data = m.tensor(least=3, dtypes=(F32,))
    channels = data.shape[1]
    groups = m.one_of([count for count in range(1, channels + 1) if channels % count == 0] or [1])
    size = [channels if m.opset >= 21 else groups]
    operands = [data, m.of_shape(size), m.of_shape(size)]
    m.node("GroupNormalization", operands, num_groups=groups, epsilon=1e-3)


def _instance_norm(m: GraphMaker) -> None:
    data = m.tensor(least=3, dtypes=(F32,))
    size = [data.shape[1]]
    m.node("InstanceNormalization", [data, m.of_shape(size), m.of_shape(size)], epsilon=1e-3)


def _batch_norm(m: GraphMaker) -> None:
    data = m.tensor(least=2, dtypes=(F32,))
    size = [data.shape[1]]
    operands = [data, *(m.of_shape(size) for _ in range(3)), m.of_shape(size, F32, 0.25)]
    m.node("BatchNormalization", operands)


def _mean_variance(m: GraphMaker) -> None:
    data = m.tensor(least=2, dtypes=(F32,), exact=True)
    if data.array.size and data.array.std() < 0.5:
        raise UnfitError
    m.node("MeanVarianceNormalization", [data], axes=sorted(axis % len(data.shape) for axis in m.axes(len(data.shape))))


def _lrn(m: GraphMaker) -> None:
    m.node("LRN", [m.tensor(least=3, dtypes=(F32,))], size=m.one_of([1, 3]), alpha=0.5)


def _each(make: Callable[[str, GraphMaker], None], *names: str) -> dict[str, Grow]:
    return {name: partial(make, name) for name in names}


OPERATORS: dict[str, Grow] = {
    **_each(_unary, *SMOOTH, *STEPS, *RANGES),
    "Not": _not,
    "BitwiseNot": _bitwise_not,
    **_each(_arithmetic, "Add", "Mul", "Sub"),
    "Div": _div,
    "Mod": _mod,
    "Pow": _pow,
    "PRelu": _prelu,
    **_each(_compare, "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    **_each(_logic, "And", "Or", "Xor"),
    **_each(_bitwise, "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    "BitShift": _shift,
    **_each(_variadic, "Max", "Mean", "Min", "Sum"),
    "Where": _where,
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": _cast_like,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "MatMul": _matmul,
    "MatMulInteger": _matmul_integer,
    "Gemm": _gemm,
    "Einsum": _einsum,
    **_each(
        _reduce,
        *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
        *("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
    ),
    **_each(_arg, "ArgMax", "ArgMin"),
    "TopK": _top_k,
    **_each(_cumulative, "CumSum", "CumProd"),
    **_each(_softmax, "Softmax", "LogSoftmax", "Hardmax"),
    "LpNormalization": _lp_normalization,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "BatchNormalization": _batch_norm,
    "MeanVarianceNormalization": _mean_variance,
    "LRN": _lrn,
    "Transpose": random_moves.transpose,
    "Reshape": random_moves.reshape,
    "Flatten": random_moves.flatten,
    "Squeeze": random_moves.squeeze,
    "Unsqueeze": random_moves.unsqueeze,
    "Concat": random_moves.concat,
    "Split": random_moves.split,
    "Slice": random_moves.cut,
    "Pad": random_moves.pad,
    "Tile": random_moves.tile,
    "Expand": random_moves.expand,
    "ConstantOfShape": random_moves.shape_arithmetic,
    "Trilu": random_moves.trilu,
    "DepthToSpace": random_moves.depth_to_space,
    "SpaceToDepth": random_moves.space_to_depth,
    "Gather": random_moves.gather,
    "GatherElements": random_moves.gather_elements,
    "GatherND": random_moves.gather_nd,
    "OneHot": random_moves.one_hot,
    "ScatterElements": random_moves.scatter_elements,
    "ScatterND": random_moves.scatter_nd,
    "TensorScatter": random_moves.tensor_scatter,
    "Attention": random_moves.attention,
    "RotaryEmbedding": random_moves.rotary,
    "Conv": random_moves.conv,
    "ConvTranspose": random_moves.conv_transpose,
    "Resize": random_moves.resize,
    **_each(random_moves.recurrent, "RNN", "GRU", "LSTM"),
    **_each(random_moves.pool, "AveragePool", "LpPool", "MaxPool"),
    **_each(random_moves.global_pool, "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"),
    "AffineGrid": random_images.affine_grid,
    "GridSample": random_images.grid_sample,
    "RoiAlign": random_images.roi_align,
    "Col2Im": random_images.col2im,
    "CenterCropPad": random_images.center_crop_pad,
    "Det": random_images.det,
    "MaxPool with positions": random_images.max_pool_positions,
    "MaxUnpool": random_images.max_unpool,
    "DFT": random_images.dft,
    "STFT": random_images.stft,
    **_each(random_images.loss, "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"),
    "QLinearMatMul": random_images.qlinear_matmul,
    "ConvInteger": random_images.conv_integer,
    "QLinearConv": random_images.qlinear_conv,
    "NonZero": random_moves.non_zero,
    "Compress": random_moves.compress,
    "ReverseSequence": random_moves.reverse_sequence,
    "If": random_moves.if_body,
    "Loop": random_moves.loop,
}
"""Operator to what draws one node of it (and, rarely, what it stands on)."""
COMMON = (
    "MatMul", "MatMul", "Gemm", "Einsum", "Add", "Mul", "Relu", "Reshape", "Reshape", "Transpose", "ReduceSum", "Softmax",
    "ReduceMean", "LayerNormalization", "Gather", "Concat", "Slice", "Where", "Expand", "Squeeze", "Unsqueeze",
)  # fmt: skip
"""Drawn more often than the others: what models consist of."""
