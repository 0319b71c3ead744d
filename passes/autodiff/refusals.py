"""Errors of autodiff: which node has no gradient, and on which path it stands."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from irpar.ir import Node, Value, captured_or_read, holder_in
from irpar.sharding import IrparError

if TYPE_CHECKING:
    from .reverse import Reverse

_ENDS_SHOWN = 6
"""Nodes of a path that are named at either end, where it is longer than both together."""


class GradientError(IrparError):
    """A gradient that cannot be made."""


def missing(reverse: "Reverse", node: Node, why: str) -> GradientError:
    """A node on the way that has no gradient, with the path from a seeded value back to a wanted one."""
    to_wanted = _path(_read_by(node, reverse), lambda value: value in reverse.wanted, _producers(reverse))
    from_seed = _path(node.results, lambda value: value in reverse.seeds, _consumers(reverse))
    values = [*reversed(from_seed), *to_wanted]
    names = [f"%{value.name}" for value in values]
    if len(names) > 2 * _ENDS_SHOWN:
        names = [*names[:_ENDS_SHOWN], f"... {len(names) - 2 * _ENDS_SHOWN} more ...", *names[-_ENDS_SHOWN:]]
    target = values[-1].source_name if values else "a parameter"
    return GradientError(
        f"{node.operator} has no gradient: {why}",
        where=f"node {node.label}: {node!r}",
        notes=(f"path from the output back to the parameter: {' <- '.join(names)}",) if names else (),
        do=f'leave "{target}" out of what gradients are asked for, or take another output; '
        "a gradient of one's own is OpDef(..., gradient=...)",
    )


def _read_by(node: Node, reverse: "Reverse") -> list[Value]:
    return [value for value in captured_or_read(node) if value in reverse.depends]


def _producers(reverse: "Reverse") -> Callable[[Value], Iterable[Value]]:
    return lambda value: _read_by(value.node, reverse) if value.node is not None else ()


def _consumers(reverse: "Reverse") -> Callable[[Value], Iterable[Value]]:
    def found(value: Value) -> Iterable[Value]:
        for user in value.users:
            holder = holder_in(user, reverse.graph)
            yield from (result for result in holder.results if result in reverse.gradients)

    return found


def _path(
    starts: Iterable[Value], is_end: Callable[[Value], bool], next_of: Callable[[Value], Iterable[Value]]
) -> list[Value]:
    """The values of a shortest path; empty where there is none."""
    before: dict[Value, Value | None] = dict.fromkeys(starts)
    waiting = list(before)
    for value in waiting:
        if is_end(value):
            path = []
            step: Value | None = value
            while step is not None:
                path.append(step)
                step = before[step]
            return path[::-1]
        for other in next_of(value):
            if other not in before:
                before[other] = value
                waiting.append(other)
    return []
