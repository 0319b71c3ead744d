"""MindSpore's device matrix: which devices a strategy of cut counts means.

MindSpore gives the ranks, in their order, the form of a matrix with a dim for each dim of the operator, as long as that
is cut, and a last one for the devices that repeat the computation: `((2, 1), (1, 4))` of a MatMul on 16 devices is the
matrix [2, 1, 4, 2] of rows, contracted dim, columns and repetition. So a strategy means the same devices whatever the
axes of the mesh are called. The order of an operator's dims is what its distributed operators do (MindSpore 2, parallel
operators MatMul, Gather, Conv2D and the elementwise ones).
"""

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from irpar.ir import Node
from irpar.ops import factor_rule
from irpar.ops.rule import FactorRule, Kind
from irpar.sharding import Axis, Mesh
from irpar.sharding.tiles import axes_of_blocks

_GATHERS = frozenset({"Gather"})

Placed = dict[Hashable, tuple[Axis, ...]]
"""The axes of each dim that is sharded."""


def axes_by_device_matrix(
    node: Node, counts: Mapping[Hashable, int], known: Sequence[Hashable], mesh: Mesh
) -> list[Placed]:
    """What the counts of an operator's dims may mean: one answer, unless the strategy leaves out what decides it.

    >>> axes_by_device_matrix(matmul, {0: 2, 1: 4}, [0, 1, 2], Mesh({"d": 8}))             # doctest: +SKIP
    [{0: (d:(1)2,), 1: (d:(2)4,)}]

    A dim that no tensor of the strategy has may be cut in any way; where that comes before another dim in the matrix,
    it decides which devices that one means.

    Args:
        node: the operator.
        counts: dims that are sharded, as factors of the operator's rule, and into how many blocks.
        known: all dims of which the strategy says how they are sharded.
        mesh: the mesh, whose ranks are numbered as MindSpore's devices are.

    Returns:
        Each way with its axes, parts of axes included; none where the devices cannot be shared out so.
    """
    rest, remainder = divmod(mesh.size, math.prod(counts.values()))
    if remainder:
        return []
    rule = factor_rule(node)
    order = list(counts) if rule is None else _order(node, rule)
    is_left = rule is not None and _repeats_left(node, rule, counts, mesh)
    found = []
    free = set() if rule is None else {dim for dim in order if dim not in known and _can_be_cut(rule, dim)}
    for matrix in _matrices([dim for dim in order if dim in counts or dim in free], counts, rest):
        repeated = mesh.size // math.prod(size for _, size in matrix)
        placed = _axes(mesh, [(None, repeated), *matrix] if is_left else matrix)
        if placed is not None and placed not in found:
            found.append(placed)
    return found


def _order(node: Node, rule: FactorRule) -> list[Hashable]:
    """The dims of an operator in the order of its device matrix."""
    operands = [_major(tensor) for tensor in rule.operands]
    results = [_major(tensor) for tensor in rule.results]
    if node.op_type in _GATHERS:
        return _once([*operands[1], *operands[0]])
    first, result = operands[0] if operands else [], results[0] if results else []
    contracted = [factor for factor in first if rule.kinds[factor] is Kind.REDUCE]
    if contracted and result and result[-1] not in first and len(operands) > 1:
        # A product: what the first matrix has, the contracted dim, the columns of the second.
        return _once([*result[:-1], *contracted, result[-1], *itertools.chain(*operands)])
    if len(operands) > 1 and all(set(operand) <= set(result) for operand in operands):
        # Elementwise: operands may have fewer dims than the result.
        return _once([*result, *itertools.chain(*operands)])
    return _once([*itertools.chain(*operands), *itertools.chain(*results)])


def _repeats_left(node: Node, rule: FactorRule, counts: Mapping[Hashable, int], mesh: Mesh) -> bool:
    """Whether repetition is the first dim: in a Gather from cut rows, but where the table takes all devices."""
    table = [counts.get(factor, 1) for factor in _major(rule.operands[0])] if rule.operands else []
    is_cut = any(factor in counts for factor, kind in enumerate(rule.kinds) if kind is Kind.REDUCE)
    return node.op_type in _GATHERS and is_cut and math.prod(table) != mesh.size


def _can_be_cut(rule: FactorRule, dim: Hashable) -> bool:
    return isinstance(dim, int) and rule.sizes[dim] != 1 and rule.kinds[dim] is not Kind.REPLICATE


def _major(tensor: Sequence[tuple[int, ...]]) -> list[int]:
    """The major factor of each dim, which is the one that is sharded first."""
    return [factors[0] for factors in tensor if factors]


def _once(factors: Sequence[int]) -> list[Hashable]:
    return list(dict.fromkeys(factors))


def _matrices(
    order: Sequence[Hashable], counts: Mapping[Hashable, int], rest: int
) -> Iterator[list[tuple[Hashable | None, int]]]:
    """The matrices for all ways to shard the dims that are not known; those side by side count as one dim."""
    gaps = [list(group) for is_cut, group in itertools.groupby(order, key=lambda dim: dim in counts) if not is_cut]
    firsts = {group[0] for group in gaps}
    slots = [dim for dim in order if dim in counts or dim in firsts]

    def fill(place: int, left: int) -> Iterator[list[tuple[Hashable | None, int]]]:
        if place == len(slots):
            yield []
            return
        dim = slots[place]
        sizes = [counts[dim]] if dim in counts else [size for size in range(1, left + 1) if left % size == 0]
        for size in sizes:
            after = left if dim in counts else left // size
            yield from ([(dim if dim in counts else None, size), *others] for others in fill(place + 1, after))

    yield from fill(0, rest)


def _axes(mesh: Mesh, matrix: Sequence[tuple[Hashable | None, int]]) -> Placed | None:
    """The axes that the dims of a matrix of ranks are; None where they are none, nor parts of axes."""
    dims, counts, strides = [], [], []
    stride = mesh.size
    for dim, size in matrix:
        stride //= size
        if dim is not None:
            dims.append(dim)
            counts.append(size)
            strides.append(stride)
    blocks = [[rank // step % count for step, count in zip(strides, counts, strict=True)] for rank in range(mesh.size)]
    axes = axes_of_blocks(mesh, blocks, counts)
    return None if axes is None else dict(zip(dims, axes, strict=True))
