"""What a rank writes to disk while it runs: one file without a name, in which freed room is used again."""

import threading
from collections import deque
from pathlib import Path

from .direct_file import BLOCK, Array, DirectFile, aligned
from .disk_array import LentExtent

Piece = tuple[Array, int]
"""Memory, and where in the file it goes; both begin at a block, as far as they go past the cache."""


class SpillFile:
    """The file of one rank.

    Args:
        folder: where.
        what: what is written to it, as messages call it.
        elsewhere: how the user names another folder.

    Attributes:
        file: that file.
        nbytes: how far it reaches.
    """

    def __init__(self, folder: Path, what: str, elsewhere: str = "") -> None:
        self.file = DirectFile.unlinked(folder, what, elsewhere)
        self.nbytes = 0
        self._free: dict[int, deque[int]] = {}
        self._lock = threading.Lock()  # What is evicted, and what a copy thread writes.

    def lend(self, nbytes: int, before: int = 0) -> LentExtent:
        """Room for so many bytes, the first of which is so many behind the beginning of a block.

        Who asked for as much and let it go leaves it to the next: steps ask for the same again and again.
        """
        room = -(-(before + nbytes) // BLOCK) * BLOCK
        with self._lock:
            free = self._free.setdefault(room, deque())
            if free:
                start = free.popleft()
            else:
                start, self.nbytes = self.nbytes, self.nbytes + room
        return LentExtent(self.file, start + before, nbytes, free)


def behind_block(data: Array) -> int:
    """How many bytes behind the beginning of a block the memory of an array begins."""
    return int(data.ctypes.data) % BLOCK


def pieces(data: Array, extent: LentExtent, most: int) -> list[Piece]:
    """What to write where, for bytes that begin as far behind a block as their extent does.

    The blocks that are whole are written from where they are. The first and the last one may have others' bytes in
    memory, so they are copied; in the file nobody else has some of them.
    """
    first = extent.offset - extent.first_block
    head = min(-first % BLOCK, data.nbytes)
    whole = (data.nbytes - head) // BLOCK * BLOCK
    found: list[Piece] = []
    if head:
        found.append((_in_block(data[:head], first), extent.first_block))
    found.extend(
        (data[start : min(start + most, head + whole)], extent.offset + start)
        for start in range(head, head + whole, most)
    )
    if head + whole < data.nbytes:
        found.append((_in_block(data[head + whole :], 0), extent.offset + head + whole))
    return found


def _in_block(data: Array, first: int) -> Array:
    block = aligned(BLOCK)
    block[:first] = 0
    block[first : first + data.nbytes] = data
    block[first + data.nbytes :] = 0
    return block
