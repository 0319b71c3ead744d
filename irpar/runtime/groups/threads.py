"""All ranks in one process: collectives are array operations over lists of per-rank operands.

A result that is equal on all members of a group is one array, which they share; nobody writes to operands.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from irpar.ir import dtype_of_numpy
from irpar.sharding import Axis, Mesh

from ..errors import MismatchError
from ..reduction import reduce_arrays
from .base import Array, Call, Collective


class ThreadGroup:
    """The ranks of a mesh, all in this process, in lockstep."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._groups: dict[tuple[Axis, ...], dict[int, list[int]]] = {}

    def exchange(self, waiting: Mapping[int, Call]) -> dict[int, Array]:
        """Execute the collectives whose groups are complete; see `Group.exchange`."""
        done: dict[int, Array] = {}
        for rank, call in waiting.items():
            if rank in done:
                continue
            members = self._members(call.collective.axes, rank)
            calls = [waiting[member] for member in members if member in waiting]
            if len(calls) < len(members) or any(other.collective.id != call.collective.id for other in calls):
                continue  # Some member is at another collective first; it may come to this one later.
            self._check(calls)
            try:
                results = self.execute(calls)
            except ValueError as error:
                raise self._mismatch(str(error), calls) from error
            done.update(zip(members, results, strict=True))
        if not done and waiting:
            raise self._stuck(waiting)
        return done

    def execute(self, calls: Sequence[Call]) -> list[Array]:
        """The results of one collective, from the calls of the members of one group in order of position."""
        collective = calls[0].collective
        return EXECUTE[collective.kind](collective, [call.operand for call in calls])

    def close(self) -> None:
        """Nothing is held."""

    def _members(self, axes: tuple[Axis, ...], rank: int) -> list[int]:
        groups = self._groups.get(axes)
        if groups is None:
            groups = {member: group for group in self.mesh.groups(axes) for member in group}
            self._groups[axes] = groups
        return groups[rank]

    def _check(self, calls: Sequence[Call]) -> None:
        first = calls[0]
        for other in calls[1:]:
            if other.collective != first.collective:
                raise self._mismatch("one collective has different attributes on different ranks", [first, other])
            if other.operand.dtype != first.operand.dtype or other.operand.ndim != first.operand.ndim:
                raise self._mismatch("operands of one collective differ in dtype or rank", [first, other])
        kind = first.collective.kind
        expected = SHAPES[kind](first.collective, [call.operand.shape for call in calls])
        for call, shape in zip(calls, expected, strict=True):
            if call.operand.shape != shape:
                what = f"operand of {list(call.operand.shape)}, where the other ranks call for {list(shape)}"
                raise self._mismatch(what, [call, *(other for other in calls if other is not call)])

    def _mismatch(self, what: str, calls: Sequence[Call]) -> MismatchError:
        lines = [call.describe(self.mesh) for call in calls]
        notes = (*lines[:8], *([f"and {len(lines) - 8} more ranks"] if len(lines) > 8 else []))
        return MismatchError(
            f"collective {calls[0].collective.id}: {what}",
            notes=notes,
            do="partition the model again, without changing its parts; if it happens again, report it",
        )

    def _stuck(self, waiting: Mapping[int, Call]) -> MismatchError:
        """Nobody can go on: name a group whose members came to different collectives, or ended before this one."""
        first = min(waiting.values(), key=lambda call: (call.collective.id, call.rank))
        members = self._members(first.collective.axes, first.rank)
        others = [waiting[member] for member in members if member in waiting and member != first.rank]
        gone = [member for member in members if member not in waiting]
        what = "ranks that should meet in it are at different collectives"
        if gone:
            what = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} ended without it"
        others.sort(key=lambda call: call.collective == first.collective)
        return self._mismatch(what, [first, *others])


Shape = tuple[int, ...]


def _equal(_: Collective, shapes: Sequence[Shape]) -> list[Shape]:
    return [shapes[0]] * len(shapes)


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _blocks_of(sizes: Sequence[int] | None, dim: int, shapes: Sequence[Shape]) -> list[Shape]:
    """Member i holds `sizes[i]` of a dim (all equal where there are no sizes)."""
    if not 0 <= dim < len(shapes[0]):
        return [()] * len(shapes)
    listed = [shapes[0][dim]] * len(shapes) if sizes is None else list(sizes)
    listed += [-1] * (len(shapes) - len(listed))
    return [_with(shapes[0], dim, size) for size in listed[: len(shapes)]]


def _gather_shapes(collective: Collective, shapes: Sequence[Shape]) -> list[Shape]:
    return _blocks_of(collective.sizes, collective.dim, shapes)


def _all_to_all_shapes(collective: Collective, shapes: Sequence[Shape]) -> list[Shape]:
    return _blocks_of(collective.concat_sizes, collective.concat_dim, shapes)


def _permute_shapes(collective: Collective, shapes: Sequence[Shape]) -> list[Shape]:
    if collective.shapes is None:
        return _equal(collective, shapes)
    rank, listed = len(shapes[0]), collective.shapes
    if len(listed) != rank * len(shapes):
        return [()] * len(shapes)
    return [listed[member * rank : (member + 1) * rank] for member in range(len(shapes))]


def _all_reduce(collective: Collective, operands: Sequence[Array]) -> list[Array]:
    return [reduce_arrays(operands, collective.reduce)] * len(operands)


def _all_gather(collective: Collective, operands: Sequence[Array]) -> list[Array]:
    return [np.concatenate(operands, axis=collective.dim)] * len(operands)


def _pieces(operand: Array, dim: int, sizes: Sequence[int] | None, count: int, kind: str) -> list[Array]:
    """Views of the `count` blocks of a dim."""
    if not 0 <= dim < operand.ndim:
        raise ValueError(f"{kind} along dim {dim} of a tensor of rank {operand.ndim}")
    whole = operand.shape[dim]
    if sizes is None:
        if whole % count:
            raise ValueError(f"dim {dim} of size {whole} has no {count} equal blocks, and no block sizes are given")
        sizes = [whole // count] * count
    if len(sizes) != count or sum(sizes) != whole or min(sizes, default=0) < 0:
        raise ValueError(f"block sizes {list(sizes)} do not fit dim {dim} of size {whole} in a group of {count}")
    before = (slice(None),) * dim
    starts = accumulate(sizes, initial=0)
    return [operand[(*before, slice(start, start + size))] for start, size in zip(starts, sizes, strict=False)]


def _reduce_scatter(collective: Collective, operands: Sequence[Array]) -> list[Array]:
    count = len(operands)
    cut = [_pieces(operand, collective.dim, collective.sizes, count, collective.kind) for operand in operands]
    return [np.ascontiguousarray(reduce_arrays([pieces[i] for pieces in cut], collective.reduce)) for i in range(count)]


def _all_to_all(collective: Collective, operands: Sequence[Array]) -> list[Array]:
    count = len(operands)
    cut = [_pieces(operand, collective.split_dim, collective.split_sizes, count, "AllToAll") for operand in operands]
    return [np.concatenate([pieces[i] for pieces in cut], axis=collective.concat_dim) for i in range(count)]


def _permute(collective: Collective, operands: Sequence[Array]) -> list[Array]:
    sources, targets = collective.pairs[::2], collective.pairs[1::2]
    inside = all(0 <= position < len(operands) for position in collective.pairs)
    if len(sources) != len(targets) or len(set(targets)) != len(targets) or not inside:
        raise ValueError(f"pairs {list(collective.pairs)} do not fit a group of {len(operands)}")
    received = dict(zip(targets, sources, strict=True))
    nothing = "" if dtype_of_numpy(operands[0].dtype).text == "str" else 0
    return [
        operands[received[i]] if i in received else np.full(operand.shape, nothing, operand.dtype)
        for i, operand in enumerate(operands)
    ]


def _broadcast(collective: Collective, operands: Sequence[Array]) -> list[Array]:
    if not 0 <= collective.root < len(operands):
        raise ValueError(f"root {collective.root} is not in a group of {len(operands)}")
    return [operands[collective.root]] * len(operands)


EXECUTE: dict[str, Callable[[Collective, Sequence[Array]], list[Array]]] = {
    "AllReduce": _all_reduce,
    "AllGather": _all_gather,
    "ReduceScatter": _reduce_scatter,
    "AllToAll": _all_to_all,
    "CollectivePermute": _permute,
    "Broadcast": _broadcast,
}
"""Per kind: the operands of a group, in order of position, to its results."""

SHAPES: dict[str, Callable[[Collective, Sequence[Shape]], list[Shape]]] = {
    "AllReduce": _equal,
    "AllGather": _gather_shapes,
    "ReduceScatter": _equal,
    "AllToAll": _all_to_all_shapes,
    "CollectivePermute": _permute_shapes,
    "Broadcast": _equal,
}
"""Per kind: the operand shapes that members must have, given those that they have."""
