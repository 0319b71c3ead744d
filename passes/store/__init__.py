"""store: weights, state and activations lie in host memory or on disk, and are on the device when they are read."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.memory.limit_search import next_end
from irpar.analysis.memory.liveness import peak_bytes
from irpar.analysis.recompute.costs import Costs
from irpar.analysis.storage.auto import SECONDS
from irpar.analysis.storage.items import items_of
from irpar.analysis.storage.timeline import Rates
from irpar.analysis.storage.written import Written
from irpar.analysis.store_said import PATH
from irpar.ir import Memory, Module
from irpar.ops.memory_copies import number_copies
from irpar.pass_manager import Pass, PassResult, format_pass
from irpar.sharding import IrparError
from irpar.units import bytes_text, gigabytes

from .asked import Asked, StoreError, TooMuchError, Where, too_much
from .by_hand import write_by_hand
from .for_limit import ForLimit
from .told import notes_of, statistics_of

__all__ = ["Store", "StoreError"]

_ZERO = {
    **dict.fromkeys(("host_gb", "disk_gb"), "; 0, or nothing, is no bound"),
    "limit_gb": "; 0, or nothing, is what the module or the network says, where something is auto",
}
"""What an option of 0 means, where that is not what its number says."""


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
        before, lacking, limit = peak_bytes(module), self._lacking(module), self._limit(module)
        asked, costs, rates = self._asked, Costs(module), Rates.of_network(network_of(module.network))
        for_limit, pinned = ForLimit(asked, limit, costs, rates), gigabytes(self.pin_gb)
        end, count = time.monotonic() + self.seconds, len(module.graphs)
        written: list[Written] = []
        refused: list[TooMuchError] = []
        for number, graph in enumerate(module.graphs):
            until = next_end(end, count - number)
            try:
                written.append(
                    for_limit.write(graph, until, written)
                    if self._is_auto
                    else write_by_hand(graph, asked, self.prefetch, pinned, costs, rates)
                )
            except TooMuchError as error:  # The user is told of the rank that holds most.
                refused.append(error)
        if refused:
            raise max(refused, key=lambda error: error.held)
        changed = any(found.moved() for found in written)
        if changed:
            module.placed |= self._reasons(written, limit)
            number_copies(module.graphs)
            if self.path:
                module.metadata[PATH] = self.path
        after = peak_bytes(module)
        if limit and after > limit:
            raise too_much(after, limit, asked.where, "move more of it, bring it later (a smaller prefetch)")
        old = module.memory_limit
        if limit:
            module.memory_limit = limit
        if not changed:
            note = f"ranks hold {bytes_text(before)}, which fits" if self._is_auto else "nothing moves"
            return PassResult(module.memory_limit != old, (note, *lacking))
        most = max(written, key=lambda found: found.timeline.copying)
        return PassResult(True, (*notes_of(most, before, after), *lacking), statistics_of(most))

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
        given: dict[str, Where] = {"weights": self.weights, "state": self.state, "activations": self.activations}
        return {kind: "auto" if self.auto and where == "device" else where for kind, where in given.items()}

    @property
    def _is_auto(self) -> bool:
        return "auto" in self._memory.values()

    @property
    def _least(self) -> int:
        """Bytes of the smallest that moves."""
        return gigabytes(self.threshold_kb / 10**6)

    @property
    def _asked(self) -> Asked:
        sizes: dict[Memory, int] = {"host": gigabytes(self.host_gb), "disk": gigabytes(self.disk_gb)}
        return Asked(self._memory, self._least, sizes, format_pass(self))

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


_NONE = {
    "weights": "the program has none on its device",
    "state": "the program has no state; steps of training have some, and models with caches",
    "activations": "no node on the device makes what another one reads",
}
