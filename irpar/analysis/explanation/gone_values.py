"""The log where values are gone and others stand for them: conflicts are told, and chains of reasons end, as before."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from irpar.ir import Conflict, Decision, Module

from .joined_reasons import joined_conflict

Step = tuple[str, str | None]
"""The name of a value, and a mesh axis that shards it; None: its sharding altogether."""


def follow_instead(module: Module, names: Mapping[str, str]) -> None:
    """In the log, let what follows a value that is gone follow the one that is there instead, which tells its conflict.

    x follows u, n follows x; u is annotated, and gone for n, which is equal:
        x follows n, and n is sharded for the reason of u: its own would lead back to it

    Args:
        module: with the log.
        names: of values that are gone, each to the one that has all of its axes.
    """
    move_conflicts(module, names)
    gone = {name: module.decisions.pop(name, ()) for name in names}
    turned: dict[Step, None] = {}
    for known in module.decisions.values() if names else ():
        for number, decision in enumerate(known):
            renamed = _renamed(decision, names)
            if renamed is not decision:
                known[number] = renamed
                assert renamed.follows is not None
                turned |= {(renamed.follows, axis): None for axis in renamed.axes or (None,)}
    told: defaultdict[str, list[Decision]] = defaultdict(list)
    for name, decisions in gone.items() if turned else ():
        told[last_name(names, name)] += [_renamed(decision, names) for decision in decisions]
    _end_circles(module, turned, told)


def _renamed(decision: Decision, names: Mapping[str, str]) -> Decision:
    if decision.follows is None or decision.follows not in names:
        return decision
    return replace(decision, follows=last_name(names, decision.follows))


def _end_circles(module: Module, starts: Mapping[Step, None], told: Mapping[str, list[Decision]]) -> None:
    """Where reasons lead round in a circle, let a value in it have the reason of one that it stands for.

    Args:
        module: with the log.
        starts: where circles may begin.
        told: by value, the decisions about values that it stands for; each is used once.
    """
    ended: set[Step] = set()
    for start in starts:
        passed: dict[Step, None] = {}
        step: Step | None = start
        while step is not None and step not in ended:
            if step in passed:
                if not _open(module, [*passed][[*passed].index(step) :], told):
                    break
                passed, step = {}, start
            passed[step] = None
            step = _next(module, *step)
        ended |= passed.keys()


def _next(module: Module, name: str, axis: str | None) -> Step | None:
    decision = module.decision(name, axis)
    return None if decision is None or decision.follows is None else (decision.follows, axis)


def _open(module: Module, circle: Sequence[Step], told: Mapping[str, list[Decision]]) -> bool:
    """Give the first value of a circle that can have one another reason; returns whether there is such a value."""
    for name, axis in circle:
        for place, other in enumerate(told.get(name, ())):
            if axis is None or not other.axes or axis in other.axes:
                del told[name][place]
                _replace(module, name, axis, other)
                return True
    return False


def _replace(module: Module, name: str, axis: str | None, other: Decision) -> None:
    """Let a value have another reason for an axis; for other axes its reasons stay."""
    now = module.decision(name, axis)
    kept: list[Decision] = []
    for each in module.decisions[name]:
        left = tuple(own for own in each.axes if other.axes and own not in other.axes)
        if each is not now:
            kept.append(each)
        elif left:
            kept.append(replace(each, axes=left))
    module.decisions[name] = [other, *kept]


def move_conflicts(module: Module, names: Mapping[str, str]) -> None:
    """In the log, let a value tell the conflicts of those that it stands for, behind its own.

    Args:
        module: with the log.
        names: of values whose collectives are gone, each to the one that is there instead.
    """
    told: dict[str, list[Conflict]] = {}
    for name in names:
        conflict = module.conflicts.pop(name, None)
        if conflict is not None:
            told.setdefault(last_name(names, name), []).append(conflict)
    for name, conflicts in told.items():
        own = module.conflicts.get(name)
        module.conflicts[name] = joined_conflict(conflicts if own is None else [own, *conflicts])


def last_name(names: Mapping[str, str], name: str) -> str:
    """The name at the end of a chain of names that stand for each other."""
    while name in names:
        name = names[name]
    return name
