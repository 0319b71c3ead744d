"""What ranks compare before they exchange data, and the errors when they do not agree."""

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

from irpar.ir import dtype_of_numpy
from irpar.runtime.errors import MismatchError
from irpar.runtime.groups.base import Call, Collective
from irpar.sharding import Mesh

HEADER_BYTES = 512
"""Bytes of a packed header."""

ELSEWHERE = "ranks that should meet in it are at different collectives"
"""What is wrong where ranks wait for each other at several."""
ONE_PARTITION = "let all ranks run the parts of one partition, as irpar wrote them; where they do, report it"
"""What to do about ranks of which each by itself does what its part says."""
CORRECT_PART = (
    "correct the collective where it was written or changed by hand; partition the model again where it was not"
)
"""What to do about a part that calls for what cannot be."""

_FIXED = struct.Struct("<qq16s16sq")
_AGREED = tuple(f.name for f in fields(Collective) if f.compare)


@dataclass(frozen=True)
class Header:
    """A rank and what it came to, in a size that does not depend on it.

    Attributes:
        rank: whose it is.
        id: the collective's id.
        dtype: element type of the operand, as text.
        digest: of all that the participants must agree on: kind, axes and attributes, dtype, number of dims.
        nbytes: bytes of the operand.
        text: the rank and what it came to, for messages.
    """

    rank: int
    id: int
    dtype: str
    digest: bytes
    nbytes: int
    text: str

    @classmethod
    def of(cls, call: Call, mesh: Mesh) -> Self:
        """The header of a call."""
        collective, operand = call.collective, call.operand
        kind = dtype_of_numpy(operand.dtype)
        agreed = (*(getattr(collective, name) for name in _AGREED), kind.text, operand.ndim)
        digest = hashlib.blake2b(repr(agreed).encode(), digest_size=16).digest()
        return cls(call.rank, collective.id, kind.text, digest, kind.nbytes(operand.size), call.describe(mesh))

    def meets(self, other: "Header") -> bool:
        """Whether both came to the same collective."""
        return (self.id, self.digest) == (other.id, other.digest)

    def pack(self) -> bytes:
        """The header as `HEADER_BYTES` bytes; the text is cut off where it is too long."""
        return self._packed

    @cached_property
    def _packed(self) -> bytes:
        fixed = _FIXED.pack(self.rank, self.id, self.dtype.encode(), self.digest, self.nbytes)
        room = HEADER_BYTES - _FIXED.size
        text = self.text.encode()
        if len(text) > room:
            text = text[: room - 3].decode(errors="ignore").encode() + b"..."
        return (fixed + text).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """The header that `pack` packed."""
        rank, id_, dtype, digest, nbytes = _FIXED.unpack_from(packed)
        text = bytes(packed[_FIXED.size :]).rstrip(b"\0").decode(errors="replace")
        return cls(rank, id_, dtype.rstrip(b"\0").decode(), digest, nbytes, text)


def check_headers(mine: Header, expected: Sequence[int], headers: Sequence[Header]) -> None:
    """Refuse to exchange data with ranks that came to something else.

    Args:
        mine: the header of the rank that checks.
        expected: bytes of the operand that each member must bring, in order of position.
        headers: of all members, in order of position.

    Raises:
        MismatchError: naming what both ranks came to.
    """
    for other, nbytes in zip(headers, expected, strict=True):
        if other.id != mine.id:
            what = ELSEWHERE
        elif other.dtype != mine.dtype:
            what = f"operands of one collective differ in dtype: {mine.dtype} and {other.dtype}"
        elif other.digest != mine.digest:
            what = "one collective has different attributes on different ranks"
        elif other.nbytes != nbytes:
            what = f"rank {other.rank} brings {other.nbytes:,} bytes, where rank {mine.rank} calls for {nbytes:,}"
        else:
            continue
        raise mismatch(mine.id, what, [mine.text, other.text])


def mismatch(id_: int, what: str, lines: Iterable[str], do: str = ONE_PARTITION) -> MismatchError:
    """The error of ranks that do not fit together at one collective.

    Args:
        id_: of the collective.
        what: is wrong.
        lines: what each rank came to.
        do: how to mend it.
    """
    told = list(lines)
    notes = (*told[:8], *([f"and {len(told) - 8} more ranks"] if len(told) > 8 else []))
    return MismatchError(
        f"collective {id_}: {what}",
        notes=notes,
        do=do,
    )


def expected_bytes(call: Call, shapes: Sequence[Sequence[int]]) -> list[int]:
    """Bytes of operands of these shapes."""
    kind: Any = dtype_of_numpy(call.operand.dtype)
    return [kind.nbytes(math.prod(shape)) for shape in shapes]
