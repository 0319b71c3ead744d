"""Operators whose elements depend on where they are in the whole: Shape, EyeLike, Trilu, DepthToSpace and their kin."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import ArrayTensor, Builder, Dim, DType, Node, Tensor, TensorType, Type, Value

from .coords import start_of_block
from .facts import (
    CannotTellError,
    dims_of,
    dtype_attribute,
    int_attribute,
    needed,
    operand,
    result_shape,
    same_type,
    shape_of,
    shapes_of,
    tensor_of,
    text_attribute,
)
from .gradients.position import of_depth_to_space, of_range, of_space_to_depth, of_trilu
from .gradients.zero import zero
from .listed_sizes import listed_sizes, target_sizes
from .local import set_target, typed_like
from .microsoft import microsoft
from .op_def import OpDef
from .registry import define
from .rule import FactorRule, Kind, RuleBuilder, whole

# -- Shape, Size, Range, ConstantOfShape ----------------------------------------------------------------------------


def _infer_shape(node: Node) -> Sequence[Type]:
    return [TensorType(DType.I64, (len(range(len(dims_of(node, 0)))[_taken_dims(node)]),))]


def _taken_dims(node: Node) -> slice:
    rank = len(dims_of(node, 0))
    return slice(int_attribute(node, "start", 0), int_attribute(node, "end", rank))


def _infer_size(node: Node) -> Sequence[Type]:
    return [TensorType(DType.I64, ())]


def _rule_sizes(node: Node) -> FactorRule:
    """All dims pass: nothing is read of them."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0))
    return rule.done([dims], [whole(len(result_shape(node)))], runs_empty=range(len(rule.sizes)))


def _localize_sizes(whole_node: Node, local: Node, builder: Builder) -> list[Value]:
    """Sizes are those of the full tensor."""
    shape = np.asarray(shape_of(whole_node, 0), np.int64)
    sizes = shape.prod() if local.op_type == "Size" else shape[_taken_dims(whole_node)]
    made = builder.constant(ArrayTensor(np.asarray(sizes, np.int64)), local.result.name)
    made.sharding, made.global_shape = local.result.sharding, local.result.global_shape
    return [made]


def _infer_constant_of_shape(node: Node) -> Sequence[Type]:
    value = node.attributes.get("value")
    sizes = listed_sizes(needed(node, 0))
    if sizes is None:
        raise CannotTellError("the rank of the target")
    return [TensorType(value.dtype if isinstance(value, Tensor) else DType.F32, tuple(target_sizes(sizes)))]


def _rule_constant_of_shape(node: Node) -> FactorRule:
    """Every device makes its block."""
    rule = RuleBuilder()
    return rule.done([whole(1)], [rule.dims(result_shape(node))])


def _localize_constant_of_shape(whole_node: Node, local: Node, builder: Builder) -> None:
    """The target is the local shape."""
    set_target(local, 0, result_shape(local), builder)


def _infer_range(node: Node) -> Sequence[Type]:
    dtype = tensor_of(node, 0).dtype
    if not dtype.is_integer:
        raise CannotTellError("the length of a range of floats")
    ((start,), (limit,), (delta,)) = (listed_sizes(needed(node, place)) or (None,) for place in range(3))
    if (start, delta) == (0, 1) and not isinstance(limit, int):
        return [TensorType(dtype, tuple(target_sizes([limit])))]
    if not isinstance(start, int) or not isinstance(limit, int) or not isinstance(delta, int) or delta == 0:
        raise CannotTellError("its bounds, or a step of 0")
    return [TensorType(dtype, (len(range(start, limit, delta)),))]


define(OpDef("", "Shape", _infer_shape, _rule_sizes, localize=_localize_sizes, reads_sizes=True, gradient=zero))
define(OpDef("", "Size", _infer_size, _rule_sizes, localize=_localize_sizes, reads_sizes=True, gradient=zero))
# A Range of constants is folded; what is left of them has no rule.
define(OpDef("", "Range", _infer_range, gradient=of_range))
define(
    OpDef(
        "",
        "ConstantOfShape",
        _infer_constant_of_shape,
        _rule_constant_of_shape,
        localize=_localize_constant_of_shape,
        gradient=zero,
    )
)


# -- Trilu, EyeLike -------------------------------------------------------------------------------------------------


def _rule_trilu(node: Node) -> FactorRule:
    """All dims pass: the diagonal lies elsewhere in each block."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0))
    others = [() if other is None else whole(len(other)) for other in shapes_of(node)[1:]]
    return rule.done([dims, *others], [dims])


def _block_offset(result: Value, whole_shape: Sequence[int], builder: Builder) -> Value | None:
    """By how much the diagonal of a block lies above that of the whole: its first row minus its first column."""
    rank = len(whole_shape)
    row, column = (start_of_block(result.sharding, dim, whole_shape[dim], builder) for dim in (rank - 2, rank - 1))
    scalar = TensorType(DType.I64, ())
    if column is None:
        return row
    zero = builder.constant(np.asarray(0, np.int64), "number_0")
    return builder.op("Sub", [zero if row is None else row, column], type=scalar)


def _localize_trilu(whole_node: Node, local: Node, builder: Builder) -> None:
    """The diagonal is that of the block."""
    offset = _block_offset(local.result, shape_of(whole_node, 0), builder)
    if offset is None:
        return
    above = operand(local, 1)
    moved = offset if above is None else builder.op("Add", [above, offset], type=above.type)
    local.set_operands([local.operands[0], moved])


def _infer_eye_like(node: Node) -> Sequence[Type]:
    found = tensor_of(node, 0)
    return [TensorType(dtype_attribute(node, "dtype") if "dtype" in node.attributes else found.dtype, found.shape)]


def _rule_eye_like(node: Node) -> FactorRule:
    """Both dims pass: each device makes its block."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0))
    return rule.done([dims], [dims])


def _localize_eye_like(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """Ones where the column is the row and `k` more, both counted in the whole."""
    offset = _block_offset(local.result, shape_of(whole_node, 0), builder)
    if offset is None:
        return None
    rows, columns = result_shape(local)
    # Column minus row in the block; k and the block's offset say where that is a one.
    places = np.arange(columns)[None, :] - np.arange(rows)[:, None] - int_attribute(whole_node, "k", 0)
    known = builder.constant(places.astype(np.int64), "places")
    hits = builder.op("Equal", [known, offset], type=TensorType(DType.BOOL, (rows, columns)))
    return [typed_like(local.result, "Cast", [hits], {"to": local.result.dtype.value}, builder)]


define(OpDef("", "Trilu", same_type, _rule_trilu, localize=_localize_trilu, gradient=of_trilu))
microsoft("Trilu", same_type, _rule_trilu, localize=_localize_trilu, gradient=of_trilu)
define(OpDef("", "EyeLike", _infer_eye_like, _rule_eye_like, localize=_localize_eye_like, gradient=zero))


# -- DepthToSpace, SpaceToDepth -------------------------------------------------------------------------------------


def _infer_depth_space(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    block = int_attribute(node, "blocksize")
    if len(dims) != 4:
        raise CannotTellError("another rank than 4")
    batch, channels, height, width = dims
    if not isinstance(channels, int) or not isinstance(height, int) or not isinstance(width, int):
        raise CannotTellError("symbolic dims")
    if node.op_type == "DepthToSpace":
        shape: tuple[Dim, ...] = (batch, channels // block**2, height * block, width * block)
    else:
        shape = (batch, channels * block**2, height // block, width // block)
    return [tensor_of(node, 0).with_shape(shape)]


def _rule_depth_to_space(node: Node) -> FactorRule:
    """`([n,x,h,w])->([n,.,h,w])`, of mode CRD `([n,(cx),h,w])->([n,c,h,w])`: even blocks stay blocks.

    Otherwise than by CRD, a block of the result's channels comes from all over those of the operand.
    """
    batch, channels, height, width = shape_of(node, 0)
    is_major = text_attribute(node, "mode", "DCR") == "CRD"
    count = result_shape(node)[1] if is_major else 1
    rule = RuleBuilder()
    n, c, h, w = rule.dims([batch, count, height, width])
    (inside,) = rule.dims([channels // count], Kind.REPLICATE)
    return rule.done([[n, (*c, *inside), h, w]], [[n, c, h, w]])


def _rule_space_to_depth(node: Node) -> FactorRule:
    """`([n,c,h,w])->([n,.,h,w])`: as DepthToSpace, the other way round."""
    batch, _, height, width = result_shape(node)
    rule = RuleBuilder()
    n, h, w = rule.dims([batch, height, width])
    (channels,) = rule.dims(shape_of(node, 0)[1:2], Kind.REPLICATE)
    return rule.done([[n, channels, h, w]], [[n, (), h, w]])


define(
    OpDef("", "DepthToSpace", _infer_depth_space, _rule_depth_to_space, moves_elements=True, gradient=of_depth_to_space)
)
define(
    OpDef("", "SpaceToDepth", _infer_depth_space, _rule_space_to_depth, moves_elements=True, gradient=of_space_to_depth)
)
