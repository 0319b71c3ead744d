"""Sample nodes of com.microsoft's operators: elementwise, normalisations, products, quantised ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .draws import bools, const, floats, ints, scalar
from .rule_proof import Array, Constant, Sample


def made(
    op: str, *operands: Array | Constant | None, results: int = 1, tolerance: float = 1e-4, **attributes: Any
) -> Sample:
    """A node of com.microsoft."""
    return Sample(op, operands, attributes, version=1, results=results, tolerance=tolerance, domain="com.microsoft")


def _elementwise() -> Iterator[Sample]:
    for name in ("Gelu", "QuickGelu", "FastGelu"):
        yield made(name, floats(5, 1, 4))
    yield made("QuickGelu", floats(5, 4), alpha=1.2)
    yield made("FastGelu", floats(3, 5, 4), floats(4))
    yield made("BiasGelu", floats(3, 5, 4), floats(4))
    yield made("BiasSplitGelu", floats(3, 5, 8), floats(8))
    yield made("BiasAdd", floats(3, 5, 4), floats(4), floats(3, 5, 4))
    yield made("ScaledSiLU", floats(5, 4), alpha=0.5)
    yield made("ScaledSiLU", floats(5, 4), floats())
    yield made("GatedAdd", floats(5, 3, 4), floats(5, 3, 4), floats(5, 3, 1))
    yield made("ComplexMul", floats(5, 4, 2), floats(5, 4, 2))
    yield made("ComplexMulConj", floats(5, 4, 2), floats(4, 2))
    yield made("SwiGLU", floats(5, 3, 4), floats(5, 3, 4), activation_alpha=1.7, activation_beta=1.0, limit=1.0)
    yield made("SwiGLU", floats(5, 3, 8))
    yield made("MurmurHash3", ints(5, 4, dtype=np.int32))
    yield made("MurmurHash3", ints(5, 4, dtype=np.int32), positive=0)
    gate = (floats(3, 5, 4), floats(4), floats(4))
    yield made("LinearAttentionGate", *gate)
    yield made("LinearAttentionGate", *gate, floats(3, 5, 4), results=2)


def _moving() -> Iterator[Sample]:
    yield made("ExpandDims", floats(5, 4), Constant(np.asarray(1, np.int32)))
    yield made("UnfoldTensor", floats(5, 8, 3), dim=1, size=3, step=2)
    yield made("GatherND", floats(6, 5, 4), ints(3, 2, low=0, high=5))
    yield made("Trilu", floats(3, 5, 6))
    yield made("Trilu", floats(5, 6), scalar(1), upper=0)
    yield made("Pad", floats(5, 6), const(0, 1, 0, 2))
    yield made("Pad", floats(5, 6), const(1, 0, 2, 0), scalar(1.5, np.float32))


def _normalising() -> Iterator[Sample]:
    vector = floats(6)
    data, skip = floats(3, 5, 6), floats(3, 5, 6)
    yield made("SkipLayerNormalization", data, skip, vector)
    yield made("SkipLayerNormalization", data, floats(5, 6), vector, vector, floats(6), epsilon=1e-3)
    yield made("SkipSimplifiedLayerNormalization", data, skip, vector)
    # results that are named may be left out in between; here all are asked for
    yield made("SkipSimplifiedLayerNormalization", data, floats(1, 5, 6), vector, floats(6))
    simplified = "SimplifiedLayerNormalization"
    yield Sample(simplified, (floats(5, 6, 4), floats(4)))
    yield Sample(simplified, (floats(5, 6, 4), floats(6, 4)), {"axis": 1}, results=2)
    yield made("GatedRMSNorm", floats(3, 5, 12), floats(3), floats(3, 5, 12))
    yield made("BranchwiseRMSNorm", floats(3, 5, 4), floats(5, 4))
    yield made("BranchwiseRMSNorm", floats(5, 12), floats(12), num_branches=4)
    yield made("BranchwiseRMSNorm", floats(5, 12), floats(3), num_branches=4)
    yield made("BranchwiseRMSNorm", floats(3, 5, 4))
    tables = (floats(9, 4), floats(7, 4), floats(3, 4), floats(4), floats(4))
    ids, kinds, places = ints(3, 5, low=0, high=9), ints(3, 5, low=0, high=3), ints(3, 5, low=0, high=7)
    words, segments, positions = (found.astype(np.int32) for found in (ids, kinds, places))
    mask = np.asarray([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    yield made("EmbedLayerNormalization", words, segments, *tables, results=2)
    yield made("EmbedLayerNormalization", words, segments, *tables, mask, results=2, mask_index_type=1)
    yield made(
        "EmbedLayerNormalization", words, None, *tables[:2], None, *tables[3:], None, positions, mask_index_type=0
    )
    for last in (0, 1):
        image = floats(3, 4, 2, 8) if last else floats(3, 8, 4, 2)
        yield made("GroupNorm", image, floats(8), floats(8), groups=4, activation=1, channels_last=last)
        rest = (floats(3, 8), floats(8))
        yield made(
            "SkipGroupNorm", image, floats(8), floats(8), *rest, groups=4, activation=0, channels_last=last, results=2
        )


def _products() -> Iterator[Sample]:
    for left, right in ((0, 0), (1, 0), (0, 1), (1, 1)):
        a, b = floats(3, *((5, 6)[:: -1 if left else 1])), floats(3, *((6, 4)[:: -1 if right else 1]))
        yield made("FusedMatMul", a, b, transA=left, transB=right, alpha=0.5)
    yield made("FusedMatMul", floats(5, 2, 3, 6), floats(4, 2, 3, 6), transBatchA=1, transBatchB=1, transB=1)
    yield made("FusedMatMul", floats(6), floats(6, 4))
    yield made("FusedGemm", floats(5, 6), floats(6, 4), floats(4), activation="Relu")
    yield made("FusedGemm", floats(5, 6), floats(4, 6), transB=1, activation="Sigmoid")
    yield made("FusedConv", floats(3, 4, 6), floats(5, 4, 3), floats(5), activation="Relu")
    yield made(
        "FusedConv",
        floats(3, 8, 6, 1),
        floats(12, 2, 3, 1),
        floats(12),
        floats(3, 12, 4, 1),
        group=4,
        activation="Relu",
    )
    for name, numbers in (("LeakyRelu", [0.2]), ("Clip", [-0.5, 0.75]), ("HardSigmoid", [0.1, 0.5])):
        yield made("FusedConv", floats(3, 4, 6), floats(5, 4, 3), activation=name, activation_params=numbers)
    yield made("FusedGemm", floats(5, 6), floats(6, 4), activation="LeakyRelu", activation_alpha=0.2, alpha=0.5)
    small: dict[str, Any] = {"dtype": np.uint8, "low": 0}
    one, point = Constant(np.asarray(0.1, np.float32)), Constant(np.asarray(3, np.uint8))
    columns, points = floats(4, low=0.1, high=0.4), ints(4, **small)
    operands = (ints(5, 6, **small), ints(6, 4, **small))
    yield made("MatMulIntegerToFloat", *operands, one, one)
    yield made("MatMulIntegerToFloat", *operands, one, columns, point, points, floats(4))
    yield made("DynamicQuantizeMatMul", floats(3, 5, 6), ints(6, 4, **small), one, point)
    yield made("DynamicQuantizeMatMul", floats(5, 6), ints(6, 4, **small), columns, points, floats(4))
    bias = ints(4, dtype=np.int32, low=-99)
    yield made("QGemm", operands[0], one, point, operands[1], one, point)
    yield made("QGemm", operands[0], one, point, operands[1], columns, points, bias)
    last = (Constant(np.asarray(0.02, np.float32)), point)
    yield made("QGemm", operands[0], one, point, operands[1], one, point, None, *last)
    yield made("CDist", floats(5, 6), floats(4, 6), metric="sqeuclidean")
    yield made("CDist", floats(5, 6), floats(4, 6), metric="euclidean")


def _experts() -> Iterator[Sample]:
    count, size, inter = 3, 4, 6
    rows, router = floats(5, size), floats(5, count)
    first, second = floats(count, inter, size), floats(count, size, inter)
    yield made("MoE", rows, router, first, None, second, k=2, activation_type="relu", normalize_routing_weights=1)
    biases = (floats(count, inter), floats(count, size))
    yield made("MoE", rows, router, first, biases[0], second, biases[1], k=1, activation_type="silu")
    fused: dict[str, Any] = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1}
    yield made("MoE", floats(3, 4, size), floats(12, count), floats(count, 2 * inter, size), None, second, **fused)

    for rows_shape in ((5,), (3, 5)):  # of which there is no float32
        data, weight = (floats(*shape, dtype=np.float16) for shape in ((*rows_shape, size), (size, count + 2 * inter)))
        yield made(
            "RouterGateUpProj", data, weight, results=2, tolerance=1e-2, router_size=count, limit=len(rows_shape) / 2
        )
    groups: dict[str, Any] = {"top_k": 2, "n_group": 4, "topk_group": 2}
    yield made("MoEGroupRouter", floats(5, 8), floats(8), **groups)
    yield made("MoEGroupRouter", floats(3, 4, 6), floats(6), top_k=3)

    wide, columns = 32, 64
    packed = (
        ints(count, columns, wide // 2, dtype=np.uint8, low=0, high=256),
        floats(count, columns, low=0.01, high=0.1),
        None,
        ints(count, wide, columns // 4, dtype=np.uint8, low=0, high=256),
        floats(count, wide, low=0.01, high=0.1),
    )
    bits: dict[str, Any] = {**fused, "expert_weight_bits": 4}
    yield made("QMoE", floats(5, wide), floats(5, count), *packed, **bits)
    yield made("QMoE", floats(3, 4, wide), floats(12, count), *packed, **bits)
    for fusion, pack, inter in ((1, 2, 96), (0, 1, 96), (1, 2, 16)):
        block = 16  # Of the last the inner size is one.
        blocks: dict[str, Any] = {"k": 2, "expert_weight_bits": 8 // pack, "block_size": block}
        blocks |= {"activation_type": "swiglu", "swiglu_fusion": 1} if fusion else {"activation_type": "silu"}
        fused_rows = inter * (1 + fusion)
        weights = (
            ints(count, fused_rows, wide // pack, dtype=np.uint8, low=0, high=256),
            floats(count, fused_rows, wide // block, low=0.01, high=0.05),
            floats(count, fused_rows),
            ints(count, wide, inter // pack, dtype=np.uint8, low=0, high=256),
            floats(count, wide, inter // block, low=0.01, high=0.05),
            floats(count, wide),
        )
        yield made("QMoE", floats(5, wide), floats(5, count), *weights, **blocks)
        none: list[None] = [None] * 6
        yield made("QMoE", floats(5, wide), floats(5, count), *weights, *none, floats(5, count), **blocks)


def _blocks() -> Iterator[Sample]:
    columns, inner, block = 6, 64, 16
    count = inner // block
    weights = ints(columns, count, block // 2, dtype=np.uint8, low=0, high=256)
    scales, sizes = floats(columns, count, low=0.1), {"K": inner, "N": columns, "bits": 4, "block_size": block}
    yield made("MatMulNBits", floats(3, 5, inner), weights, scales, **sizes)
    points = ints(columns, count // 2, dtype=np.uint8, low=0, high=256)
    yield made("MatMulNBits", floats(5, inner), weights, scales, points, **sizes)
    yield made("MatMulNBits", floats(5, inner), weights, scales.ravel(), None, None, floats(columns), **sizes)
    short = {**sizes, "K": 56}
    yield made("MatMulNBits", floats(5, 56), weights, scales, **short)
    packed = ints(columns * inner // 2, dtype=np.uint8, low=0, high=256)
    absmax = floats(columns * inner // block, low=0.1)
    yield made("MatMulBnb4", floats(3, 5, inner), packed, absmax, K=inner, N=columns, block_size=block, quant_type=1)
    table: dict[str, Any] = {"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 2}
    data, rows = ints(7, 3, 24, dtype=np.uint8, low=0, high=256), ints(5, low=0, high=7)
    yield made("GatherBlockQuantized", data, rows, floats(7, 3, 3), **table)
    # 256 numbers in 144 bytes, of the format 2; its scales, each two bytes at the start of 18, are no NaN
    bytes_ = ints(7, 8, 18, dtype=np.uint8, low=0, high=60).reshape(7, 144)
    yield made("GatherPacked", bytes_, ints(3, 5, low=0, high=7), packed_type=2, K=256, output_dtype=1)
    yield made("GatherPacked", bytes_, ints(5, low=-3, high=12), packed_type=2, K=256, output_dtype=10)


def _quantised() -> Iterator[Sample]:
    one, other = (Constant(np.asarray(number, np.float32)) for number in (0.25, 0.5))
    point, zero = Constant(np.asarray(3, np.uint8)), Constant(np.asarray(100, np.uint8))

    def data(*shape: int) -> Array:
        return ints(*shape, dtype=np.uint8, low=0, high=256)

    for name in ("QLinearAdd", "QLinearMul"):
        yield made(name, data(5, 4), one, point, data(5, 4), other, zero, other, zero)
        yield made(name, data(6, 1, 4), one, point, data(5, 1), other, zero, other, zero)
    yield made("QLinearLeakyRelu", data(5, 4), one, zero, one, zero, alpha=0.3)
    yield made("QLinearSigmoid", data(5, 4), one, zero, Constant(np.asarray(0.004, np.float32)), point)
    yield made("QLinearWhere", bools(5, 4), data(5, 4), one, point, data(4), other, zero, other, zero)
    yield made("QLinearConcat", one, point, data(5, 2, 4), one, zero, data(5, 3, 4), other, point, axis=1)
    yield made(
        "QLinearSoftmax", data(5, 6, 4), one, zero, Constant(np.asarray(0.004, np.float32)), point, axis=1, opset=13
    )
    yield made(
        "QLinearSoftmax", data(5, 6), one, zero, Constant(np.asarray(0.004, np.float32)), point, axis=-1, opset=11
    )
    pool: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
    yield made("QLinearAveragePool", data(3, 5, 6, 6), one, zero, one, zero, **pool)
    yield made("QLinearGlobalAveragePool", data(3, 5, 6, 4), one, zero, one, zero)
    yield made("QLinearAveragePool", data(3, 6, 6, 5), one, zero, one, zero, channels_last=1, **pool)
    yield made("QLinearGlobalAveragePool", data(3, 6, 4, 5), one, zero, one, zero, channels_last=1)
    yield made("NhwcMaxPool", data(3, 6, 6, 5), **pool)


MICROSOFT = [
    *_elementwise(),
    *_moving(),
    *_normalising(),
    *_products(),
    *_experts(),
    *_blocks(),
    *_quantised(),
]
