"""store: weights, state and activations lie in host memory or on disk, and are on the device when they are read."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.memory.limit_search import MOST_TRIES, next_end, search_within
from irpar.analysis.memory.liveness import peak, peak_bytes
from irpar.analysis.recompute.costs import Costs
from irpar.analysis.storage.auto import SECONDS, FoundMoves, solve
from irpar.analysis.storage.bodies import BodyMoves, LoopBody, let_bodies_make, loop_bodies, places_of, without_bodies
from irpar.analysis.storage.gaps import Gaps, Room
from irpar.analysis.storage.items import MovableValue, items_of
from irpar.analysis.storage.moves import Move, Wish, moves_by_hand, pinned_by_hand
from irpar.analysis.storage.rewriting import write_moves
from irpar.analysis.storage.steps import steps_of_layers, steps_of_reads
from irpar.analysis.storage.timeline import Rates, Timeline, seconds_of_steps, timeline
from irpar.analysis.storage.written import Written, held_after, with_bodies
from irpar.analysis.store_said import PATH
from irpar.analysis.types.control_flow import assumed_trips
from irpar.ir import Graph, Memory, Module, holder_in
from irpar.ir.clone import clone_graph
from irpar.ops.memory_copies import number_copies
from irpar.pass_manager import Pass, PassResult, format_pass
from irpar.sharding import IrparError
from irpar.units import GIGABYTE, bytes_text, gigabytes, gigabytes_option, seconds_text

Where = Literal["device", "host", "disk", "auto"]


_ZERO = {
    **dict.fromkeys(("host_gb", "disk_gb"), "; 0, or nothing, is no bound"),
    "limit_gb": "; 0, or nothing, is what the module or the network says, where something is auto",
}
"""What an option of 0 means, where that is not what its number says."""


class StoreError(IrparError):
    """What cannot lie where it is asked to."""


class TooMuchError(StoreError):
    """A rank holds more than a limit, whatever moves.

    Attributes:
        held: the least bytes that were found.
    """

    held = 0


@dataclass(frozen=True)
class Store(Pass):
    """Let weights, state and activations lie in host memory or on disk, and come to the device before they are read.

    Before: local view, the order that of execution. After: the same nodes in the same order, which read the same
    numbers; copies between them. What moves is brought `prefetch` steps before its use and given up after it: a step
    works on the weights of one layer, in one phase. Activations leave after their last use near by and come back before
    the next one. State that is replaced leaves when it is made. The body of a loop is such a program of its own, which
    brings in each trip what it reads; not so loops in loops, and branches.

    Where something is auto, no more moves than has to, for a rank to hold no more than the limit, and computation waits
    as little for copies as was found; `irpar.analysis.storage.auto` says how. What is given as host or disk beside it
    goes there, if it has to.

    Options:
        weights: where constants, and the parameters of a step of training, lie.
        state: where other state lies, such as what an optimizer keeps.
        activations: where results of nodes lie that are read much later.
        auto: those of the three that are not said are auto.
        prefetch: steps before their use that things begin to come; 0: when they are read, and everything waits.
        pin_gb: GB of weights that stay on the device all the same.
        limit_gb: GB that a rank may hold on its device, but no more than the module says; later passes keep to it. 0:
            where something is auto, what the module or the network says; else any number.
        host_gb, disk_gb: GB that may lie there, of a rank; 0: any number.
        path: the folder where a run makes files for what it writes; empty: where the system has temporary ones.
        threshold_kb: what is smaller, in kB, stays on the device.
        seconds: of search, for all programs together.
    """

    name = "store"
    weights: Where = "device"
    state: Where = "device"
    activations: Where = "device"
    auto: bool = False
    prefetch: int = 2
    pin_gb: float = 0
    limit_gb: float = 0
    host_gb: float = 0
    disk_gb: float = 0
    path: str = ""
    threshold_kb: float = 1
    seconds: float = SECONDS

    def run(self, module: Module) -> PassResult:
        """Put copies into the programs.

        Raises:
            IrparError: an option does not fit.
            StoreError: a rank would hold more than a limit.
        """
        self._check(module)
        before, costs, lacking = peak_bytes(module), Costs(module), self._lacking(module)
        rates = Rates.of_network(network_of(module.network))
        limit = self._limit(module)
        end, count = time.monotonic() + self.seconds, len(module.graphs)
        written: list[Written] = []
        too_much: list[TooMuchError] = []
        for number, graph in enumerate(module.graphs):
            until = next_end(end, count - number)
            try:
                written.append(self._write(graph, costs, rates, limit, until, written))
            except TooMuchError as error:  # The user is told of the rank that holds most.
                too_much.append(error)
        if too_much:
            raise max(too_much, key=lambda error: error.held)
        changed = any(found.moved() for found in written)
        if changed:
            module.placed |= self._reasons(written, limit)
            number_copies(module.graphs)
            if self.path:
                module.metadata[PATH] = self.path
        after = peak_bytes(module)
        if limit and after > limit:
            raise self._too_much(after, limit, "move more of it, bring it later (a smaller prefetch)")
        old = module.memory_limit
        if limit:
            module.memory_limit = limit
        if not changed:
            note = f"ranks hold {bytes_text(before)}, which fits" if self._is_auto else "nothing moves"
            return PassResult(module.memory_limit != old, (note, *lacking))
        most = max(written, key=lambda found: found.timeline.copying)
        return PassResult(True, (*_notes(most, before, after), *lacking), _statistics(most))

    def _reasons(self, written: Sequence[Written], limit: int) -> dict[str, str]:
        """Why what does not lie on the device lies where it does, by name."""
        lists = (moves for found in written for moves in (found.moves, *(each.moves for each in found.bodies)))
        items = [move.item for moves in lists for move in moves if move.item.made is None]
        return {
            item.value.name: f"store lets it, so that a rank holds no more than {bytes_text(limit)} on its device"
            if self._is_auto
            else f"store has {item.kind}={item.value.memory}"
            for item in items
            if item.value.memory != "device"
        }

    # -- what is asked for --------------------------------------------------------------------------------------------

    @property
    def _memory(self) -> dict[str, Where]:
        found: dict[str, Where] = {"weights": self.weights, "state": self.state, "activations": self.activations}
        return {kind: "auto" if self.auto and where == "device" else where for kind, where in found.items()}

    @property
    def _is_auto(self) -> bool:
        return "auto" in self._memory.values()

    def _check(self, module: Module) -> None:
        where = format_pass(self)
        if not module.is_local:
            raise IrparError("store needs the local view", where=where, do="run it after localize")
        if set(self._memory.values()) == {"device"}:
            do = "write weights=host, state=host or activations=host, or disk, or auto"
            raise IrparError("store has nothing to move", where=where, do=do)
        for name in ("prefetch", "pin_gb", "limit_gb", "host_gb", "disk_gb", "threshold_kb", "seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                option = name.replace("_", "-")
                do = f"give a finite number of 0 or more{_ZERO.get(name, '')}"
                raise IrparError(f"store with {option}={getattr(self, name):g}", where=where, do=do)
        if self._is_auto and self.pin_gb:
            raise IrparError(
                "store with pin-gb and auto",
                where=where,
                do="leave out pin-gb: with auto what fits the limit stays on the device",
            )

    def _limit(self, module: Module) -> int:
        """What a rank may hold: as said, but no more than the module has it; else as that or the device has it.

        By hand any number where nothing is said: 0.
        """
        said, network = gigabytes(self.limit_gb), network_of(module.network)
        if said or not self._is_auto:
            return min(said, module.memory_limit or said)
        limit = module.memory_limit or network.memory
        if limit is None:
            raise IrparError(
                "store with auto needs a limit",
                where=format_pass(self),
                do="write limit-gb=16, or choose a network whose device has a memory",
            )
        return limit

    def _lacking(self, module: Module) -> tuple[str, ...]:
        """Why nothing of a kind moves that is to go elsewhere."""
        found: list[str] = []
        for kind, where in self._memory.items():
            if where not in ("host", "disk"):
                continue
            bodies = [inner for graph in module.graphs for inner in graph.graphs()]
            sizes = [item.nbytes for graph in bodies for item in items_of(graph, 1) if item.kind == kind]
            if not sizes:
                found.append(f"{kind}={where}: {_NONE[kind]}")
            elif max(sizes) < self._least:
                least = f"threshold-kb={self.threshold_kb:g}"
                found.append(f"{kind}={where}: all are smaller than {least}, the largest has {max(sizes):,} bytes")
        return tuple(found)

    # -- programs -----------------------------------------------------------------------------------------------------

    def _write(
        self, graph: Graph, costs: Costs, rates: Rates, limit: int, end: float, known: Sequence[Written]
    ) -> Written:
        if self._is_auto:
            return self._write_found(graph, costs, rates, limit, end, known)
        memory: dict[str, Memory] = {kind: where for kind, where in self._memory.items() if where != "auto"}
        wish = Wish(memory, self.prefetch, gigabytes(self.pin_gb))
        items = items_of(graph, self._least)
        pinned = pinned_by_hand(items, steps_of_layers(graph, items), wish, lambda item: _trips_of(item, graph))
        wanted = [item.value for item in items if item.made is None and wish.moves(item) and item.value not in pinned]
        if let_bodies_make(graph, wanted):
            items = items_of(graph, self._least)
        steps = steps_of_layers(graph, items)
        bodies = list(loop_bodies(graph, items, self._least, by_layers=True))
        inside = [body.timed(body.moves_by_hand(wish, pinned), costs.of_node, rates) for body in bodies]
        items = without_bodies(items, graph, inside)
        steps = steps.with_loops(places_of(graph, inside))
        moves = tuple(moves_by_hand(items, steps, wish, pinned))
        taken = timeline(moves, steps, seconds_of_steps(graph, steps, costs.of_node), rates)
        written = Written(moves, with_bodies(taken, inside), tuple(inside))
        self._check_room(written)
        for each in inside:
            each.body.write(each.moves)
        if moves:
            write_moves(graph, steps, moves)
        return written

    @property
    def _least(self) -> int:
        """Bytes of the smallest that moves."""
        return gigabytes(self.threshold_kb / 10**6)

    def _write_found(
        self, graph: Graph, costs: Costs, rates: Rates, limit: int, end: float, known: Sequence[Written]
    ) -> Written:
        """Write what a search finds; steps are as short as can be, for no copy has to wait for a layer to end."""
        before = peak(graph).total_bytes
        if before <= limit:
            return Written((), Timeline(0, 0, 0))
        spare = self._spare(graph, costs, rates, limit)
        inside = self._in_bodies_found(graph, costs, rates, limit - spare, end)
        items = without_bodies(items_of(graph, self._least), graph, inside)
        steps = steps_of_reads(graph, items)
        seconds = seconds_of_steps(graph, steps, costs.of_node)
        alike = (steps, tuple(seconds), tuple(map(_shape, items)))
        for same in known:
            if same.alike == alike:
                by_shape = {_shape(item): item for item in items}
                moves = tuple(replace(move, item=by_shape[_shape(move.item)]) for move in same.moves)
                if held_after(graph, steps, moves) <= limit:
                    write_moves(graph, steps, moves)
                    return Written(moves, same.timeline, tuple(inside), alike)

        def search(asked: int, left: float) -> tuple[FoundMoves, bool]:
            solved = solve(graph, items, steps, seconds, rates, self._room(asked, inside), left)
            return solved, solved.fits

        def held_by(found: FoundMoves) -> int:
            return held_after(graph, steps, found.moves)

        tried = search_within(limit, end, search, held_by)
        found, least = tried
        if found is None:
            raise self._too_much(min(least, before), limit, "let more kinds of things move, or recompute or shard")
        written = Written(found.moves, with_bodies(found.timeline, inside), tuple(inside), alike)
        self._check_room(written)
        write_moves(graph, steps, found.moves)
        return written

    def _spare(self, graph: Graph, costs: Costs, rates: Rates, limit: int) -> int:
        """Bytes that bodies are to leave, so that the program around them fits the limit by its own liveness, too."""
        spare = 0
        for _ in range(MOST_TRIES):
            trial = clone_graph(graph)
            inside = self._in_bodies_found(trial, costs, rates, limit - spare, time.monotonic())
            if not inside:
                return 0
            items = without_bodies(items_of(trial, self._least), trial, inside)
            steps = steps_of_reads(trial, items)
            seconds = seconds_of_steps(trial, steps, costs.of_node)
            solved = solve(trial, items, steps, seconds, rates, self._room(limit, inside), 0)
            held = held_after(trial, steps, solved.moves)
            if held <= limit:
                return spare
            spare += held - limit
        return limit

    def _in_bodies_found(self, graph: Graph, costs: Costs, rates: Rates, limit: int, end: float) -> list[BodyMoves]:
        """Find and write what moves in bodies of loops, while which there would be too much whatever else moves."""
        found: list[BodyMoves] = []
        room = self._room(limit)
        bodies = self._held_in_loops(graph, rates, room)
        if all(held <= limit for _, held in bodies):
            return found
        items = items_of(graph, self._least)
        if let_bodies_make(graph, [item.value for item in items if item.made is None and item.kind in room.memory]):
            bodies = self._held_in_loops(graph, rates, room)
        for number, (body, held) in enumerate(bodies):
            if held <= limit:
                continue
            own = peak(body.graph).total_bytes + body.captured_bytes(room.memory)
            left = replace(self._room(limit, found), limit=limit - (held - own))
            until = next_end(end, len(bodies) - number + 1)
            moves = self._found_in_body(body, body.seconds(costs.of_node), rates, left, until)
            found.append(body.timed(moves, costs.of_node, rates))
            body.write(moves)
        return found

    def _found_in_body(
        self, body: LoopBody, seconds: Sequence[float], rates: Rates, room: Room, end: float
    ) -> tuple[Move, ...]:
        """What moves in a body; all that can, where nothing keeps the limit."""

        def search(asked: int, left: float) -> tuple[FoundMoves, bool]:
            given = replace(room, limit=asked)
            solved = solve(body.graph, body.items, body.steps, seconds, rates, given, left)
            return solved, solved.fits

        def held_by(found: FoundMoves) -> int:
            return body.held_after(found.moves, room.memory)

        tried = search_within(room.limit, end, search, held_by)
        found = tried[0]
        return search(0, 0)[0].moves if found is None else found.moves

    def _held_in_loops(self, graph: Graph, rates: Rates, room: Room) -> list[tuple[LoopBody, int]]:
        """The bodies of loops, and what the device holds meanwhile at least if they bring nothing."""
        items = items_of(graph, self._least)
        steps = steps_of_reads(graph, items)
        bodies = list(loop_bodies(graph, items, self._least, by_layers=False))
        if not bodies:
            return []
        least = Gaps(graph, items, steps, rates, room).least
        places = {node: place for place, node in enumerate(graph)}
        return [(body, int(least[steps.of(places[body.node])])) for body in bodies]

    def _room(self, limit: int, inside: Sequence[BodyMoves] = ()) -> Room:
        """What may lie where, beside what bodies have there."""
        to: dict[Where, tuple[Memory, ...]] = {"auto": ("host", "disk"), "host": ("host",), "disk": ("disk",)}
        memory = {kind: to[where] for kind, where in self._memory.items() if where != "device"}
        taken = {place: sum(each.own_bytes(place) for each in inside) for place in self._sizes}
        left = {place: max(0, size - taken[place]) if size else None for place, size in self._sizes.items()}
        return Room(limit, memory, left["host"], left["disk"])

    @property
    def _sizes(self) -> dict[Memory, int]:
        """Bytes that may lie in a memory; 0: any number."""
        return {"host": gigabytes(self.host_gb), "disk": gigabytes(self.disk_gb)}

    def _check_room(self, written: Written) -> None:
        """Refuse moves to a memory of which more is asked than there may be."""
        for memory, size in self._sizes.items():
            needed = sum(each.nbytes for each in written.moved() if each.memory == memory)
            if size and needed > size:
                raise StoreError(
                    f"{needed:,} bytes ({bytes_text(needed)}) are to lie {_PLACES[memory]}, "
                    f"{memory}-gb allows {size / GIGABYTE:g} GB",
                    where=format_pass(self),
                    do=f"give {memory}-gb={gigabytes_option(needed)}, or let less lie there",
                )

    def _too_much(self, held: int, limit: int, do: str) -> TooMuchError:
        error = TooMuchError(
            f"a rank holds {held:,} bytes ({bytes_text(held)}) on its device, the limit is {limit:,}",
            where=format_pass(self),
            do=f"{do}, or give a limit of {held:,} bytes: limit-gb={gigabytes_option(held)}",
        )
        error.held = held
        return error


_NONE = {
    "weights": "the program has none on its device",
    "state": "the program has no state; steps of training have some, and models with caches",
    "activations": "no node on the device makes what another one reads",
}

_PLACES: dict[Memory, str] = {"host": "in host memory", "disk": "on disk"}


def _trips_of(item: MovableValue, graph: Graph) -> int:
    """How often bodies would bring an item."""
    holders = {holder_in(user, graph) for user in item.value.users}
    return sum(assumed_trips(holder) for holder in holders if holder.holds_graphs and item.value not in holder.inputs)


def _shape(item: MovableValue) -> tuple[object, ...]:
    """What is the same of an item in programs that are alike: all but the values themselves."""
    times = item.reads, item.made, item.replaced_at, item.replaced_until
    return item.value.name, item.kind, item.nbytes, *times


def _notes(written: Written, before: int, after: int) -> tuple[str, ...]:
    lines = [f"ranks hold {bytes_text(after)} on their device instead of {bytes_text(before)}"]
    for memory, place in _PLACES.items():
        there = [each for each in written.moved() if each.memory == memory]
        if there:
            sizes = zip(*((each.nbytes, each.brought, each.sent) for each in there), strict=True)
            own, brought, sent = map(bytes_text, map(sum, sizes))
            lines.append(f"{own} {place}: {brought} to the device and {sent} back in a run")
    taken = written.timeline
    lines.append(
        f"copies take {seconds_text(taken.copying)} in a run of {seconds_text(taken.compute + taken.exposed)}; "
        f"computation waits {seconds_text(taken.exposed)} for them"
    )
    return tuple(lines)


def _statistics(written: Written) -> dict[str, int | float]:
    moved = written.moved()
    return {
        "moved": len(moved),
        "bytes to the device": sum(each.brought for each in moved),
        "bytes from the device": sum(each.sent for each in moved),
    }
