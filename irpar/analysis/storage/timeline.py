"""How long the copies of a program take, and how much of that is beside computation."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from irpar.analysis.cost.model import FEMTOSECONDS, CostOf
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.recompute.costs import ASSUMED
from irpar.ir import Graph, Memory

from .moves import Move
from .steps import Steps


@dataclass(frozen=True)
class Rates:
    """How long copies between a device and other memories take.

    Attributes:
        network: it knows its link to the host, and the disk.
    """

    network: Network

    @classmethod
    def of_network(cls, network: Network) -> "Rates":
        """Those of a network; what it does not know as in `irpar.analysis.recompute.costs.ASSUMED`."""
        assumed = network_of(ASSUMED)
        link, disk = network.host_link or assumed.host_link, network.disk or assumed.disk
        return cls(replace(network, host_link=link, disk=disk))

    def coming(self, nbytes: int, memory: Memory) -> float:
        """Seconds of a copy to the device."""
        return self._seconds(memory, "device", nbytes)

    def going(self, nbytes: int, memory: Memory) -> float:
        """Seconds of a copy from the device."""
        return self._seconds("device", memory, nbytes)

    def _seconds(self, source: Memory, target: Memory, nbytes: int) -> float:
        seconds = self.network.copy_seconds(source, target, nbytes)
        assert seconds is not None
        return seconds


@dataclass(frozen=True)
class Timeline:
    """What copies take.

    Attributes:
        compute: seconds of all nodes.
        copying: of all copies.
        exposed: for how long nodes wait for copies.
    """

    compute: float
    copying: float
    exposed: float


def seconds_of_steps(graph: Graph, steps: Steps, cost: CostOf) -> "list[float]":
    """What each step computes for; `cost` in femtoseconds."""
    nodes = np.array([cost(node) for node in graph] or [0], np.float64)
    return [float(part) for part in np.add.reduceat(nodes, steps.firsts) / FEMTOSECONDS]


def timeline(moves: Sequence[Move], steps: Steps, seconds: Sequence[float], rates: Rates) -> Timeline:
    """Go through a program: copies run one after the other, in the order in which they are written (`rewriting`)."""
    gone, going, come, coming = (defaultdict[int, list[_Copy]](list) for _ in range(4))
    for move in moves:
        for stay in move.stays:
            if stay.comes:
                one = _Copy(rates.coming(move.item.nbytes, move.memory))
                (come if stay.begin == stay.first else coming)[stay.begin].append(one)
                if stay.begin != stay.first:
                    come[stay.first].append(one)
            if stay.leaves:
                _leave(move, stay.last, stay.gone, rates, going, gone)
        if move.item.replaced is not None:
            _leave(move, steps.of(move.item.replaced_at), move.new_gone, rates, going, gone)
    now = free = exposed = copying = 0.0
    for step in range(steps.count + 1):
        for tasks, waits in ((gone, True), (going, False), (come, True), (coming, False)):
            for one in tasks[step]:
                if one.end is None:
                    one.end = free = max(now, free) + one.seconds
                    copying += one.seconds
                if (waits or one.is_alone) and one.end > now:
                    exposed, now = exposed + one.end - now, one.end
        if step < steps.count:
            now += seconds[step]
    return Timeline(sum(seconds), copying, exposed)


@dataclass(eq=False)
class _Copy:
    """A copy; one that is alone is waited for where it begins."""

    seconds: float
    is_alone: bool = False
    end: float | None = None


def _leave(
    move: Move,
    last: int,
    until: int,
    rates: Rates,
    going: "defaultdict[int, list[_Copy]]",
    gone: "defaultdict[int, list[_Copy]]",
) -> None:
    one = _Copy(rates.going(move.item.nbytes, move.memory), until == last)
    going[last + 1].append(one)
    if until != last:
        gone[until + 1].append(one)
