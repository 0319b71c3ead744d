"""What the store's server and its clients say to each other: fixed headers, then bytes; nothing is ever unpickled.

server: GREETING nonce
client: GREETING nonce rank size proof        of the run's secret and id, see `proof`
server: answer OK, its own proof              or another answer, and why
client: request, key, value                   any number of times, each answered before the next
server: answer, value
"""

import struct
from enum import IntEnum

from irpar.runtime.errors import RunError

from .proof import NONCE_BYTES, PROOF_BYTES, proof

GREETING = b"irpar-store/2\n"
HELLO = struct.Struct(f"!{len(GREETING)}s{NONCE_BYTES}sII{PROOF_BYTES}s")
"""Greeting, nonce, rank, size, proof."""
REQUEST = struct.Struct("!BHdQ")
"""What, bytes of the key, seconds to wait at most, bytes of the value."""
REPLY = struct.Struct("!BQ")
"""Answer, bytes of the value."""
RANK = struct.Struct("!i")
"""Before the text of an answer that is not OK: the rank that is to blame, -1 where none is."""
MOST_KEY_BYTES = 1024
MOST_BYTES = 64 << 20
"""Of a value; larger things go through the group."""


class StoreError(RunError):
    """The store cannot be used: its port, another run, something that is no rank's fault."""


class Ask(IntEnum):
    """What a client asks for."""

    SET = 1
    GET = 2
    BARRIER = 3
    ABORT = 4
    LEAVE = 5


class Answer(IntEnum):
    """How the server answers; TIMED_OUT, FAILED and REFUSED come with a rank and a text."""

    OK = 0
    TIMED_OUT = 1
    FAILED = 2
    """A rank ended or failed."""
    REFUSED = 3
    """The client cannot be who it says."""
    OTHER_RUN = 4


def proof_of_rank(key: bytes, side: str, nonces: bytes, rank: int, size: int) -> bytes:
    """That whoever says it knows the run."""
    return proof(key, side, nonces, struct.pack("!II", rank, size))
