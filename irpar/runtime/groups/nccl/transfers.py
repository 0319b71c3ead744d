"""What NCCL must do for one member of a collective: its calls, what goes into them, what becomes of their results.

NCCL gathers and scatters equal blocks that lie one after the other; so blocks of another dim than the first are packed
and unpacked by copies on the stream, and shorter ones travel as long as the longest, as plan.json counts them. Parts of
all-to-all and permute are sent and received as they are, several at once.

Where nothing is computed, elements travel as unsigned integers of their size: NCCL needs not know the dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from irpar.ir import dtype_of_numpy, with_dim
from irpar.ops.collectives import KINDS, REDUCING
from irpar.ops.collectives.arrays import CARRIERS, block_bounds, check_dim, is_text
from irpar.ops.collectives.broadcast import check_root
from irpar.ops.collectives.reduced_arrays import operation
from irpar.runtime.groups.base import Array, Collective
from irpar.runtime.groups.results import EXECUTED

_CARRIED = {1: ("NCCL_UINT8", 1), 2: ("NCCL_UINT8", 2), 4: ("NCCL_UINT32", 1), 8: ("NCCL_UINT64", 1)} | {
    16: ("NCCL_UINT64", 2)
}
"""Bytes of an element, to NCCL's dtype and how many of it make one."""

_COMPUTED = {
    "i8": ("NCCL_INT8", 1),
    "u8": ("NCCL_UINT8", 1),
    "i32": ("NCCL_INT32", 1),
    "u32": ("NCCL_UINT32", 1),
    "i64": ("NCCL_INT64", 1),
    "u64": ("NCCL_UINT64", 1),
    "f16": ("NCCL_FLOAT16", 1),
    "bf16": ("NCCL_BFLOAT16", 1),
    "f32": ("NCCL_FLOAT32", 1),
    "f64": ("NCCL_FLOAT64", 1),
    "c64": ("NCCL_FLOAT32", 2),
    "c128": ("NCCL_FLOAT64", 2),
}
"""The dtypes that NCCL can reduce; complex numbers only by adding, as pairs."""

_WIDENED: dict[str, Any] = {"i16": np.int32, "u16": np.uint32}
"""Dtypes that NCCL lacks, to one in which the low bits of sums and products are the same, and the order too."""

_OPERATIONS = {"sum": "NCCL_SUM", "prod": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN"}
_BOOL_OPERATIONS = {"and": "NCCL_MIN", "or": "NCCL_MAX"}
"""Of bools as bytes that are 0 or 1."""


@dataclass(frozen=True)
class Wire:
    """How the elements of a collective travel.

    Attributes:
        dtype: theirs.
        wide: the dtype they have on the way.
        carrier: what copies take them for; as long as `wide`.
        nccl: NCCL's dtype, by name.
        count: how many of NCCL's make one element.
        operation: NCCL's reduction, by name; "" where nothing is computed.
    """

    dtype: np.dtype[Any]
    wide: np.dtype[Any]
    carrier: np.dtype[Any]
    nccl: str
    count: int
    operation: str = ""

    def load(self, operand: Any) -> Any:
        """An array of any module, as it travels."""
        return operand.astype(self.wide, copy=False).view(self.carrier)

    def unload(self, result: Any) -> Any:
        """An array that has travelled, as it was."""
        return result.view(self.wide).astype(self.dtype, copy=False)


def wire_of(collective: Collective, dtype: np.dtype[Any]) -> Wire | None:
    """How the operands of a collective travel; None where NCCL cannot do it, and the hosts must.

    Raises:
        ValueError: the dtype has no such reduction.
    """
    if is_text(dtype):
        return None
    if KINDS[collective.kind] not in REDUCING:
        carrier = np.dtype(CARRIERS[dtype.itemsize])
        return Wire(dtype, dtype, carrier, *_CARRIED[dtype.itemsize])
    operation(dtype, collective.reduce)
    kind = dtype_of_numpy(dtype).text
    if dtype == np.bool_:
        uint8 = np.dtype(np.uint8)
        return Wire(dtype, dtype, uint8, "NCCL_UINT8", 1, _BOOL_OPERATIONS[collective.reduce])
    wide = np.dtype(_WIDENED.get(kind, dtype))
    computed = _COMPUTED.get(dtype_of_numpy(wide).text)
    if computed is None or collective.reduce not in _OPERATIONS or (computed[1] > 1 and collective.reduce != "sum"):
        return None
    carrier = np.dtype(CARRIERS[wide.itemsize])
    return Wire(dtype, wide, carrier, *computed, _OPERATIONS[collective.reduce])


@dataclass(frozen=True, eq=False)
class Step:
    """A call of a communicator.

    Attributes:
        name: of the method.
        buffers: arrays whose addresses it takes.
        count: elements.
        argument: position of the root or peer, where it takes one; the reduction is known from the wire.
    """

    name: str
    buffers: tuple[Any, ...]
    count: int
    argument: int | None = None


@dataclass(frozen=True, eq=False)
class NcclCalls:
    """One member's calls.

    Attributes:
        steps: to be made as one group.
        result: makes the result, when the calls have been enqueued.
    """

    steps: list[Step]
    result: Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Member:
    """One member of a collective, when its operand lies on its device.

    Attributes:
        collective: the collective.
        position: the member's.
        shapes: of the operands of all members, in order of position.
        operand: as it travels.
        xp: the array module of the device.
    """

    collective: Collective
    position: int
    shapes: Sequence[tuple[int, ...]]
    operand: Any
    xp: Any

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.shapes)

    def empty(self, shape: Sequence[int]) -> Any:
        """A new array for what comes."""
        return self.xp.empty(tuple(shape), self.operand.dtype)

    def whole(self, array: Any) -> Any:
        """The array, its elements one after the other."""
        return self.xp.ascontiguousarray(array).reshape(array.shape)


def transfer(member: Member) -> NcclCalls:
    """What one member does.

    Raises:
        ValueError: the attributes do not fit the operand.
    """
    return _NATIVE.get(member.collective.kind, _moves)(member)


def moves_nothing(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether no operand of a collective has an element."""
    return not any(map(prod, shapes))


def _all_reduce(member: Member) -> NcclCalls:
    result = member.empty(member.operand.shape)
    return NcclCalls([Step("allReduce", (member.whole(member.operand), result), result.size)], lambda: result)


def _broadcast(member: Member) -> NcclCalls:
    root = member.collective.root
    check_root(member.collective, member.size)
    result = member.empty(member.operand.shape)
    sent = member.whole(member.operand) if member.position == root else result
    return NcclCalls([Step("broadcast", (sent, result), result.size, root)], lambda: result)


def _all_gather(member: Member) -> NcclCalls:
    dim = member.collective.dim
    check_dim(member.collective, dim, member.operand.ndim)
    sizes = [shape[dim] for shape in member.shapes]
    padded = with_dim(member.operand.shape, dim, max(sizes))
    sent = member.whole(member.operand) if sizes[member.position] == padded[dim] else _pad(member, padded)
    came = member.empty((member.size, *padded))

    def result() -> Any:
        if prod(padded[:dim]) == 1 and min(sizes) == max(sizes):
            return came.reshape(with_dim(padded, dim, sum(sizes)))
        return member.xp.concatenate([_cut(came[i], dim, 0, size) for i, size in enumerate(sizes)], axis=dim)

    return NcclCalls([Step("allGather", (sent, came), sent.size)], result)


def _pad(member: Member, padded: tuple[int, ...]) -> Any:
    """The operand, followed by zeros up to a shape."""
    made = member.xp.zeros(padded, member.operand.dtype)
    made[tuple(map(slice, member.operand.shape))] = member.operand
    return made


def _reduce_scatter(member: Member) -> NcclCalls:
    operand, dim = member.operand, member.collective.dim
    bounds = _bounds(member, dim, member.collective.sizes)
    sizes = [end - start for start, end in pairwise(bounds)]
    padded = with_dim(operand.shape, dim, max(sizes))
    if prod(padded[:dim]) == 1 and min(sizes) == max(sizes):
        sent = member.whole(operand)
    else:
        sent = member.xp.zeros((member.size, *padded), operand.dtype)
        for position, size in enumerate(sizes):
            _cut(sent[position], dim, 0, size)[...] = _cut(operand, dim, bounds[position], size)
    came = member.empty(padded)
    own = sizes[member.position]
    return NcclCalls(
        [Step("reduceScatter", (sent, came), came.size)],
        lambda: came if own == padded[dim] else member.whole(_cut(came, dim, 0, own)),
    )


def _moves(member: Member) -> NcclCalls:
    """Sends and receives, as the kind's record says."""
    moves = EXECUTED[member.collective.kind].moves
    assert moves is not None
    movement = moves(member, member.empty)
    steps = []
    for positions, array in movement.sends:
        if array.size:
            sent = member.whole(array)
            steps += [Step("send", (sent,), sent.size, position) for position in positions]
    came = []
    for position, place in movement.receives:
        if place.size:
            into = place if place.flags.c_contiguous else member.empty(place.shape)
            steps.append(Step("recv", (into,), into.size, position))
            came.append((place, into))

    def result() -> Any:
        for place, into in came:
            if into is not place:
                place[...] = into
        return movement.result

    # All calls of a group go at once; peer by peer they are read most easily.
    return NcclCalls(sorted(steps, key=lambda step: step.argument or 0), result)


_NATIVE: dict[str, Callable[[Member], NcclCalls]] = {
    "AllReduce": _all_reduce,
    "AllGather": _all_gather,
    "ReduceScatter": _reduce_scatter,
    "Broadcast": _broadcast,
}
"""The kinds that NCCL has itself."""


def _bounds(member: Member, dim: int, sizes: Sequence[int] | None) -> list[int]:
    check_dim(member.collective, dim, member.operand.ndim)
    return block_bounds(member.operand.shape[dim], sizes, member.size, dim)


def _cut(array: Array, dim: int, start: int, size: int) -> Any:
    return array[(*(slice(None),) * dim, slice(start, start + size))]
