"""Local programs that bring elements of a dim to the devices that need them, for operators that put them elsewhere.

y = Concat(a : [4@tp], b : [4@tp])     4 devices hold a row of each; the first wants rows 0 and 1 of a, the last those
                                       of b: two rounds, in which each device sends and receives one row at most
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from irpar.ir import DType, Node, Value
from irpar.sharding import block_range
from irpar.sharding.exchange import Exchange, Indices, plan_exchange

from ..facts import needed
from .program import Cuts, LocalProgram, ProgramWriter, Sent, Shape, with_size

MOST_PLACES = 1 << 20
"""Elements along a dim, for all devices together, up to which an exchange is planned."""

_MOST_SLICES = 4
"""Runs of elements up to which they are sliced, and not looked up."""

_FEW = 7
"""Elements of a dim that every device may have, where others have so many times as many:"""
_MANY_TIMES = 8

Wanted = Callable[[Node, int, int], Sequence[Indices]]
"""(node, dim, parts): per device the elements that it wants, numbered through the operands that lie in blocks."""


def blocks_of(size: int, parts: int) -> list[range]:
    """The elements of each block of a dim."""
    return [range(*block_range(size, parts, at)) for at in range(parts)]


class _Plans:
    """Exchanges by a digest of what they are for, those asked last; together they hold no more than so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held = 0
        self.known: OrderedDict[bytes, Exchange] = OrderedDict()

    def plan(self, sources: Sequence[int], wanted: Sequence[Indices], *, zero_fill: bool) -> Exchange:
        rows = [np.ascontiguousarray(row, np.int64) for row in wanted]
        digest = hashlib.sha256(repr((tuple(sources), zero_fill, list(map(len, rows)))).encode())
        for row in rows:
            digest.update(row.data)
        key = digest.digest()
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = plan_exchange(sources, rows, zero_fill=zero_fill)
            self.held += _bytes(found)
            while self.held > self.most_bytes:
                self.held -= _bytes(self.known.popitem(last=False)[1])
        else:
            self.known.move_to_end(key)
        return found


def _bytes(exchange: Exchange) -> int:
    rows = (*exchange.rows, *(row for step in exchange.rounds for row in step.rows if row is not None))
    return sum(row.nbytes for row in rows)


_plans = _Plans(most_bytes=1 << 26)


def planned(sources: Sequence[int], wanted: Sequence[Indices], *, zero_fill: bool) -> Exchange:
    """`plan_exchange`, each problem once: layers are alike."""
    return _plans.plan(sources, wanted, zero_fill=zero_fill)


def sends(exchange: Exchange, block: Shape, dim: int, bits: int) -> list[Sent]:
    """The rounds of an exchange along a dim of a block."""
    others = prod(size for at, size in enumerate(block) if at != dim)
    return [Sent("permute", step.size * others, bits, dim) for step in exchange.rounds]


def perform(
    program: ProgramWriter,
    exchange: Exchange,
    sources: Sequence[Value],
    dim: int,
    fill: "np.ndarray[Any, Any] | None",
    of: Value | None = None,
    beside: Sequence[Value] = (),
) -> Value:
    """Write an exchange: what the device wants, along a dim of its blocks of the sources.

    Args:
        program: writes.
        exchange: the plan.
        sources: the local blocks; all lie alike in the other dims.
        dim: along which.
        fill: what stands for missing elements; None: there are none, or zeros do.
        of: the value in global view as which they lie; None: the operand along which the program works.
        beside: what every device has beside them; none: the element to fill with.
    """
    ours = own_devices(program, dim)
    held = program.joined(sources, dim)
    has = [held]
    for step in exchange.rounds:
        has.append(program.permute(taken(program, held, dim, list(step.rows), ours), dim, step.pairs, of))
    total = sum(value.shape[dim] for value in has)
    if any((exchange.rows[at] >= total).any() for at in ours):
        has.extend(beside or [program.filled(held, dim, 1, 0 if fill is None else fill)])
    return taken(program, program.joined(has, dim), dim, list(exchange.rows), ours)


def own_devices(program: ProgramWriter, dim: int) -> set[int]:
    """The positions, along the axes that cut a dim, of the devices that run the program."""
    axes = program.lies.axes[dim]
    return {program.mesh.position(program.mesh.coords(rank), axes) for rank in program.ranks}


def own(
    program: ProgramWriter, rows: "Sequence[np.ndarray[Any, Any] | None]", dim: int, ours: set[int], name: str
) -> Value:
    """The device's own one of constants: of one where all our devices have the same, else looked up by place.

    Args:
        program: writes.
        rows: for each position along the axes that cut `dim`; those of our devices have one shape.
        dim: see rows.
        ours: positions of the devices that run the program.
        name: of the constant.
    """
    mine = [row for at, row in enumerate(rows) if at in ours and row is not None]
    if all(np.array_equal(row, mine[0]) for row in mine):
        return program.builder.constant(np.asarray(mine[0]), name)
    nothing = np.zeros_like(mine[0])
    table = np.stack([nothing if row is None or at not in ours else row for at, row in enumerate(rows)])
    return program.of_place(table, dim, name)


def taken(program: ProgramWriter, value: Value, dim: int, rows: Sequence[Indices | None], ours: set[int]) -> Value:
    """The elements of a row along a dim: slices where all our devices take the same, else looked up by place."""
    mine = [row for at, row in enumerate(rows) if at in ours and row is not None]
    if not mine:
        # We send nothing in this round; what we hold is as good as anything.
        size = next(len(row) for row in rows if row is not None)
        mine = [np.zeros(size, np.int64)]
    if all(np.array_equal(row, mine[0]) for row in mine):
        return _sliced(program, value, dim, mine[0])
    row = own(program, rows, dim, ours, "places")
    return program.op("Gather", [value, row], {"axis": dim}, shape=with_size(value.shape, dim, len(mine[0])))


def _sliced(program: ProgramWriter, value: Value, dim: int, row: Indices) -> Value:
    """The elements of a row as slices side by side."""
    if len(row) == value.shape[dim] and np.array_equal(row, np.arange(len(row))):
        return value
    if not len(row):
        runs = [row]
    else:
        runs = np.split(row, np.flatnonzero(np.diff(row) != 1) + 1)
    if len(runs) > _MOST_SLICES:
        places = program.ints(row.tolist())
        return program.op("Gather", [value, places], {"axis": dim}, shape=with_size(value.shape, dim, len(row)))
    made = []
    for run in runs:
        start = int(run[0]) if len(run) else 0
        ends = [program.ints([number]) for number in (start, start + len(run), dim)]
        made.append(program.op("Slice", [value, *ends], shape=with_size(value.shape, dim, len(run))))
    return program.joined(made, dim)


# -- operators that put elements elsewhere --------------------------------------------------------------------------


@dataclass(frozen=True)
class Moving:
    """An operator that puts elements of its operands elsewhere along some dims.

    Attributes:
        dims: along which dims it does so and may be sharded, None where it may not.
        wanted: per device the elements that its block of the result, or of all results one after the other, has.
        rest: what is left to do when the elements along some dims are there: gives the results, or None where it
            changed the local node.
        sources: the numbers of the operands that lie in blocks.
        beside: the numbers of those that every device has in full, of which it takes elements as well.
        fill: the element that FILL stands for; None: zero.
        reads_elements: see `LocalProgram`.
    """

    dims: Callable[[Node], Sequence[int] | None]
    wanted: Wanted
    rest: Callable[[ProgramWriter, Value, Sequence[int]], Sequence[Value] | None]
    sources: Callable[[Node], Sequence[int]] = lambda node: (0,)
    beside: Callable[[Node], Sequence[int]] = lambda node: ()
    fill: "Callable[[Node], np.ndarray[Any, Any] | None]" = lambda node: None
    reads_elements: bool = True

    def local_program(self) -> LocalProgram:
        """Its local program."""
        return LocalProgram(self._sends, self._write, self._dims, self._first, reads_elements=self.reads_elements)

    def _first(self, node: Node) -> int:
        return self.sources(node)[0]

    def _dims(self, node: Node) -> Sequence[int] | None:
        # ONNX Runtime's Gather, which takes what a block has, gives only the first string of each row.
        return None if needed(node, 0).dtype is DType.STR else self.dims(node)

    def _plan(self, node: Node, dim: int, parts: int) -> Exchange:
        sizes = [needed(node, place).shape[dim] for place in self.sources(node)]
        fill = self.fill(node)
        is_zero = not self.beside(node) and (fill is None or not fill)
        return planned(sizes, self.wanted(node, dim, parts), zero_fill=is_zero)

    def _sends(self, node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
        shape = list(blocks[self._first(node)] or ())
        found = []
        for dim, parts in sorted(cuts.items()):
            exchange = self._plan(node, dim, parts)
            found.extend(sends(exchange, tuple(shape), dim, needed(node, 0).dtype.bits))
            shape[dim] = max(map(len, exchange.rows))
        return found

    def _write(self, program: ProgramWriter) -> Sequence[Value] | None:
        node = program.whole
        cut = [dim for dim in sorted(program.dims) if program.lies.dim_parts(dim) > 1]
        values, beside = (
            [needed(program.local, place) for place in places] for places in (self.sources(node), self.beside(node))
        )
        for dim in cut:
            exchange = self._plan(node, dim, program.lies.dim_parts(dim))
            values = [perform(program, exchange, values, dim, self.fill(node), beside=beside)]
        return self.rest(program, values[0], cut)


def is_few(size: int, longest: int) -> bool:
    """Whether so few elements of a dim stand beside so many others that every device may have them all.

    They are often less than devices. One beside two is none of a few: so q stands beside k and v.
    """
    return size <= _FEW and size * _MANY_TIMES <= longest


def is_small(node: Node, dims: Sequence[int]) -> bool:
    """Whether the dims of a node's tensors are short enough to plan an exchange, of what can be looked up by place.

    Of rows of strings ONNX Runtime 1.31's Gather takes the first string alone.
    """
    if needed(node, 0).dtype is DType.STR:
        return False
    return all(value.shape[dim] <= MOST_PLACES for value in (*node.inputs[:1], *node.results) for dim in dims)
