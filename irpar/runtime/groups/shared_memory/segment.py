"""The memory that the ranks of a run share, and what lies where in it."""

import ctypes
import mmap
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from irpar.process import cores
from irpar.runtime.groups.wire.header import HEADER_BYTES
from irpar.sharding import IrparError, option

from ..base import Array
from .semaphores import SEMAPHORE_BYTES, Semaphore

FAULT_BYTES = 4096
"""Of what a rank says of its failure."""
BOARD_WORDS = 10
"""8-byte words of a rank's board, before the mask of the ranks that it waits for."""
_MOST_ARENAS = 256 << 20
_MOST_RINGS = 64 << 20
_PAGE = 4096
_MOST_LAID = 10_000
"""Places of operands that are known: of each slot of each rank, by dtype and shape."""


@dataclass(frozen=True)
class SegmentLayout:
    """What lies where in the segment of a run; the same on all ranks.

    Attributes:
        count: ranks.
        ring: bytes of each ring of records; there is one for each two ranks and direction.
        slot: bytes of a slot, which holds data on its way from a rank to others.
        slots: of each rank.
        pooled: more of them, for operands that their readers take where they lie.
        cores: that the ranks share, as the one that made the segment sees them.
    """

    count: int
    ring: int
    slot: int
    slots: int
    pooled: int
    cores: int

    @classmethod
    def of(cls, count: int) -> Self:
        """For this many ranks: memory that is bounded (32 MB for 4 ranks, at most 0.5 GB), whatever is sent."""
        ring = 516 << 10
        while ring > 8 << 10 and ring * count * count > _MOST_RINGS:
            ring //= 2
        ring -= ring % 64
        slot, slots, pooled = 256 << 10, 16, 8
        while slot > 32 << 10 and slot * (slots + pooled) * count > _MOST_ARENAS:
            slot //= 2
        return cls(count, ring, slot, slots, pooled, cores())

    @property
    def longest(self) -> int:
        """Bytes that the payload of a record may have: with it, a ring is at most half full."""
        return self.ring // 4

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each kind of thing begins."""
        count = self.count
        sizes = {
            "boards": count * self.board,
            "faults": count * (FAULT_BYTES + SEMAPHORE_BYTES),
            "bells": count * SEMAPHORE_BYTES,
            "tokens": count * count * SEMAPHORE_BYTES,
            "rings": count * count * self.ring,
            "arenas": count * (self.slots + self.pooled) * self.slot,
        }
        places, place = {}, 0
        for name, size in sizes.items():
            places[name] = place
            place += -(-size // _PAGE) * _PAGE
        return {**places, "end": place}

    @property
    def board(self) -> int:
        """Bytes of a rank's board: words, a byte for each rank that it waits for, and where it waits."""
        return BOARD_WORDS * 8 + -(-self.count // 64) * 64 + HEADER_BYTES

    @property
    def nbytes(self) -> int:
        """Of the whole segment."""
        return self.places["end"]

    def numbers(self) -> dict[str, int]:
        """What makes the same layout in another process."""
        return asdict(self)


class Segment:
    """The shared memory of a run, mapped into this process.

    It has no name in any folder: the file lives in memory as long as a process has it open, so that nothing is left
    when all are gone, however they ended.

    It is unmapped with the last reference to it: semaphores are addresses in it, which must not outlive it.

    Args:
        layout: what lies where.
        handle: the open file; it is closed here.

    Raises:
        IrparError: there is no room for it.
    """

    def __init__(self, layout: SegmentLayout, handle: int) -> None:
        self.layout = layout
        try:
            self._map = mmap.mmap(handle, layout.nbytes)
        except (OSError, ValueError) as error:
            raise _no_room(layout, error) from error
        finally:
            os.close(handle)
        self.memory = memoryview(self._map)
        self._laid: dict[tuple[int, int, np.dtype[Any], tuple[int, ...]], Array] = {}
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @staticmethod
    def create(layout: SegmentLayout) -> int:
        """The open file of a new segment, all of it taken from the system: nothing can be missing later.

        Raises:
            IrparError: there is not enough memory.
        """
        handle = -1
        try:
            handle = os.memfd_create("irpar-segment", os.MFD_CLOEXEC)
            os.posix_fallocate(handle, 0, layout.nbytes)
        except OSError as error:
            if handle >= 0:
                os.close(handle)
            raise _no_room(layout, error) from error
        except AttributeError as error:
            raise IrparError(
                f"the system has no memory files, which {option('group', 'processes')} needs",
                do=f"run on Linux, or with {option('group', 'mpi')}",
            ) from error
        return handle

    def start(self) -> None:
        """Make the semaphores; once, before others use the segment."""
        count = self.layout.count
        for rank in range(count):
            self.bell(rank).create()
            self.fault_token(rank).create()
            for other in range(count):
                self.token(rank, other).create()

    def _semaphore(self, place: int) -> Semaphore:
        return Semaphore(self._address + place)

    def bell(self, rank: int) -> Semaphore:
        """What wakes a rank."""
        return self._semaphore(self.layout.places["bells"] + rank * SEMAPHORE_BYTES)

    def token(self, source: int, target: int) -> Semaphore:
        """As many as there are records from a rank to another that it has not taken."""
        place = (source * self.layout.count + target) * SEMAPHORE_BYTES
        return self._semaphore(self.layout.places["tokens"] + place)

    def fault_token(self, rank: int) -> Semaphore:
        """What a rank posts for every other, once its fault is written."""
        return self._semaphore(self.layout.places["faults"] + rank * (FAULT_BYTES + SEMAPHORE_BYTES))

    def fault(self, rank: int) -> memoryview:
        """Where a rank tells of its failure."""
        place = self.layout.places["faults"] + rank * (FAULT_BYTES + SEMAPHORE_BYTES) + SEMAPHORE_BYTES
        return self.memory[place : place + FAULT_BYTES]

    def ring(self, source: int, target: int) -> memoryview:
        """The ring of records from a rank to another."""
        place = self.layout.places["rings"] + (source * self.layout.count + target) * self.layout.ring
        return self.memory[place : place + self.layout.ring]

    def slot(self, rank: int, number: int, dtype: np.dtype[Any], count: int) -> Array:
        """The first elements of a slot of a rank, as an array."""
        place = (
            self.layout.places["arenas"] + (rank * (self.layout.slots + self.layout.pooled) + number) * self.layout.slot
        )
        return np.frombuffer(self._map, dtype, count, place)

    def laid(self, rank: int, number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """An operand behind its header in a slot of a rank."""
        known = rank, number, dtype, shape
        found = self._laid.get(known)
        if found is None:
            if len(self._laid) > _MOST_LAID:
                self._laid.clear()
            slot = self.slot(rank, number, np.dtype(np.uint8), self.layout.slot)
            found = self._laid[known] = np.ndarray(shape, dtype, slot.data, HEADER_BYTES)
        return found

    def board(self, rank: int) -> tuple[memoryview, memoryview, memoryview]:
        """The board of a rank: its words, whom it waits for (a byte a rank), and where it waits."""
        place = self.layout.places["boards"] + rank * self.layout.board
        words = self.memory[place : place + BOARD_WORDS * 8].cast("q")
        mask = place + BOARD_WORDS * 8
        text = place + self.layout.board - HEADER_BYTES
        return words, self.memory[mask : mask + self.layout.count], self.memory[text : text + HEADER_BYTES]


def _no_room(layout: SegmentLayout, error: Exception) -> IrparError:
    told = error.strerror if isinstance(error, OSError) else str(error)
    return IrparError(
        f"{layout.count} ranks need {layout.nbytes / 2**20:.0f} MB of shared memory, which the system refuses: {told}",
        do="give the machine, or the container (--memory), more memory, or raise the limit (ulimit -f, ulimit -v); "
        "or run fewer ranks on it",
    )
