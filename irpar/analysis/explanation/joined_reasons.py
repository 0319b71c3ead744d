"""What one collective tells that does what several did."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from irpar.ir import Conflict, Module

MOST_TOLD = 4
"""Of what one sum adds: of more the first half."""


def joined_texts(texts: Iterable[str]) -> str:
    """Different texts behind each other."""
    return "; ".join(dict.fromkeys(text for text in texts if text))


def few_texts(texts: Iterable[str]) -> str:
    """The same, where it may be one for each weight of a model: of many the first ones."""
    told = list(dict.fromkeys(text for text in texts if text))
    return joined_texts(told if len(told) <= MOST_TOLD else [*told[: MOST_TOLD // 2], "and others like these"])


def joined_conflict(conflicts: Sequence[Conflict]) -> Conflict:
    """The words of several conflicts behind each other; rematerialized where one of them is."""
    words = {
        field.name: joined_texts(getattr(conflict, field.name) for conflict in conflicts)
        for field in fields(Conflict)
        if field.name != "rematerialized"
    }
    return Conflict(**words, rematerialized=any(conflict.rematerialized for conflict in conflicts))


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
