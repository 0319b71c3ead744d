"""The one error type of irpar: what, where, which rule, what to do."""

import difflib
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from .visible import visible

_MOST_COMPARED = 20_000
"""Comparing is slow (about 10 us a name): of the names of a huge model only the first are compared."""


class IrparError(Exception):
    """A mistake in what irpar was given, told so that its user can mend it.

    Args:
        what: the problem, in one sentence, without a full stop.
        where: where it is: file and line, node, value.
        notes: further facts, a line each.
        do: what to do about it.
    """

    def __init__(self, what: str, *, where: str = "", notes: tuple[str, ...] = (), do: str = "") -> None:
        self.what = what
        self.where = where
        self.notes = tuple(notes)
        self.do = do
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  {self.where}")
        lines.extend(f"  {note}" for note in self.notes)
        if self.do:
            lines.append(f"  do: {self.do}")
        return visible("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.notes, self.do)


def _rebuild(kind: type[IrparError], what: str, where: str, notes: tuple[str, ...], do: str) -> IrparError:
    return kind(what, where=where, notes=notes, do=do)


def nearest_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """A note for an error with the known names that resemble `name` most; no note where none does."""
    candidates = list(islice(filter(None, known), _MOST_COMPARED))
    found = difflib.get_close_matches(name, candidates, n=5, cutoff=0.5)
    return (f"nearest names: {', '.join(found)}",) if found else ()


def nearest_or_first_names(name: str, known: Collection[str]) -> tuple[str, ...]:
    """As `nearest_names`; where none resembles it, the first of them."""
    return nearest_names(name, known) or ((f"names are {listed(list(known), 4)}",) if known else ())


def listed(names: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: the first of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class ShardingError(IrparError):
    """A mesh, a sharding or an annotation that cannot be."""
