"""Waiting for a message of another rank: for how long, and what is said of one that does not come."""

import time
from dataclasses import dataclass
from typing import Protocol

from irpar.sharding import Mesh

from ..driver import DRIVER
from ..errors import PeerError
from .base import rank_text
from .pulse import LOOK_SECONDS, Silence
from .spmd import see_late

READING = 20
"""A rank may take so many times the bound of a collective to read and compile its part."""
_SLACK_SECONDS = 2.0
"""How much longer an answer may take than a collective, whose error says more."""


class Word(Protocol):
    """A message that is waited for."""

    def comes(self, seconds: float) -> bool:
        """Wait for so long, or longer where its bytes are coming; whether it is there."""
        ...

    def shows_life(self) -> bool:
        """Whether its sender, that has been asked for it, answers, and is not seen computing again as the last time."""
        ...

    def is_silent(self, silence: Silence) -> bool:
        """Whether its sender, the driver, has given no sign of life for too long."""
        ...


@dataclass(frozen=True)
class Fault:
    """What is wrong with a rank whose message does not come.

    Attributes:
        rank: that rank.
        what: it did, or did not.
        note: more of it; may be empty.
    """

    rank: int
    what: str
    note: str = ""

    @property
    def reason(self) -> str:
        """What the others are told of that rank."""
        return "\n".join(filter(None, (f"it {self.what}", self.note)))

    def error(self, mesh: Mesh) -> PeerError:
        """What this rank raises."""
        notes = (self.note,) if self.note else ()
        return PeerError(f"{rank_text(mesh, self.rank)} {self.what}", rank=self.rank, notes=notes, do=see_late())


def await_word(rank: int, word: Word, was_asked: bool, seconds: float) -> Fault | None:
    """Wait for a message; what is wrong where it does not come.

    The driver may be idle between two runs for as long as it likes, if it lives. One that was asked for something may
    compute as long as it comes to a collective now and then. The others read their parts, and then say so.

    Args:
        rank: the sender.
        word: the message.
        was_asked: whether this rank has asked for it.
        seconds: how long ranks wait for each other at a collective.
    """
    if rank == DRIVER:
        silence = Silence(seconds)
        while not word.comes(LOOK_SECONDS):
            if word.is_silent(silence):
                note = (
                    "it was stopped, its host hangs or is cut off, or a native call of its program lets no thread run"
                )
                return Fault(rank, f"gave no sign of life for {seconds:g} s", note)
    elif was_asked:
        last = time.monotonic()
        while not word.comes(seconds / 4):
            if word.shows_life():
                last = time.monotonic()
            elif time.monotonic() > last + seconds + _SLACK_SECONDS:
                return Fault(rank, f"did not answer in {seconds:g} s")
    elif not word.comes(READING * seconds):
        return Fault(rank, f"did not become ready in {READING * seconds:g} s")
    return None
