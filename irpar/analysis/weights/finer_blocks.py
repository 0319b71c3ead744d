"""Blocks of quantized weights that a mesh axis does not divide become smaller ones, several with the same scale.

q : u8[64, 86, 64] by blocks of 128    no rank of tp=4 has whole ones; u8[64, 172, 32], by blocks of 64, gives each 43

What is computed stays the same to the bit, but where products quantize their data by the same blocks: these stay.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from irpar.ir import DType, LazyTensor, Module, Node, Tensor, Value, joined_tensor, with_dim
from irpar.ops.facts import int_attribute, operand
from irpar.ops.microsoft import DOMAIN
from irpar.sharding import Sharding

from .writer import constant_like, stand_for

_LEAST_BLOCK = 16
"""Of MatMulNBits; ONNX Runtime takes powers of two from there on."""
_INT8_DATA = 4
"""The accuracy_level with which ONNX Runtime quantizes the data of a product, too."""


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a node's weights.

    Attributes:
        axis: dim of the scales along which they lie.
        size: elements of a block.
        of_byte: how many share a byte of zero points, and stay together.
        scales: which operands have a number for each block.
        packed: the operand whose elements of a block are a dim of their own, the last; None where they are not.
        points: the operand that has several numbers in a byte; None where none does.
        least: the smallest size.
    """

    axis: int
    size: int
    of_byte: int
    scales: tuple[int, ...]
    packed: int | None
    points: int | None
    least: int


def take_finer_blocks(module: Module, propagated: Callable[[], Mapping[Value, Sharding]]) -> int:
    """Let nodes read quantized weights by blocks that divide over the ranks among which their data is sharded.

    Args:
        module: in global view, annotated.
        propagated: how values lie by what annotations propagate; asked where blocks might not divide.

    Returns:
        Of how many nodes blocks became smaller.
    """
    if not module.annotated:
        return 0
    sizes = set(module.mesh.axes.values())
    able = [
        (node, blocks)
        for graph in module.all_graphs()
        for node in graph
        if (blocks := _blocks(node)) is not None and _times(node, blocks, sizes) > 1
    ]
    lies = propagated() if able else {}
    made: dict[tuple[Value, int], Value] = {}
    count = 0
    for node, blocks in able:
        times = _times(node, blocks, _parts(node, blocks, lies))
        operands = {index: node.operands[index] for index in (*blocks.scales, blocks.packed, blocks.points) if index}
        if times == 1 or not all(_is_read_alike(value, blocks) for value in operands.values()):
            continue
        for index, value in operands.items():
            assert value is not None
            if (value, times) not in made:
                made[value, times] = constant_like(value, _finer(value, index, blocks, times, node))
            node.set_operand(index, made[value, times])
        node.set_attribute("block_size", blocks.size // times)
        count += 1
    for (value, _), finer in made.items():
        stand_for(value, finer)
    return count


def _parts(node: Node, blocks: _Blocks, lies: Mapping[Value, Sharding]) -> set[int]:
    """Into how many parts the dim of the blocks is sharded: of the product's data, or of the weight."""
    first, second = node.operands[:2]
    dims = [(first, -1), (second, 1)] if blocks.packed else [(first, blocks.axis), (node.result, blocks.axis)]
    return {lies[value].dim_parts(dim) for value, dim in dims if value is not None and value in lies}


def _blocks(node: Node) -> _Blocks | None:
    if node.identity == (DOMAIN, "MatMulNBits"):
        return _of_product(node)
    if node.op_type == "DequantizeLinear":
        return _of_dequantized(node)
    return None


def _of_product(node: Node) -> _Blocks | None:
    size, bits = int_attribute(node, "block_size"), int_attribute(node, "bits", 4)
    is_plain = operand(node, 4) is None and not int_attribute(node, "weight_prepacked", 0)
    if not is_plain or int_attribute(node, "accuracy_level", 0) == _INT8_DATA or 8 % bits:
        return None
    points = operand(node, 3)
    is_packed = points is not None and points.dtype is DType.U8
    shapes = [None if value is None else value.shape for value in node.operands[1:4]]
    columns, count = int_attribute(node, "N"), int_attribute(node, "K") // size
    if int_attribute(node, "K") % size or shapes[:2] != [(columns, count, size * bits // 8), (columns, count)]:
        return None
    in_bytes = -(-count * bits // 8) if is_packed else count
    if points is not None and points.shape != (columns, in_bytes):
        return None
    scales = (2,) if points is None or is_packed else (2, 3)
    return _Blocks(1, size, 8 // bits if is_packed else 1, scales, 1, 3 if is_packed else None, _LEAST_BLOCK)


def _of_dequantized(node: Node) -> _Blocks | None:
    size, weight = int_attribute(node, "block_size", 0), node.operands[0]
    if not size or weight is None or not weight.is_constant:
        return None
    axis = int_attribute(node, "axis", 1) % len(weight.shape)
    expected = with_dim(weight.shape, axis, weight.shape[axis] // size)
    scales = tuple(index for index, value in enumerate(node.operands) if index and value is not None)
    if weight.shape[axis] % size or any(value.shape != expected for value in node.inputs[1:]):
        return None
    return _Blocks(axis, size, 1, scales, None, None, 1)


def _times(node: Node, blocks: _Blocks, ways: set[int]) -> int:
    """How many smaller blocks each becomes: the fewest that divide over as many of the ways as can be."""
    scales = node.operands[blocks.scales[0]]
    assert scales is not None
    count, found = scales.shape[blocks.axis], 1
    for parts in sorted(ways):
        able = (times for times in _splits(blocks) if count * times % (blocks.of_byte * parts) == 0)
        found = max(found, next(able, 1))
    return found


def _splits(blocks: _Blocks) -> Iterator[int]:
    """1, 2, 4, .. as far as blocks of that share of the size are allowed."""
    times = 1
    while blocks.size % times == 0 and blocks.size // times >= blocks.least:
        yield times
        times *= 2


def _is_read_alike(value: Value | None, blocks: _Blocks) -> bool:
    """Whether a constant is read by nodes with such blocks alone."""
    return value is not None and value.data is not None and all(_blocks(user) == blocks for user in value.users)


def _finer(value: Value, index: int, blocks: _Blocks, times: int, node: Node) -> Tensor:
    """The numbers of an operand for smaller blocks."""
    assert value.data is not None
    if index == blocks.packed:
        *rows, count, size = value.shape
        return value.data.reshaped((*rows, count * times, size // times))
    if index != blocks.points:
        return joined_tensor([value.data] * times, blocks.axis, value.shape[blocks.axis])
    count = int_attribute(node, "K") // blocks.size
    bits = 8 // blocks.of_byte
    shape = (value.shape[0], count * times * bits // 8)
    return LazyTensor(DType.U8, shape, partial(_repeated_points, value.data, count, bits, times))


def _repeated_points(packed: Tensor, count: int, bits: int, times: int) -> "np.ndarray[Any, Any]":
    """Each of `count` numbers of a row so many times; the first lies in the lowest bits of a byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    rows = packed.numpy()
    numbers = ((rows[..., None] >> shifts) & ((1 << bits) - 1)).reshape(len(rows), -1)[:, :count]
    several = np.repeat(numbers, times, axis=1).reshape(len(rows), -1, len(shifts))
    made: np.ndarray[Any, Any] = np.bitwise_or.reduce(several << shifts, axis=2).astype(np.uint8)
    return made
