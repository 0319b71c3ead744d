"""Annotations that close a dim further on: why a node gives up a cut that it could have worked along.

x : [8@dp, 64], a = LayerNormalization(x), y = Relu(a) annotated [8, 64]
    x is gathered before the LayerNormalization: dim 0 of y, which dim 0 of x becomes, is annotated whole
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.placement import Axes, Placement
from irpar.analysis.completion.rule_view import RuleView
from irpar.ir import Annotation, Node, Value
from irpar.sharding import Sharding, are_disjoint

from .origins import cutting_names

_MOST_NODES = 64
"""That are followed from one value."""


@dataclass(frozen=True)
class Closing:
    """An annotation of what is made of a value.

    Attributes:
        value: that is annotated.
        start: what the first node makes of the value on the way there; `value` itself where no other node is between.
        lies: how it is sharded.
        instead: as what it could be annotated, so that the cut passes; None where its other dims need these axes.
    """

    value: Value
    start: Value
    lies: Sharding
    instead: Sharding | None


def closing_annotation(
    flow: Flow,
    placements: Mapping[Node, Placement],
    annotated: Mapping[str, Annotation],
    node: Node,
    value: Value,
    given_up: Mapping[int, Axes],
) -> Closing | None:
    """The nearest annotation that closes a dim which a given-up dim of an operand becomes; None where there is none.

    Args:
        flow: the graph and the bodies in it.
        placements: how each node runs.
        annotated: the annotations by names of values.
        node: reads the value without the cut.
        value: the operand.
        given_up: the cuts of its dims that are given up.
    """
    dims = tuple(given_up.get(dim, ()) for dim in range(len(value.shape)))
    waiting: deque[tuple[Node, Value, tuple[Axes, ...], Value | None]] = deque([(node, value, dims, None)])
    seen = {node}
    while waiting:
        reader, operand, cut, start = waiting.popleft()
        for result, reached in _results(flow, reader, operand, cut):
            lies = _whole_in(placements, result, reached)
            if lies is None:
                continue
            first = start or result
            said = annotated.get(result.name)
            if said is not None and _closes(said, lies, reached):
                return Closing(result, first, lies, _instead(lies, reached))
            for user in result.users:
                user = flow.holder(user) or user
                if user not in seen and len(seen) < _MOST_NODES:
                    seen.add(user)
                    waiting.append((user, result, reached, first))
    return None


def _results(flow: Flow, node: Node, operand: Value, cut: tuple[Axes, ...]) -> Iterator[tuple[Value, tuple[Axes, ...]]]:
    """What a node would give in blocks, and how these are cut, if it took an operand so; without a local program where
    it can."""
    for view in flow.views_reading(node, operand):
        tensor = view.values.index(operand)
        for number in range(view.operand_count, len(view.values)):
            result = view.values[number]
            ways = sorted(view.ways, key=lambda way: bool(way.program_factors))
            found = (_carried(way, tensor, number, cut, alone=alone) for alone in (True, False) for way in ways)
            reached = next((dims for dims in found if dims is not None), None)
            if result is not None and reached is not None:
                yield result, reached


def _carried(way: RuleView, tensor: int, result: int, cut: tuple[Axes, ...], *, alone: bool) -> tuple[Axes, ...] | None:
    """How a result lies where an operand is sharded so; `alone`: only along what needs nothing of other devices."""
    factors = way.project(tensor, cut)
    kept = [
        () if alone and factor in way.program_factors else factors.get(factor, ())
        for factor in range(len(way.rule.sizes))
    ]
    dims = way.assemble(result, kept)
    return dims if dims is not None and any(dims) else None


def _whole_in(placements: Mapping[Node, Placement], value: Value, cut: tuple[Axes, ...]) -> Sharding | None:
    """How a value lies; None where it has some of the axes, or its node produces it so: it moves behind that."""
    placement = placements.get(value.node) if value.node is not None else None
    given = None if placement is None else placement.results[value.index]
    names = {axis.name for axes in cut for axis in axes}
    having = {*cutting_names(value.sharding), *cutting_names(given)}
    return value.sharding if names.isdisjoint(having) else None


def _closes(said: Annotation, lies: Sharding, cut: tuple[Axes, ...]) -> bool:
    """Whether an annotation leaves none of the cuts open."""
    written = Sharding.of_spec(lies.mesh, said.spec)
    return all(not dim.is_open for dim, axes in zip(written.dims, cut, strict=True) if axes)


def _instead(lies: Sharding, cut: tuple[Axes, ...]) -> Sharding | None:
    dims = [axes or known for axes, known in zip(cut, lies.axes, strict=True)]
    if not are_disjoint(lies.mesh, [axis for axes in dims for axis in axes]):
        return None
    return Sharding.of_axes(lies.mesh, dims)
