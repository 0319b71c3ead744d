"""ConvTranspose along places that are sharded: each device gets the places from which something reaches its block.

y = ConvTranspose(x : [1, 8, 16@sp, 16], w : [8, 4, 3, 3], strides 2)     of 33 rows 4 devices make 9, 9, 9 and 6: each
                                                                        spreads its rows and one of a neighbour, and
                                                                        keeps those of its block
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from irpar.ir import Node, Value
from irpar.sharding import block_range, ceil_div
from irpar.sharding.exchange import FILL, Indices

from ..facts import ints_attribute, result_shape, shape_of, text_attribute
from ..local import add_bias_once
from .exchange import Moving, blocks_of, is_small
from .program import ProgramWriter, with_size
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
    rank = len(value.shape) - 2
    attributes: dict[str, Any] = {name: found for name, found in local.attributes.items() if name != "auto_pad"}
    pads = place_pads(whole)
    extra = list(ints_attribute(whole, "output_padding") or (0,) * rank)
    shape = list(local.result.shape)
    for dim in cut:
        stride, reach, _ = _numbers(whole, dim)
        pads[dim - 2], extra[dim - 2] = (0, 0), 0
        shape[dim] = (value.shape[dim] - 1) * stride + reach
    attributes |= {"pads": flat_pads(pads), "output_padding": tuple(extra)}
    attributes["group"] = local.result.shape[1] // local.inputs[1].shape[1]
    made = program.op("ConvTranspose", [value, *local.operands[1:]], attributes, shape=shape)
    for dim in cut:
        made = _kept(program, made, dim)
    return [made]


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


TRANSPOSED = Moving(_dims, _wanted, _write)
