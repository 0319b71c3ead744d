"""When the copies of chosen gaps run: as late as they may without being waited for, and as early as there is room."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from irpar.ir import Memory

from .gaps import Gap, Gaps, Numbers
from .moves import Move, Stay
from .timeline import Rates


@dataclass(eq=False)
class _PlannedStay:
    """A stay that is being planned: `begin` and `gone` move; it may not begin before `floor`."""

    item: int
    first: int
    last: int
    comes: bool
    leaves: bool
    begin: int
    gone: int
    floor: int


class Lead:
    """Plans copies within the room that is left.

    Args:
        gaps: of the program.
        chosen: which of them, by number.
        seconds: that steps take.
        rates: of copies.
    """

    def __init__(self, gaps: Gaps, chosen: Numbers, seconds: Sequence[float], rates: Rates) -> None:
        self.gaps, self.seconds, self.rates = gaps, seconds, rates
        self.slack = gaps.room.limit - gaps.held(chosen)
        self.starts = np.concatenate([[0.0], np.cumsum(seconds)]).tolist()
        self.by_item: dict[int, list[Gap]] = {}
        for number in np.flatnonzero(chosen):
            gap = gaps.all[number]
            self.by_item.setdefault(gap.item, []).append(gap)
        self.memory = self._memories()
        self.parts = [part for number, own in self.by_item.items() for part in self._parts(number, own)]
        self.new_gone: dict[int, int] = {}

    def moves(self) -> tuple[Move, ...]:
        """The moves."""
        self._bring()
        self._take_away()
        stays: dict[int, list[Stay]] = {}
        for part in self.parts:
            stay = Stay(part.begin, part.first, part.last, part.comes, part.leaves, part.gone)
            stays.setdefault(part.item, []).append(stay)
        return tuple(
            Move(
                self.gaps.items[number],
                self.memory[number],
                tuple(stays.get(number, ())),
                self.new_gone.get(number, -1),
            )
            for number in self.by_item
        )

    def _memories(self) -> Mapping[int, Memory]:
        """Where items lie: by first choice; once that has no more room, what is copied least goes to the second.

        Where some then find no room at all, the largest ones choose first.
        """
        often = sorted(self.by_item, key=lambda number: (-len(self.by_item[number]), number))
        found, fits = self._chosen(often)
        if not fits:
            large = sorted(self.by_item, key=lambda number: (-self.gaps.items[number].nbytes, number))
            other, fits = self._chosen(large)
            found = other if fits else found
        return found

    def _chosen(self, order: Sequence[int]) -> tuple[dict[int, Memory], bool]:
        """Where items lie that choose in an order, those first that have no choice; and whether all have room."""
        room, fits = self.gaps.room, True
        left = {"host": room.host, "disk": room.disk}
        found: dict[int, Memory] = {}
        for number in sorted(order, key=lambda number: len(room.memory[self.gaps.items[number].kind]) > 1):
            item = self.gaps.items[number]
            choices = room.memory[item.kind]
            able = [memory for memory in choices if (size := left[memory]) is None or item.nbytes <= size]
            found[number] = memory = (able or choices)[0]
            fits = fits and bool(able)
            if (size := left[memory]) is not None:
                left[memory] = size - item.nbytes
        return found, fits

    def _parts(self, number: int, own: Sequence[Gap]) -> list[_PlannedStay]:
        """The stays of an item between its gaps."""
        item, used = self.gaps.items[number], self.gaps.used[number]
        if not used:
            return []
        starts = [used[0], *(gap.before for gap in own if not gap.is_around)]
        ends = [*starts[1:], self.gaps.steps.count]
        found: list[_PlannedStay] = []
        for place, (first, end) in enumerate(zip(starts, ends, strict=True)):
            last = max(step for step in used if first <= step < end)
            is_made = item.made is not None and place == 0
            floor = found[-1].last + 1 if found else 0
            found.append(_PlannedStay(number, first, last, not is_made, is_made, first, last, floor))
        return found

    def _bring(self) -> None:
        """From the last one on, let what comes begin so that it is there in time and before what comes later."""
        free = float("inf")
        for part in sorted((part for part in self.parts if part.comes), key=lambda part: (-part.first, part.item)):
            nbytes = self.gaps.items[part.item].nbytes
            takes = self.rates.coming(nbytes, self.memory[part.item])
            begins = min(self.starts[part.first], free) - takes
            wanted = max(bisect_right(self.starts, begins) - 1, part.floor)
            for step in range(part.first - 1, wanted - 1, -1):
                if self.slack[step] < nbytes:
                    break
                part.begin = step
            self.slack[part.begin : part.first] -= nbytes
            free = max(begins, self.starts[part.begin])

    def _take_away(self) -> None:
        """Let what leaves go beside the next steps, where it may stay so long."""
        comes_back: dict[int, int] = {}
        for part in reversed(self.parts):
            if part.leaves:
                part.gone = self._until(part.item, part.last, part.last, comes_back[part.item])
            comes_back[part.item] = part.begin
        for number in self.by_item:
            item = self.gaps.items[number]
            if item.replaced is not None:
                made, read = self.gaps.steps.of(item.replaced_at), self.gaps.steps.of(item.replaced_until)
                self.new_gone[number] = self._until(number, made, read, self.gaps.steps.count)

    def _until(self, number: int, last: int, stays: int, before: int) -> int:
        """The step beside which something has gone that goes after `last`.

        It is there until the step `stays` in any case, and comes back from `before` on.
        """
        nbytes = self.gaps.items[number].nbytes
        takes = self.rates.going(nbytes, self.memory[number])
        until = last
        while takes > 0 and until + 1 < before and (until < stays or self.slack[until + 1] >= nbytes):
            until += 1
            takes -= self.seconds[until]
        self.slack[stays + 1 : until + 1] -= nbytes
        return until
