"""Requests that are kept from one collective to the next, and where what they send and take lies."""

import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from irpar.runtime.groups.base import Array
from irpar.runtime.groups.wire.header import HEADER_BYTES
from irpar.runtime.messages import ALIGNMENT

from .parcels import INLINE, Parcels, beginning

HEAD_BYTES = len(beginning(0, bytes(HEADER_BYTES)))
"""Of the first parcel that a member sends for a collective, before its content."""
give_way = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Gives the core to others."""


class Line:
    """What comes of another rank as small parcels over one tag: each into the same place, by a request that is kept.

    Only the first collective that has begun over the tag waits for it; what that makes of it is copied.

    Attributes:
        rank: the other.
        came: what came, in bytes.
        head: how it begins.
        request: of MPI, started anew for each.
        has_come: whether what it was started for has come, of which the status of the parcels then tells.
    """

    def __init__(self, parcels: Parcels, rank: int, tag: int, head_bytes: int) -> None:
        self.rank = rank
        self.came = room(head_bytes, INLINE)
        self.head = self.came.data[:head_bytes]
        self.request = parcels.comm.Recv_init((self.came, parcels.byte), rank, tag)
        self.has_come: Callable[[], bool] = partial(self.request.Test, parcels.status)


class Lines:
    """Those of one rank.

    Args:
        parcels: what else it sends and receives.
    """

    def __init__(self, parcels: Parcels) -> None:
        self._parcels = parcels
        self._known: dict[tuple[int, int], Line] = {}

    def of(self, rank: int, tag: int, head_bytes: int) -> Line:
        """That of a rank and tag, of whose parcels so many bytes are before the content."""
        if (rank, tag) not in self._known:
            self._known[rank, tag] = Line(self._parcels, rank, tag, head_bytes)
        return self._known[rank, tag]

    def forget(self) -> None:
        """Wait for nothing any more, and give the requests back to MPI, which would tell of each that it finds."""
        for line in self._known.values():
            if not line.request.Get_status():
                line.request.Cancel()
            line.request.Free()
        self._known.clear()


def room(head_bytes: int, nbytes: int) -> Array:
    """Bytes for a small parcel, of which the content lies where arrays may.

    Args:
        head_bytes: before the content.
        nbytes: of the content.
    """
    whole = np.empty(head_bytes + nbytes + ALIGNMENT, np.uint8)
    first = -(whole.ctypes.data + head_bytes) % ALIGNMENT
    return whole[first : first + head_bytes + nbytes]


def content_in(parcel: Array, head_bytes: int, like: Array) -> Array:
    """The array, like another one, that is the content of a small parcel."""
    return parcel[head_bytes : head_bytes + like.nbytes].view(like.dtype).reshape(like.shape)
