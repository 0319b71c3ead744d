"""com.microsoft's products and look-ups of weights that are packed and scaled in blocks."""

from collections.abc import Sequence
from functools import partial

from irpar.ir import Builder, DType, Node, TensorType, Type, dtype_of_onnx

from .facts import (
    CannotTellError,
    axis_attribute,
    dims_of,
    int_attribute,
    operand,
    result_shape,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients.quantized import decompose_packed_product, decompose_packed_rows
from .gradients.refused import PACKED
from .gradients.zero import zero
from .indexing import look_up_own_rows
from .local import add_bias_once
from .matmul import cost_matmul
from .microsoft import microsoft
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

# -- MatMulNBits ----------------------------------------------------------------------------------------------------


def _infer_matmul(node: Node) -> Sequence[Type]:
    return [tensor_of(node, 0).with_shape((*dims_of(node, 0)[:-1], int_attribute(node, "N")))]


def _rule_nbits(node: Node) -> FactorRule:
    """`([i,(kb)],[j,k,.],[j,k],[j,k],[],[j])->([i,j])`: rows i and columns j pass, blocks k give partial sums.

    Zero points packed several to a byte make `[j,(kp)]` of the blocks: p of them share a byte and stay together.
    Where K is no multiple of the block, or there is a group index, k is whole.
    """
    if int_attribute(node, "weight_prepacked", 0):
        raise CannotTellError("weights in the layout of a device")
    inner, columns_size, block = (int_attribute(node, name) for name in ("K", "N", "block_size"))
    bits = int_attribute(node, "bits", 4)
    count = -(-inner // block)
    has_order = operand(node, 4) is not None
    is_even = inner % block == 0 and not has_order
    points = operand(node, 3)
    is_packed = points is not None and points.dtype is DType.U8
    shared = 8 // bits if is_packed and 8 % bits == 0 else 1
    if is_packed and (8 % bits or count % shared):
        is_even = False
    rule = RuleBuilder()
    rows = rule.dims(shape_of(node, 0)[:-1])
    (columns,) = rule.dims([columns_size])
    blocks: DimFactors = ()
    together: DimFactors = ()
    if is_even:
        (blocks,) = rule.dims([count // shared], Kind.REDUCE)
        together, inside = rule.dims([shared, shared * block], Kind.REPLICATE)
    else:
        (inside,) = rule.dims([inner], Kind.REPLICATE)
    along_k: DimFactors = (*blocks, *together) if is_even else ()
    operands: list[Sequence[DimFactors]] = [[*rows, (*blocks, *inside)], [columns, along_k, ()]]
    for index, shape in enumerate(shapes_of(node)[2:], 2):
        if shape is None:
            operands.append([])
        elif index == 5:
            operands.append([columns])
        elif index == 4:
            operands.append(whole(1))
        else:
            last = blocks if index == 3 and is_packed else along_k
            operands.append([columns, last] if len(shape) == 2 else [(*columns, *last)])
    return rule.done(operands, [[*rows, columns]])


def _localize_nbits(whole_node: Node, local: Node, builder: Builder) -> None:
    """K and N are those of the block; the bias is added once.

    Of scales that other ranks send, ONNX Runtime makes zeros where it quantizes the data (accuracy_level 4) and packs
    the weights ahead: then it computes in floats.
    """
    weights, *scales = local.operands[1:4]
    if weights is not None and weights.is_constant and not all(value is None or value.is_constant for value in scales):
        local.attributes.pop("accuracy_level", None)
    local.set_attribute("K", shape_of(local, 0)[-1])
    local.set_attribute("N", result_shape(local)[-1])
    add_bias_once(local, 5, builder)


microsoft("MatMulNBits", _infer_matmul, _rule_nbits, cost_matmul, _localize_nbits, decompose=decompose_packed_product)


# -- MatMulBnb4: blocks of the weights run on from column to column -------------------------------------------------


def _rule_bnb4(node: Node) -> FactorRule:
    """`([i,k],[.],[.])->([i,j])`: rows i pass."""
    rule = RuleBuilder()
    *batch, inner = shape_of(node, 0)
    rows = rule.dims(batch)
    return rule.done([[*rows, *rule.dims([inner], Kind.REPLICATE)], whole(1), whole(1)], [[*rows, ()]])


microsoft("MatMulBnb4", _infer_matmul, _rule_bnb4, cost_matmul, gradient=PACKED)


# -- GatherBlockQuantized -------------------------------------------------------------------------------------------


def _packed(node: Node) -> int:
    """Elements in a byte of the data."""
    return 8 // int_attribute(node, "bits", 4) if tensor_of(node, 0).dtype is DType.U8 else 1


def _infer_gather(node: Node) -> Sequence[Type]:
    dims = list(dims_of(node, 0))
    axis = axis_attribute(node, len(dims), 0, "gather_axis")
    last = dims[-1]
    dims[-1] = None if last is None else last * _packed(node)
    return [TensorType(tensor_of(node, 2).dtype, (*dims[:axis], *dims_of(node, 1), *dims[axis + 1 :]))]


def _rule_gather(node: Node) -> FactorRule:
    """`([v,i,(kb)],[j],[v,i,k],[v,i,k])->([j,i,(kb)])`: v is reduced, as in Gather; what is in a block is whole.

    Where the zero points are packed, or blocks do not divide their axis, the axis of blocks is whole.
    """
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape), 0, "gather_axis")
    blocked = axis_attribute(node, len(shape), 1, "quantize_axis")
    size = int_attribute(node, "block_size", 128)
    if axis == blocked:
        raise CannotTellError("blocks along the axis")
    rule = RuleBuilder()
    data: list[DimFactors] = []
    scales: list[DimFactors] = []
    result: list[DimFactors] = []
    for dim, (length, count) in enumerate(zip(shape, shape_of(node, 2), strict=True)):
        if dim == axis:
            (indexed,) = rule.dims([length], Kind.REDUCE if count == length else Kind.REPLICATE)
            data.append(indexed)
            scales.append(indexed if count == length else ())
            result.extend(rule.dims(shape_of(node, 1)))
        elif dim != blocked:
            (factors,) = rule.dims([length], Kind.PASS if dim != len(shape) - 1 else Kind.REPLICATE)
            data.append(factors)
            scales.append(factors if count == length else ())
            result.append(factors if dim != len(shape) - 1 else ())
        else:
            bytes_of_block = size // _packed(node) if dim == len(shape) - 1 else size
            fits = length == count * bytes_of_block and operand(node, 3) is None
            (blocks,) = rule.dims([count], Kind.PASS if fits else Kind.REPLICATE)
            (inside,) = rule.dims([bytes_of_block], Kind.REPLICATE)
            data.append((*blocks, *inside) if fits else ())
            scales.append(blocks)
            result.append(blocks if fits else ())
    indices = result[axis : axis + len(shape_of(node, 1))]
    operands: list[Sequence[DimFactors]] = [data, indices, scales]
    if len(node.operands) > 3:
        operands.append([] if operand(node, 3) is None else [*scales[:blocked], (), *scales[blocked + 1 :]])
    return rule.done(operands, [result])


microsoft(
    "GatherBlockQuantized",
    _infer_gather,
    _rule_gather,
    localize=partial(look_up_own_rows, attribute="gather_axis"),
    dtypes=2,
    decompose=decompose_packed_rows,
)


# -- GatherPacked: a row of the table is blocks of a format that an attribute numbers ------------------------------


def _packed_dtype(node: Node) -> DType:
    found = dtype_of_onnx(int_attribute(node, "output_dtype", DType.BF16.value))
    if found is None:
        raise CannotTellError("the dtype")
    return found


def _infer_gather_packed(node: Node) -> Sequence[Type]:
    return [TensorType(_packed_dtype(node), (*dims_of(node, 1), int_attribute(node, "K")))]


def _rule_gather_packed(node: Node) -> FactorRule:
    """`([v,.],[i,j])->([i,j,k])`: the looked-up dims pass; the table is whole."""
    rule = RuleBuilder()
    indices = rule.dims(shape_of(node, 1))
    return rule.done([whole(2), indices], [[*indices, ()]])


microsoft(
    "GatherPacked", _infer_gather_packed, _rule_gather_packed, dtypes=lambda node: [_packed_dtype(node)], gradient=zero
)
