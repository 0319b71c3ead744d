"""Concat, Split, Slice, Pad, Tile and their like along dims that are cut: what each block of the result is made of."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from irpar.ir import Node, Value
from irpar.ir.dims import product_of
from irpar.sharding.exchange import FILL, Indices

from ..facts import (
    CannotTellError,
    axis_attribute,
    axis_of,
    data_of,
    dims_of,
    ints_attribute,
    ints_operand,
    needed,
    needed_ints,
    operand,
    origin_of,
    result_shape,
    result_shapes,
    shape_of,
    shapes_of,
    tensor_of,
    text_attribute,
)
from ..neutral import COMBINED, neutral
from ..rule import FactorRule, moving_rule
from .exchange import Moving, blocks_of, is_few, is_small
from .program import ProgramWriter

# -- Concat, Split --------------------------------------------------------------------------------------------------


def _axis_dims(node: Node) -> Sequence[int] | None:
    dims = (axis_attribute(node, len(result_shape(node)), 0),)
    return dims if is_small(node, dims) else None


def pieces_in_full(node: Node) -> list[bool]:
    """Of the operands of a Concat, which every device has in full: those of a few elements beside one of many."""
    axis = axis_attribute(node, len(result_shape(node)))
    sizes = [shape_of(node, place)[axis] for place in range(len(node.operands))]
    return [is_few(size, max(sizes)) for size in sizes]


def _operands_in_blocks(node: Node) -> list[int]:
    return [place for place, is_full in enumerate(pieces_in_full(node)) if not is_full]


def _operands_in_full(node: Node) -> list[int]:
    return [place for place, is_full in enumerate(pieces_in_full(node)) if is_full]


def _wanted_of_concat(node: Node, dim: int, parts: int) -> list[Indices]:
    numbers, in_blocks, beside = [], 0, 0
    for place, is_full in enumerate(pieces_in_full(node)):
        size = shape_of(node, place)[dim]
        if is_full:
            numbers.append(FILL - np.arange(beside, beside + size, dtype=np.int64))
            beside += size
        else:
            numbers.append(np.arange(in_blocks, in_blocks + size, dtype=np.int64))
            in_blocks += size
    return _in_blocks(np.concatenate(numbers), parts)


def _in_blocks(taken: Indices, parts: int) -> list[Indices]:
    """Of elements that are taken of a dim, those of each device's block."""
    return [taken[block.start : block.stop] for block in blocks_of(len(taken), parts)]


def _parts_of(taken: Indices, size: int, parts: int) -> list[Indices]:
    """All elements that are taken of a dim of some size, as each device has them."""
    return [np.where((taken >= own.start) & (taken < own.stop), taken, FILL) for own in blocks_of(size, parts)]


def _wanted_of_split(node: Node, dim: int, parts: int) -> list[Indices]:
    sizes = [shape[dim] for shape in result_shapes(node)]
    pieces = np.split(np.arange(sum(sizes), dtype=np.int64), np.cumsum(sizes)[:-1])
    blocks = [
        _parts_of(piece, sum(sizes), parts) if is_full else _in_blocks(piece, parts)
        for piece, is_full in zip(pieces, pieces_taken_in_full(node), strict=True)
    ]
    return [np.concatenate(of_all_results) for of_all_results in zip(*blocks, strict=True)]


def pieces_taken_in_full(node: Node) -> list[bool]:
    """Of the results of a Split, which every device gets in full, as sums of parts: those of few elements."""
    axis = axis_attribute(node, len(result_shape(node)), 0)
    sizes = [shape[axis] for shape in result_shapes(node)]
    # Without the local program a device would take its part for all.
    is_able = tensor_of(node, 0).dtype in COMBINED and _axis_dims(node) is not None
    return [is_able and is_few(size, max(sizes)) for size in sizes]


def _split_block(program: ProgramWriter, value: Value, cut: Sequence[int]) -> list[Value]:
    """The blocks of all results, which stand side by side, taken apart."""
    (dim,) = cut
    sizes = [result.shape[dim] for result in program.local.results]
    node = program.builder.node("Split", [value, program.ints(sizes)], {"axis": dim}, results=len(sizes))
    for made, result in zip(node.results, program.local.results, strict=True):
        made.type = result.type
    return list(node.results)


def _neutral(node: Node) -> "np.ndarray[Any, Any] | None":
    """What changes nothing where parts of a piece are combined."""
    dtype = tensor_of(node, 0).dtype
    return neutral(COMBINED[dtype], dtype) if dtype in COMBINED else None


CONCAT = Moving(
    _axis_dims,
    _wanted_of_concat,
    lambda program, value, cut: [value],
    sources=_operands_in_blocks,
    beside=_operands_in_full,
    reads_elements=False,
)
SPLIT = Moving(_axis_dims, _wanted_of_split, _split_block, fill=_neutral)


# -- Gather, of other places than it stands at ----------------------------------------------------------------------


_MOST_ORDERED = 1 << 16
"""Places of an order that are looked at."""


def order_of(node: Node) -> "Indices | None":
    """The order in which a Gather takes all places of what is computed; None of others.

    Raises:
        CannotTellError: the attribute names no dim.
    """
    data, order = needed(node, 0), needed(node, 1)
    size = data.shape[axis_attribute(node, len(data.shape), 0)]
    if origin_of(data).is_constant or order.shape != (size,) or not 1 < size <= _MOST_ORDERED:
        return None
    numbers = data_of(order)
    if numbers is None:
        return None
    places = numbers.numpy().astype(np.int64)
    places = np.where(places < 0, places + size, places)
    is_known = places.min() >= 0 and places.max() < size
    return places if is_known and (np.bincount(places, minlength=size) == 1).all() else None


def ordered_rule(node: Node) -> FactorRule | None:
    """The rule of a Gather that takes all places in another order: elements move to other blocks."""
    if order_of(node) is None:
        return None
    axis = axis_attribute(node, len(shape_of(node, 0)), 0)
    return moving_rule(shapes_of(node), result_shape(node), {axis}, elsewhere={axis})


def _ordered_dims(node: Node) -> Sequence[int] | None:
    return None if order_of(node) is None else (axis_attribute(node, len(shape_of(node, 0)), 0),)


def _wanted_of_order(node: Node, dim: int, parts: int) -> list[Indices]:
    places = order_of(node)
    assert places is not None
    return _in_blocks(places, parts)


ORDER = Moving(_ordered_dims, _wanted_of_order, lambda program, value, cut: [value])


# -- Slice ----------------------------------------------------------------------------------------------------------


def slices(node: Node, rank: int) -> dict[int, tuple[int, int, int]]:
    """Axis to (start, end, step)."""
    starts, ends = needed_ints(node, 1), needed_ints(node, 2)
    axes = ints_operand(node, 3)
    steps = ints_operand(node, 4) or (1,) * len(starts)
    places = range(len(starts)) if axes is None else [axis_of(axis, rank) for axis in axes]
    if not len(places) == len(starts) == len(ends) == len(steps) or 0 in steps:
        raise CannotTellError("starts, ends, axes and steps do not fit each other")
    # To the end, whichever way: ONNX Runtime takes the greatest integers so for a negative step too.
    ends = tuple(
        -(2**62) if step < 0 and end in (2**31 - 1, 2**63 - 1) else end for end, step in zip(ends, steps, strict=True)
    )
    return dict(zip(places, zip(starts, ends, steps, strict=True), strict=True))


def _sliced_dims(node: Node) -> Sequence[int] | None:
    dims = list(slices(node, len(shape_of(node, 0))))
    return dims if is_small(node, dims) else None


def _wanted_of_slice(node: Node, dim: int, parts: int) -> list[Indices]:
    size = shape_of(node, 0)[dim]
    start, end, step = slices(node, len(shape_of(node, 0)))[dim]
    # Python takes an end before the first element for one counted from the back.
    taken = np.arange(size, dtype=np.int64)[start : None if step < 0 and end < -size else end : step]
    return _parts_of(taken, size, parts) if dim in dims_taken_in_full(node) else _in_blocks(taken, parts)


def dims_taken_in_full(node: Node) -> frozenset[int]:
    """The dims of which a Slice takes few elements, so that every device gets them in full, as sums of parts.

    x : [5@tp]; y = Slice(x, 4:5)      the last of five devices has that element, the others what changes no sum
    """
    dims = _sliced_dims(node)
    # Without the local program a device would take its part for all.
    if dims is None or tensor_of(node, 0).dtype not in COMBINED:
        return frozenset()
    shape, result = shape_of(node, 0), result_shape(node)
    return frozenset(dim for dim in dims if is_few(result[dim], shape[dim]))


def _slice_rest(program: ProgramWriter, value: Value, cut: Sequence[int]) -> list[Value]:
    left = {dim: how for dim, how in slices(program.whole, len(value.shape)).items() if dim not in cut}
    if not left:
        return [value]
    starts, ends, steps = (list(column) for column in zip(*left.values(), strict=True))
    operands = [program.ints(numbers) for numbers in (starts, ends, list(left), steps)]
    return [program.op("Slice", [value, *operands], shape=program.local.result.shape)]


SLICE = Moving(_sliced_dims, _wanted_of_slice, _slice_rest, fill=_neutral)


# -- Pad, Tile ------------------------------------------------------------------------------------------------------


def pads_of(node: Node, rank: int) -> dict[int, tuple[int, int]]:
    """Axis to (before, after)."""
    pads = needed_ints(node, 1)
    axes = ints_operand(node, 3)
    places = range(rank) if axes is None else [axis_of(axis, rank) for axis in axes]
    half = len(pads) // 2
    if len(pads) != 2 * len(places):
        raise CannotTellError("pads of another rank")
    return dict(zip(places, zip(pads[:half], pads[half:], strict=True), strict=True))


_BORDERS = ("reflect", "edge", "wrap")
"""Modes of Pad that repeat elements; numpy calls them so too."""


def _pad_dims(node: Node) -> Sequence[int] | None:
    mode, value = text_attribute(node, "mode", "constant"), operand(node, 2)
    is_known = mode in _BORDERS or (mode == "constant" and (value is None or value.data is not None))
    takes_away = mode == "constant"
    dims = [dim for dim, pads in pads_of(node, len(shape_of(node, 0))).items() if takes_away or min(pads) >= 0]
    return dims if is_known and is_small(node, dims) else None


def _wanted_of_pad(node: Node, dim: int, parts: int) -> list[Indices]:
    size, mode = shape_of(node, 0)[dim], text_attribute(node, "mode", "constant")
    before, after = pads_of(node, len(shape_of(node, 0)))[dim]
    if mode == "constant":
        places = np.arange(-before, size + after, dtype=np.int64)
        places[(places < 0) | (places >= size)] = FILL
    else:
        places = np.pad(np.arange(size, dtype=np.int64), (before, after), mode=mode)  # type: ignore[call-overload]
    return [places[block.start : block.stop] for block in blocks_of(len(places), parts)]


def _pad_fill(node: Node) -> "np.ndarray[Any, Any] | None":
    value = operand(node, 2)
    return None if value is None or value.data is None else value.data.numpy().reshape(())


def _pad_rest(program: ProgramWriter, value: Value, cut: Sequence[int]) -> list[Value]:
    pads = {dim: pair for dim, pair in pads_of(program.whole, len(value.shape)).items() if dim not in cut}
    if not any(any(pair) for pair in pads.values()):
        return [value]
    flat = [pads.get(dim, (0, 0))[side] for side in (0, 1) for dim in range(len(value.shape))]
    operands = [value, program.ints(flat), operand(program.local, 2)]
    return [program.op("Pad", operands, program.whole.attributes, shape=program.local.result.shape)]


PAD = Moving(_pad_dims, _wanted_of_pad, _pad_rest, fill=_pad_fill)


def _tile_dims(node: Node) -> Sequence[int] | None:
    dims = [dim for dim, count in enumerate(needed_ints(node, 1)) if count != 1]
    return dims if is_small(node, dims) else None


def _wanted_of_tile(node: Node, dim: int, parts: int) -> list[Indices]:
    size = shape_of(node, 0)[dim]
    return [np.array(block, np.int64) % size for block in blocks_of(result_shape(node)[dim], parts)]


def _tile_rest(program: ProgramWriter, value: Value, cut: Sequence[int]) -> list[Value]:
    repeats = [1 if dim in cut else count for dim, count in enumerate(needed_ints(program.whole, 1))]
    if set(repeats) == {1}:
        return [value]
    return [program.op("Tile", [value, program.ints(repeats)], shape=program.local.result.shape)]


TILE = Moving(_tile_dims, _wanted_of_tile, _tile_rest)


# -- CenterCropPad, Compress ----------------------------------------------------------------------------------------


def crop_targets(node: Node, rank: int) -> dict[int, int]:
    """Axis to the size that a CenterCropPad gives it."""
    axes = ints_attribute(node, "axes")
    dims = range(rank) if axes is None else [axis_of(axis, rank) for axis in axes]
    return dict(zip(dims, needed_ints(node, 1), strict=True))


def _cropped_dims(node: Node) -> Sequence[int] | None:
    shape = shape_of(node, 0)
    dims = [dim for dim, size in crop_targets(node, len(shape)).items() if size != shape[dim]]
    return dims if is_small(node, dims) else None


def _wanted_of_crop(node: Node, dim: int, parts: int) -> list[Indices]:
    size, after = shape_of(node, 0)[dim], result_shape(node)[dim]
    # Of an odd number of elements the last side gets one more, to be padded or left out.
    first = (size - after) // 2 if size > after else -((after - size) // 2)
    places = np.arange(after, dtype=np.int64) + first
    places = np.where((places < 0) | (places >= size), FILL, places)
    return [places[block.start : block.stop] for block in blocks_of(after, parts)]


def _crop_rest(program: ProgramWriter, value: Value, cut: Sequence[int]) -> list[Value]:
    shape = program.local.result.shape
    if value.shape == shape:
        return [value]
    sizes = [shape[dim] for dim in crop_targets(program.whole, len(shape))]
    return [program.op("CenterCropPad", [value, program.ints(sizes)], program.whole.attributes, shape=shape)]


CENTER_CROP_PAD = Moving(_cropped_dims, _wanted_of_crop, _crop_rest)


def chosen(node: Node) -> "np.ndarray[Any, Any]":
    """The elements that a Compress with a constant condition takes; what it says beyond the last element says nothing.

    Raises:
        CannotTellError: the condition is computed.
    """
    condition = data_of(needed(node, 1))
    if condition is None:
        raise CannotTellError("the condition")
    dims = dims_of(node, 0)
    size = dims[axis_attribute(node, len(dims))] if "axis" in node.attributes else product_of(dims)
    return np.flatnonzero(condition.numpy()[: size if isinstance(size, int) else None])


def _compressed_dims(node: Node) -> Sequence[int] | None:
    if "axis" not in node.attributes:
        return None
    chosen(node)
    dims = (axis_attribute(node, len(shape_of(node, 0))),)
    return dims if is_small(node, dims) else None


def _wanted_of_compress(node: Node, dim: int, parts: int) -> list[Indices]:
    taken = chosen(node)
    return [taken[block.start : block.stop] for block in blocks_of(len(taken), parts)]


COMPRESS = Moving(_compressed_dims, _wanted_of_compress, lambda program, value, cut: [value])
