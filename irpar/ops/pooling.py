"""Pooling and its reverse: batch and channels may be sharded; places of pooling with what its windows cover."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from irpar.ir import Builder, Dim, DType, Node, TensorType, Type, Value
from irpar.sharding import Reduction

from .convolution import window_sizes
from .coords import start_of_block
from .facts import (
    CannotTellError,
    dims_of,
    ints_attribute,
    ints_operand,
    is_at_hand,
    needed,
    operand,
    origin_of,
    result_shape,
    shape_of,
    tensor_of,
)
from .gradients import pooling as gradients
from .local import typed_like
from .local_programs.normalization import LOCAL_PROGRAMS
from .local_programs.window import WINDOWS
from .op_def import OpDef
from .registry import define
from .rule import FactorRule, Kind, RuleBuilder, whole


def _infer_pool(node: Node) -> Sequence[Type]:
    data = tensor_of(node, 0)
    shape = (*dims_of(node, 0)[:2], *window_sizes(node, ints_attribute(node, "kernel_shape") or ()))
    return [data.with_shape(shape), TensorType(DType.I64, shape)][: len(node.results)]


def _infer_global_pool(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    return [tensor_of(node, 0).with_shape((*dims[:2], *[1] * (len(dims) - 2)))]


def _rule_pool(node: Node) -> FactorRule:
    """Batch and channels pass; places need what their windows cover."""
    shape = shape_of(node, 0)
    rule = RuleBuilder()
    dims = [*rule.dims(shape[:2]), *rule.dims(shape[2:], Kind.PERMUTE)]
    return rule.done([dims], [dims] * len(node.results))


def _rule_global_pool(node: Node) -> FactorRule:
    """Batch and channels pass; a maximum or mean over all places comes from those over blocks of them.

    So does the sum that GlobalLpPool takes the root of, in a local program.
    """
    shape = shape_of(node, 0)
    rule = RuleBuilder()
    leading = rule.dims(shape[:2])
    places = rule.dims(shape[2:], Kind.REPLICATE if node.op_type == "GlobalLpPool" else Kind.REDUCE)
    reduce: Reduction = "sum" if node.op_type == "GlobalAveragePool" else "max"
    return rule.done([[*leading, *places]], [[*leading, *[()] * len(places)]], reduce)


def _localize_global_average(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """The mean over a block is scaled by the block's share of the places, so that the sum over blocks is the mean."""
    total, count = (prod(shape_of(node, 0)[2:]) for node in (whole_node, local))
    if count == total:
        return None
    result = local.result
    mean = typed_like(result, local.op_type, local.operands, local.attributes, builder)
    share = builder.constant(np.asarray(count / total, result.dtype.numpy), "share")
    return [typed_like(result, "Mul", [mean, share], None, builder)]


def _cost_pool(node: Node) -> int:
    # Windows may be wider than the image, whose rest is padding.
    window = map(min, ints_attribute(node, "kernel_shape") or (), shape_of(node, 0)[2:])
    return prod(result_shape(node)) * prod(window)


def _cost_global_pool(node: Node) -> int:
    return prod(shape_of(node, 0))


# -- positions, which count through the full tensor ----------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """The first two dims of a tensor [n, c, ..] and of a device's block of it; starts are None where it is not cut."""

    whole_channels: int
    channels: int
    batch_start: Value | None
    channel_start: Value | None


def _block_of(value: Value, local: Value, builder: Builder) -> _Block | None:
    """The block of a tensor that is sharded in its first two dims, or None where it is not."""
    sharding = value.sharding
    if sharding is None or not any(dim.axes for dim in sharding.dims[:2]):
        return None
    starts = [start_of_block(sharding, dim, size, builder) for dim, size in enumerate(value.shape[:2])]
    return _Block(value.shape[1], local.shape[1], *starts)


def _moved(index: Value, block: _Block, places: int, builder: Builder, *, to_whole: bool) -> Value:
    """Positions ((n * channels) + c) * places + s of a block as positions of the whole, or the other way round."""
    of = TensorType(DType.I64, index.shape)

    def op(name: str, a: Value, b: Value | int) -> Value:
        other = b if isinstance(b, Value) else builder.constant(np.asarray(b, np.int64), f"number_{b}")
        return builder.op(name, [a, other], type=of if a.shape or other.shape else TensorType(DType.I64, ()))

    shift = "Add" if to_whole else "Sub"
    before, after = block.channels, block.whole_channels
    if not to_whole:
        before, after = after, before
    row, place = op("Div", index, places), op("Mod", index, places)
    batch, channel = op("Div", row, before), op("Mod", row, before)
    if block.batch_start is not None:
        batch = op(shift, batch, block.batch_start)
    if block.channel_start is not None:
        channel = op(shift, channel, block.channel_start)
    return op("Add", op("Mul", op("Add", op("Mul", batch, after), channel), places), place)


def _localize_max_pool(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """Positions of maxima are those in the full tensor."""
    if len(local.results) == 1:
        return None
    block = _block_of(needed(whole_node, 0), needed(local, 0), builder)
    if block is None:
        return None
    values, positions = local.results
    results = [Value(value.name, value.type) for value in (values, positions)]
    made = builder.node("MaxPool", local.operands, local.attributes, results=results)
    places = prod(shape_of(whole_node, 0)[2:])
    moved = _moved(made.results[1], block, places, builder, to_whole=True)
    for new, old in zip((made.results[0], moved), local.results, strict=True):
        new.sharding, new.global_shape = old.sharding, old.global_shape
    return [made.results[0], moved]


for _name, _gradient in (("AveragePool", gradients.of_average_pool), ("LpPool", gradients.of_lp_pool)):
    define(
        OpDef(
            "",
            _name,
            _infer_pool,
            _rule_pool,
            _cost_pool,
            local_program=WINDOWS[_name].local_program(),
            gradient=_gradient,
        )
    )
define(
    OpDef(
        "",
        "MaxPool",
        _infer_pool,
        _rule_pool,
        _cost_pool,
        _localize_max_pool,
        WINDOWS["MaxPool"].local_program(),
        gradient=gradients.of_max_pool,
    )
)
define(
    OpDef(
        "",
        "GlobalMaxPool",
        _infer_global_pool,
        _rule_global_pool,
        _cost_global_pool,
        gradient=gradients.of_global_max,
    )
)
_LP = "GlobalLpPool"
define(
    OpDef(
        "",
        _LP,
        _infer_global_pool,
        _rule_global_pool,
        _cost_global_pool,
        local_program=LOCAL_PROGRAMS[_LP],
        gradient=gradients.of_global_lp,
    )
)
define(
    OpDef(
        "",
        "GlobalAveragePool",
        _infer_global_pool,
        _rule_global_pool,
        _cost_global_pool,
        _localize_global_average,
        gradient=gradients.of_global_average,
    )
)


# -- MaxUnpool ------------------------------------------------------------------------------------------------------


def _unpooled(node: Node) -> list[Dim]:
    """Sizes of the result along the places, from kernel, strides and pads."""
    places = dims_of(node, 0)[2:]
    rank = len(places)
    kernel = ints_attribute(node, "kernel_shape") or ()
    if len(kernel) != rank:
        raise CannotTellError("a kernel of another rank")
    strides = ints_attribute(node, "strides") or (1,) * rank
    pads = ints_attribute(node, "pads") or (0,) * (2 * rank)
    return [
        None if size is None else (size - 1) * strides[dim] + kernel[dim] - pads[dim] - pads[dim + rank]
        for dim, size in enumerate(places)
    ]


def _infer_max_unpool(node: Node) -> Sequence[Type]:
    asked = ints_operand(node, 2)
    return [tensor_of(node, 0).with_shape(asked or (*dims_of(node, 0)[:2], *_unpooled(node)))]


_MOST_READ = 1 << 16
"""Of a constant's positions."""


def _stay_in_their_maps(positions: Value, places: int) -> bool:
    """Whether positions [n, c, ..] are known to lie in the n * c maps, of so many places, that they stand at."""
    origin = origin_of(positions)
    if origin.node is not None:
        return origin.node.identity == ("", "MaxPool") and prod(shape_of(origin.node, 0)[2:]) == places
    if origin.data is None or not origin.data.size or not is_at_hand(origin.data, _MOST_READ):
        return False
    maps = origin.data.numpy().reshape(prod(origin.shape[:2]), -1) // places
    return bool((maps == np.arange(len(maps))[:, None]).all())


def _rule_max_unpool(node: Node) -> FactorRule:
    """`([b,c,s],[b,c,s],[.])->([b,c,t])`: b and c pass, places are whole.

    Of positions that stay in the map of their element; ONNX lets them lead from any map to any other.
    """
    if list(result_shape(node)[2:]) != _unpooled(node):
        raise CannotTellError("positions in a tensor of another size")
    if not _stay_in_their_maps(needed(node, 1), prod(result_shape(node)[2:])):
        raise CannotTellError("its positions may lie in any map: no MaxPool of a tensor of that size gives them")
    shape = shape_of(node, 0)
    rule = RuleBuilder()
    data = [*rule.dims(shape[:2]), *rule.dims(shape[2:], Kind.REPLICATE)]
    others = [] if len(node.operands) < 3 else [whole(1) if operand(node, 2) is not None else ()]
    return rule.done([data, data, *others], [[*data[:2], *[()] * (len(shape) - 2)]])


def _localize_max_unpool(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """Positions are taken relative to the block, whose shape kernel and strides give."""
    block = _block_of(needed(whole_node, 0), needed(local, 0), builder)
    if block is None:
        return None
    places = prod(result_shape(local)[2:])
    index = _moved(needed(local, 1), block, places, builder, to_whole=False)
    return [typed_like(local.result, "MaxUnpool", [needed(local, 0), index], local.attributes, builder)]


define(
    OpDef(
        "",
        "MaxUnpool",
        _infer_max_unpool,
        _rule_max_unpool,
        localize=_localize_max_unpool,
        rule_looks_back=True,
        gradient=gradients.of_max_unpool,
    )
)
