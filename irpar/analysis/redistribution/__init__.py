"""How to get a tensor from one sharding to another at the least cost, by default with the fewest sent bytes.

A shortest path over shardings, whose edges are the collectives, over blocks that are never larger than those of the two
ends and a chunk; compare Rink, Paszke, Tillet & Schmid, Memory-efficient array redistribution through portable
collective communication (arXiv 2112.01075).

    [@x, _] -> [_, @y]     AllSlice(y, dim 1) is free and halves what AllGather(x, dim 0) then sends
    [@x, _] -> [_, @x]     AllToAll(x, split 1, concat 0)
    [@x, @y] -> [@y, @x]   CollectivePermute, where x and y are of one size
    [_, _] partial(x) -> [@x, _]     ReduceScatter(x, dim 0)
    [_, _] -> [_, _] partial(x)      MakePartial(x) is free: the first device of x keeps the value
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from irpar.analysis.cost.model import CostModel, Key, add_keys
from irpar.analysis.cost.network import BYTES, Network
from irpar.analysis.cost.network_algorithms import ring_bytes
from irpar.analysis.memory.liveness import value_bytes
from irpar.ir import Value
from irpar.ops.collectives import FREE, KINDS
from irpar.sharding import Axis, IrparError, Mesh, Sharding, ceil_shape, join_axes, permutation

from .problem import Names, common_axes, problem_of
from .solution import Planner, names_at, solve
from .space import CollectiveStep

__all__ = [
    "CHUNK_BYTES",
    "Planner",
    "Redistribution",
    "Step",
    "block_bytes",
    "bytes_held",
    "planned",
    "price",
    "redistribution",
    "steps_key",
]

CHUNK_BYTES = 1 << 20
"""How far above the larger block of both ends a block on the way may be, 1 MiB: below it memory is not the question."""


@dataclass(frozen=True)
class Step:
    """One collective (or AllSlice or MakePartial, which send nothing) and the tensor's sharding after it.

    Attributes:
        op: the op type in domain `irpar`.
        axes: the mesh axes it runs over, major first.
        dims: AllGather, AllSlice, ReduceScatter: (dim,); AllToAll: (split dim, concat dim); others: ().
        after: the sharding after it.
        sent_bytes: bytes that a device sends, by the ring model.
        pairs: of CollectivePermute: positions that send and receive, in turn.
    """

    op: str
    axes: tuple[Axis, ...]
    dims: tuple[int, ...]
    after: Sharding
    sent_bytes: int
    pairs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Redistribution:
    """The steps from one sharding to another.

    Attributes:
        steps: in order.
        key: what they cost by the network, comparable (`CostModel.redistribution`).
        peak_bytes: the largest block that a device holds on the way, both ends included.
        ends_bytes: the larger block of the two ends.
    """

    steps: tuple[Step, ...]
    key: Key
    peak_bytes: int
    ends_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends."""
        return sum(step.sent_bytes for step in self.steps)

    def then(self, other: "Redistribution", ends_bytes: int) -> "Redistribution":
        """The steps of this one, and then those of another; where they meet is no end."""
        peak = max(self.peak_bytes, other.peak_bytes)
        return Redistribution(self.steps + other.steps, add_keys(self.key, other.key), peak, ends_bytes)


def redistribution(
    source: Sharding,
    target: Sharding,
    shape: Sequence[int],
    itemsize_bits: int,
    network: Network = BYTES,
    *,
    planner: Planner = "optimal",
    chunk_bytes: int = CHUNK_BYTES,
) -> Redistribution:
    """The cheapest way from `source` to `target`.

    Args:
        source: where the tensor is; may be partial.
        target: where it should be; where it is partial over axes that the source is not, the first device along
            these keeps the value.
        shape: the full tensor's.
        itemsize_bits: bits of one element.
        network: what communication costs.
        planner: optimal, or fast: at most 1.1 times the cost of optimal. Either is content with a good path where there
            are very many (more than 8,000 and 3,000 states seen; axes of more than six prime factors in all).
        chunk_bytes: how far above the larger block of both ends a block may be on the way. Where uneven blocks, or
            sub-axes whose cuts cross, leave no such way, it is the cheapest of those with the least peak: see
            `Redistribution.peak_bytes`.

    Raises:
        IrparError: the shardings are of two meshes.
    """
    if source.mesh != target.mesh:
        raise IrparError(
            f"cannot redistribute from {source} to {target}: they are of two meshes",
            do="redistribute within one mesh; see cross_mesh for what to send from one mesh to another",
        )
    return planned(source.closed(), target.closed(), tuple(shape), itemsize_bits, network, planner, chunk_bytes)


def price(
    source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bits: int, network: Network = BYTES
) -> Key:
    """What the cheapest steps cost by the network (`CostModel.redistribution`); arguments as for `redistribution`."""
    if source is target or (source.axes == target.axes and source.partial == target.partial):
        return CostModel(network).nothing
    return _price(source, target, tuple(shape), itemsize_bits, network)


@lru_cache(maxsize=65536)
def _price(source: Sharding, target: Sharding, shape: tuple[int, ...], bits: int, network: Network) -> Key:
    return redistribution(source, target, shape, bits, network).key


def steps_key(
    steps: Iterable[tuple[Sharding, Step]], mesh: Mesh, shape: Sequence[int], itemsize_bits: int, network: Network
) -> Key:
    """What steps cost together by the network, each from a sharding of a tensor; free ones cost nothing."""
    sent = (
        (KINDS[step.op], step.axes, operand_bytes(step, before, shape, itemsize_bits))
        for before, step in steps
        if step.op not in FREE
    )
    return CostModel(network).redistribution(sent, mesh)


@lru_cache(maxsize=65536)
def planned(
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    bits: int,
    network: Network,
    planner: Planner,
    chunk_bytes: int,
) -> Redistribution:
    """As `redistribution`, of shardings whose dims are closed; what was asked before is known."""
    if source == target:
        size = block_bytes(source, shape, bits)
        return Redistribution((), CostModel(network).nothing, size, size)
    runs = common_axes(source, target)
    if runs is None or (source.partial and target.partial and source.reduce != target.reduce):
        stop = _stop_between(source, target)
        there = planned(source, stop, shape, bits, network, planner, chunk_bytes)
        ends = max(block_bytes(source, shape, bits), block_bytes(target, shape, bits))
        return there.then(planned(stop, target, shape, bits, network, planner, chunk_bytes), ends)
    problem, names = problem_of(source, target, runs, shape, bits, network)
    solution = solve(problem, names, network, planner, chunk_bytes)
    steps = _steps(solution.moves, names_at(problem, names, solution.granularity), source, target, shape, bits)
    befores = (source, *(step.after for step in steps))
    key = steps_key(zip(befores, steps, strict=False), source.mesh, shape, bits, network)
    return Redistribution(steps, key, solution.peak_bytes, solution.ends_bytes)


def _stop_between(source: Sharding, target: Sharding) -> Sharding:
    """Where a tensor must pass: the reduced value, if the target is partial by another reduction, or the full tensor.

    Sub-axes whose cuts do not divide each other (of 6: by 2 and by 3) meet only there.
    """
    if source.partial and target.partial and source.reduce != target.reduce:
        return target.with_partial(())
    whole = Sharding.replicated(source.mesh, source.rank)
    shares = whole.with_partial(source.partial, source.reduce)
    return shares if source.axes != whole.axes and common_axes(shares, target) is not None else whole


def _steps(
    moves: Sequence[CollectiveStep], names: Names, source: Sharding, target: Sharding, shape: tuple[int, ...], bits: int
) -> tuple[Step, ...]:
    """Moves by the names of axes and dims; the last ends in the very words of the target."""
    mesh, steps, before = names.mesh, list[Step](), source
    for index, move in enumerate(moves):
        dims, partial = move.after
        reduce = source.reduce if source.partial else target.reduce
        after = target
        if index < len(moves) - 1:
            joined = [join_axes(mesh, axes) for axes in names.of_dims(dims)]
            after = Sharding.of_axes(mesh, joined, join_axes(mesh, names.of_atoms(partial)), reduce)
        if move.op == "CollectivePermute":
            axes, pairs = permutation(before, after)
        else:
            axes, pairs = join_axes(mesh, names.of_atoms(move.atoms)), ()
        step = Step(move.op, axes, tuple(names.dims[dim] for dim in move.dims), after, 0, pairs)
        last = steps[-1] if steps else None
        if last is not None and step.op == last.op == "AllSlice" and step.dims == last.dims:
            before = source if len(steps) == 1 else steps[-2].after
            step = Step("AllSlice", join_axes(mesh, (*last.axes, *step.axes)), step.dims, after, 0)
            steps.pop()
        elif step.op not in FREE:
            sent = ring_bytes(KINDS[step.op], mesh.group_size(axes), operand_bytes(step, before, shape, bits))
            step = Step(step.op, step.axes, step.dims, after, sent, pairs)
        steps.append(step)
        before = after
    return tuple(steps)


def block_bytes(sharding: Sharding, shape: Sequence[int], bits: int) -> int:
    """Bytes of the largest block that any device holds, rounded up."""
    return _block_bytes(sharding, tuple(shape), bits)


def bytes_held(value: Value, lies: Sharding | None) -> int:
    """What a device holds of a value that is sharded so, or not known to be; 0 for what has no static size."""
    if lies is None or not value.is_static:
        return value_bytes(value)
    return block_bytes(lies, value.shape, value.dtype.bits)


@lru_cache(maxsize=65536)
def _block_bytes(sharding: Sharding, shape: tuple[int, ...], bits: int) -> int:
    return _bytes(ceil_shape(sharding, shape), bits)


def operand_bytes(step: Step, before: Sharding, shape: Sequence[int], bits: int) -> int:
    """What a device holds before a step; of uneven blocks padded."""
    block = list(ceil_shape(before, shape))
    if step.op in ("ReduceScatter", "AllToAll"):
        dim = step.dims[0]
        block[dim] = before.mesh.group_size(step.axes) * ceil_shape(step.after, shape)[dim]
    return _bytes(block, bits)


def _bytes(block: Sequence[int], bits: int) -> int:
    return -(-prod(block) * bits // 8)
