"""What a module tells of why its values are as they are: of a few layers, then of all."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from irpar.ir import Annotation, Gone, Module

from .chain import MODEL
from .chain_names import Around, Said, Words
from .layer_texts import LayerTexts
from .numbered_names import NumberedNames, with_number
from .planned_program import PlannedProgram
from .units import NotAlike


class _Elsewhere(Words):
    """Texts about what belongs to no layer, with the names in them that values have with all layers."""

    def __init__(self, numbered: NumberedNames) -> None:
        super().__init__(((), (), ()))
        self._numbered = numbered

    def text(self, text: str, around: Around) -> str:
        """A text."""
        return self._numbered.text(text)


class LayerLog:
    """What a folded module tells of its values, which becomes what it tells of those of all layers.

    Args:
        folded, whole: as for `unfold`.
        texts: of the layers.
        program: one of the programs.
    """

    def __init__(self, folded: Module, whole: Module, texts: LayerTexts, program: PlannedProgram) -> None:
        self.chain = program.chain
        self.texts = texts
        self.numbered = numbered = texts.numbered
        self.program = program
        self.words = words = program.words
        elsewhere = _Elsewhere(numbered)
        self.tables: list[tuple[dict[str, Any], dict[str, Any], Said, Said]] = [
            (folded.decisions, {}, words.decisions, elsewhere.decisions),
            (folded.annotated, {}, words.annotation, elsewhere.annotation),
            (folded.conflicts, whole.conflicts, words.conflict, elsewhere.conflict),
            (folded.whole, whole.whole, words.text, elsewhere.text),
            (folded.gone, whole.gone, words.gone, elsewhere.gone),
        ]
        self.own = [
            {name: None for name in table if words.names_own(name) and name not in before}
            for table, before, *_ in self.tables
        ]  # fmt: skip

    def check(self) -> None:
        """Refuse a log that tells other things of the layers that should be alike.

        Raises:
            NotAlike: see there.
        """
        near: set[str] = set()
        for number in (MODEL - 1, MODEL, MODEL + 1):
            around = self.program.folded_names(number)
            words = Words(around)
            for own, (table, before, said, _) in zip(self.own, self.tables, strict=True):
                for name in own:
                    if table.get(self.words.text(name, around)) != said(table[name], around):
                        raise NotAlike(f"%{name} is explained otherwise than in another layer")
                its = [name for name in table if words.names_own(name) and name not in before]
                if len(its) != len(own):
                    raise NotAlike("the log tells more of one layer than of another")
                near.update(its)
                for name, step in self.numbered.steps.items():
                    other = with_number(name, step * (number - MODEL))
                    if (name in table) != (other in table):
                        raise NotAlike(f"%{name} is explained, and %{other} is not")
                    if name in table and table[other] != said(table[name], around):
                        raise NotAlike(f"%{name} is explained otherwise than in another layer")
        self._check_others(near)

    def _check_others(self, near: Set[str]) -> None:
        """What is said of layers names no value that counts on, and what is said elsewhere none of the layer."""
        for table, *_ in self.tables:
            for name, entry in table.items():
                is_near = name in near or self.numbered.counts(name)
                for text in _texts(entry):
                    if self.program.is_of_one_layer(text, self.numbered, is_near=is_near):
                        raise NotAlike(f"%{name} is explained with a value of one layer")

    def write(self) -> None:
        """Let the log tell the same of all layers."""
        nowhere = (), (), ()
        for own, (table, _, said, elsewhere) in zip(self.own, self.tables, strict=True):
            entries = dict(table)
            table.clear()
            run: dict[str, Any] = {}
            for name, entry in entries.items():
                if name in own or name in self.numbered.steps:
                    run[name] = entry
                    continue
                self._repeat(table, run, said)
                run = {}
                table[self.numbered.shifted(name) if self.numbered.counts(name) else name] = elsewhere(entry, nowhere)
            self._repeat(table, run, said)
            beside = self.chain.names.around(self.chain.kept[MODEL + 1])
            table.update({self.words.text(name, beside): said(entries[name], beside) for name in own})

    def _repeat(self, table: dict[str, Any], entries: Mapping[str, Any], said: Said) -> None:
        """Put in what a log tells of the layer that stands for others, for each of these."""
        names = [self.texts.name(name) for name in entries]
        its = [self.texts.entries(entry, said) for entry in entries.values()]
        for named, told in zip(zip(*names, strict=True), zip(*its, strict=True), strict=True):
            table.update(zip(named, told, strict=True))


def _texts(entry: Any) -> Iterator[str]:
    """What an entry of a log says."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, list):
        for each in entry:
            yield from (each.why, each.follows or "")
    elif isinstance(entry, Gone):
        yield from (entry.why, entry.annotation.pattern, entry.annotation.said)
    elif isinstance(entry, Annotation):
        yield from (entry.pattern, entry.said)
    else:
        yield from (text for text in vars(entry).values() if isinstance(text, str))
