"""What is said of one layer, said of another: names in texts are those of the layer, or of the ones beside it.

rows        ["/h.0/fc", "h.0.fc.weight"], ["/h.1/fc", "h.1.fc.weight"], ["/h.2/fc", "h.2.fc.weight"] ...
of layer 1  "follows %h.1.fc.weight through MatMul /h.1/fc"
of layer 2  "follows %h.2.fc.weight through MatMul /h.2/fc"
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from irpar.ir import Annotation, Conflict, Decision, Gone

NUMBERED = re.compile(r"(.*)_([0-9]+)", re.DOTALL)
"""A name that was made of another, which was taken."""
_BETWEEN = re.compile(r"""([\s%"(),;]+)""")
"""What stands between names in a text."""
_BEHIND = ".:"
"""What may stand behind a name in a text."""

Row = Sequence[str]
"""The names of one layer, those at one place alike."""
Around = tuple[Row | None, Row, Row | None]
"""The names of a layer, between those of the layers before and behind it."""
_Slot = tuple[int, int, str]
"""Which of three layers, which of its names, and what makes another name of that."""


@dataclass(frozen=True)
class LayerNames:
    """The names that differ between layers.

    Attributes:
        rows: those of each layer.
    """

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "LayerNames | None":
        """Those of rows in which all names at a place are one name, or each is another; None where they are not.

        Names that are equal within one layer are equal within each.
        """
        differing = []
        for column in zip(*rows, strict=True):
            distinct = set(column)
            if len(distinct) == 1:
                continue
            if len(distinct) < len(rows) or "" in distinct:
                return None
            differing.append(column)
        made = tuple(zip(*differing, strict=True)) or ((),) * len(rows)
        if len({_pattern(row) for row in made}) > 1:
            return None
        return cls(made)

    def around(self, layer: int, before: int | None = None, behind: int | None = None) -> Around:
        """The names of a layer, and of those beside it, where these are not others."""
        before = layer - 1 if before is None else before
        behind = layer + 1 if behind is None else behind
        rows = self.rows
        return rows[before] if before >= 0 else None, rows[layer], rows[behind] if behind < len(rows) else None


def _pattern(row: Row) -> tuple[int, ...]:
    first: dict[str, int] = {}
    return tuple(first.setdefault(name, place) for place, name in enumerate(row))


def words_of(text: str) -> Iterator[str]:
    """What may be names in a text."""
    return (piece.rstrip(_BEHIND) for piece in _BETWEEN.split(text))


class Words:
    """Texts about a layer, said of another.

    Args:
        around: the names of the layer that they are about.
    """

    def __init__(self, around: Around) -> None:
        self._slots: dict[str, tuple[int, int]] = {}
        for number in (0, 2, 1):  # The layer's own names count, where they are those of another too.
            for place, name in reversed(tuple(enumerate(around[number] or ()))):
                self._slots[name] = number, place
        self._known: dict[str, list[str | _Slot]] = {}

    def text(self, text: str, around: Around) -> str:
        """A text, or a name."""
        parts = self._parts(text)
        if len(parts) == 1 and isinstance(parts[0], str):
            return text
        return "".join([part if isinstance(part, str) else _name(part, around) for part in parts])

    def optional(self, text: str | None, around: Around) -> str | None:
        """A text, where there is one."""
        return text and self.text(text, around)

    def names_own(self, text: str) -> bool:
        """Whether a text has a name of the layer itself in it."""
        return any(not isinstance(part, str) and part[0] == 1 for part in self._parts(text))

    def decisions(self, decisions: Sequence[Decision], around: Around) -> list[Decision]:
        """Why a value is sharded so."""
        return [
            Decision(self.text(each.why, around), self.optional(each.follows, around), each.axes) for each in decisions
        ]

    def conflict(self, conflict: Conflict, around: Around) -> Conflict:
        """Two sides between which a value is moved."""
        words: dict[str, Any] = {
            name: self.text(text, around) for name, text in vars(conflict).items() if isinstance(text, str)
        }
        return replace(conflict, **words)

    def annotation(self, annotation: Annotation, around: Around) -> Annotation:
        """What a user, or a pass, says of a value."""
        words = {name: self.text(getattr(annotation, name), around) for name in ("pattern", "where", "said")}
        behind = annotation.behind and self.annotation(annotation.behind, around)
        return replace(annotation, **words, behind=behind)  # type: ignore[arg-type]

    def gone(self, gone: Gone, around: Around) -> Gone:
        """What has taken a value out."""
        return Gone(self.annotation(gone.annotation, around), self.text(gone.why, around))

    def _parts(self, text: str) -> list[str | _Slot]:
        known = self._known.get(text)
        if known is None:
            whole = self._slot(text)
            known = self._known[text] = [whole] if whole is not None else self._found(text)
        return known

    def _found(self, text: str) -> list[str | _Slot]:
        found: list[str | _Slot] = []
        for piece in _BETWEEN.split(text):
            word = piece.rstrip(_BEHIND)
            slot = self._slot(word)
            found += [piece] if slot is None else [slot, piece[len(word) :]]
        return found if any(not isinstance(part, str) for part in found) else [text]

    def _slot(self, word: str) -> _Slot | None:
        """Which name a word is, or was made of."""
        suffix = ""
        while word:
            known = self._slots.get(word)
            if known is not None:
                return *known, suffix
            match = NUMBERED.fullmatch(word)
            if match is None:
                break
            word, suffix = match[1], f"_{match[2]}{suffix}"
        return None


def _name(slot: _Slot, around: Around) -> str:
    number, place, suffix = slot
    row = around[number]
    # At an end of the chain there is no layer beside: what is said so is not said of any.
    return "" if row is None else row[place] + suffix
