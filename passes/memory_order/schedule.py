"""Orders of a program's nodes in which less is held at once."""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from .program import Program

_MOST_ROUNDS = 8

Order = list[int]
Key = Callable[[int, int], tuple[int, int]]
"""What is done first, by what a node adds to what is held, and its place in the order that is to be improved."""


def least_peak(program: Program) -> Order:
    """The best order that is found: that of the program's own numbers where none has a lower peak.

    Barriers come where they are in all of them.
    """
    backward = program.reversed()
    best = _in_order(program, list(range(len(program.touches))))
    least = peak_of(program, best)
    for _ in range(_MOST_ROUNDS):
        tried = [(peak_of(program, order), order) for order in _tried(program, backward, best)]
        lowest, order = min(tried, key=lambda one: one[0])
        if lowest >= least:
            break
        least, best = lowest, order
    return best


def peak_of(program: Program, order: Sequence[int]) -> int:
    """The most bytes that are held at once in an order."""
    left = [len(nodes) for nodes in program.touched]
    is_held = [buffer in program.at_start for buffer in range(len(left))]
    most = held = sum(program.sizes[buffer] for buffer in program.at_start)
    for node in order:
        for buffer in program.touches[node]:
            if not is_held[buffer]:
                is_held[buffer] = True
                held += program.sizes[buffer]
        most = max(most, held + program.inside[node])
        for buffer in program.touches[node]:
            left[buffer] -= 1
            if not left[buffer] and buffer not in program.at_end:
                held -= program.sizes[buffer]
    return most


def _in_order(program: Program, rank: Sequence[int]) -> Order:
    """The nodes by rank, as far as they can follow each other so."""
    return _greedy(program, rank, lambda _, rank: (0, rank))


def _tried(program: Program, backward: Program, order: Order) -> Iterator[Order]:
    """Orders that may be better than one."""

    def early(given: Order, key: Key) -> Order:
        return _greedy(program, _ranks(given), key)

    def late(given: Order, key: Key) -> Order:
        return _greedy(backward, _ranks(given[::-1]), key)[::-1]

    for key in (_shrinking_first, _least_first):
        yield early(order, key)
        yield late(order, key)
    yield early(late(order, _shrinking_first), _shrinking_first)
    yield late(early(order, _shrinking_first), _shrinking_first)


def _shrinking_first(added: int, rank: int) -> tuple[int, int]:
    return (0 if added < 0 else 1, rank)


def _least_first(added: int, rank: int) -> tuple[int, int]:
    return (added, rank)


def _ranks(order: Order) -> list[int]:
    ranks = [0] * len(order)
    for rank, node in enumerate(order):
        ranks[node] = rank
    return ranks


def _greedy(program: Program, ranks: Sequence[int], key: Key) -> Order:
    """Of all nodes that can be next always the one whose key is least. What a node adds changes as others run."""
    touches, touched, sizes = program.touches, program.touched, program.sizes
    left = [len(nodes) for nodes in touched]
    others = [sum(nodes) for nodes in touched]  # The sum of those left: the last one, where that is alone.
    is_held = [buffer in program.at_start for buffer in range(len(left))]
    added = [0] * len(touches)
    for buffer, nodes in enumerate(touched):
        for node in nodes:
            added[node] += 0 if is_held[buffer] else sizes[buffer]
        if len(nodes) == 1 and buffer not in program.at_end:
            added[nodes[0]] -= sizes[buffer]
    waits = [0] * len(touches)
    for followers in program.followers:
        for follower in followers:
            waits[follower] += 1
    ready = [(key(added[node], ranks[node]), node) for node, count in enumerate(waits) if not count]
    heapify(ready)
    is_done = [False] * len(touches)
    order: Order = []

    def change(node: int, size: int) -> None:
        added[node] -= size
        if not waits[node]:
            heappush(ready, (key(added[node], ranks[node]), node))

    while ready:
        _, node = heappop(ready)
        if is_done[node]:  # It was better meanwhile, and so came before.
            continue
        is_done[node] = True
        order.append(node)
        for buffer in touches[node]:
            left[buffer] -= 1
            others[buffer] -= node
            if not is_held[buffer]:
                is_held[buffer] = True
                for other in touched[buffer]:
                    if not is_done[other]:
                        change(other, sizes[buffer])
            if left[buffer] == 1 and buffer not in program.at_end:
                change(others[buffer], sizes[buffer])
        for follower in program.followers[node]:
            waits[follower] -= 1
            if not waits[follower]:
                heappush(ready, (key(added[follower], ranks[follower]), follower))
    return order
