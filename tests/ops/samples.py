"""Sample nodes for every operator with a factor rule: ranks, attributes, uneven sizes, data of both signs."""

from collections.abc import Iterator

import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from irpar.ir import DOMAIN
from irpar.kernels import lookup
from irpar.ops import elementwise, recurrent, reduction

from .draws import bools, const, floats, ints, scalar
from .rule_proof import Array, Constant, Sample
from .samples_classic import CLASSIC
from .samples_heads import HEADS
from .samples_images import IMAGES
from .samples_microsoft import MICROSOFT
from .samples_others import OTHERS

_INT_BINARY = {"BitwiseAnd", "BitwiseOr", "BitwiseXor"}
_BOOL_BINARY = {"And", "Or", "Xor"}
_POSITIVE = {"Log", "Sqrt", "Reciprocal", "Acosh"}
_UNIT = {"Acos", "Asin", "Atanh"}
_NEW_VERSIONS = {"Swish": 24}


def _unary() -> Iterator[Sample]:
    for name in elementwise.UNARY:
        version = _NEW_VERSIONS.get(name, 21)
        if name == "Not":
            yield Sample(name, (bools(5, 4),))
        elif name == "BitwiseNot":
            yield Sample(name, (ints(5, 4),))
        elif name in _POSITIVE:
            yield Sample(name, (floats(5, 4, low=1.1, high=3.0),), version=version)
        elif name in _UNIT:
            yield Sample(name, (floats(5, 4, low=-0.9, high=0.9),), version=version)
        else:
            yield Sample(name, (floats(5, 1, 4),), version=version)
    for name in ("IsNaN", "IsInf", "Identity"):
        yield Sample(name, (np.array([1, np.nan, np.inf, -np.inf, 0], np.float32),))
    yield Sample("Gelu", (floats(5, 4),), {"approximate": "tanh"})
    yield Sample("BitCast", (floats(5, 4),), {"to": 6}, version=26)
    yield Sample("SwiGLU", (floats(5, 4), floats(5, 4)), version=28)


def _binary() -> Iterator[Sample]:
    for name in (*elementwise.BINARY, *elementwise.COMPARISONS):
        if name in _BOOL_BINARY:
            yield Sample(name, (bools(5, 4), bools(4)))
        elif name in _INT_BINARY:
            yield Sample(name, (ints(5, 1, 4), ints(6, 1)))
        elif name == "BitShift":
            yield Sample(
                name, (ints(5, 4, low=0, dtype=np.uint8), ints(5, 1, low=0, dtype=np.uint8)), {"direction": "LEFT"}
            )
        elif name == "Mod":
            yield Sample(name, (ints(5, 4), ints(5, 4, low=1)))
            yield Sample(name, (floats(5, 4), floats(4, low=1)), {"fmod": 1})
        elif name == "Pow":
            yield Sample(name, (floats(5, 4, low=0.1), floats(4)))
            yield Sample(name, (floats(5, 4), Constant(np.asarray(2, np.int32))))
        elif name == "PRelu":
            yield Sample(name, (floats(5, 4, 3), floats(4, 1)))
        else:
            yield Sample(name, (floats(5, 4), floats(5, 4)))
            yield Sample(name, (floats(6, 1, 4), floats(5, 1)))
            yield Sample(name, (floats(4), floats()))


def _many() -> Iterator[Sample]:
    for name in elementwise.VARIADIC:
        yield Sample(name, (floats(5, 4), floats(4), floats(3, 1, 1)))
        yield Sample(name, (floats(5, 4),))
    yield Sample("Where", (bools(5, 1), floats(5, 4), floats(4)))
    yield Sample("Where", (bools(6, 5, 4), floats(5, 4), floats()))
    yield Sample("Clip", (floats(5, 4), scalar(-1, np.float32), scalar(1, np.float32)))
    yield Sample("Clip", (floats(5, 4), None, scalar(1, np.float32)))
    yield Sample("Cast", (floats(5, 4),), {"to": 7})
    yield Sample("CastLike", (floats(5, 4), ints(6)))
    yield Sample("Dropout", (floats(5, 4),))
    yield Sample("Dropout", (floats(5, 4), scalar(0.5, np.float32), Constant(np.asarray(False))), results=2)


def _matmul() -> Iterator[Sample]:
    for left, right in (
        ((5, 6), (6, 4)),
        ((5,), (5,)),
        ((5,), (5, 4)),
        ((6, 5), (5,)),
        ((3, 1, 5, 6), (4, 6, 7)),
        ((3, 5, 6), (6, 4)),
        ((5,), (3, 5, 4)),
        ((3, 4, 5), (5,)),
        ((6, 1), (1, 4)),
    ):
        yield Sample("MatMul", (floats(*left), floats(*right)))
    yield Sample("MatMul", (ints(5, 6, dtype=np.int32), ints(6, 4, dtype=np.int32)))
    for trans_a in (0, 1):
        for trans_b in (0, 1):
            a, b = floats(*((5, 6)[:: -1 if trans_a else 1])), floats(*((6, 4)[:: -1 if trans_b else 1]))
            yield Sample("Gemm", (a, b), {"transA": trans_a, "transB": trans_b, "alpha": 0.5})
            yield Sample("Gemm", (a, b, floats(4)), {"transA": trans_a, "transB": trans_b, "beta": 0.5})
    yield Sample("Gemm", (floats(5, 6), floats(6, 4), floats(5, 1)))
    yield Sample("Gemm", (floats(5, 6), floats(6, 4), floats(5, 4)))
    yield Sample("Gemm", (floats(5, 6), floats(6, 4), None))
    for equation, shapes in {
        "bij,bjk->bik": ((3, 5, 6), (3, 6, 4)),
        "bhqd,bhkd->bhqk": ((2, 3, 5, 4), (2, 3, 6, 4)),
        "ij->ji": ((5, 4),),
        "ij->": ((5, 4),),
        "ij,i->i": ((5, 4), (5,)),
        "i,j->ij": ((5,), (4,)),
        "ij,jk,kl->il": ((3, 4), (4, 5), (5, 6)),
        "ij , jk": ((5, 4), (4, 6)),
        "...ij->...ji": ((2, 5, 4),),
        "... ij, jk": ((2, 3, 5, 4), (4, 6)),
        "...ij,...jk->...ik": ((2, 3, 5, 4), (2, 3, 4, 6)),
        "i...,...j->...ij": ((5, 2, 3), (2, 3, 4)),
        "...qhd,...khd->...hqk": ((2, 3, 5, 2, 4), (2, 3, 6, 2, 4)),
    }.items():
        yield Sample("Einsum", tuple(floats(*shape) for shape in shapes), {"equation": equation})


def _reductions() -> Iterator[Sample]:
    for name in (*reduction.PARTIAL, *reduction.NONLINEAR):
        low = 0.1 if "Log" in name and "Exp" not in name else -2.0
        data = floats(5, 4, 6, low=low)
        yield Sample(name, (data, const(1)))
        yield Sample(name, (data, const(0, -1)), {"keepdims": 0})
        yield Sample(name, (data,), {"keepdims": 0})
        yield Sample(name, (data, const()), {"noop_with_empty_axes": 1})
        if name != "ReduceSum":
            yield Sample(name, (data,), {"axes": [0, 2]}, version=17)
        if name not in reduction.NONLINEAR:
            # Large enough to go beyond the type.
            large = 2**12 if name == "ReduceSumSquare" else 2**27
            yield Sample(name, (ints(5, 6, low=-8, dtype=np.int32) * large, const(0)))
    yield Sample("ReduceMean", (floats(7, 4, dtype=np.float16), const(0)), tolerance=1e-2)
    yield Sample("ReduceMax", (bools(5, 6), const(0)))
    yield Sample("ReduceMin", (bools(5, 6), const(0)))
    for name in ("ArgMax", "ArgMin"):
        yield Sample(name, (floats(5, 6),), {"axis": 1})
        yield Sample(name, (floats(5, 6),), {"axis": -2, "keepdims": 0})
    yield Sample("TopK", (floats(5, 6), const(3)), {"axis": 1}, results=2)
    yield Sample("TopK", (floats(5, 6, 4), const(2)), {"axis": 0, "largest": 0}, results=2)
    yield Sample("CumSum", (floats(5, 6), scalar(1)))
    yield Sample("CumSum", (floats(5, 6), scalar(-2)), {"reverse": 1, "exclusive": 1})
    yield Sample("CumProd", (floats(5, 6), scalar(1)), version=26)


def _normalization() -> Iterator[Sample]:
    for name in ("Softmax", "LogSoftmax", "Hardmax"):
        yield Sample(name, (floats(5, 6),))
        yield Sample(name, (floats(5, 6, 4),), {"axis": 1})
    yield Sample("LpNormalization", (floats(5, 6),), {"axis": 0, "p": 1})
    yield Sample("MeanVarianceNormalization", (floats(3, 5, 4, 2),), version=13)
    yield Sample("LRN", (floats(3, 6, 4, 2),), {"size": 3, "alpha": 1.0})
    yield Sample("LayerNormalization", (floats(5, 6, 4), floats(4), floats(4)))
    yield Sample("LayerNormalization", (floats(5, 6, 4), floats(6, 4)), {"axis": 1}, results=3)
    yield Sample("LayerNormalization", (floats(5, 6), floats(6), None))
    yield Sample("RMSNormalization", (floats(5, 6, 4), floats(4)), version=23)
    yield Sample("RMSNormalization", (floats(5, 6, 4), floats(6, 4)), {"axis": -2}, version=23)
    yield Sample("GroupNormalization", (floats(3, 8, 5), floats(8), floats(8)), {"num_groups": 4})
    yield Sample("GroupNormalization", (floats(3, 8, 5), floats(4), floats(4)), {"num_groups": 4}, version=20)
    yield Sample("InstanceNormalization", (floats(3, 5, 4, 6), floats(5), floats(5)))
    statistics = (floats(5), floats(5), floats(5), floats(5, low=0.5))
    yield Sample("BatchNormalization", (floats(4, 5, 3), *statistics))
    yield Sample("BatchNormalization", (floats(4, 5, 3), *statistics), {"training_mode": 1}, results=3)


def _moving() -> Iterator[Sample]:
    yield Sample("Transpose", (floats(5, 4, 3),), {"perm": [2, 0, 1]})
    yield Sample("Transpose", (floats(5, 4, 3),))
    for before, target in (
        ((6, 4), (2, 3, 4)),
        ((2, 3, 4), (6, -1)),
        ((5, 12), (0, 4, 3)),
        ((5, 4, 3), (5, 12)),
        ((6, 4), (4, 6)),
        ((12, 4), (2, 4, 6)),
        ((1, 5, 1, 6), (5, 6)),
        ((6,), (1, 6, 1)),
        ((4, 6), (-1,)),
    ):
        yield Sample("Reshape", (floats(*before), const(*target)))
    yield Sample("Flatten", (floats(4, 3, 5),), {"axis": 2})
    yield Sample("Flatten", (floats(5, 2, 6),), {"axis": -2})
    yield Sample("Squeeze", (floats(5, 1, 2, 1), const(1, -1)))
    yield Sample("Squeeze", (floats(5, 1, 2, 1),))
    yield Sample("Unsqueeze", (floats(5, 4), const(0, -1)))
    yield Sample("Concat", (floats(5, 2, 4), floats(5, 3, 4)), {"axis": 1})
    yield Sample("Concat", (floats(5, 2, 4), floats(5, 2, 4)), {"axis": -1})
    yield Sample("Split", (floats(5, 6), const(2, 4)), {"axis": 1}, results=2)
    yield Sample("Split", (floats(7, 6),), {"axis": 0, "num_outputs": 3}, results=3)
    yield Sample("Slice", (floats(5, 6, 8), const(1), const(5), const(1)))
    yield Sample("Slice", (floats(5, 6, 8), const(0, -6), const(2**63 - 1, 6), const(2, 1)))
    yield Sample("Slice", (floats(5, 6), const(-1), const(-100), const(0), const(-1)))
    yield Sample("Slice", (floats(5, 6), const(0, 0), const(5, 6), const(0, 1), const(1, 2)))
    yield Sample("Pad", (floats(5, 6), const(0, 1, 0, 2)))
    yield Sample("Pad", (floats(5, 6), const(1, -2), scalar(1, np.float32), const(-1)))
    yield Sample("Pad", (floats(5, 6), const(2, 0, 1, 0)), {"mode": "reflect"})
    yield Sample("Pad", (floats(5, 6), const(7, -8, -7, 8)))
    yield Sample("Tile", (floats(5, 6), const(1, 3)))
    yield Sample("Tile", (floats(6, 5), const(2, 1)))
    yield Sample("Expand", (floats(5, 1), const(4, 1, 6)))
    yield Sample("Expand", (floats(6), const(5, 6)))
    yield Sample("ConstantOfShape", (const(5, 6),), {"value": np.asarray([2.5], np.float32)})
    yield Sample("Trilu", (floats(3, 5, 6),))
    yield Sample("Trilu", (floats(5, 6), scalar(1)), {"upper": 0})
    yield Sample("Trilu", (floats(5, 3, 5), scalar(-2)))
    yield Sample("Trilu", (floats(6, 5), scalar(9)), {"upper": 0})
    yield Sample("EyeLike", (floats(5, 6),))
    yield Sample("EyeLike", (floats(6, 5),), {"k": -2, "dtype": 7})
    yield Sample("Shape", (floats(5, 6),))
    yield Sample("Shape", (floats(5, 6, 3),), {"start": -2, "end": 2})
    yield Sample("Size", (floats(5, 6),))
    yield Sample("DepthToSpace", (floats(3, 8, 2, 6),), {"blocksize": 2})
    yield Sample("DepthToSpace", (floats(3, 27, 4, 6),), {"blocksize": 3, "mode": "CRD"})
    yield Sample("SpaceToDepth", (floats(3, 2, 4, 6),), {"blocksize": 2})


def _indexing() -> Iterator[Sample]:
    yield Sample("Gather", (floats(7, 4), ints(5, 3, low=-7, high=7)))
    yield Sample("Gather", (floats(5, 6, 4), ints(3, low=-6, high=6, dtype=np.int32)), {"axis": 1})
    yield Sample("Gather", (ints(6, 4), ints(low=-6, high=6)), {"axis": 0})
    yield Sample("Gather", (floats(5, 6, dtype=np.float16), ints(2, 3, low=0, high=6)), {"axis": -1})
    yield Sample("Gather", (bools(6, 4), ints(5, low=0, high=6)))
    for small in (np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.uint64):
        # Numbers of all sizes: as signed ones, half of them are negative.
        numbers = ints(6, 4, low=np.iinfo(small).min, high=np.iinfo(np.int64).max, dtype=small)
        yield Sample("Gather", (numbers, ints(5, low=-6, high=6)))
    yield Sample("GatherElements", (ints(6, 5, dtype=np.int8), ints(4, 5, low=-6, high=6)), {"axis": 0})
    yield Sample("GatherND", (ints(6, 5, 4, dtype=np.int8), ints(3, 2, low=-5, high=5)))
    yield Sample("ScatterND", (ints(6, 5, 4, dtype=np.int8), np.asarray([[1], [4]]), ints(2, 5, 4, dtype=np.int8)))
    codes = ints(6, 5, low=0, dtype=np.uint8)
    yield Sample(
        "ScatterElements", (codes, np.asarray([[0] * 5, [3] * 5, [-1] * 5]), ints(3, 5, low=0, dtype=np.uint8))
    )
    yield Sample("GatherElements", (floats(6, 5), ints(4, 5, low=-6, high=6)), {"axis": 0})
    yield Sample("GatherElements", (floats(6, 5, 4), ints(6, 3, 4, low=0, high=5)), {"axis": 1})
    yield Sample("GatherElements", (floats(6, 5), ints(4, 3, low=0, high=5)), {"axis": 1})
    yield Sample("Compress", (floats(5, 6, 4), Constant(np.array([1, 0, 1, 0, 1, 1], bool))), {"axis": 1})
    yield Sample("Compress", (floats(5, 6), Constant(np.tile([True, False, False, True, True], 6))))
    yield Sample("ReverseSequence", (floats(5, 6, 4), ints(6, low=2, high=5)))
    yield Sample("ReverseSequence", (floats(6, 5), ints(6, low=2, high=5)), {"batch_axis": 0, "time_axis": 1})
    yield Sample("GatherND", (floats(6, 5, 4), ints(3, 2, low=0, high=5)))
    yield Sample("GatherND", (floats(6, 5, 4), ints(6, 2, 1, low=0, high=5)), {"batch_dims": 1})
    yield Sample("GatherND", (floats(6, 5, 4), ints(3, 2, low=-5, high=5)))
    yield Sample("GatherND", (floats(3, 6, 5, 4), ints(3, 5, 2, low=-5, high=5)), {"batch_dims": 1})
    yield Sample("GatherND", (floats(6, 5), ints(3, 5, 2, low=-5, high=5)))
    yield Sample("GatherND", (ints(6, 5, 4), ints(3, 2, low=-5, high=5)))
    yield Sample("GatherND", (floats(6, 5, 4) > 0, ints(3, 2, low=-5, high=5)))
    values = np.asarray([-1, 2], np.float32)
    yield Sample("OneHot", (ints(5, 3, low=0, high=6), const(6), values))
    yield Sample("OneHot", (ints(5, low=0, high=6), const(6), values), {"axis": 0})
    yield Sample("OneHot", (ints(5, 3, low=0, high=6), scalar(6), values), {"axis": 1})
    rows = np.asarray([[4, 1, 0, 3, 2]] * 3)
    yield Sample("ScatterElements", (floats(6, 5), rows.T.copy()[:, :3], floats(5, 3)), {"axis": 0})
    yield Sample("ScatterElements", (floats(3, 6), rows, floats(3, 5)), {"axis": 1, "reduction": "add"})
    yield Sample("ScatterND", (floats(6, 5, 4), np.asarray([[1], [4]]), floats(2, 5, 4)))
    yield Sample("ScatterND", (floats(6, 5, 4), np.asarray([[1, 2], [4, 0]]), floats(2, 4)), {"reduction": "add"})
    repeated = np.asarray([[1], [4], [1], [0], [4]])
    for way in ("add", "mul", "max", "min"):
        yield Sample("ScatterND", (floats(6, 5), repeated, floats(5, 5)), {"reduction": way})
        few = {"axis": 0, "reduction": way}
        yield Sample("ScatterElements", (floats(6, 4), ints(5, 4, low=-6, high=6), floats(5, 4)), few)
        pairs = ints(7, 2, low=-5, high=5)
        yield Sample("ScatterND", (floats(6, 5, 4), pairs, floats(7, 4)), {"reduction": way})
    yield Sample("ScatterND", (floats(6, 5, 4), np.asarray([[-6, 2], [4, -1], [3, 3]]), floats(3, 4)))
    own = np.arange(5)[:, None].repeat(3, 1)
    columns = np.asarray([[0, 2, 4], [1, -1, 3], [5, 0, 1], [2, 3, 4], [3, 1, 0]])
    counted = Constant(np.stack([own, columns], -1))
    yield Sample("ScatterND", (floats(5, 6, 4), counted, floats(5, 3, 4)))
    yield Sample("ScatterND", (floats(5, 6), counted, floats(5, 3)), {"reduction": "add"})
    triples = np.asarray([[[5, 2, 0], [4, -1, 3]], [[1, 1, 1], [0, 0, -2]]])
    yield Sample("ScatterND", (floats(6, 5, 4), triples, floats(2, 2)))
    yield Sample("ScatterND", (ints(6, 5), np.asarray([[1], [4], [1]]), ints(3, 5)), {"reduction": "add"})
    yield Sample("Scatter", (floats(6, 5), rows.T.copy()[:, :3], floats(5, 3)), version=10)
    cache = floats(3, 2, 6, 4)
    yield Sample("TensorScatter", (cache, floats(3, 2, 2, 4), np.asarray([0, 3, 1])), version=24)
    yield Sample("TensorScatter", (cache, floats(3, 2, 2, 4)), version=24)
    starts, circular = np.asarray([5, 3, 4]), {"mode": "circular"}
    yield Sample("TensorScatter", (cache, floats(3, 2, 3, 4), starts), circular, version=24)
    yield Sample("TensorScatter", (cache, floats(3, 1, 6, 4), starts), {"axis": 1} | circular, version=24)


def _attention() -> Iterator[Sample]:
    def heads(count: int, places: int, size: int = 4, batch: int = 3) -> Array:
        return floats(batch, count, places, size)

    def packed(count: int, places: int, size: int = 4, batch: int = 3) -> Array:
        return floats(batch, places, count * size)

    yield Sample("Attention", (heads(5, 5), heads(5, 6), heads(5, 6, 2)), version=23)
    yield Sample("Attention", (heads(6, 5), heads(3, 5), heads(3, 5)), {"is_causal": 1}, version=23)
    yield Sample("Attention", (heads(8, 5), heads(2, 6), heads(2, 6), floats(3, 1, 5, 6)), version=23)
    yield Sample("Attention", (heads(4, 5), heads(4, 6), heads(4, 6), bools(5, 6)), {"scale": 0.3}, version=23)
    yield Sample("Attention", (heads(4, 5), heads(2, 6), heads(2, 6), floats(1, 5, 6)), version=23)
    many = {"q_num_heads": 4, "kv_num_heads": 2}
    yield Sample("Attention", (packed(4, 5), packed(2, 6), packed(2, 6)), many, version=23)
    yield Sample("Attention", (packed(4, 5), packed(2, 6), packed(2, 6, 2)), {**many, "softcap": 2.0}, version=23)
    yield Sample(
        "Attention",
        (heads(4, 5), heads(2, 2), heads(2, 2), None, heads(2, 4), heads(2, 4)),
        version=23,
        results=3,
    )
    yield Sample(
        "Attention",
        (heads(4, 5), heads(4, 6), heads(4, 6), None, None, None, np.asarray([6, 3, 4])),
        version=24,
    )
    rotary = {"version": 23}
    yield Sample("RotaryEmbedding", (floats(3, 5, 4, 8), floats(3, 4, 4), floats(3, 4, 4)), **rotary)
    places = ints(3, 5, low=0, high=9)
    yield Sample("RotaryEmbedding", (floats(3, 2, 5, 8), floats(9, 4), floats(9, 4), places), **rotary)
    yield Sample("RotaryEmbedding", (floats(3, 5, 32), floats(9, 4), floats(9, 4), places), {"num_heads": 4}, **rotary)
    half = {"rotary_embedding_dim": 4, "interleaved": 1}
    yield Sample("RotaryEmbedding", (floats(3, 4, 5, 8), floats(9, 2), floats(9, 2), places), half, **rotary)


def _convolution() -> Iterator[Sample]:
    yield Sample("Conv", (floats(3, 4, 6, 5), floats(5, 4, 3, 2)), {"pads": [1, 0, 1, 1]})
    yield Sample("Conv", (floats(3, 4, 6, 5), floats(5, 4, 3, 2), floats(5)), {"strides": [2, 1]})
    yield Sample("Conv", (floats(3, 6, 8), floats(6, 1, 3), floats(6)), {"group": 6})
    yield Sample("Conv", (floats(3, 8, 6), floats(12, 2, 3)), {"group": 4, "auto_pad": "SAME_UPPER"})
    yield Sample("Conv", (floats(3, 8, 6), floats(12, 4, 3), floats(12)), {"group": 2})
    yield Sample("ConvTranspose", (floats(3, 4, 5, 4), floats(4, 5, 3, 2)), {"strides": [2, 1], "pads": [1, 0, 1, 0]})
    yield Sample("ConvTranspose", (floats(3, 4, 5), floats(4, 5, 2), floats(5)), {"strides": [2]})
    yield Sample("ConvTranspose", (floats(3, 8, 5), floats(8, 6, 3), floats(12)), {"group": 2})
    yield Sample("ConvTranspose", (floats(3, 6, 5), floats(6, 1, 3), floats(6)), {"group": 6})
    yield Sample("MaxPool", (floats(3, 5, 6, 6),), {"kernel_shape": [2, 2], "strides": [2, 2]})
    yield Sample("MaxPool", (floats(4, 6, 6, 6),), {"kernel_shape": [2, 2], "strides": [2, 2]}, results=2)
    yield Sample("MaxPool", (floats(5, 3, 7),), {"kernel_shape": [3], "storage_order": 1}, results=2)
    yield Sample("MaxPool", (floats(3, 5, 7),), {"kernel_shape": [2], "strides": [2], "ceil_mode": 1})
    yield Sample("AveragePool", (floats(3, 5, 6, 6),), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]})
    yield Sample("LpPool", (floats(3, 5, 6, 6),), {"kernel_shape": [2, 2]})
    for name in ("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"):
        yield Sample(name, (floats(3, 5, 6, 4),))


def _resize() -> Iterator[Sample]:
    def scales(*numbers: float) -> Constant:
        return Constant(np.asarray(numbers, np.float32))

    image = floats(3, 4, 6, 5)
    yield Sample("Resize", (image, None, scales(1, 1, 2, 2)), {"mode": "nearest"})
    yield Sample("Resize", (image, None, scales(1, 1, 1, 1.7)), {"mode": "linear"})
    yield Sample("Resize", (image, None, None, const(3, 4, 9, 5)), {"mode": "linear"})
    yield Sample("Resize", (image, None, scales(2, 1), None), {"mode": "nearest", "axes": [3, 2]})
    yield Sample("Upsample", (image, scales(1, 1, 2, 3)), {"mode": "nearest"}, version=9)
    yield Sample("Upsample", (image,), {"mode": "nearest", "scales": [1.0, 1.0, 2.0, 1.0]}, version=8)
    # As many places as before, but not the same ones.
    yield Sample("Resize", (image, None, scales(1, 1, 1.1, 1)), {"mode": "linear"})


def _recurrent() -> Iterator[Sample]:
    for name, gates in recurrent.GATES.items():
        weights = (floats(1, gates * 3, 5), floats(1, gates * 3, 3))
        results = 3 if name == "LSTM" else 2
        yield Sample(name, (floats(4, 6, 5), *weights), {"hidden_size": 3}, results=results)
        both = (floats(2, gates * 3, 5), floats(2, gates * 3, 3), floats(2, 2 * gates * 3))
        lengths = np.asarray([4, 2, 3, 1, 4, 2], np.int32)
        states = [floats(2, 6, 3)] * (results - 1)
        attributes = {"hidden_size": 3, "direction": "bidirectional"}
        yield Sample(name, (floats(4, 6, 5), *both, lengths, *states), attributes, results=results)
        # Directions of their own devices, of which the second turns the steps around.
        yield Sample(name, (floats(4, 6, 5), *both, None, *states), attributes, results=results)


_ALL = [
    *_unary(),
    *_binary(),
    *_many(),
    *_matmul(),
    *_reductions(),
    *_normalization(),
    *_moving(),
    *_indexing(),
    *_attention(),
    *_convolution(),
    *_resize(),
    *_recurrent(),
    *IMAGES,
    *OTHERS,
    *CLASSIC,
    *MICROSOFT,
    *HEADS,
]


def _runs(sample: Sample) -> bool:
    """Whether there is something that runs it: ONNX Runtime lacks operators of com.microsoft that later ones have."""
    known = sample.domain != "com.microsoft" or sample.op in _OF_ONNX_RUNTIME
    return known or lookup(sample.domain, sample.op, sample.version) is not None


_OF_ONNX_RUNTIME = {schema.name for schema in runtime.get_all_operator_schema() if schema.domain == "com.microsoft"}
SAMPLES = [sample for sample in _ALL if _runs(sample)]
IN_FILES = [sample for sample in SAMPLES if sample.domain != DOMAIN]
"""Those of operators that a file can have: irpar's own (parameter updates) are written out in one."""
NOT_RUN = {(sample.domain, sample.op) for sample in _ALL if not _runs(sample)}
"""Operators that nothing here runs."""
