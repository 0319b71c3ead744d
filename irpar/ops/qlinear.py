"""com.microsoft's operators on quantised tensors: dequantise, compute, quantise, with scales of the full tensor."""

from collections.abc import Sequence
from math import prod

from irpar.ir import Dim, Node, TensorType, Type

from .convolution import window_sizes
from .elementwise import per_element
from .facts import (
    CannotTellError,
    axis_attribute,
    broadcast_dims,
    dims_of,
    int_attribute,
    ints_attribute,
    result_shape,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients.zero import zero
from .microsoft import microsoft
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole


def _data_places(node: Node) -> tuple[int, ...]:
    """The operands that are tensors; the others are their scales and zero points."""
    if node.op_type == "QLinearConcat":
        return tuple(range(2, len(node.operands), 3))
    return {"QLinearAdd": (0, 3), "QLinearMul": (0, 3), "QLinearWhere": (0, 1, 4)}.get(node.op_type, (0,))


def _is_whole_scale(node: Node) -> None:
    """Scales for each channel are not covered."""
    places = _data_places(node)
    for index, shape in enumerate(shapes_of(node)):
        if index not in places and shape is not None and prod(shape) != 1:
            raise CannotTellError("several scales")


def _operands(node: Node, data: Sequence[Sequence[DimFactors]]) -> list[Sequence[DimFactors]]:
    """Factors of the tensors, in order; scales and zero points are whole."""
    _is_whole_scale(node)
    found = iter(data)
    places = _data_places(node)
    return [next(found) if index in places else whole(len(shape or ())) for index, shape in enumerate(shapes_of(node))]


# -- elementwise ----------------------------------------------------------------------------------------------------


def _infer_elementwise(node: Node) -> Sequence[Type]:
    places = _data_places(node)
    return [TensorType(tensor_of(node, places[-1]).dtype, broadcast_dims([dims_of(node, index) for index in places]))]


def _rule_elementwise(node: Node) -> FactorRule:
    """`([i,j],[],[],[j],[],[],[],[])->([i,j])`: every dim passes, by broadcasting."""
    shape = result_shape(node)
    rule = RuleBuilder()
    dims = rule.dims(shape)
    data = []
    for index in _data_places(node):
        sizes = shape_of(node, index)
        start = len(shape) - len(sizes)
        data.append([dims[start + n] if size == shape[start + n] else () for n, size in enumerate(sizes)])
    return rule.done(_operands(node, data), [dims])


for _name, _flops in {
    "QLinearAdd": 7,
    "QLinearMul": 7,
    "QLinearWhere": 4,
    "QLinearLeakyRelu": 5,
    "QLinearSigmoid": 5,
}.items():
    # The first operand of a Where is bools.
    _data = 1 if _name == "QLinearWhere" else 0
    microsoft(_name, _infer_elementwise, _rule_elementwise, per_element(_flops), dtypes=_data, gradient=zero)


# -- along an axis --------------------------------------------------------------------------------------------------


def _infer_concat(node: Node) -> Sequence[Type]:
    shapes = [dims_of(node, index) for index in _data_places(node)]
    axis = axis_attribute(node, len(shapes[0]))
    sizes = [shape[axis] for shape in shapes]
    if not all(isinstance(size, int) for size in sizes):
        raise CannotTellError("a symbolic axis")
    total = sum(size for size in sizes if isinstance(size, int))
    return [TensorType(tensor_of(node, 2).dtype, (*shapes[0][:axis], total, *shapes[0][axis + 1 :]))]


def _rule_along(node: Node) -> FactorRule:
    """The axis is whole, the other dims pass."""
    shape = result_shape(node)
    axis = axis_attribute(node, len(shape), -1 if node.op_type == "QLinearSoftmax" else None)
    if node.op_type == "QLinearSoftmax" and int_attribute(node, "opset") < 13 and axis != len(shape) - 1:
        raise CannotTellError("several dims taken as one")
    rule = RuleBuilder()
    if node.op_type == "QLinearConcat":
        dims: list[DimFactors] = [() if dim == axis else rule.dims([size])[0] for dim, size in enumerate(shape)]
    else:
        dims = [rule.dims([size], Kind.REPLICATE if dim == axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    return rule.done(_operands(node, [dims] * len(_data_places(node))), [dims])


microsoft("QLinearConcat", _infer_concat, _rule_along, per_element(4), dtypes=2, gradient=zero)
microsoft("QLinearSoftmax", _infer_elementwise, _rule_along, per_element(9), gradient=zero)


# -- pooling --------------------------------------------------------------------------------------------------------


def _infer_pool(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    is_last = bool(int_attribute(node, "channels_last", 0))
    batch, *places = (dims[0], *dims[1:-1]) if is_last else (dims[0], *dims[2:])
    channels = dims[-1] if is_last else dims[1]
    if node.op_type == "QLinearGlobalAveragePool":
        sizes: list[Dim] = [1] * len(places)
    else:
        sizes = window_sizes(node, ints_attribute(node, "kernel_shape") or (), places)
    shape = (batch, *sizes, channels) if is_last else (batch, channels, *sizes)
    return [tensor_of(node, 0).with_shape(shape)]


def _rule_pool(node: Node) -> FactorRule:
    """Batch and channels pass, places are whole, wherever the channels stand."""
    shape = shape_of(node, 0)
    last = node.op_type == "NhwcMaxPool" or int_attribute(node, "channels_last", 0)
    rule = RuleBuilder()
    kept = {0, len(shape) - 1} if last else {0, 1}
    dims = [rule.dims([size], Kind.PASS if dim in kept else Kind.REPLICATE)[0] for dim, size in enumerate(shape)]
    result = [factors if dim in kept else () for dim, factors in enumerate(dims)]
    return rule.done(_operands(node, [dims]), [result])


def _cost_pool(node: Node) -> int:
    return prod(result_shape(node)) * prod(ints_attribute(node, "kernel_shape") or (1,))


def _infer_nhwc_pool(node: Node) -> Sequence[Type]:
    batch, *places, channels = dims_of(node, 0)
    sizes = window_sizes(node, ints_attribute(node, "kernel_shape") or (), places)
    return [tensor_of(node, 0).with_shape((batch, *sizes, channels))]


microsoft("QLinearAveragePool", _infer_pool, _rule_pool, _cost_pool, gradient=zero)
microsoft("QLinearGlobalAveragePool", _infer_pool, _rule_pool, lambda node: prod(shape_of(node, 0)), gradient=zero)
microsoft("NhwcMaxPool", _infer_nhwc_pool, _rule_pool, _cost_pool, gradient=zero)
