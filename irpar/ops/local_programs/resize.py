"""Resize along dims that are sharded: each device gets the elements between which its block of the result lies.

y = Resize(x : [1, 8, 16@sp, 16], scales 2, linear)   4 devices hold 4 rows each and make 8; with a row of a neighbour
                                                      (at the edges: zeros, which count nothing) every device has what
                                                      its rows are weighted sums of
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from irpar.ir import Floats, Node, Value
from irpar.kernels.resize import Axis as Resized
from irpar.kernels.resize import Filter, coordinate_dtype, plan
from irpar.sharding.exchange import FILL, Indices

from ..facts import (
    CannotTellError,
    axes_of,
    axis_of,
    data_of,
    float_attribute,
    int_attribute,
    ints_attribute,
    ints_operand,
    needed,
    operand,
    shape_of,
    tensor_of,
    text_attribute,
)
from .exchange import Moving, blocks_of, is_small, own, own_devices, taken
from .program import FLOATS, ProgramWriter

_ROUNDING = 1e-6
"""What coordinates may differ by between engines, as a share of a dim."""

_MOST_TAPS = 4
"""Neighbours up to which each is looked up; more of them are a product with a matrix."""


# -- what a node says -----------------------------------------------------------------------------------------------


def named_dims(node: Node, rank: int) -> tuple[int, ...]:
    """The dims that scales or sizes speak of, in their order."""
    axes = ints_attribute(node, "axes")
    if axes is None:
        return tuple(range(rank))
    axes_of(axes, rank)  # refuses one that is named twice
    return tuple(axis_of(axis, rank) for axis in axes)


def sizes_of(node: Node) -> tuple[int, ...] | None:
    """The operand `sizes`, or None where there are scales."""
    found = ints_operand(node, 3) if operand(node, 3) is not None else None
    return found or None


def scales_of(node: Node) -> list[float]:
    """The constant operand `scales`."""
    if node.op_type == "Upsample" and node.version < 9:
        listed = node.attributes.get("scales")
        if not isinstance(listed, Floats):
            raise CannotTellError("scales")
        return list(listed)
    found = data_of(needed(node, 1 if node.version < 11 else 2))
    if found is None:
        raise CannotTellError("scales")
    return [float(scale) for scale in found.numpy()]


def is_crop(node: Node) -> bool:
    """Whether it resizes a region that an operand names."""
    return text_attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"


def policy_of(node: Node) -> str:
    """How sizes are to be taken."""
    return text_attribute(node, "keep_aspect_ratio_policy", "stretch")


def resized_dims(
    node: Node, shape: Sequence[int] | None = None, wanted: Sequence[int] | None = None
) -> dict[int, Resized]:
    """The dims whose places change; `shape` is that of the operand, `wanted` the sizes, where they are not known.

    None does where no size changes, whatever the scales: ONNX Runtime copies. Beside a dim that does, a scale of 1
    keeps the places; 5 places at scale 1.1 are 5 places with other numbers.

    Raises:
        CannotTellError: it crops, or sizes and scales are not constant.
    """
    if is_crop(node):
        raise CannotTellError("a crop")
    shape, sizes = shape_of(node, 0) if shape is None else shape, sizes_of(node) if wanted is None else wanted
    dims = named_dims(node, len(shape))
    lengths = [shape[dim] for dim in dims]
    scales = None if sizes is not None else np.asarray(scales_of(node), np.float32)
    axes = plan(lengths, scales, None if sizes is None else np.asarray(sizes), policy=policy_of(node))
    if all(axis.length == axis.resized for axis in axes):
        return {}
    return {dim: axis for dim, axis in zip(dims, axes, strict=True) if axis.scale != 1 or axis.length != axis.resized}


def _is_old(node: Node) -> bool:
    """Whether elements are sharded as before Resize of opset 11."""
    return node.op_type == "Upsample" or node.version < 11


def _coordinate_mode(node: Node) -> str:
    return "asymmetric" if _is_old(node) else text_attribute(node, "coordinate_transformation_mode", "half_pixel")


def _mode(node: Node) -> str:
    return text_attribute(node, "mode", "nearest")


def _filter(node: Node) -> Filter:
    return Filter(
        _mode(node),
        "floor" if _is_old(node) else text_attribute(node, "nearest_mode", "round_prefer_floor"),
        float_attribute(node, "cubic_coeff_a", -0.75),
        bool(int_attribute(node, "antialias", 0)),
        bool(int_attribute(node, "exclude_outside", 0)),
    )


def taps_of(node: Node, axis: Resized) -> "tuple[Indices, np.ndarray[Any, Any]]":
    """Places and weights, each [resized, taps], of what each element of the result is made of."""
    dtype = coordinate_dtype(_mode(node), tensor_of(node, 0).dtype.numpy)
    return _filter(node).taps(np, axis.coordinates(np, _coordinate_mode(node), dtype), axis)


def _is_clear(node: Node, axis: Resized) -> bool:
    """Whether every engine takes the same nearest elements: where none is halfway, or all places are exact."""
    mode, how = _coordinate_mode(node), _filter(node)
    places = axis.coordinates(np, mode)
    rounded = replace(axis, scale=float(np.float32(axis.scale)))
    if np.array_equal(places, rounded.coordinates(np, mode, np.float64)):
        return True
    moved = (places + sign * _ROUNDING * axis.length for sign in (-1, 1))
    below, above = (how.taps(np, each, axis)[0] for each in moved)
    return bool(np.array_equal(below, above))


# -- the local program ----------------------------------------------------------------------------------------------


def _dims(node: Node) -> Sequence[int] | None:
    resized = resized_dims(node)
    if _mode(node) == "nearest":
        dims = [dim for dim, axis in resized.items() if _is_clear(node, axis)]
        if len(dims) < len(resized) and policy_of(node) != "stretch":
            return None
    elif _mode(node) in ("linear", "cubic") and tensor_of(node, 0).dtype in FLOATS:
        dims = list(resized)
    else:
        return None  # Of integers every engine rounds in its own way.
    return dims if is_small(node, dims) else None


@dataclass(frozen=True)
class _Blocks:
    """What each device's block of the result along a dim is made of.

    Attributes:
        starts: the first element that each needs.
        width: how many it gets, all alike: those that it needs, and behind them any.
        places, weights: per device [block, taps]; places count from its start.
    """

    starts: list[int]
    width: int
    places: list[Indices]
    weights: "list[np.ndarray[Any, Any]]"


def _blocks(node: Node, dim: int, parts: int) -> _Blocks:
    axis = resized_dims(node)[dim]
    places, weights = taps_of(node, axis)
    blocks = blocks_of(axis.resized, parts)
    rows = [places[block.start : block.stop] for block in blocks]
    starts = [int(row.min()) for row in rows] if parts > 1 else [0]
    width = max(int(row.max()) - start + 1 for row, start in zip(rows, starts, strict=True))
    return _Blocks(
        starts,
        width,
        [row - start for row, start in zip(rows, starts, strict=True)],
        [weights[block.start : block.stop] for block in blocks],
    )


def _wanted(node: Node, dim: int, parts: int) -> list[Indices]:
    axis = resized_dims(node)[dim]
    if _mode(node) == "nearest":
        places = taps_of(node, axis)[0][:, 0]
        return [places[block.start : block.stop] for block in blocks_of(axis.resized, parts)]
    found = []
    blocks = _blocks(node, dim, parts)
    for start, row in zip(blocks.starts, blocks.places, strict=True):
        needs = np.arange(blocks.width, dtype=np.int64)
        found.append(np.where(needs <= row.max(), needs + start, FILL))
    return found


def _write(program: ProgramWriter, value: Value, cut: Sequence[int]) -> list[Value]:
    """Weigh what is there now along the dims that are sharded, and resize the others."""
    node, dtype = program.whole, value.dtype
    resized = resized_dims(node)
    # Scales that keep the shape of an image are found from all sizes, so that the engine must not see other ones.
    # Nor may it see nothing but sizes that stay, which ONNX Runtime copies.
    has_policy = policy_of(node) != "stretch"
    written = [dim for dim, axis in resized.items() if has_policy or dim in cut or axis.length == axis.resized]
    if _mode(node) != "nearest":
        value = program.wide(value)
        for dim in cut:
            value = _weighed(program, value, dim, _blocks(node, dim, program.lies.dim_parts(dim)))
    for dim in written:
        if dim not in cut:
            value = _weighed(program, value, dim, _blocks(node, dim, 1))
    if set(resized) - set(written):
        value = _engine_resized(program, value, written)
    return [program.cast(value, dtype)]


def _weighed(program: ProgramWriter, value: Value, dim: int, blocks: _Blocks) -> Value:
    """Weighted sums of the elements along a dim."""
    count = blocks.places[0].shape[1]
    if count > _MOST_TAPS:
        return _product(program, value, dim, blocks)
    devices = own_devices(program, dim)
    made: Value | None = None
    for tap in range(count):
        found = taken(program, value, dim, [row[:, tap] for row in blocks.places], devices)
        if count > 1 or _mode(program.whole) != "nearest":
            rows = [row[:, tap].astype(value.dtype.numpy) for row in blocks.weights]
            trailing = (1,) * (len(value.shape) - dim - 1)
            weight = own(program, [row.reshape(-1, *trailing) for row in rows], dim, devices, "weights")
            found = program.op("Mul", [found, weight])
        made = found if made is None else program.op("Add", [made, found])
    assert made is not None
    return made


def _product(program: ProgramWriter, value: Value, dim: int, blocks: _Blocks) -> Value:
    """The same by a matrix [elements that are there, elements of the block]."""
    rank, width = len(value.shape), value.shape[dim]
    matrices = []
    for places, weights in zip(blocks.places, blocks.weights, strict=True):
        numbers = np.zeros((width, len(places)), np.float64)
        np.add.at(numbers, (places, np.arange(len(places))[:, None]), weights)
        matrices.append(numbers.astype(value.dtype.numpy))
    matrix = own(program, matrices, dim, own_devices(program, dim), "weights")
    order = [*(at for at in range(rank) if at != dim), dim]
    last = program.op("Transpose", [value], {"perm": order}, shape=[value.shape[at] for at in order])
    made = program.op("MatMul", [last, matrix], shape=(*last.shape[:-1], matrix.shape[1]))
    back = [order.index(at) for at in range(rank)]
    return program.op("Transpose", [made], {"perm": back}, shape=[made.shape[at] for at in back])


def _engine_resized(program: ProgramWriter, value: Value, done: Sequence[int]) -> Value:
    """What the engine resizes: the dims that are not done."""
    node, local = program.whole, program.local
    shape = local.result.shape
    dims = named_dims(node, len(shape))
    attributes: dict[str, Any] = dict(node.attributes)
    operands: list[Value | None] = [value, *local.operands[1:]]
    sizes = sizes_of(node)
    if sizes is not None:
        operands[3] = program.ints([shape[dim] for dim in dims])
        return program.op(node.op_type, operands, attributes, shape=shape)
    scales = [1.0 if dim in done else scale for dim, scale in zip(dims, scales_of(node), strict=True)]
    if node.op_type == "Upsample" and node.version < 9:
        attributes["scales"] = Floats(scales)
    else:
        operands[1 if node.version < 11 else 2] = program.builder.constant(np.asarray(scales, np.float32), "scales")
    return program.op(node.op_type, operands, attributes, shape=shape)


RESIZE = Moving(_dims, _wanted, _write)
