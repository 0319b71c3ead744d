"""Digests of a file: of all of it, and of samples of a large one, cheap enough to be compared whenever it is opened."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 64 << 10
SAMPLES = 64
"""Blocks between the first and the last one."""
_WHOLE_BYTES = (SAMPLES + 2) * BLOCK_BYTES
"""Files of up to this many bytes are read whole."""
_DIGEST_BYTES = 16
ALGORITHM = "blake2b-128-sampled"
"""What stands before the digest; another way to sample needs another name."""


WHOLE = "blake2b-128"
"""As `ALGORITHM`, of the digest over all bytes."""


def whole_digest(path: Path) -> str:
    """A digest over all bytes of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        made = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES))
    return f"{WHOLE}:{made.hexdigest()}"


def bytes_digest(data: bytes) -> str:
    """As `whole_digest`, of bytes."""
    return f"{WHOLE}:{hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()}"


def fingerprint(path: Path) -> str:
    """A digest over the size of a file and 66 blocks of 64 KiB, which lie evenly in it; over all of a smaller file.

    It tells that a file was cut off, zeroed, or exchanged for another. It does not tell single bytes that changed in
    a file of more than 4.125 MiB.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.blake2b(b"%d\n" % size, digest_size=_DIGEST_BYTES)
        for offset, length in _blocks(size):
            digest.update(_read(file.fileno(), offset, length))
    return f"{ALGORITHM}:{digest.hexdigest()}"


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of the blocks that are read, in order."""
    if size <= _WHOLE_BYTES:
        for offset in range(0, size, BLOCK_BYTES):
            yield offset, min(BLOCK_BYTES, size - offset)
        return
    last = size - BLOCK_BYTES
    for number in range(SAMPLES + 2):
        yield last * number // (SAMPLES + 1), BLOCK_BYTES


def _read(file: int, offset: int, length: int) -> bytes:
    """Bytes at an offset; fewer where the file ends."""
    pieces = []
    while length:
        piece = os.pread(file, length, offset)
        if not piece:
            break
        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return b"".join(pieces)
