"""What is found out of a rule beside the shapes of values, once for all nodes that are alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from irpar.ops import FactorRule, Kind
from irpar.sharding import Axis, Mesh, filled_blocks

from .placement import Axes, Carried, FactorAxes, Placement, Suggested


@dataclass(frozen=True, eq=False)
class RuleMemory:
    """What holds for all nodes of one rule, shapes and factors of a local program; layers that are alike ask once.

    Attributes:
        must_divide: per factor, whether it may be sharded evenly only.
        least: per factor the smallest dim that it stands for.
        able: the factors along which a local program works, with elements for each device along some axis.
        moves: (from, to): what cuts the one may cut the other instead, after an all-to-all: those that the rule names,
            and from factors that are needed whole to those beside them that pass.
        projections: by (tensor, dim axes): factor axes.
        reduced_last: the factors, those that are reduced behind the others.
        assembled: by (tensor, factor axes): dim axes.
        expressible: by factor axes: the same of all tensors, without what cannot be said.
        merged: by the dim axes of all values: the factor axes on which they agree.
        placements: by (factor axes, what is carried).
        agreements: by the dim axes of all values: how a node runs that takes them as they are sharded.
        suggestions: by the dim axes of all values: what they suggest for each factor.
        joined: by several dim axes of each value: the factor axes that one or two of them suggest.
    """

    must_divide: tuple[bool, ...]
    least: tuple[int, ...]
    able: frozenset[int]
    moves: tuple[tuple[int, int], ...]
    reduced_last: tuple[int, ...]
    projections: dict[tuple[int, tuple[Axes, ...]], Mapping[int, Axes]] = field(default_factory=dict)
    assembled: dict[tuple[int, FactorAxes], tuple[Axes, ...] | None] = field(default_factory=dict)
    expressible: dict[FactorAxes, tuple[tuple[Axes, ...], ...]] = field(default_factory=dict)
    merged: dict[tuple[tuple[Axes, ...] | None, ...], FactorAxes] = field(default_factory=dict)
    placements: dict[tuple[FactorAxes, Carried], Placement | None] = field(default_factory=dict)
    agreements: dict[tuple[tuple[Axes, ...] | None, ...], Placement | None] = field(default_factory=dict)
    suggestions: dict[tuple[tuple[Axes, ...] | None, ...], Suggested] = field(default_factory=dict)
    joined: dict[tuple[tuple[tuple[Axes, ...], ...], ...], tuple[FactorAxes, ...]] = field(default_factory=dict)


@lru_cache(maxsize=4096)
def rule_memory(
    rule: FactorRule, mesh: Mesh, shapes: tuple[tuple[int, ...] | None, ...], in_program: frozenset[int]
) -> RuleMemory:
    """The memory of a rule: the same one for nodes of equal shapes and factors `in_program`."""
    must_divide, least = [False] * len(rule.sizes), list(rule.sizes)
    for shape, factors in zip(shapes, (*rule.operands, *rule.results), strict=True):
        for size, parts in zip(shape, factors, strict=True) if shape is not None else ():
            if len(parts) == 1 and parts[0] in in_program:
                # Its local program takes blocks of any sizes.
                least[parts[0]] = min(least[parts[0]], size)
            elif len(parts) > 1 or (parts and rule.sizes[parts[0]] != size):
                for factor in parts:
                    must_divide[factor] = True
    reduced_last = sorted(range(len(rule.sizes)), key=lambda factor: rule.kinds[factor] is Kind.REDUCE)
    counts = [mesh.axis_size(Axis(name)) for name in mesh.axis_names]
    able = frozenset(
        factor for factor in in_program if any(1 < count == filled_blocks(least[factor], count) for count in counts)
    )
    return RuleMemory(tuple(must_divide), tuple(least), able, _moves(rule, able), tuple(reduced_last))


def _moves(rule: FactorRule, in_program: frozenset[int]) -> tuple[tuple[int, int], ...]:
    found = dict.fromkeys(rule.moves)
    for factors in rule.operands:
        present = dict.fromkeys(factor for dim in factors for factor in dim)
        whole = [f for f in present if rule.kinds[f] in (Kind.REPLICATE, Kind.PERMUTE) and f not in in_program]
        found.update(dict.fromkeys((f, to) for f in whole for to in present if rule.kinds[to] is Kind.PASS))
    return tuple(found)
