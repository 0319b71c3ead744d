"""What one collective tells that does what several did."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields

from irpar.ir import Conflict

MOST_TOLD = 4
"""Reasons of one sum that are all told, alike or not."""
MOST_ALIKE = 2
"""Of more those that are told of reasons that differ in names and numbers alone."""
_NAMED = re.compile(r"%[^\s;:,()]+|\S*\d\S*")


def joined_texts(texts: Iterable[str]) -> str:
    """Different texts behind each other."""
    return "; ".join(dict.fromkeys(text for text in texts if text))


def few_texts(texts: Iterable[str]) -> str:
    """The same, where there may be one for each weight of a model: of many that are alike the first ones."""
    every = list(dict.fromkeys(text for text in texts if text))
    if len(every) <= MOST_TOLD:
        return joined_texts(every)
    alike = Counter[str]()
    told = []
    for text in every:
        kind = _NAMED.sub("%", text)
        alike[kind] += 1
        if alike[kind] <= MOST_ALIKE:
            told.append(text)
    return joined_texts(told if len(told) == len(every) else [*told, "and others like these"])


def joined_conflict(conflicts: Sequence[Conflict]) -> Conflict:
    """The words of several conflicts behind each other; rematerialized where one of them is."""
    words = {
        field.name: joined_texts(getattr(conflict, field.name) for conflict in conflicts)
        for field in fields(Conflict)
        if field.name != "rematerialized"
    }
    return Conflict(**words, rematerialized=any(conflict.rematerialized for conflict in conflicts))
