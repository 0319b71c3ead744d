"""Ring attention: the same axes cut queries and keys, and blocks of keys and values travel from device to device.

y = Attention(q : [1, 8, 4096@sp, 64], k : [1, 8, 4096@sp, 64], v : [1, 8, 4096@sp, 64])
                                     4 devices hold 1024 places each; in 4 steps each scores its queries against the
                                     block that it has, and hands that on to the next: 3 permutes of K and of V

What was found so far is a maximum, a sum and a result for each query, which a greater maximum scales down (Milakov and
Gimelshein, arXiv 1805.02867; Rabe and Staats, arXiv 2112.05682). The bytes are those of gathering K and V (Liu et al.,
arXiv 2310.01889), but a device never holds more than two blocks of each, nor scores of more than one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from irpar.ir import DType, Node, Value
from irpar.sharding import ceil_div

from ..attention_sizes import Places, attention_sizes, key_count, masked, query_dim, reads_position, static
from ..coords import block_index
from ..facts import needed, operand, tensor_of
from .attention import as_result, by_heads, caches, key_dims, scaled_query, scores_of, weighted, with_masks
from .program import Cuts, ProgramWriter, Sent, Shape


def sends(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
    """The blocks of K and V, one after the other, as often as there are others to see them."""
    dim = query_dim(node)
    count = cuts[dim] - 1
    each = [Sent("permute", prod(blocks[place] or ()), tensor_of(node, place).dtype.bits, dim) for place in (1, 2)]
    return each * count


def dims(node: Node) -> Sequence[int] | None:
    """Those of K."""
    return key_dims(node)


@dataclass(frozen=True)
class _Found:
    """What a device knows of its queries, of the keys that it has seen: (batch, query heads, queries, ..).

    Attributes:
        most: the greatest score; minus infinity where none may be seen.
        unseen: whether that is so.
        total: the sum of exponentials of scores less the greatest.
        result: the values by these.
    """

    most: Value
    unseen: Value
    total: Value
    result: Value


class _Ring:
    """The writer of one node."""

    def __init__(self, program: ProgramWriter) -> None:
        self.program = program
        self.dim = query_dim(program.whole)
        self.count = key_count(program.whole)
        self.block = ceil_div(self.count, program.parts)
        self.of = attention_sizes(program.whole)
        self.query = scaled_query(program)
        mask = operand(program.local, 3)
        self.is_sliced = mask is not None and mask.shape[-1:] not in ((), (1,))
        self.mask = self._padded(mask, -1, self.block * program.parts) if mask is not None and self.is_sliced else mask

    def run(self) -> Value:
        """Returns the result for the device's queries."""
        key, value = (self._padded(needed(self.program.local, place), self.dim, self.block) for place in (1, 2))
        found = None
        for step in range(self.program.parts):
            here = key, value
            if step < self.program.parts - 1:
                # First of all, so that blocks may travel while others are computed with.
                key, value = self._handed_on(key, 1), self._handed_on(value, 2)
            found = self._more(found, *here, step)
        assert found is not None
        one = self.program.constant(1, found.total.dtype)
        # A query that may see no key has a sum of zeros, and gets zeros.
        total = self._where(found.unseen, one, found.total)
        return as_result(self.program, self.program.op("Div", [found.result, total]))

    def _handed_on(self, value: Value, place: int) -> Value:
        count = self.program.parts
        pairs = [(position, (position + 1) % count) for position in range(count)]
        return self.program.permute(value, self.dim, pairs, needed(self.program.whole, place))

    def _more(self, before: _Found | None, key: Value, value: Value, step: int) -> _Found:
        """What is known after the keys of a block have been seen too."""
        program = self.program
        key, value = by_heads(program, key, static(self.of.head)), by_heads(program, value, static(self.of.value_head))
        scores = self._scores(key, step)
        most = program.reduced("ReduceMax", scores, (3,))
        if before is not None:
            most = program.op("Max", [before.most, most])
        unseen = program.op("IsInf", [most], {"detect_positive": 0}, dtype=DType.BOOL)
        less = self._where(unseen, program.constant(0, most.dtype), most)
        weights = program.op("Exp", [program.op("Sub", [scores, less])])
        total, result = program.reduced("ReduceSum", weights, (3,)), weighted(program, weights, value)
        if before is not None:
            factor = program.op("Exp", [program.op("Sub", [before.most, less])])
            total = program.op("Add", [program.op("Mul", [before.total, factor]), total])
            result = program.op("Add", [program.op("Mul", [before.result, factor]), result])
        return _Found(most, unseen, total, result)

    def _where(self, condition: Value, number: Value, otherwise: Value) -> Value:
        return self.program.op("Where", [condition, number, otherwise], shape=otherwise.shape, dtype=otherwise.dtype)

    # -- which keys -------------------------------------------------------------------------------------------------

    def _scores(self, key: Value, step: int) -> Value:
        """Of the keys that have come in a number of steps; what a block lacks counts as not to be seen."""
        program = self.program
        is_short = self.block * program.parts > self.count
        reads_place = is_short or self.is_sliced or operand(program.whole, 6) or reads_position(program.whole)
        start = self._start(step) if reads_place else None
        keys = Places(self.block, self.count, program.axes, start)
        mask = self._columns(start) if start is not None and self.is_sliced else self.mask
        scores = with_masks(program, scores_of(program, self.query, key), mask, keys)
        if not is_short:
            return scores
        positions = keys.positions(program.mesh, program.builder, (1, self.block))
        count = program.builder.constant(np.asarray(self.count, np.int64), "keys")
        return masked(scores, program.op("Less", [positions, count], dtype=DType.BOOL), program.builder)

    def _start(self, step: int) -> Value:
        """Where the block starts that has come in a number of steps: that of the device so far before ours."""
        program, parts = self.program, self.program.parts
        place = block_index(program.builder, program.mesh, program.axes)
        if step:
            place = self._computed("Mod", self._computed("Add", place, parts - step), parts)
        return self._computed("Mul", place, self.block)

    def _computed(self, op_type: str, value: Value, number: int) -> Value:
        other = self.program.builder.constant(np.asarray(number, np.int64), "number")
        return self.program.op(op_type, [value, other])

    def _columns(self, start: Value) -> Value:
        """Of the mask, those of the keys of a block."""
        program, mask = self.program, self.mask
        assert mask is not None
        first = program.op("Reshape", [start, program.ints([1])], shape=(1,))
        last = program.op("Add", [first, program.ints([self.block])])
        shape = (*mask.shape[:-1], self.block)
        return program.op("Slice", [mask, first, last, program.ints([len(shape) - 1])], shape=shape)

    def _padded(self, value: Value, dim: int, size: int) -> Value:
        """The value with zeros behind it, along a dim."""
        dim = dim % len(value.shape)
        missing = size - value.shape[dim]
        if not missing:
            return value
        return self.program.joined([value, self.program.filled(value, dim, missing, 0)], dim)


def write(program: ProgramWriter) -> list[Value]:
    """The program."""
    return [_Ring(program).run(), *caches(program)]
