"""When items come to the device and leave it: the decisions that are written into a program."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from irpar.ir import Graph, Memory, Value

from .items import MovableValue, item_in
from .steps import Steps


@dataclass(frozen=True, eq=False)
class Stay:
    """For how long an item is on the device.

    Attributes:
        begin: the step before which it begins to come; of what a node makes, that of the node.
        first: the first step that needs it.
        last: the last one that does.
        comes: whether it is brought; else it is there from the beginning, or made.
        leaves: whether it is brought elsewhere after the last step.
        gone: the step after which it is gone, if it leaves: the last one, or a later one beside which it goes.
    """

    begin: int
    first: int
    last: int
    comes: bool = True
    leaves: bool = False
    gone: int = -1


@dataclass(frozen=True, eq=False)
class Move:
    """An item that is not on the device all the time.

    Attributes:
        item: it.
        memory: where it lies meanwhile.
        stays: when it is on the device, in order; none where only bodies of loops bring it.
        new_gone: of state that is replaced, the step after which the new one has gone to that memory.
    """

    item: MovableValue
    memory: Memory
    stays: tuple[Stay, ...]
    new_gone: int = -1

    @property
    def to_device(self) -> int:
        """How often it is brought to the device."""
        return sum(stay.comes for stay in self.stays)

    @property
    def from_device(self) -> int:
        """How often it, or what replaces it, is brought away."""
        return sum(stay.leaves for stay in self.stays) + (self.item.replaced is not None)


@dataclass(frozen=True)
class Wish:
    """What is asked for by hand.

    Attributes:
        memory: kind of items to where they lie.
        prefetch: how many steps before their use they begin to come.
        pinned: bytes of weights that stay on the device all the same.
    """

    memory: Mapping[str, Memory] = field(default_factory=dict)
    prefetch: int = 2
    pinned: int = 0

    def moves(self, item: MovableValue) -> bool:
        """Whether an item is to lie elsewhere than on the device."""
        return self.memory.get(item.kind, "device") != "device"


def moves_in(graph: Graph, moves: Iterable[Move]) -> list[Move]:
    """The moves of a copy of their program."""
    return [replace(move, item=item_in(graph, move.item)) for move in moves]


def moves_by_hand(
    items: Sequence[MovableValue], steps: Steps, wish: Wish, pinned: Collection[Value] = frozenset()
) -> list[Move]:
    """The moves that are asked for, but for what is pinned.

    What is read again before it could leave and come back stays: within as many steps as it is brought before its use,
    and one more. With prefetch=1, read in steps 0, 2 and 6:

        step     0    1    2    3    4    5    6
        there   [use ...  use]           [... use]
    """
    moved = [item for item in items if item.value not in pinned and wish.moves(item)]
    found = (_move(item, steps, wish) for item in moved)
    return [move for move in found if move is not None]


def pinned_by_hand(
    items: Iterable[MovableValue], steps: Steps, wish: Wish, often: Callable[[MovableValue], int] = lambda _: 0
) -> set[Value]:
    """Weights that stay: those that would be brought most often, the first ones first.

    Args:
        items: of a program.
        steps: its steps.
        wish: what is asked for.
        often: how often bodies of loops would bring one.
    """

    def times(item: MovableValue) -> int:
        return max(often(item), sum(1 for _ in _groups(item, steps, wish.prefetch)))

    found: set[Value] = set()
    room = wish.pinned
    weights = [item for item in items if item.kind == "weights" and wish.moves(item)]
    for item in sorted(weights, key=lambda item: -times(item)):
        if item.nbytes <= room:
            room -= item.nbytes
            found.add(item.value)
    return found


def _move(item: MovableValue, steps: Steps, wish: Wish) -> Move | None:
    """The move of an item; None for what a node makes that is not away at all."""
    groups = list(_groups(item, steps, wish.prefetch))
    if item.made is not None and len(groups) == 1:
        return None
    beside = min(wish.prefetch, 1)
    stays = []
    for number, (first, last) in enumerate(groups):
        is_made = item.made is not None and number == 0
        begin = first if is_made else steps.before(first, wish.prefetch)
        gone = steps.beside(last, beside)
        stays.append(Stay(begin, first, last, not is_made, is_made, gone))
    new_gone = -1 if item.replaced is None else steps.beside(steps.of(item.replaced_at), beside)
    return Move(item, wish.memory[item.kind], tuple(stays), new_gone)


def _groups(item: MovableValue, steps: Steps, prefetch: int) -> Iterator[tuple[int, int]]:
    """The first and last steps of uses that lie so near that the item stays between them."""
    used = list(dict.fromkeys(map(steps.of, item.touched)))
    if not used:
        return
    first = used[0]
    for before, after in pairwise(used):
        if after - before > prefetch + 1 or steps.has_loop(before + 1, after):
            yield first, before
            first = after
    yield first, used[-1]
