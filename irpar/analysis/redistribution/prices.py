"""What collectives over atoms cost, as one number that can be added and compared.

The parts of a network's key, seconds before bytes before launches, stand side by side in one integer.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from irpar.analysis.cost.model import CostModel, Key
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.network_algorithms import ring_bytes
from irpar.ops.collectives import KINDS
from irpar.sharding import Axis, Mesh

from .space import prime_factors

PART_BITS = 64
"""Of each part of a key: sums of bytes and of launches stay far below."""


class Prices(Protocol):
    """Prices of collectives."""

    def of(self, op: str, atoms: tuple[int, ...], n: int, operand: int) -> int:
        """A collective over atoms, n devices together; of uneven blocks the operand, in bytes, is the padded one."""
        ...

    def least(self, op: str, n: int, operand: int) -> int:
        """The least that it costs over any n devices."""
        ...


class BytePrices:
    """By the ring model; launches break ties. It is all the same over which atoms a collective runs."""

    def of(self, op: str, atoms: tuple[int, ...], n: int, operand: int) -> int:
        """See `Prices.of`."""
        match op:
            case "AllGather":
                sent = (n - 1) * operand
            case "AllToAll" | "ReduceScatter":
                sent = -(-(n - 1) * operand // n)
            case _:
                sent = ring_bytes(KINDS[op], n, operand)
        return (sent << PART_BITS) + 1

    def least(self, op: str, n: int, operand: int) -> int:
        """See `Prices.least`."""
        return self.of(op, (), n, operand)


class NetworkPrices:
    """By a network's links."""

    def __init__(self, network: Network, mesh: Mesh, axes: Sequence[Axis], sizes: Sequence[int]) -> None:
        self.cost = CostModel(network)
        self.mesh = mesh
        self.axes = tuple(axes)
        self._known: dict[tuple[str, tuple[int, ...], int], int] = {}
        self._groups = self._groups_by_size(sizes)

    def _groups_by_size(self, sizes: Sequence[int]) -> dict[int, list[tuple[int, ...]]]:
        """For each number of devices, one group of atoms for each set of links that it may run over."""
        reached: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[int, ...]] = {(1, ()): ()}
        for atom, size in enumerate(sizes):
            for (n, _), atoms in list(reached.items()):
                more = (*atoms, atom)
                key = n * size, self.cost.network.levels(tuple(self.axes[a] for a in more), self.mesh)
                reached.setdefault(key, more)
        groups: dict[int, list[tuple[int, ...]]] = {}
        for (n, _), atoms in reached.items():
            groups.setdefault(n, []).append(atoms)
        return groups

    def of(self, op: str, atoms: tuple[int, ...], n: int, operand: int) -> int:
        """See `Prices.of`."""
        known = self._known.get((op, atoms, operand))
        if known is None:
            axes = tuple(self.axes[atom] for atom in atoms)
            known = self._known[op, atoms, operand] = coded(self.cost.collective(KINDS[op], axes, operand, self.mesh))
        return known

    def least(self, op: str, n: int, operand: int) -> int:
        """See `Prices.least`; of a number of devices that no atoms make up, nothing."""
        return min((self.of(op, atoms, n, operand) for atoms in self._groups.get(n, ())), default=0)


def coded(key: Key) -> int:
    """A network's key as one number."""
    number = 0
    for part in key:
        number = (number << PART_BITS) + part
    return number


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All but 1."""
    found = {1}
    for factor in prime_factors(number):
        found |= {known * factor for known in found}
    return tuple(sorted(found - {1}))
