"""Products with blocks of one tensor that may be one product, device by device."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from irpar.analysis.weights.fused_weights import beside, columns_of, passage, with_columns
from irpar.ir import Graph, Node, SlicedTensor, Value, place_of
from irpar.ops.collectives import KINDS
from irpar.ops.effects import is_compute

_WITHOUT_DIM = frozenset({"AllReduce"})
"""Collectives that treat all dims alike."""
_ALONG_DIM = frozenset({"AllGather", "ReduceScatter"})
"""Collectives that may run for several values at once where they are about another dim."""


@dataclass(frozen=True)
class Step:
    """Nodes that do the same, one for each section.

    Attributes:
        nodes: in order of the sections.
        dim: of their results, along which these stand side by side.
        operands: per operand number that is a constant of sections, its dim of them.
        own: which operand the step before gives.
    """

    nodes: tuple[Node, ...]
    dim: int
    operands: dict[int, int]
    own: int


@dataclass
class Join:
    """Constants that are blocks of one tensor, and the steps that all of them go through.

    Attributes:
        weights: the constants, in order.
        dim: along which they stand side by side.
        steps: in order; a product is among them.
    """

    weights: tuple[Value, ...]
    dim: int
    steps: list[Step] = field(default_factory=list)

    @property
    def name(self) -> tuple[str, ...]:
        """Equal for the joins of two programs that do the same."""
        return tuple(node.results[0].name for step in self.steps for node in step.nodes)


def joins(graph: Graph) -> Iterator[Join]:
    """The joins of a local graph."""
    for dim, weights in _side_by_side(graph):
        # Layers that share weights read them one after the other; if one went without, both forms would be held.
        found = [_join(weights, dim, turn) for turn in range(len(weights[0].uses))]
        if all(found):
            yield from (join for join in found if join is not None)


def _join(weights: tuple[Value, ...], dim: int, turn: int) -> Join | None:
    """What the weights go through where they are read for the n-th time; None without a product."""
    join = Join(weights, dim)
    nodes = tuple(weight.uses[turn][0] for weight in weights)
    values, has_product = weights, False
    while (step := _step(values, nodes, dim, has_product)) is not None:
        join.steps.append(step)
        has_product = has_product or columns_of(step.nodes[0], step.own) is not None
        values, dim = tuple(node.result for node in step.nodes), step.dim
        nodes = tuple(value.users[0] for value in values if len(value.uses) == 1)
    return join if has_product else None


def _side_by_side(graph: Graph) -> Iterator[tuple[int, tuple[Value, ...]]]:
    """The constants of a graph that are blocks of one tensor, apart in one dim, each read as often."""
    found: dict[Hashable, list[Value]] = {}
    for value in graph.constants:
        if isinstance(value.data, SlicedTensor) and value.has_uses:
            key = place_of(value.data.base), value.sharding, value.memory, len(value.uses)
            found.setdefault(key, []).append(value)
    for values in found.values():
        dim = _apart_in([value.data.region for value in values if value.data is not None])
        if dim is not None and len(values) > 1 and all(is_even(value, dim) for value in values):
            yield dim, tuple(sorted(values, key=lambda value: value.data.region[dim]))  # type: ignore[union-attr]


def _apart_in(regions: Sequence[tuple[tuple[int, int], ...]]) -> int | None:
    """The one dim in which blocks differ, without a common element."""
    dims = [dim for dim, ranges in enumerate(zip(*regions, strict=True)) if len(set(ranges)) > 1]
    if len(dims) != 1:
        return None
    ranges = sorted(region[dims[0]] for region in regions)
    return dims[0] if all(a[1] <= b[0] for a, b in pairwise(ranges)) else None


def parts_along(value: Value, dim: int) -> int:
    """Into how many blocks a value is sharded along a dim."""
    return 1 if value.sharding is None else value.sharding.dim_parts(dim)


def is_even(value: Value, dim: int) -> bool:
    """Whether all blocks of a value along a dim are equal."""
    return value.is_static and value.whole_shape[dim] % parts_along(value, dim) == 0


def _step(values: tuple[Value, ...], nodes: tuple[Node, ...], dim: int, has_product: bool) -> Step | None:
    """The nodes that read the values, where they do the same with each."""
    if len(nodes) < len(values) or len(set(nodes)) < len(nodes):
        return None
    first = nodes[0]
    if not all(_is_like(node, first) for node in nodes) or not all(is_even(value, dim) for value in values):
        return None
    own = first.operands.index(values[0])
    if any(node.operands[own] is not value for node, value in zip(nodes, values, strict=True)):
        return None
    found = _through(first, values[0], own, dim, has_product)
    if found is None:
        return None
    after, columns = found
    others = {index: at for index, at in columns.items() if index != own}
    if not all(_may_join(nodes, index, others.get(index)) for index in range(len(first.operands)) if index != own):
        return None
    return Step(nodes, after, others, own)


def _is_like(node: Node, other: Node) -> bool:
    attributes = [{**with_columns(each, 0), "id": None} for each in (node, other)]
    facts = [(each.identity, each.version, each.graph, each.phase, each.stage, each.place) for each in (node, other)]
    lies = [[(value.sharding, value.memory) for value in each.results] for each in (node, other)]
    same = attributes[0] == attributes[1] and facts[0] == facts[1] and lies[0] == lies[1]
    is_simple = len(node.results) == 1 and node.callee is None and not node.is_return and node.result.is_static
    return same and is_simple and len(node.operands) == len(other.operands)


def _through(node: Node, value: Value, own: int, dim: int, has_product: bool) -> tuple[int, dict[int, int]] | None:
    """The dim of the result that `dim` of an operand becomes, and the operands with it; None where joining ends."""
    if not is_compute(node):
        if node.op_type not in KINDS or not has_product:
            return None
        at = node.attributes.get("dim")
        fits = node.op_type in _WITHOUT_DIM or (node.op_type in _ALONG_DIM and at != dim)
        return (dim, {0: dim}) if fits else None
    if has_product:
        columns = beside(node, value, dim)
        return (dim, columns) if columns is not None and columns.get(own) == dim else None
    found = columns_of(node, own)
    if found is not None:
        return found if found[1].get(own) == dim else None
    made = passage(node, dim) if own == 0 else None
    return None if made is None else (made.dim, made.columns)


def _may_join(nodes: Sequence[Node], index: int, dim: int | None) -> bool:
    """Whether an operand is the same in all nodes, or blocks of one tensor side by side."""
    values = [node.operands[index] for node in nodes]
    if dim is None:
        return len(set(values)) == 1
    constants = [value for value in values if value is not None and isinstance(value.data, SlicedTensor)]
    if len(constants) < len(values) or not all(is_even(value, dim) for value in constants):
        return False
    if len({len(value.uses) for value in constants}) > 1:
        return False
    facts = {(place_of(value.data.base), value.sharding, value.memory) for value in constants if value.data is not None}
    regions = [value.data.region for value in constants if value.data is not None]
    starts = [region[dim] for region in regions]
    return len(facts) == 1 and _apart_in(regions) == dim and starts == sorted(starts)
