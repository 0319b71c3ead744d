"""store: weights, state and activations lie in host memory or on disk, and are on the device when they are read."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.memory.liveness import peak
from irpar.analysis.recompute.costs import Costs
from irpar.analysis.storage.auto import SECONDS, solve
from irpar.analysis.storage.gaps import Room
from irpar.analysis.storage.items import Item, items_of
from irpar.analysis.storage.moves import Move, Wish, moves_by_hand
from irpar.analysis.storage.rewriting import write_moves
from irpar.analysis.storage.steps import Steps, steps_of_layers, steps_of_reads
from irpar.analysis.storage.timeline import Rates, Timeline, seconds_of_steps, timeline
from irpar.analysis.store_said import PATH
from irpar.ir import Graph, Memory, Module
from irpar.ir.clone import clone_graph
from irpar.ops.memory_copies import number_copies
from irpar.pass_manager import Pass, PassResult, format_pass
from irpar.pass_manager.memory_limit import peak_bytes
from irpar.sharding import IrparError
from irpar.units import GIGABYTE, bytes_text, gigabytes_option, seconds_text

Where = Literal["device", "host", "disk", "auto"]
_MOST_TRIES = 4
"""How often a limit is lowered where a program then holds more than was thought."""


class StoreError(IrparError):
    """What cannot lie where it is asked to."""


@dataclass(frozen=True)
class Written:
    """What was done to a program.

    Attributes:
        moves: what comes and goes.
        timeline: how long that takes, by the network.
        alike: what a program has in common with those that need no search of their own; None: nothing was searched.
    """

    moves: tuple[Move, ...]
    timeline: Timeline
    alike: object = None


@dataclass(frozen=True)
class Store(Pass):
    """Let weights, state and activations lie in host memory or on disk, and come to the device before they are read.

    Before: local view, the order that of execution. After: the same nodes in the same order, which read the same
    numbers; copies between them. What moves is brought `prefetch` steps before its use and given up after it: a step
    works on the weights of one layer, in one phase. Activations leave after their last use near by and come back before
    the next one. State that is replaced leaves when it is made.

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
        limit_gb: GB that a rank may hold on its device; later passes keep to it.
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
        before, costs = peak_bytes(module), Costs(module)
        rates = Rates.of_network(network_of(module.network))
        limit = self._limit(module) if self._is_auto else round(self.limit_gb * GIGABYTE)
        end, count = time.monotonic() + self.seconds, len(module.graphs)
        written: list[Written] = []
        for number, graph in enumerate(module.graphs):
            now = time.monotonic()
            until = now + max(0.0, end - now) / (count - number)
            written.append(self._write(graph, costs, rates, limit, until, written))
        changed = any(found.moves for found in written)
        if changed:
            number_copies(module.graphs)
            if self.path:
                module.metadata[PATH] = self.path
        after = peak_bytes(module)
        if limit and after > limit:
            raise self._too_much(after, limit, "move more of it, bring it later (a smaller prefetch)")
        old = module.memory_limit
        if limit:
            module.memory_limit = min(limit, old or limit)
        if not changed:
            note = f"ranks hold {bytes_text(before)}, which fits" if limit else "nothing is large enough to move"
            return PassResult(module.memory_limit != old, (note,))
        most = max(written, key=lambda found: found.timeline.copying)
        return PassResult(True, _notes(most, before, after), _statistics(most.moves))

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
                do = "give a number of 0 or more"
                raise IrparError(f"store with {option}={getattr(self, name):g}", where=where, do=do)
        if self._is_auto and self.pin_gb:
            raise IrparError(
                "store with pin-gb and auto",
                where=where,
                do="leave out pin-gb: with auto what fits the limit stays on the device",
            )

    def _limit(self, module: Module) -> int:
        """What a rank may hold: as said, else as the module or the device has it."""
        network = network_of(module.network)
        limit = round(self.limit_gb * GIGABYTE) or module.memory_limit or network.memory
        if limit is None:
            raise IrparError(
                "store with auto needs a limit",
                where=format_pass(self),
                do="write limit-gb=16, or choose a network whose device has a memory",
            )
        return limit

    # -- programs -----------------------------------------------------------------------------------------------------

    def _write(
        self, graph: Graph, costs: Costs, rates: Rates, limit: int, end: float, known: Sequence[Written]
    ) -> Written:
        if self._is_auto:
            return self._write_found(graph, costs, rates, limit, end, known)
        items = items_of(graph, round(self.threshold_kb * 1000))
        steps = steps_of_layers(graph, items)
        memory: dict[str, Memory] = {kind: where for kind, where in self._memory.items() if where != "auto"}
        moves = tuple(moves_by_hand(items, steps, Wish(memory, self.prefetch, round(self.pin_gb * GIGABYTE))))
        self._check_room(moves)
        taken = timeline(moves, steps, seconds_of_steps(graph, steps, costs.of_node), rates)
        if moves:
            write_moves(graph, steps, moves)
        return Written(moves, taken)

    def _write_found(
        self, graph: Graph, costs: Costs, rates: Rates, limit: int, end: float, known: Sequence[Written]
    ) -> Written:
        """Write what a search finds; steps are as short as can be, for no copy has to wait for a layer to end."""
        before = peak(graph).total_bytes
        if before <= limit:
            return Written((), Timeline(0, 0, 0))
        items = items_of(graph, round(self.threshold_kb * 1000))
        steps = steps_of_reads(graph, items)
        seconds = seconds_of_steps(graph, steps, costs.of_node)
        alike = (steps, tuple(seconds), tuple(map(_shape, items)))
        for same in known:
            if same.alike == alike:
                by_shape = {_shape(item): item for item in items}
                moves = tuple(replace(move, item=by_shape[_shape(move.item)]) for move in same.moves)
                if _held_after(graph, steps, moves) <= limit:
                    write_moves(graph, steps, moves)
                    return Written(moves, same.timeline, alike)
        tried, least = limit, before
        for _ in range(_MOST_TRIES):
            left = max(0.0, end - time.monotonic())
            found = solve(graph, items, steps, seconds, rates, self._room(tried), left)
            held = _held_after(graph, steps, found.moves)
            if held <= limit:
                self._check_room(found.moves)
                write_moves(graph, steps, found.moves)
                return Written(found.moves, found.timeline, alike)
            least = min(least, held)
            if not found.fits:
                break
            tried -= held - limit
        raise self._too_much(least, limit, "let more kinds of things move, or recompute or shard")

    def _room(self, limit: int) -> Room:
        to: dict[Where, tuple[Memory, ...]] = {"auto": ("host", "disk"), "host": ("host",), "disk": ("disk",)}
        memory = {kind: to[where] for kind, where in self._memory.items() if where != "device"}
        sizes = (round(size * GIGABYTE) or None for size in (self.host_gb, self.disk_gb))
        return Room(limit, memory, *sizes)

    def _check_room(self, moves: Sequence[Move]) -> None:
        """Refuse moves to a memory of which more is asked than there may be."""
        for memory, size in (("host", self.host_gb), ("disk", self.disk_gb)):
            needed = sum(move.item.nbytes for move in moves if move.memory == memory)
            if size and needed > size * GIGABYTE:
                raise StoreError(
                    f"{needed:,} bytes ({bytes_text(needed)}) are to lie {_PLACES[memory]}, "
                    f"{memory}-gb allows {size:g} GB",
                    where=format_pass(self),
                    do=f"give {memory}-gb={gigabytes_option(needed)}, or let less lie there",
                )

    def _too_much(self, held: int, limit: int, do: str) -> StoreError:
        return StoreError(
            f"a rank holds {held:,} bytes ({bytes_text(held)}) on its device, the limit is {limit:,}",
            where=format_pass(self),
            do=f"{do}, or give a limit of {held:,} bytes: limit-gb={gigabytes_option(held)}",
        )


_PLACES = {"host": "in host memory", "disk": "on disk"}


def _held_after(graph: Graph, steps: Steps, moves: Sequence[Move]) -> int:
    """What a program holds on the device with moves, by its own liveness."""
    trial = clone_graph(graph)
    there = [replace(move, item=_item_in(trial, move.item)) for move in moves]
    write_moves(trial, steps, there)
    return peak(trial).total_bytes


def _shape(item: Item) -> tuple[object, ...]:
    """What is the same of an item in programs that are alike: all but the values themselves."""
    times = item.reads, item.made, item.replaced_at, item.replaced_until
    return item.value.name, item.kind, item.nbytes, *times


def _item_in(graph: Graph, item: Item) -> Item:
    """An item of a copy of its program."""
    replaced = None if item.replaced is None else graph.value(item.replaced.name)
    return replace(item, value=graph.value(item.value.name), replaced=replaced)


def _notes(written: Written, before: int, after: int) -> tuple[str, ...]:
    lines = [f"ranks hold {bytes_text(after)} on their device instead of {bytes_text(before)}"]
    for memory, place in _PLACES.items():
        there = [move for move in written.moves if move.memory == memory]
        if there:
            own, brought, sent = (bytes_text(sum(sizes)) for sizes in zip(*map(_sizes, there), strict=True))
            lines.append(f"{own} {place}: {brought} to the device and {sent} back in a run")
    taken = written.timeline
    lines.append(
        f"copies take {seconds_text(taken.copying)} in a run of {seconds_text(taken.compute + taken.exposed)}; "
        f"computation waits {seconds_text(taken.exposed)} for them"
    )
    return tuple(lines)


def _sizes(move: Move) -> tuple[int, int, int]:
    nbytes = move.item.nbytes
    return nbytes, move.to_device * nbytes, move.from_device * nbytes


def _statistics(moves: Sequence[Move]) -> dict[str, int | float]:
    return {
        "moved": len(moves),
        "bytes to the device": sum(_sizes(move)[1] for move in moves),
        "bytes from the device": sum(_sizes(move)[2] for move in moves),
    }
