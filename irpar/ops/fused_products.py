"""com.microsoft's products: fused with transposes, activations, or with operands quantised on the way."""

from collections.abc import Sequence
from math import prod

from irpar.ir import Builder, DType, Node, TensorType, Type, Value

from .convolution import conv_factors, count_groups, window_sizes
from .facts import (
    CannotTellError,
    dims_of,
    int_attribute,
    ints_attribute,
    operand,
    result_shape,
    same_type,
    shape_of,
    shapes_of,
    tensor_of,
    text_attribute,
)
from .gradients.fused_products import (
    decompose_distance,
    decompose_fused_conv,
    decompose_fused_gemm,
    decompose_fused_matmul,
)
from .gradients.quantized import decompose_to_float
from .gradients.refused import EXPERTS, PACKED, ROUNDS
from .gradients.writer import GradientWriter
from .local import add_bias_once
from .matmul import cost_gemm, cost_matmul, cost_products, matmul_dims, matmul_factors
from .microsoft import microsoft
from .quantized import along
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

# -- FusedMatMul ----------------------------------------------------------------------------------------------------


def _order(node: Node, index: int, rank: int) -> list[int]:
    """The dims of an operand in the order in which they are multiplied."""
    side = "AB"[index]
    order = list(range(rank))
    if rank < 2:
        return order
    if int_attribute(node, f"transBatch{side}", 0):
        order = [*order[1:-1], order[0], order[-1]]
    if int_attribute(node, f"trans{side}", 0):
        order[-2:] = order[:-3:-1]
    return order


def _infer_fused_matmul(node: Node) -> Sequence[Type]:
    sides = []
    for index in (0, 1):
        dims = dims_of(node, index)
        sides.append([dims[dim] for dim in _order(node, index, len(dims))])
    return [TensorType(tensor_of(node, 0).dtype, matmul_dims(*sides))]


def _rule_fused_matmul(node: Node) -> FactorRule:
    """As MatMul, with dims in the order that the attributes say; the contraction gives partial sums."""
    shapes = [shape_of(node, index) for index in (0, 1)]
    orders = [_order(node, index, len(shape)) for index, shape in enumerate(shapes)]
    ordered = [[shape[dim] for dim in order] for shape, order in zip(shapes, orders, strict=True)]
    rule, operands, result = matmul_factors(ordered[0], ordered[1], result_shape(node))
    placed = [
        [factors[order.index(dim)] for dim in range(len(order))]
        for factors, order in zip(operands, orders, strict=True)
    ]
    return rule.done(placed, [result])


def _cost_fused_matmul(node: Node) -> int:
    shape = shape_of(node, 0)
    return cost_products(node, shape[_order(node, 0, len(shape))[-1]])


def _decompose_fused_matmul(node: Node, w: GradientWriter) -> list[Value]:
    return decompose_fused_matmul(node, w, [_order(node, index, len(dims_of(node, index))) for index in (0, 1)])


microsoft(
    "FusedMatMul",
    _infer_fused_matmul,
    _rule_fused_matmul,
    _cost_fused_matmul,
    decompose=_decompose_fused_matmul,
)


# -- FusedGemm, QGemm -----------------------------------------------------------------------------------------------


def _gemm_factors(
    node: Node, right_index: int, kind: Kind
) -> tuple[RuleBuilder, list[DimFactors], list[DimFactors], list[DimFactors]]:
    """The builder, and the factors of A, B and the result."""
    left = shape_of(node, 0)
    rule = RuleBuilder()
    rows, columns = rule.dims(result_shape(node))
    transposed = bool(int_attribute(node, "transA", 0))
    (inner,) = rule.dims([left[0 if transposed else 1]], kind)
    a = [inner, rows] if transposed else [rows, inner]
    b = [columns, inner] if int_attribute(node, "transB", 0) else [inner, columns]
    assert len(shape_of(node, right_index)) == 2
    return rule, a, b, [rows, columns]


def _gemm_dims(node: Node, right_index: int) -> tuple[object, object]:
    left, right = dims_of(node, 0), dims_of(node, right_index)
    return left[1 if int_attribute(node, "transA", 0) else 0], right[0 if int_attribute(node, "transB", 0) else 1]


def _infer_fused_gemm(node: Node) -> Sequence[Type]:
    return [TensorType(tensor_of(node, 0).dtype, _gemm_dims(node, 1))]  # type: ignore[arg-type]


def _rule_fused_gemm(node: Node) -> FactorRule:
    """`([i,k],[k,j],[i,j])->([i,j])`: k is whole, since an activation follows the sum."""
    rule, a, b, result = _gemm_factors(node, 1, Kind.REPLICATE)
    others = [along(shape, result, result_shape(node)) for shape in shapes_of(node)[2:]]
    return rule.done([a, b, *others], [result])


def _qgemm_dtype(node: Node) -> DType:
    return tensor_of(node, 8).dtype if operand(node, 8) is not None else DType.F32


def _infer_qgemm(node: Node) -> Sequence[Type]:
    return [TensorType(_qgemm_dtype(node), _gemm_dims(node, 3))]  # type: ignore[arg-type]


def _rule_qgemm(node: Node) -> FactorRule:
    """`([i,k],[],[],[k,j],[j],[j],[i,j],[],[])->([i,j])`: k gives partial sums, but where the result is rounded."""
    is_rounded = operand(node, 7) is not None
    shapes = shapes_of(node)
    rule, a, b, result = _gemm_factors(node, 3, Kind.REPLICATE if is_rounded else Kind.REDUCE)
    operands: list[Sequence[DimFactors]] = [whole(len(shape or ())) for shape in shapes]
    operands[0], operands[3] = a, b
    for index in (4, 5, 6):
        if index < len(shapes):
            operands[index] = along(
                shapes[index], result if index == 6 else result[1:], result_shape(node)[index != 6 :]
            )
    return rule.done(operands, [result])


def _localize_qgemm(whole_node: Node, local: Node, builder: Builder) -> None:
    add_bias_once(local, 6, builder)


microsoft("FusedGemm", _infer_fused_gemm, _rule_fused_gemm, cost_gemm, decompose=decompose_fused_gemm)
microsoft(
    "QGemm",
    _infer_qgemm,
    _rule_qgemm,
    cost_gemm,
    _localize_qgemm,
    dtypes=lambda node: [_qgemm_dtype(node)],
    gradient=PACKED,
)


# -- FusedConv ------------------------------------------------------------------------------------------------------


def _infer_fused_conv(node: Node) -> Sequence[Type]:
    kernel = dims_of(node, 1)
    window = [size for size in ints_attribute(node, "kernel_shape") or kernel[2:] if isinstance(size, int)]
    return [tensor_of(node, 0).with_shape((dims_of(node, 0)[0], kernel[0], *window_sizes(node, window)))]


def _rule_fused_conv(node: Node) -> FactorRule:
    """As Conv, but input channels are whole, since an activation follows the sum; Z is sharded as the result."""
    found = conv_factors(shape_of(node, 0), shape_of(node, 1), int_attribute(node, "group", 1), Kind.REPLICATE)
    others: list[Sequence[DimFactors]] = [[found.channels], found.result]
    rest = [[] if value is None else factors for value, factors in zip(node.operands[2:], others, strict=False)]
    return found.rule.done([found.data, found.kernel, *rest], [found.result])


def _cost_fused_conv(node: Node) -> int:
    return prod(result_shape(node)) * (2 * prod(shape_of(node, 1)[1:]) + len(node.operands) - 1)


microsoft(
    "FusedConv",
    _infer_fused_conv,
    _rule_fused_conv,
    _cost_fused_conv,
    lambda node, local, _: count_groups(node, local, 0, 1),
    decompose=decompose_fused_conv,
)


# -- MatMulIntegerToFloat, DynamicQuantizeMatMul --------------------------------------------------------------------


def _infer_to_float(node: Node) -> Sequence[Type]:
    return [TensorType(tensor_of(node, 2).dtype, matmul_dims(dims_of(node, 0), dims_of(node, 1)))]


def _rule_to_float(node: Node) -> FactorRule:
    """`([i,k],[k,j],[],[j],[],[j],[j])->([i,j])`: k gives partial sums, to one of which the bias is added."""
    shapes = shapes_of(node)
    rule, operands, result = matmul_factors(shape_of(node, 0), shape_of(node, 1), result_shape(node))
    for index, shape in enumerate(shapes[2:], 2):
        if index in (2, 4) and prod(shape or ()) != 1:
            raise CannotTellError("several scales of the data")
        operands.append(along(shape, result[-1:], result_shape(node)[-1:]))
    return rule.done(operands, [result])


def _localize_to_float(whole_node: Node, local: Node, builder: Builder) -> None:
    add_bias_once(local, 6, builder)


microsoft(
    "MatMulIntegerToFloat",
    _infer_to_float,
    _rule_to_float,
    cost_matmul,
    _localize_to_float,
    dtypes=2,
    decompose=decompose_to_float,
)


def _infer_dynamic(node: Node) -> Sequence[Type]:
    return [TensorType(tensor_of(node, 0).dtype, matmul_dims(dims_of(node, 0), dims_of(node, 1)))]


def _rule_dynamic(node: Node) -> FactorRule:
    """`([i,k],[k,j],[j],[j],[j])->([i,j])`: j passes; the scale of A comes from all of its elements."""
    left, right = shape_of(node, 0), shape_of(node, 1)
    rule = RuleBuilder()
    data = rule.dims(left, Kind.REPLICATE)
    *batch, _, count = right
    (columns,) = rule.dims([count])
    operands: list[Sequence[DimFactors]] = [data, [*rule.dims(batch, Kind.REPLICATE), data[-1], columns]]
    operands.extend(along(shape, [columns], [count]) for shape in shapes_of(node)[2:])
    return rule.done(operands, [[*[()] * (len(result_shape(node)) - 1), columns]])


microsoft("DynamicQuantizeMatMul", _infer_dynamic, _rule_dynamic, cost_matmul, gradient=ROUNDS)


# -- CDist ----------------------------------------------------------------------------------------------------------


def _infer_distance(node: Node) -> Sequence[Type]:
    return [tensor_of(node, 0).with_shape((dims_of(node, 0)[0], dims_of(node, 1)[0]))]


def _rule_distance(node: Node) -> FactorRule:
    """`([i,k],[j,k])->([i,j])`: i and j pass; k gives partial sums of squares, and is whole where a root follows."""
    squared = text_attribute(node, "metric", "sqeuclidean") == "sqeuclidean"
    rule = RuleBuilder()
    rows, columns = rule.dims(result_shape(node))
    (inner,) = rule.dims(shape_of(node, 0)[1:], Kind.REDUCE if squared else Kind.REPLICATE)
    return rule.done([[rows, inner], [columns, inner]], [[rows, columns]])


def _cost_distance(node: Node) -> int:
    return 3 * prod(result_shape(node)) * shape_of(node, 0)[1]


microsoft("CDist", _infer_distance, _rule_distance, _cost_distance, decompose=decompose_distance)


# -- MoE ------------------------------------------------------------------------------------------------------------


def _rule_moe(node: Node) -> FactorRule:
    """`([r,d],[r,e],[e,i,d],[e,i],[e,d,i],[e,d],[e,i,d],[e,i])->([r,d])`: rows r pass, i gives partial sums.

    Which experts a row goes to is decided among all of them, so that e is whole. Gates that stand beside their values
    make fc1 `[e,(i2),d]`; where they stand behind them all, i is whole.
    """
    shape = shape_of(node, 0)
    experts, fused, _ = shape_of(node, 2)
    inter = shape_of(node, 4)[2]
    fusion = int_attribute(node, "swiglu_fusion", 0)
    if fused % inter or (fused != inter and fusion not in (1, 2)):
        raise CannotTellError("a fusion that is not covered")
    rule = RuleBuilder()
    rows = rule.dims(shape[:-1])
    (size, expert) = rule.dims([shape[-1], experts], Kind.REPLICATE)
    (inside,) = rule.dims([inter], Kind.REPLICATE if fusion == 2 else Kind.REDUCE)
    (pair,) = rule.dims([fused // inter], Kind.REPLICATE)
    first: DimFactors = () if fusion == 2 else (*inside, *pair)
    given: list[list[DimFactors]] = [
        [*rows, size],
        [tuple(factor for dim in rows for factor in dim), expert],
        [expert, first, size],
        [expert, first],
        [expert, size, inside],
        [expert, size],
        [expert, inside, size],
        [expert, inside],
    ]
    operands = [[] if value is None else factors for value, factors in zip(node.operands, given, strict=False)]
    return rule.done(operands, [[*rows, ()]])


def _localize_moe(whole_node: Node, local: Node, builder: Builder) -> None:
    add_bias_once(local, 5, builder)


def _cost_moe(node: Node) -> int:
    """The products of the experts that each row goes to."""
    rows = prod(shape_of(node, 0)[:-1])
    weights = sum(prod(shape_of(node, index)[1:]) for index in (2, 4, 6) if operand(node, index) is not None)
    return 2 * rows * int_attribute(node, "k", 1) * weights


microsoft("MoE", same_type, _rule_moe, _cost_moe, _localize_moe, gradient=EXPERTS)


_ROWS_OF_INNER = frozenset({2, 3, 4, 11})
"""The weights of QMoE's fc1, their scales, biases and zero points."""
_COLUMNS_OF_INNER = frozenset({5, 6, 12})
"""The weights of fc2, their scales and zero points."""
_OF_FC3 = (8, 9, 10, 13, 15, 16)
"""What a third matrix has, and scales of the whole."""
_ROUTER_WEIGHTS = 14
_MOST_OPERANDS = 17


def _rule_packed_moe(node: Node) -> FactorRule:
    """`([r,d],[r,e],[e,(ui),.],[e,(ui)],[e,(ui)],[e,d,(uj)],[e,d,u],[e,d])->([r,d])`: r pass, u gives partial sums.

    u are the parts of the inner size that share a scale, or a byte: those of fc1 are rows, of fc2 bytes. Where they are
    not told apart, weights, their scales and biases are whole.
    """
    shape = shape_of(node, 0)
    rule = RuleBuilder()
    rows = rule.dims(shape[:-1])
    size, experts = rule.dims([shape[-1], shape_of(node, 1)[-1]], Kind.REPLICATE)
    operands: list[Sequence[DimFactors]] = [whole(len(found or ())) for found in shapes_of(node)]
    operands[0] = [*rows, size]
    operands[1] = [tuple(factor for dim in rows for factor in dim), experts]
    if operand(node, _ROUTER_WEIGHTS) is not None:
        operands[_ROUTER_WEIGHTS] = operands[1]
    count = _inner_units(node)
    if count > 1:
        (unit,) = rule.dims([count], Kind.REDUCE)
        (rows_inside,) = rule.dims([shape_of(node, 2)[1] // count], Kind.REPLICATE)
        for index, found in enumerate(shapes_of(node)):
            if found is not None and index in _ROWS_OF_INNER:
                operands[index] = [(), (*unit, *rows_inside), *[()] * (len(found) - 2)]
            elif found is not None and index in _COLUMNS_OF_INNER and len(found) == 3:
                (columns_inside,) = rule.dims([found[2] // count], Kind.REPLICATE)
                operands[index] = [(), (), (*unit, *columns_inside)]
    return rule.done(operands, [[*rows, ()]])


def _packed_in_byte(node: Node) -> int:
    """How many weights of fc2 a byte has; 0 where that is no whole number."""
    bits = int_attribute(node, "fc2_expert_weight_bits", int_attribute(node, "expert_weight_bits", 4))
    return 8 // bits if 8 % bits == 0 else 0


def _inner_units(node: Node) -> int:
    """Into how many parts the inner size can be taken apart; 0 where these are not told apart."""
    pack, block = _packed_in_byte(node), int_attribute(node, "block_size", 0)
    shapes = [*shapes_of(node), *[None] * _MOST_OPERANDS]
    points, others = shapes[11:13], [shapes[index] for index in _OF_FC3]
    is_plain = text_attribute(node, "quant_type", "int") == "int" and int_attribute(node, "weights_prepacked", -1) < 1
    if not is_plain or not pack or any(found is not None for found in others):
        return 0
    inner, fused = shape_of(node, 5)[2] * pack, shape_of(node, 2)[1]
    if fused != inner and (fused != 2 * inner or int_attribute(node, "swiglu_fusion", 0) != 1):
        return 0
    if any(found is not None and len(found) != 3 for found in points):
        return 0  # Zero points of several rows share a byte.
    length = pack if block <= 0 else block * (1 if points[1] is None else pack)
    return inner // length if inner % length == 0 else 0


def _localize_packed_moe(whole_node: Node, local: Node, builder: Builder) -> None:
    add_bias_once(local, 7, builder)


def _cost_packed_moe(node: Node) -> int:
    """As MoE; a row of packed weights stands for as many columns as the data has, or as the first product gives."""
    rows, size = prod(shape_of(node, 0)[:-1]), shape_of(node, 0)[-1]
    return 2 * rows * int_attribute(node, "k", 1) * size * 2 * shape_of(node, 2)[1]


microsoft("QMoE", same_type, _rule_packed_moe, _cost_packed_moe, _localize_packed_moe, gradient=PACKED)
