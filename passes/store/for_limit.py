"""What moves for a limit: as little as has to, so that computation waits as little for copies as was found."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from irpar.analysis.memory.limit_search import MOST_TRIES, next_end, search_within
from irpar.analysis.memory.liveness import peak
from irpar.analysis.recompute.costs import Costs
from irpar.analysis.storage.auto import FoundMoves, solve
from irpar.analysis.storage.bodies import BodyMoves, LoopBody, let_bodies_make, loop_bodies, without_bodies
from irpar.analysis.storage.gaps import Gaps, Room
from irpar.analysis.storage.items import MovableValue, items_of
from irpar.analysis.storage.moves import Move
from irpar.analysis.storage.rewriting import write_moves
from irpar.analysis.storage.steps import steps_of_reads
from irpar.analysis.storage.timeline import Rates, Timeline, seconds_of_steps
from irpar.analysis.storage.written import Written, held_after, with_bodies
from irpar.ir import Graph
from irpar.ir.clone import clone_graph

from .asked import Asked, too_much


@dataclass(frozen=True)
class ForLimit:
    """Finds what moves in programs.

    Attributes:
        asked: what may lie where.
        limit: bytes that a rank may hold on its device.
        costs: of nodes.
        rates: of copies.
    """

    asked: Asked
    limit: int
    costs: Costs
    rates: Rates

    def write(self, graph: Graph, end: float, known: Sequence[Written]) -> Written:
        """Write what a search finds; steps are as short as can be, for no copy has to wait for a layer to end.

        Args:
            graph: a program.
            end: when to stop, by `time.monotonic`.
            known: what was written of other programs; one that is alike is not searched again.

        Raises:
            TooMuchError: nothing that was found keeps the limit.
            StoreError: there is no room for what moves.
        """
        before = peak(graph).total_bytes
        if before <= self.limit:
            return Written((), Timeline(0, 0, 0))
        spare = self._spare(graph)
        inside = self._in_bodies_found(graph, self.limit - spare, end)
        items = without_bodies(items_of(graph, self.asked.least), graph, inside)
        steps = steps_of_reads(graph, items)
        seconds = seconds_of_steps(graph, steps, self.costs.of_node)
        alike = (steps, tuple(seconds), tuple(map(_shape, items)))
        for same in known:
            if same.alike == alike:
                by_shape = {_shape(item): item for item in items}
                moves = tuple(replace(move, item=by_shape[_shape(move.item)]) for move in same.moves)
                if held_after(graph, steps, moves) <= self.limit:
                    write_moves(graph, steps, moves)
                    return Written(moves, same.timeline, tuple(inside), alike)

        def search(limit: int, left: float) -> tuple[FoundMoves, bool]:
            solved = solve(graph, items, steps, seconds, self.rates, self.asked.room(limit, inside), left)
            return solved, solved.fits

        def held_by(found: FoundMoves) -> int:
            return held_after(graph, steps, found.moves)

        tried = search_within(self.limit, end, search, held_by)
        found, least = tried
        if found is None:
            do = "let more kinds of things move, or recompute or shard"
            raise too_much(min(least, before), self.limit, self.asked.where, do)
        written = Written(found.moves, with_bodies(found.timeline, inside), tuple(inside), alike)
        self.asked.check_room(written)
        write_moves(graph, steps, found.moves)
        return written

    def _spare(self, graph: Graph) -> int:
        """Bytes that bodies are to leave, so that the program around them fits the limit by its own liveness, too."""
        spare = 0
        for _ in range(MOST_TRIES):
            trial = clone_graph(graph)
            inside = self._in_bodies_found(trial, self.limit - spare, time.monotonic())
            if not inside:
                return 0
            items = without_bodies(items_of(trial, self.asked.least), trial, inside)
            steps = steps_of_reads(trial, items)
            seconds = seconds_of_steps(trial, steps, self.costs.of_node)
            solved = solve(trial, items, steps, seconds, self.rates, self.asked.room(self.limit, inside), 0)
            held = held_after(trial, steps, solved.moves)
            if held <= self.limit:
                return spare
            spare += held - self.limit
        return self.limit

    def _in_bodies_found(self, graph: Graph, limit: int, end: float) -> list[BodyMoves]:
        """Find and write what moves in bodies of loops, while which there would be too much whatever else moves."""
        found: list[BodyMoves] = []
        room = self.asked.room(limit)
        bodies = self._held_in_loops(graph, room)
        if all(held <= limit for _, held in bodies):
            return found
        items = items_of(graph, self.asked.least)
        if let_bodies_make(graph, [item.value for item in items if item.made is None and item.kind in room.memory]):
            bodies = self._held_in_loops(graph, room)
        for number, (body, held) in enumerate(bodies):
            if held <= limit:
                continue
            own = peak(body.graph).total_bytes + body.captured_bytes(room.memory)
            left = replace(self.asked.room(limit, found), limit=limit - (held - own))
            until = next_end(end, len(bodies) - number + 1)
            moves = self._found_in_body(body, body.seconds(self.costs.of_node), left, until)
            found.append(body.timed(moves, self.costs.of_node, self.rates))
            body.write(moves)
        return found

    def _found_in_body(self, body: LoopBody, seconds: Sequence[float], room: Room, end: float) -> tuple[Move, ...]:
        """What moves in a body; all that can, where nothing keeps the limit."""

        def search(limit: int, left: float) -> tuple[FoundMoves, bool]:
            given = replace(room, limit=limit)
            solved = solve(body.graph, body.items, body.steps, seconds, self.rates, given, left)
            return solved, solved.fits

        def held_by(found: FoundMoves) -> int:
            return body.held_after(found.moves, room.memory)

        tried = search_within(room.limit, end, search, held_by)
        found = tried[0]
        return search(0, 0)[0].moves if found is None else found.moves

    def _held_in_loops(self, graph: Graph, room: Room) -> list[tuple[LoopBody, int]]:
        """The bodies of loops, and what the device holds meanwhile at least if they bring nothing."""
        items = items_of(graph, self.asked.least)
        steps = steps_of_reads(graph, items)
        bodies = list(loop_bodies(graph, items, self.asked.least, by_layers=False))
        if not bodies:
            return []
        least = Gaps(graph, items, steps, self.rates, room).least
        places = {node: place for place, node in enumerate(graph)}
        return [(body, int(least[steps.of(places[body.node])])) for body in bodies]


def _shape(item: MovableValue) -> tuple[object, ...]:
    """What is the same of an item in programs that are alike: all but the values themselves."""
    times = item.reads, item.made, item.replaced_at, item.replaced_until
    return item.value.name, item.kind, item.nbytes, *times
