"""Layers that several model families share. Shapes: B batch, S sequence, D hidden, H heads, K head dim."""

import math

import numpy as np
import onnx

from .builder import Dim, GraphBuilder
from .weights import NUMPY_DTYPES, ONNX_DTYPES


def linear(b: GraphBuilder, name: str, x: str, fan_in: int, fan_out: int, *, gain: float = 1.0) -> str:
    """`[.., fan_in] -> [.., fan_out]` by MatMul with `<name>.weight`; unit variance in gives `gain`**2 out."""
    with b.scope(name):
        return b.op("MatMul", x, b.weight("weight", (fan_in, fan_out), std=gain / math.sqrt(fan_in)))


def linear_with_bias(b: GraphBuilder, name: str, x: str, fan_in: int, fan_out: int, *, gain: float = 1.0) -> str:
    """As `linear`, and Add of `<name>.bias`; the bias is far from zero so that adding it twice shows."""
    product = linear(b, name, x, fan_in, fan_out, gain=gain)
    with b.scope(name):
        return b.op("Add", product, b.weight("bias", (fan_out,), std=0.2))


def embedding(b: GraphBuilder, name: str, ids: str, rows: int, width: int, *, std: float) -> str:
    """Rows of `<name>.weight` `[rows, width]` by index."""
    with b.scope(name):
        return b.op("Gather", b.weight("weight", (rows, width), std=std), ids, axis=0)


def split_heads(b: GraphBuilder, x: str, batch: Dim, seq: Dim, heads: int, head_dim: int) -> str:
    """`[B,S,H*K] -> [B,H,S,K]`."""
    return b.op("Transpose", b.reshape(x, (batch, seq, heads, head_dim)), perm=(0, 2, 1, 3))


def merge_heads(b: GraphBuilder, x: str, batch: Dim, seq: Dim, hidden: int) -> str:
    """`[B,H,S,K] -> [B,S,H*K]`."""
    return b.reshape(b.op("Transpose", x, perm=(0, 2, 1, 3)), (batch, seq, hidden))


def masked_out(b: GraphBuilder) -> str:
    """The score of a position that may not be seen: large enough that its softmax weight is zero, finite in float16."""
    return b.constant("masked_out", np.float32(-3e4).item())


def batch_and_seq(b: GraphBuilder, x: str, batch: int, seq: int) -> tuple[Dim, Dim]:
    """The first two dims of `x`: known sizes, or read from `x` at run time where the model is dynamic."""
    if not b.config.dynamic:
        return batch, seq
    return b.size(x, 0), b.size(x, 1)


def wide_elem_type(b: GraphBuilder) -> int:
    """The ONNX element type of what halves are too coarse for: float32, or the model's own where that is wider."""
    return ONNX_DTYPES[_wide_dtype(b)]


def wide_constant(b: GraphBuilder, hint: str, value: float) -> str:
    """A constant of the type `wide_elem_type`."""
    return b.constant(hint, np.array(value, NUMPY_DTYPES[_wide_dtype(b)]))


def _wide_dtype(b: GraphBuilder) -> str:
    return "float64" if b.config.dtype == "float64" else "float32"


def positions(b: GraphBuilder, seq: Dim) -> str:
    """The int64 vector 0 .. S-1: a constant where S is known, else a Range."""
    if isinstance(seq, int):
        return b.constant("positions", np.arange(seq, dtype=np.int64))
    return b.op("Range", b.constant("zero", 0), seq, b.constant("one", 1))


def causal_mask(b: GraphBuilder, seq: Dim) -> str:
    """The bool matrix [S, S], true where row may see column: a constant where S is known, else through Trilu."""
    if isinstance(seq, int):
        return b.constant("causal_mask", np.tri(seq, dtype=np.bool_))
    one = onnx.helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1])
    ones = b.op("ConstantOfShape", b.shape((seq, seq)), value=one)
    return b.op("Cast", b.op("Trilu", ones, upper=0), to=onnx.TensorProto.BOOL)


def layer_norm(b: GraphBuilder, name: str, x: str, hidden: int) -> str:
    """LayerNormalization over the last dim with `<name>.weight` and `<name>.bias`."""
    with b.scope(name):
        gain = b.weight("weight", (hidden,), mean=1.0, std=0.1)
        return b.op("LayerNormalization", x, gain, b.weight("bias", (hidden,), std=0.1), axis=-1, epsilon=1e-5)


def rms_norm(b: GraphBuilder, name: str, x: str, hidden: int) -> str:
    """x / rms(x) * `<name>.weight` over the last dim: one op from opset 23 on, else op by op, in float32 at least."""
    with b.scope(name):
        gain = b.weight("weight", (hidden,), mean=1.0, std=0.1)
        if b.config.opset >= 23:
            return b.op("RMSNormalization", x, gain, axis=-1, epsilon=1e-5)
        wide_dtype = wide_elem_type(b)
        half = wide_dtype != b.elem_type
        wide = b.op("Cast", x, to=wide_dtype) if half else x
        last = b.constant("axes", np.array([-1], np.int64))
        square = b.op("Pow", wide, wide_constant(b, "two", 2.0))
        mean = b.op("ReduceMean", square, last, keepdims=1)
        root = b.op("Sqrt", b.op("Add", mean, wide_constant(b, "epsilon", 1e-5)))
        normed = b.op("Div", wide, root)
        return b.op("Mul", b.op("Cast", normed, to=b.elem_type) if half else normed, gain)


def gelu(b: GraphBuilder, x: str) -> str:
    """The exact Gelu: one op from opset 20 on, before that x/2 * (1 + erf(x / sqrt 2))."""
    if b.config.opset >= 20:
        return b.op("Gelu", x)
    error_function = b.op("Erf", b.op("Div", x, b.constant("sqrt_2", math.sqrt(2))))
    product = b.op("Mul", x, b.op("Add", error_function, b.constant("1.0", 1.0)))
    return b.op("Mul", product, b.constant("0.5", 0.5))


def tanh_gelu(b: GraphBuilder, x: str) -> str:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), op by op as GPT-2 exports have it."""
    cube = b.op("Pow", x, b.constant("3.0", 3.0))
    inner = b.op("Add", x, b.op("Mul", cube, b.constant("gelu_cubic", 0.044715)))
    tanh = b.op("Tanh", b.op("Mul", inner, b.constant("gelu_scale", math.sqrt(2 / math.pi))))
    half = b.op("Mul", x, b.constant("0.5", 0.5))
    return b.op("Mul", half, b.op("Add", tanh, b.constant("1.0", 1.0)))
