"""Convolution and pooling along places that are sharded: each device gets the places that its windows cover (a halo).

y = Conv(x : [1, 8, 32@sp, 32], w : [8, 8, 3, 3])     4 devices hold 8 rows each; with a row of each neighbour, zeros at
                                                      the edges, every device convolves 10 rows to its own 8
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from irpar.ir import Node, Value
from irpar.sharding.exchange import FILL, Indices

from ..facts import CannotTellError, int_attribute, ints_attribute, result_shape, shape_of, tensor_of, text_attribute
from ..neutral import neutral
from .exchange import Moving, blocks_of, is_small
from .program import ProgramWriter


def stride_and_reach(node: Node, dim: int) -> tuple[int, int]:
    """How far windows along a dim are apart, and how many places one spans."""
    place, rank = dim - 2, len(shape_of(node, 0)) - 2
    kernel = ints_attribute(node, "kernel_shape") or shape_of(node, 1)[2:]
    stride, dilation = ((ints_attribute(node, name) or (1,) * rank)[place] for name in ("strides", "dilations"))
    return stride, dilation * (kernel[place] - 1) + 1


def place_pads(node: Node) -> list[tuple[int, int]]:
    """(before, after) of each place dim, as they are or as `auto_pad` means them for a node that is not transposed."""
    places, after = shape_of(node, 0)[2:], result_shape(node)[2:]
    rank = len(places)
    auto_pad = text_attribute(node, "auto_pad", "NOTSET")
    if not auto_pad.startswith("SAME"):
        given = ints_attribute(node, "pads") or (0,) * (2 * rank)
        return [(given[dim], given[dim + rank]) if auto_pad == "NOTSET" else (0, 0) for dim in range(rank)]
    found = []
    for dim, (size, count) in enumerate(zip(places, after, strict=True), 2):
        stride, reach = stride_and_reach(node, dim)
        total = (count - 1) * stride + reach - size
        if total < 0:
            raise CannotTellError("windows that leave out places; where they start, engines see differently")
        less = total // 2
        found.append((less, total - less) if auto_pad == "SAME_UPPER" else (total - less, less))
    return found


def flat_pads(pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """As ONNX's `pads` have them: all of before, then all of after."""
    return tuple(pair[side] for side in (0, 1) for pair in pairs)


def _wanted(node: Node, dim: int, parts: int) -> list[Indices]:
    """The places that the windows of each block of the result cover; beyond the edges there is nothing."""
    size, after = shape_of(node, 0)[dim], result_shape(node)[dim]
    stride, reach = stride_and_reach(node, dim)
    before, _ = place_pads(node)[dim - 2]
    found = []
    for block in blocks_of(after, parts):
        places = np.arange(block.start * stride, (block.stop - 1) * stride + reach, dtype=np.int64) - before
        found.append(np.where((places < 0) | (places >= size), FILL, places))
    return found


def _mend(program: ProgramWriter, value: Value, cut: Sequence[int]) -> None:
    """Let the local node slide over what is there now: padding is left for the other dims alone."""
    local, pads = program.local, place_pads(program.whole)
    left = [(0, 0) if dim + 2 in cut else pair for dim, pair in enumerate(pads)]
    local.set_operand(0, value)
    local.attributes.pop("auto_pad", None)
    local.set_attribute("pads", flat_pads(left))


def _place_dims(node: Node) -> Sequence[int] | None:
    dims = range(2, len(shape_of(node, 0)))
    place_pads(node)
    return dims if len(node.results) == 1 and is_small(node, dims) else None


def _average_dims(node: Node) -> Sequence[int] | None:
    """Those where every window counts as many places."""
    dims = _place_dims(node)
    if dims is None or int_attribute(node, "ceil_mode", 0):
        return None
    counts_padding = int_attribute(node, "count_include_pad", 0)
    return [dim for dim in dims if counts_padding or place_pads(node)[dim - 2] == (0, 0)]


def _lowest(node: Node) -> "np.ndarray[Any, Any]":
    """What never is a maximum."""
    return neutral("max", tensor_of(node, 0).dtype)


def _moving(dims: Callable[[Node], Sequence[int] | None], fill: Callable[[Node], Any] = lambda node: None) -> Moving:
    return Moving(dims, _wanted, _mend, fill=fill, reads_elements=False)


WINDOWS = {
    "Conv": _moving(_place_dims),
    "MaxPool": _moving(_place_dims, _lowest),
    "AveragePool": _moving(_average_dims),
    "LpPool": _moving(_place_dims),
}
"""Operator to how it gets what its windows cover."""
