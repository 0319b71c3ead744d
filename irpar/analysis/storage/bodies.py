"""Bodies of loops that bring what they read from around them by themselves, in each trip.

    g = Scan(0, xs) { s, x -> a = f(x, w0); b = f(a, w1); ...; c = f(b, w9); s + c }

With w0 to w9 in host memory, all of them are on the device while the Scan runs, if the program brings them. If the body
does, it holds two or three at once, and each trip copies them again. What nodes of the body make may leave and come
back within a trip, too. A loop that stands in another one, or in a branch, is a node like others.
"""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from irpar.analysis.cost.model import CostOf
from irpar.analysis.into_loops import is_loop, move_into_loops, only_rearranges
from irpar.analysis.memory.liveness import peak
from irpar.analysis.newest import view_roots
from irpar.analysis.types.control_flow import assumed_trips
from irpar.ir import Graph, Memory, Node, Value, captured_or_read
from irpar.ir.clone import clone_graph
from irpar.ops.coords import root_of

from .items import MovableValue, items_of, reads_of
from .moves import Move, Wish, moves_by_hand, moves_in
from .rewriting import write_moves
from .steps import Steps, steps_of_layers, steps_of_reads
from .timeline import Rates, Timeline, seconds_of_steps, timeline


@dataclass(frozen=True)
class LoopBody:
    """The body of a loop, as a program of its own.

    Attributes:
        node: the loop.
        graph: its body.
        items: what may move in it: first those of the program around it that only its nodes read of the loop.
        steps: of the body.
    """

    node: Node
    graph: Graph
    items: tuple[MovableValue, ...]
    steps: Steps

    @property
    def trips(self) -> int:
        """How often it runs; once where nobody knows."""
        return assumed_trips(self.node)

    def moves_by_hand(self, wish: Wish, pinned: Collection[Value]) -> tuple[Move, ...]:
        """The moves that are asked for, but of what would be there in each step: the program brings that once."""
        found = moves_by_hand(self.items, self.steps, wish, pinned)
        last = self.steps.count - 1
        return tuple(move for move in found if not (self._is_outer(move.item) and _is_always_there(move, last)))

    def brings(self, moves: Sequence[Move]) -> set[Value]:
        """The values of the program around it that moves are of."""
        return {move.item.value for move in moves if self._is_outer(move.item)}

    def captured_bytes(self, kinds: Container[str]) -> int:
        """Bytes of the items of some kinds of the program around it."""
        return sum(item.nbytes for item in self.items if self._is_outer(item) and item.kind in kinds)

    def held_after(self, moves: Sequence[Move], kinds: Container[str]) -> int:
        """What the device holds of the body with moves, by its liveness, and of the program's items that they leave."""
        program = root_of(self.graph)
        place = next(place for place, node in enumerate(program) if node is self.node)
        trial = clone_graph(program)
        node = next(node for number, node in enumerate(trial) if number == place)
        (body,) = node.nested_graphs()
        write_moves(body, self.steps, moves_in(trial, moves))
        brought = sum(item.nbytes for item in self.items if item.value in self.brings(moves))
        return peak(body).total_bytes + self.captured_bytes(kinds) - brought

    def seconds(self, cost_of: CostOf) -> list[float]:
        """What each step takes in one trip."""
        return [each / max(self.trips, 1) for each in seconds_of_steps(self.graph, self.steps, cost_of)]

    def timed(self, moves: Sequence[Move], cost_of: CostOf, rates: Rates) -> "BodyMoves":
        """Moves, and how long they take."""
        one = timeline(moves, self.steps, self.seconds(cost_of), rates)
        return BodyMoves(self, tuple(moves), Timeline(*(self.trips * each for each in astuple(one))))

    def write(self, moves: Sequence[Move]) -> None:
        """Write moves into the body."""
        write_moves(self.graph, self.steps, moves)

    def _is_outer(self, item: MovableValue) -> bool:
        return item.value.owner is not self.graph


@dataclass(frozen=True)
class BodyMoves:
    """What was written into the body of a loop.

    Attributes:
        body: that.
        moves: what comes and goes in each trip.
        timeline: how long that takes, of all trips.
    """

    body: LoopBody
    moves: tuple[Move, ...]
    timeline: Timeline

    def own_bytes(self, memory: Memory) -> int:
        """Bytes in a memory that only the body has there; where what it brings lies is for the program to say."""
        brought = self.body.brings(self.moves)
        own = (move for move in self.moves if move.item.value not in brought)
        return sum(move.item.nbytes for move in own if move.memory == memory)


def let_bodies_make(graph: Graph, values: Collection[Value]) -> bool:
    """Let bodies of loops make by themselves what only moves or rounds elements of weights that they may bring.

    Args:
        graph: the program.
        values: the weights.

    Returns:
        Whether something changed.
    """
    made, found = dict.fromkeys(values), list[Node]()
    for node in graph:
        source = node.inputs[0] if node.inputs else None
        if source in made and (only_rearranges(node) or node.identity == ("", "Cast")):
            made[node.result] = None
            found.append(node)
    return move_into_loops(graph, found)


def _is_always_there(move: Move, last: int) -> bool:
    return len(move.stays) == 1 and move.stays[0].begin == 0 and move.stays[0].last == last


def loop_bodies(graph: Graph, items: Sequence[MovableValue], least: int, *, by_layers: bool) -> Iterator[LoopBody]:
    """The bodies of the loops of a program that run on the device.

    Args:
        graph: the program.
        items: what may move in it.
        least: bytes of the smallest that may.
        by_layers: whether steps are those of layers; else they are the shortest.
    """
    known = {item.value: item for item in items if item.made is None}
    roots = view_roots(graph)
    for node in graph:
        if is_loop(node):
            (body,) = node.nested_graphs()
            # What the loop begins with, or a view of it is read in the body, has to be there for it.
            read = [value for value in captured_or_read(node) if value in roots or value in node.inputs]
            whole = {roots.get(value, value) for value in read}
            own = {value: item for value, item in known.items() if value not in whole}
            inside = tuple(_items(body, own, least))
            if inside:
                steps = (steps_of_layers if by_layers else steps_of_reads)(body, inside)
                yield LoopBody(node, body, inside, steps)


def _items(body: Graph, known: Mapping[Value, MovableValue], least: int) -> Iterator[MovableValue]:
    """Those of the program that nodes of the body read; then its own."""
    roots = view_roots(body)
    reads = reads_of(body, roots)
    given = {roots.get(value, value) for value in body.outputs}
    for value, item in known.items():
        if value in reads and value not in given:
            yield replace(item, reads=tuple(reads[value]), replaced=None, replaced_at=-1, replaced_until=-1)
    yield from items_of(body, least)


def places_of(graph: Graph, written: Sequence[BodyMoves]) -> list[int]:
    """The places in a program of the loops whose bodies bring or take away something."""
    loops = {each.body.node for each in written if each.moves}
    return [place for place, node in enumerate(graph) if node in loops]


def without_bodies(items: Sequence[MovableValue], graph: Graph, written: Sequence[BodyMoves]) -> list[MovableValue]:
    """The items of a program, read no more where bodies bring them."""
    places = {node: place for place, node in enumerate(graph)}
    brought: dict[Value, set[int]] = {}
    for each in written:
        for value in each.body.brings(each.moves):
            brought.setdefault(value, set()).add(places[each.body.node])
    return [
        replace(item, reads=tuple(place for place in item.reads if place not in brought[item.value]), is_brought=True)
        if item.value in brought
        else item
        for item in items
    ]
