"""ConvTranspose along places that are sharded: each device gets the places from which something reaches its block.

y = ConvTranspose(x : [1, 8, 16@sp, 16], w : [8, 4, 3, 3], strides 2)     of 33 rows 4 devices make 9, 9, 9 and 6: each
                                                                        spreads its rows and one of a neighbour, and
                                                                        keeps those of its block

Where blocks are even and the result has fewer channels, each device spreads what it holds, and sends what falls beyond
its block to the neighbour, who adds it: a gradient of a convolution, of which the operand has fewer channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from irpar.ir import Node, Value
from irpar.sharding import block_range, ceil_div
from irpar.sharding.exchange import FILL, Indices

from ..facts import int_attribute, ints_attribute, result_shape, shape_of, text_attribute
from ..local import add_bias_once
from .exchange import Moving, blocks_of, is_small
from .program import Cuts, ProgramWriter, Sent, Shape, with_size
from .window import flat_pads, place_pads, stride_and_reach


def _numbers(node: Node, dim: int) -> tuple[int, int, int]:
    """Stride, reach of a window, and places that are left out before the first one."""
    return *stride_and_reach(node, dim), place_pads(node)[dim - 2][0]


def _dims(node: Node) -> Sequence[int] | None:
    """Place dims, where pads are given."""
    dims = range(2, len(shape_of(node, 0)))
    is_given = (
        text_attribute(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID") and "output_shape" not in node.attributes
    )
    return dims if is_given and is_small(node, dims) else None


def _first(node: Node, dim: int, start: int) -> int:
    """The first place whose window may reach the result from `start` on."""
    stride, reach, before = _numbers(node, dim)
    return (start + before - reach + 1) // stride


def _wanted(node: Node, dim: int, parts: int) -> list[Indices]:
    """As many places for blocks of equal size: all that reach the block, of which some may be beyond the edges."""
    stride, reach, before = _numbers(node, dim)
    size, found = shape_of(node, 0)[dim], []
    for block in blocks_of(result_shape(node)[dim], parts):
        count = ceil_div(len(block) + reach - 1, stride) + 1 + (stride > reach + 1)
        places = np.arange(count, dtype=np.int64) + _first(node, dim, block.start)
        starts = places * stride - before
        reaches = (starts < block.stop) & (starts + reach > block.start)
        found.append(np.where(reaches & (places >= 0) & (places < size), places, FILL))
    return found


def _write(program: ProgramWriter, value: Value, cut: Sequence[int]) -> list[Value]:
    """Spread what is there without padding, and keep the block."""
    whole, local = program.whole, program.local
    add_bias_once(local, 2, program.builder)
    shape = list(local.result.shape)
    for dim in cut:
        stride, reach, _ = _numbers(whole, dim)
        shape[dim] = (value.shape[dim] - 1) * stride + reach
    attributes = _without_pads(program, cut)
    attributes["group"] = local.result.shape[1] // local.inputs[1].shape[1]
    made = program.op("ConvTranspose", [value, *local.operands[1:]], attributes, shape=shape)
    for dim in cut:
        made = _kept(program, made, dim)
    return [made]


def _without_pads(program: ProgramWriter, cut: Sequence[int]) -> dict[str, Any]:
    """The node's attributes, without padding along the dims that are sharded."""
    attributes = {name: found for name, found in program.local.attributes.items() if name != "auto_pad"}
    pads = place_pads(program.whole)
    extra = list(ints_attribute(program.whole, "output_padding") or (0,) * len(pads))
    for dim in cut:
        pads[dim - 2], extra[dim - 2] = (0, 0), 0
    return {**attributes, "pads": flat_pads(pads), "output_padding": tuple(extra)}


def _kept(program: ProgramWriter, value: Value, dim: int) -> Value:
    """The block along a dim: it starts elsewhere on each device."""
    whole, parts = program.whole, program.lies.dim_parts(dim)
    stride, _, before = _numbers(whole, dim)
    blocks = [block_range(result_shape(whole)[dim], parts, at)[0] for at in range(parts)]
    starts = [[start + before - stride * _first(whole, dim, start)] for start in blocks]
    size = program.local.result.shape[dim]
    start = program.of_place(np.asarray(starts, np.int64), dim, "starts")
    stop = program.op("Add", [start, program.ints([size])])
    return program.op("Slice", [value, start, stop, program.ints([dim])], shape=with_size(value.shape, dim, size))


@dataclass(frozen=True)
class _Borders:
    """What a device's own places spread beyond its block of the result.

    Attributes:
        dim: along which.
        before, after: how many places of the result, before the block and behind it.
        size: of the block.
    """

    dim: int
    before: int
    after: int
    size: int


def _borders(node: Node, dim: int, parts: int) -> _Borders | None:
    """That, where it is the same on all devices and falls into the blocks beside; None where it is not."""
    size, made = shape_of(node, 0)[dim], result_shape(node)[dim]
    stride, reach, before = _numbers(node, dim)
    after, block = reach - stride - before, size // parts * stride
    is_even = not size % parts and made == size * stride and int_attribute(node, "group", 1) == 1
    if not is_even or len(node.inputs) > 2 or not (0 <= before <= block and 0 <= after <= block):
        return None
    return _Borders(dim, before, after, block)


@dataclass(frozen=True)
class _Spreading(Moving):
    """Sends places of the operand, or of the result, whichever is less."""

    def _spread(self, node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> tuple[_Borders, list[Sent]] | None:
        """The borders of the result that are sent, where that is less than to send places of the operand."""
        cut = [(dim, parts) for dim, parts in cuts.items() if parts > 1]
        if len(cut) != 1 or blocks[0] is None or blocks[1] is None:
            return None
        (dim, parts) = cut[0]
        found = _borders(node, dim, parts)
        if found is None:
            return None
        others = prod(size for at, size in enumerate(result_shape(node)) if at > 1 and at != dim)
        row = blocks[0][0] * blocks[1][1] * others
        bits = node.inputs[0].dtype.bits
        sent = [Sent("permute", rows * row, bits, dim) for rows in (found.before, found.after) if rows]
        moved = Moving._sends(self, node, blocks, cuts)
        return (found, sent) if sum(each.bytes for each in sent) < sum(each.bytes for each in moved) else None

    def _sends(self, node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
        found = self._spread(node, blocks, cuts)
        return super()._sends(node, blocks, cuts) if found is None else found[1]

    def _write(self, program: ProgramWriter) -> Sequence[Value] | None:
        cuts = {dim: program.lies.dim_parts(dim) for dim in program.dims}
        found = self._spread(program.whole, [value.shape for value in program.local.inputs], cuts)
        return super()._write(program) if found is None else [_write_spread(program, found[0])]


def _write_spread(program: ProgramWriter, borders: _Borders) -> Value:
    """Spread what the device holds without padding, exchange what is beyond the block, and add it."""
    whole, local, dim = program.whole, program.local, borders.dim
    attributes = _without_pads(program, [dim])
    total = borders.before + borders.size + borders.after
    shape = with_size(local.result.shape, dim, total)
    made = program.op("ConvTranspose", list(local.operands), attributes, shape=shape)

    def rows(start: int, stop: int) -> Value:
        ends = [program.ints([number]) for number in (start, stop, dim)]
        return program.op("Slice", [made, *ends], shape=with_size(shape, dim, stop - start))

    result = rows(borders.before, borders.before + borders.size)
    devices = program.lies.dim_parts(dim)
    if borders.after:
        pairs = [(at, at + 1) for at in range(devices - 1)]
        got = program.permute(rows(total - borders.after, total), dim, pairs, whole.result)
        result = _added(program, result, got, borders.size - borders.after, dim, is_first=True)
    if borders.before:
        pairs = [(at + 1, at) for at in range(devices - 1)]
        got = program.permute(rows(0, borders.before), dim, pairs, whole.result)
        result = _added(program, result, got, borders.size - borders.before, dim, is_first=False)
    return result


def _added(program: ProgramWriter, value: Value, got: Value, rest: int, dim: int, *, is_first: bool) -> Value:
    """The value with what came added to its first, or last, places along a dim."""
    nothing = [program.filled(value, dim, rest, 0)] if rest else []
    other = program.joined([got, *nothing] if is_first else [*nothing, got], dim)
    return program.op("Add", [value, other], shape=value.shape)


TRANSPOSED = _Spreading(_dims, _wanted, _write)
