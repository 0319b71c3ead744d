"""What is said of the layer that stands for others, said of each of these: every text is made for all of them at once.

text           "follows %h.2.fc.weight"
of the layers  ["follows %h.2.fc.weight", "follows %h.3.fc.weight", "follows %h.4.fc.weight" ...]
"""

from collections.abc import Iterable, Sequence
from typing import Any

from irpar.ir import Decision, Node, Value
from irpar.ir.clone import NodeTexts, ValueTexts

from .chain import MODEL, Chain
from .chain_names import Said, Words
from .numbered_names import NumberedNames


class LayerTexts:
    """Texts of the layers, the one that stands for the others first.

    Args:
        chain: with the layers.
        words: texts about the one that stands for the others.
        numbered: names that count on.
    """

    def __init__(self, chain: Chain, words: Words, numbered: NumberedNames) -> None:
        self.words = words
        self.numbered = numbered
        self.arounds = [chain.names.around(layer) for layer in (MODEL, *chain.left_out)]
        self._texts: dict[str, Sequence[str]] = {}
        self._names: dict[str, Sequence[str]] = {}
        self._decisions: dict[Decision, Sequence[Decision]] = {}

    def of(self, text: str) -> Sequence[str]:
        """A text."""
        known = self._texts.get(text)
        if known is None:
            known = self._texts[text] = self.words.texts(text, self.arounds)
        return known

    def optional(self, text: str | None) -> Sequence[str | None]:
        """A text, where there is one."""
        return (None,) * len(self.arounds) if text is None else self.of(text)

    def name(self, name: str) -> Sequence[str]:
        """The name of a value, which may count on."""
        known = self._names.get(name)
        if known is None:
            counts_on = name in self.numbered.steps
            known = self.numbered.of_layers(name, len(self.arounds)) if counts_on else self.of(name)
            self._names[name] = known
        return known

    def node(self, node: Node) -> list[NodeTexts]:
        """What a node is called."""
        texts = self.of(node.name), self.optional(node.source), self.optional(node.scope), self.of(node.doc)
        return list(zip(*texts, strict=True))

    def value(self, value: Value, name: str) -> list[ValueTexts]:
        """What a value is called, which has that name."""
        return list(zip(self.name(name), self.optional(value.source), self.of(value.doc), strict=True))

    def decisions(self, decisions: Sequence[Decision]) -> list[list[Decision]]:
        """Why a value is sharded so."""
        return list(map(list, zip(*map(self._decision, decisions), strict=True))) or [[] for _ in self.arounds]

    def entries(self, entry: Any, said: Said) -> Iterable[Any]:
        """An entry of a log."""
        if isinstance(entry, list):
            return self.decisions(entry)
        return [said(entry, around) for around in self.arounds]

    def _decision(self, decision: Decision) -> Sequence[Decision]:
        known = self._decisions.get(decision)
        if known is None:
            texts = zip(self.of(decision.why), self.optional(decision.follows), strict=True)
            known = self._decisions[decision] = [Decision(why, follows, decision.axes) for why, follows in texts]
        return known
