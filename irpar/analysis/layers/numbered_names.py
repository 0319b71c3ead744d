"""Names with a number that counts on from layer to layer: `n_4` and `n_5` in one, `n_6` and `n_7` in the next.

Who makes a value for a layer and names it after something that all layers share gets the next free number.
"""

from collections.abc import Callable, Collection, Iterator, Mapping

from irpar.ir.value import NUMBERED, Names, made_of

from .chain_names import words_of

ALIKE = 3
"""Layers that come out alike: the one that stands for others, and those beside it."""


class NumberedNames:
    """The names that count on in a folded module, and what they are with all layers.

    Args:
        steps: of such names of the layer that stands for others, by how much the numbers grow from layer to layer.
        more: how many layers it stands for, besides itself.
    """

    def __init__(self, steps: Mapping[str, int], more: int) -> None:
        self.steps = steps
        self.more = more
        self.is_regular = True
        self._runs: dict[str, list[tuple[int, int]]] = {}
        """Per name without number the first number of each run of a layer, and how long it is."""
        found: dict[str, dict[int, int]] = {}
        for name, step in steps.items():
            base, number = _split(name)
            found.setdefault(base, {})[number] = step
        for base, numbers in found.items():
            self._runs[base] = self._runs_of(numbers)

    def _runs_of(self, numbers: Mapping[int, int]) -> list[tuple[int, int]]:
        runs, ordered = [], sorted(numbers)
        while ordered:
            step = numbers[ordered[0]]
            run, ordered = ordered[:step], ordered[step:]
            is_run = run == list(range(run[0], run[0] + step)) and all(numbers[number] == step for number in run)
            self.is_regular &= is_run
            runs.append((run[0], step))
        return runs

    def counts(self, name: str) -> bool:
        """Whether a name may be one of those, of this layer or another."""
        match = NUMBERED.fullmatch(name)
        return match is not None and match[1] in self._runs

    def of_layer(self, name: str, further: int) -> str:
        """What a name of the layer is in one that is so many layers further."""
        return with_number(self.shifted(name), further * self.steps[name])

    def shifted(self, name: str) -> str:
        """What a name of the folded module is with all layers."""
        base, number = _split(name)
        return with_number(name, sum(step * self.more for first, step in self._runs[base] if number >= first + step))

    def given(self, names: Collection[str]) -> Iterator[str]:
        """All names from the first that counts on to the last one that there is with all layers.

        Args:
            names: those of the folded module.
        """
        for base, runs in self._runs.items():
            numbers = [int(match[2]) for name in names if (match := NUMBERED.fullmatch(name)) and match[1] == base]
            last = max(numbers, default=0) + self.more * sum(step for _, step in runs)
            yield from (f"{base}_{number}" for number in range(runs[0][0], last + 1))

    def is_in(self, text: str) -> bool:
        """Whether a text names such a value."""
        return bool(self._runs) and any(self.counts(word) for word in words_of(text))


def first_hidden(names: Names, had: Callable[[str], bool], own: Collection[str]) -> str | None:
    """A name that a new value has had and that nothing has any more, before the last one like it; None: there is none.

    Where there are fewer of them than layers that came out alike, no layer has had one.

    Args:
        names: those of a program.
        had: whether the model had a name before.
        own: names of layers: who names a new value after one of these counts for this layer alone.
    """
    last: dict[str, int] = {}
    for name in names.table:
        match = NUMBERED.fullmatch(name)
        if match is not None and match[1] in names.hints and not had(name):
            last[match[1]] = max(last.get(match[1], 0), int(match[2]))
    for base, number in last.items():
        numbered = (f"{base}_{before}" for before in range(1, number))
        hidden = [name for name in numbered if name not in names.table and not had(name)]
        if len(hidden) >= ALIKE and not any(name in own for name in made_of(base)):
            return hidden[0]
    return None


def with_number(name: str, more: int) -> str:
    """A numbered name with a number that is so much greater."""
    base, number = _split(name)
    return f"{base}_{number + more}"


def _split(name: str) -> tuple[str, int]:
    match = NUMBERED.fullmatch(name)
    assert match is not None
    return match[1], int(match[2])
