"""What the pass is asked for, as its searches read it, and what it refuses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from irpar.analysis.storage.bodies import BodyMoves
from irpar.analysis.storage.gaps import Room
from irpar.analysis.storage.written import Written
from irpar.ir import Memory
from irpar.sharding import IrparError
from irpar.units import GIGABYTE, bytes_text, gigabytes_option

Where = Literal["device", "host", "disk", "auto"]

PLACES: Mapping[Memory, str] = {"host": "in host memory", "disk": "on disk"}


class StoreError(IrparError):
    """What cannot lie where it is asked to."""


class TooMuchError(StoreError):
    """A rank holds more than a limit, whatever moves.

    Attributes:
        held: the least bytes that were found.
    """

    held = 0


def too_much(held: int, limit: int, where: str, do: str) -> TooMuchError:
    """The error of a rank that holds so many bytes."""
    error = TooMuchError(
        f"a rank holds {held:,} bytes ({bytes_text(held)}) on its device, the limit is {limit:,}",
        where=where,
        do=f"{do}, or give a limit of {held:,} bytes: limit-gb={gigabytes_option(held)}",
    )
    error.held = held
    return error


@dataclass(frozen=True)
class Asked:
    """Where things are to lie.

    Attributes:
        memory: by kind.
        least: bytes of the smallest that moves.
        sizes: bytes that may lie in a memory; 0: any number.
        where: the pass as it is written, for errors.
    """

    memory: Mapping[str, Where]
    least: int
    sizes: Mapping[Memory, int]
    where: str

    def room(self, limit: int, inside: Sequence[BodyMoves] = ()) -> Room:
        """What may lie where, beside what bodies have there."""
        to: dict[Where, tuple[Memory, ...]] = {"auto": ("host", "disk"), "host": ("host",), "disk": ("disk",)}
        memory = {kind: to[where] for kind, where in self.memory.items() if where != "device"}
        taken = {place: sum(each.own_bytes(place) for each in inside) for place in self.sizes}
        left = {place: max(0, size - taken[place]) if size else None for place, size in self.sizes.items()}
        return Room(limit, memory, left["host"], left["disk"])

    def check_room(self, found: Written) -> None:
        """Refuse moves to a memory of which more is asked than there may be.

        Raises:
            StoreError: naming it.
        """
        for memory, size in self.sizes.items():
            needed = sum(each.nbytes for each in found.moved() if each.memory == memory)
            if size and needed > size:
                raise StoreError(
                    f"{needed:,} bytes ({bytes_text(needed)}) are to lie {PLACES[memory]}, "
                    f"{memory}-gb allows {size / GIGABYTE:g} GB",
                    where=self.where,
                    do=f"give {memory}-gb={gigabytes_option(needed)}, or let less lie there",
                )
