"""Names with a number that counts on from layer to layer: `n_4` and `n_5` in one, `n_6` and `n_7` in the next.

Who makes a value for a layer and names it after something that all layers share gets the next free number. Where
gradients are computed the last layer comes first: numbers fall from layer to layer.
"""

from collections.abc import Callable, Collection, Container, Iterator, Mapping

from irpar.ir.value import NUMBERED, Names, made_of

from .chain import FIRST, LAST, MODEL
from .chain_names import pieces_of, with_word, words_of


class NumberedNames:
    """The names that count on in a folded module, and what they are with all layers.

    Args:
        steps: of such names of the layer that stands for others, by how much the numbers grow, or fall, from layer to
            layer.
        more: how many layers it stands for, besides itself.
    """

    def __init__(self, steps: Mapping[str, int], more: int) -> None:
        self.steps = steps
        self.more = more
        self.is_regular = True
        self._runs: dict[str, list[tuple[int, int]]] = {}
        """Per name without number the first number of each run of a layer, and its step."""
        self._are_in: dict[str, bool] = {}
        """What `is_in` has found, per text."""
        found: dict[str, dict[int, int]] = {}
        for name, step in steps.items():
            base, number = _split(name)
            found.setdefault(base, {})[number] = step
        for base, numbers in found.items():
            self._runs[base] = self._runs_of(numbers)

    def _runs_of(self, numbers: Mapping[int, int]) -> list[tuple[int, int]]:
        runs, ordered = [], sorted(numbers)
        while ordered:
            first, step = ordered[0], numbers[ordered[0]]
            run = [number for number in ordered[: abs(step)] if number < first + abs(step)]
            self.is_regular &= all(numbers[number] == step for number in run)
            ordered = ordered[len(run) :]
            runs.append((first, step))
        return runs

    def is_of_layers(self, base: str, number: int) -> bool:
        """Whether a number is one that layers which are planned have had, though values have other names now."""
        before = (
            number - first + (MODEL if step > 0 else LAST) * abs(step) for first, step in self._runs.get(base, ())
        )
        sizes = ((FIRST + LAST) * abs(step) for _, step in self._runs.get(base, ()))
        return any(0 <= number < size for number, size in zip(before, sizes, strict=True))

    def counts(self, name: str) -> bool:
        """Whether a name may be one of those, of this layer or another."""
        if not name[-1:].isdigit():  # Most words of texts are no such names.
            return False
        match = NUMBERED.fullmatch(name)
        runs = () if match is None else self._runs.get(match[1], ())
        return match is not None and any(int(match[2]) >= _first_of(run) for run in runs)

    def of_layers(self, name: str, count: int) -> list[str]:
        """What a name of the layer is in that layer, and in those behind it, so many in all."""
        base, number = _split(self.shifted(name))
        step = self.steps[name]
        return [f"{base}_{number + further * step}" for further in range(count)]

    def shifted(self, name: str) -> str:
        """What a name of the folded module is with all layers."""
        base, number = _split(name)
        before = (abs(step) for first, step in self._runs[base] if number >= first + max(step, 0))
        return with_number(name, self.more * sum(before))

    def given(self, names: Collection[str]) -> Iterator[str]:
        """All names from the first that counts on to the last one that there is with all layers.

        Args:
            names: those of the folded module.
        """
        greatest: dict[str, int] = {}
        for match in filter(None, map(NUMBERED.fullmatch, names if self._runs else ())):
            greatest[match[1]] = max(greatest.get(match[1], 0), int(match[2]))
        for base, runs in self._runs.items():
            last = greatest.get(base, 0) + self.more * sum(abs(step) for _, step in runs)
            yield from (f"{base}_{number}" for number in range(runs[0][0], last + 1))

    def is_in(self, text: str) -> bool:
        """Whether a text names such a value."""
        known = self._are_in.get(text)
        if known is None:
            known = self._are_in[text] = bool(self._runs) and any(map(self.counts, words_of(text)))
        return known

    def is_clear(self, text: str, names: Container[str]) -> bool:
        """Whether it names, of those that count, values alone, and none of the layer that stands for others."""
        return all(word in names and word not in self.steps for word in words_of(text) if self.counts(word))

    def text(self, text: str) -> str:
        """A text, with the names in it that values have with all layers; it is clear."""
        if not self.is_in(text):
            return text
        return "".join(
            with_word(piece, lambda word: self.shifted(word) if self.counts(word) else word)
            for piece in pieces_of(text)
        )


def _first_of(run: tuple[int, int]) -> int:
    """The first number of the layers that are planned."""
    first, step = run
    return first - (MODEL if step > 0 else LAST) * abs(step)


def first_hidden(names: Names, had: Callable[[str], bool], own: Collection[str], numbered: NumberedNames) -> str | None:
    """A name that a new value has had and that nothing has any more, before the last one like it; None: there is none.

    The layers that are planned have had as many in a row: where fewer follow each other, no layer has had one.

    Args:
        names: those of a program.
        had: whether the model had a name before.
        own: names of layers: who names a new value after one of these counts for this layer alone.
        numbered: names that count on, with those between them.
    """
    last: dict[str, int] = {}
    for name in names.table:
        match = NUMBERED.fullmatch(name)
        if match is not None and int(match[2]) <= names.counted(match[1]) and not had(name):
            last[match[1]] = max(last.get(match[1], 0), int(match[2]))
    for base, number in last.items():
        if any(name in own for name in made_of(base)):
            continue
        row: list[str] = []
        for name in (f"{base}_{before}" for before in range(1, number) if not numbered.is_of_layers(base, before)):
            row = [] if name in names.table else row if had(name) else [*row, name]
            if len(row) == FIRST + LAST:
                return row[0]
    return None


def with_number(name: str, more: int) -> str:
    """A numbered name with a number that is so much greater."""
    base, number = _split(name)
    return f"{base}_{number + more}"


def _split(name: str) -> tuple[str, int]:
    match = NUMBERED.fullmatch(name)
    assert match is not None
    return match[1], int(match[2])
