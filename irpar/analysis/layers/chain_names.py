"""What is said of one layer, said of another: names in texts are those of the layer, or of the ones beside it.

rows        ["/h.0/fc", "h.0.fc.weight"], ["/h.1/fc", "h.1.fc.weight"], ["/h.2/fc", "h.2.fc.weight"] ...
of layer 1  "follows %h.1.fc.weight through MatMul /h.1/fc"
of layer 2  "follows %h.2.fc.weight through MatMul /h.2/fc"
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from irpar.ir import Annotation, Conflict, Decision, Gone
from irpar.ir.value import made_of

_BETWEEN = re.compile(r"""([\s%"(),;]+)""")
"""What stands between names in a text."""
_BEHIND = ".:"
"""What may stand behind a name in a text."""

Row = Sequence[str]
"""The names of one layer, those at one place alike."""
Around = tuple[Row, Row, Row]
"""The names of a layer, between those of the layers before and behind it; empty ones beyond the ends of the chain."""
_OWN = 1
"""Which of the three the layer is."""
_Slot = tuple[int, int, str]
"""Which of three layers, which of its names, and what follows it."""
_Template = tuple[str, tuple[_Slot, ...]]
"""What a text begins with, and the names in it."""
Said = Callable[[Any, Around], Any]
"""Makes of an entry of a log what it is for another layer, or with all layers."""


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
        rows, nameless = self.rows, ("",) * len(self.rows[layer])
        return rows[before] if before >= 0 else nameless, rows[layer], rows[behind] if behind < len(rows) else nameless


def _pattern(row: Row) -> tuple[int, ...]:
    first = dict(zip(reversed(row), reversed(range(len(row))), strict=True))
    return tuple(map(first.__getitem__, row))


def words_of(text: str) -> list[str]:
    """What may be names in a text."""
    return [piece.rstrip(_BEHIND) for piece in pieces_of(text)[::2]]


def pieces_of(text: str) -> list[str]:
    """A text in pieces, which are in turn what may be a name, and what stands between."""
    return _BETWEEN.split(text)


def with_word(piece: str, other: Callable[[str], str]) -> str:
    """A piece of a text with another word in it."""
    word = piece.rstrip(_BEHIND)
    return other(word) + piece[len(word) :]


class Words:
    """Texts about a layer, said of another.

    Args:
        around: the names of the layer that they are about.
    """

    def __init__(self, around: Around) -> None:
        self._slots: dict[str, tuple[int, int]] = {}
        for number in (0, 2, _OWN):  # The layer's own names count, where they are those of another too.
            for place, name in reversed(tuple(enumerate(around[number]))):
                if name:
                    self._slots[name] = number, place
        self._known: dict[str, _Template] = {}

    def text(self, text: str, around: Around) -> str:
        """A text, or a name."""
        known = self._known.get(text)
        begin, slots = self._learn(text) if known is None else known
        if not slots:
            return text
        return begin + "".join([around[layer][place] + end for layer, place, end in slots])

    def texts(self, text: str, arounds: Sequence[Around]) -> Sequence[str]:
        """A text, for each of several layers."""
        begin, slots = self._known.get(text) or self._learn(text)
        if not slots:
            return (text,) * len(arounds)
        if len(slots) > 1:
            return [self.text(text, around) for around in arounds]
        ((layer, place, end),) = slots
        return [begin + around[layer][place] + end for around in arounds]

    def optional(self, text: str | None, around: Around) -> str | None:
        """A text, where there is one."""
        return text and self.text(text, around)

    def names_own(self, text: str) -> bool:
        """Whether a text has a name of the layer itself in it."""
        _, slots = self._known.get(text) or self._learn(text)
        return any(layer == _OWN for layer, _, _ in slots)

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
        texts = annotation.pattern, annotation.where, annotation.said
        its = pattern, where, said = tuple([self.text(text, around) for text in texts])
        behind = annotation.behind and self.annotation(annotation.behind, around)
        if its == texts and behind is annotation.behind:
            return annotation
        return replace(annotation, pattern=pattern, where=where, said=said, behind=behind)

    def gone(self, gone: Gone, around: Around) -> Gone:
        """What has taken a value out."""
        return Gone(self.annotation(gone.annotation, around), self.text(gone.why, around))

    def _learn(self, text: str) -> _Template:
        whole = self._slot(text)
        known = self._known[text] = ("", (whole,)) if whole is not None else self._found(text)
        return known

    def _found(self, text: str) -> _Template:
        begin, slots = "", list[_Slot]()
        for piece in _BETWEEN.split(text):
            word = piece.rstrip(_BEHIND)
            slot = self._slot(word)
            if slot is not None:
                layer, place, end = slot
                slots.append((layer, place, end + piece[len(word) :]))
            elif slots:
                layer, place, end = slots[-1]
                slots[-1] = layer, place, end + piece
            else:
                begin += piece
        return begin, tuple(slots)

    def _slot(self, word: str) -> _Slot | None:
        """Which name a word is, or was made of."""
        for name in made_of(word):
            known = self._slots.get(name)
            if known is not None:
                return *known, word[len(name) :]
        return None
