"""Groups that do the same to tensors of different sizes, as the update of each parameter: one node for all of them."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from irpar.ir import DOMAIN, Node, Strings, Value
from irpar.ir.module import IRPAR_OPSET

from .groups import Group, Grouping
from .products import Product
from .shared_products import SharedProduct

SMALL_BYTES = 4096
"""What may be held longer."""


@dataclass(frozen=True, eq=False)
class Alike:
    """Groups of one expression, none of which waits for another.

    Attributes:
        groups: they, in order.
    """

    groups: tuple[Group, ...]

    @property
    def members(self) -> tuple[Node, ...]:
        """Their nodes."""
        return tuple(node for group in self.groups for node in group.members)

    @property
    def last(self) -> Node:
        """The last of them."""
        return self.groups[-1].last

    def writer(self) -> Callable[[Callable[..., Node]], list[Node]]:
        """What makes the node that takes their place, also when they read nothing any more."""
        operands = [value for group in self.groups for value in group.operands()]
        results = [value for group in self.groups for value in group.results()]
        attributes: dict[str, Any] = {
            "expression": Strings(self.groups[0].expression().lines),
            "times": len(self.groups),
        }
        facts = {"results": results, "domain": DOMAIN, "version": IRPAR_OPSET}
        return lambda make: [make("FusedEach", operands, attributes, **facts)]


def join_alike(
    grouping: Grouping, groups: Sequence[Group | Product | SharedProduct]
) -> list[Group | Product | SharedProduct | Alike]:
    """Groups and products, with one unit in place of elementwise groups that do the same.

    Only those are joined whose results nothing else in the stretch reads, so that nobody waits longer for one of them,
    and which read nothing large that the stretch makes, which would be held longer.
    """
    alike: dict[Hashable, list[Group]] = {}
    for group in groups:
        if isinstance(group, Group) and _gives_results_alone(group):
            alike.setdefault(_what_it_does(group), []).append(group)
    joined = {group: found for found in map(_joined(grouping), alike.values()) if found for group in found.groups}
    return list(dict.fromkeys(joined.get(group, group) for group in groups))  # type: ignore[arg-type]


def _joined(grouping: Grouping) -> Callable[[list[Group]], Alike | None]:
    def join(groups: list[Group]) -> Alike | None:
        members = [node for group in groups for node in group.members]
        if len(groups) < 2 or not _are_apart(groups) or not grouping.is_convex(members):
            return None
        made = Alike(tuple(groups))
        grouping.assign(made)
        return made

    return join


def _gives_results_alone(group: Group) -> bool:
    """Whether a group is elementwise, gives nothing to other nodes of its stretch, and takes nothing large of them."""
    stretch, results = group.stretch, group.results()
    uses = (use for value in results for use in value.uses if use[0] not in group.members)
    made = (value for value in group.operands() if value.node in stretch.places)
    is_alone = {*results} <= stretch.kept and not any(map(stretch.is_read, uses))
    return (
        not group.reduced
        and not group.outer
        and is_alone
        and all(value.tensor_type.nbytes <= SMALL_BYTES for value in made)
    )


def _what_it_does(group: Group) -> Hashable:
    """What groups have in common that one kernel computes: the expression, dtypes, and which operands are numbers."""
    last = group.last
    operands = tuple((value.dtype, not value.shape) for value in group.operands())
    results = tuple(value.dtype for value in group.results())
    return group.expression().lines, operands, results, (last.phase, last.stage, last.place)


def _are_apart(groups: Iterable[Group]) -> bool:
    """Whether none of them writes over a state that another one reads."""
    readers: dict[Value, set[Group]] = {}
    for group in groups:
        for value in group.operands():
            readers.setdefault(value, set()).add(group)
    return all(
        readers.get(state, {group}) == {group}
        for group in groups
        for value in group.results()
        if (state := group.stretch.over.get(value)) is not None
    )
