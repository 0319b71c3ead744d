"""What takes the place of a node in the program of one device: nothing where it has no elements, or the op's hook."""

from collections.abc import Iterator
from math import prod

import numpy as np

from irpar.ir import ArrayTensor, Builder, Node, Value

from .bodies import holds_collectives
from .local import typed_like
from .neutral import neutral
from .op_def import definition
from .registry import factor_rule, other_rules
from .rule import FactorRule, Kind

_INLINE = 16
"""Elements of a constant that stands in the program; of more, one number is expanded."""


def localized(whole: Node, local: Node, builder: Builder) -> list[Value] | None:
    """Values that take over from the results of a local node, or None where the node stays, its operands mended.

    Args:
        whole: the node in global view, with the shardings that it runs with.
        local: its copy in a local graph, the local types set.
        builder: inserts before it.
    """
    found = without_elements(whole, local, builder)
    if found is not None:
        return found
    known = definition(whole)
    made = None if known is None or known.localize is None else known.localize(whole, local, builder)
    return None if made is None else list(made)


def without_elements(whole: Node, local: Node, builder: Builder) -> list[Value] | None:
    """What a node gives on a device that holds no elements of what is sharded, so that no engine runs it there.

    x : [5@tp, 64] over tp=4 is 2, 2, 1, 0         Relu(x) on the last device is a constant f32[0, 64]
    a : [8, 5@tp], b : [5@tp, 6]                   MatMul(a, b), partial sums, is -0.0 [8, 6] there: it changes no sum

    Returns:
        A value for each result; None where the node has something to compute.
    """
    if holds_collectives(local) or not all(value.is_static for value in (*local.inputs, *local.results)):
        return None
    if local.results and not any(map(_elements, local.results)):
        return [_filled(value, 0, builder) for value in local.results]
    if all(map(_elements, local.inputs)):
        return None
    for rule in _rules(whole):
        for value, factors in zip(local.operands, rule.operands, strict=True):
            for dim, parts in enumerate(factors):
                is_reduced = any(rule.kinds[factor] is Kind.REDUCE for factor in parts)
                if value is not None and is_reduced and value.shape[dim] == 0:
                    return [_filled(result, neutral(rule.reduce, result.dtype), builder) for result in local.results]
    return None


def _rules(whole: Node) -> Iterator[FactorRule]:
    """The rules by which a node may run: by another one than its first only where its results are partial."""
    first = factor_rule(whole)
    if first is not None:
        yield first
    if any(value.sharding is not None and value.sharding.partial for value in whole.results):
        yield from other_rules(whole)


def _elements(value: Value) -> int:
    return prod(value.shape)


def _filled(result: Value, number: object, builder: Builder) -> Value:
    """A value like a result, every element a number."""
    dtype, shape = result.dtype, result.shape
    if prod(shape) <= _INLINE:
        made = builder.constant(ArrayTensor(np.full(shape, number, dtype.numpy), dtype), result.name)
        made.sharding, made.global_shape = result.sharding, result.global_shape
        return made
    scalar = builder.constant(ArrayTensor(np.full((), number, dtype.numpy), dtype), "neutral")
    target = builder.constant(np.asarray(shape, np.int64), "shape")
    return typed_like(result, "Expand", [scalar, target], None, builder)
