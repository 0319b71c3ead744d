"""One program whose ranks run in several processes: rank 0 drives, the others serve.

The driver alone takes inputs and gives results. For each run it tells every other rank what to fetch, with the rank's
own blocks of the inputs, and gets its blocks of the results and what it logged.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from irpar.sharding import IrparError

from .errors import PeerError, ProgramError
from .groups.base import Messenger
from .log import CollectiveLog
from .messages import decode, encode

DRIVER = 0
"""The rank that drives."""

READY = "ready"
RUN = "run"
CLOSE = "close"


StateRequest = Literal["write", "read", "drop", "undo", "save", "load"]


@dataclass(frozen=True)
class Request:
    """What a rank is to run.

    Attributes:
        inputs: name to the rank's block.
        fetch: source name of a value to give back besides the outputs, to how it must lie there.
        all_copies: give back all blocks, those too that a rank before it gives.
        partition: the id of the partition that the driver opened; empty where it was not opened from a folder.
        session: whose state it runs with and keeps; 0: none, all inputs are given.
        what: run; write, read or drop the state of the session, `inputs` being blocks and `fetch` names of states;
            undo its last run; save it to or load it from the checkpoint in the folder `path`.
        batch: samples of which the rank reads its own part, as `irpar.inputs.dataset.Batch.message` has it; empty:
            none.
        path: see `what`.
        program: which program runs: that of the partition, or `EVALUATION` beside it.
    """

    inputs: Mapping[str, Any]
    fetch: Mapping[str, str] = field(default_factory=dict)
    all_copies: bool = False
    partition: str = ""
    session: int = 0
    what: StateRequest | Literal["run"] = "run"
    batch: Sequence[Any] = ()
    path: str = ""
    program: str = ""


@dataclass(frozen=True)
class Answer:
    """What a rank computed.

    Attributes:
        blocks: name of an output or fetched value, to the rank's block of it.
        log: what it logged, see `CollectiveLog.text`.
        read_bytes: what it has read of samples, for this run.
    """

    blocks: Mapping[str, Any]
    log: str
    read_bytes: int = 0


class Driver:
    """Rank 0's side.

    Args:
        messenger: the group of the run.
        others: the ranks of other processes.
    """

    def __init__(self, messenger: Messenger, others: Sequence[int]) -> None:
        self._messenger = messenger
        self.others = tuple(others)
        self._logs: dict[int, str] = {}
        """What each has logged last: it tells what differs from that."""
        self._is_open = True

    def meet(self) -> None:
        """Wait until all others are ready to run: one that takes long to read its part is not late at a collective.

        Of one that takes longer than the bound of a collective, a line on standard error tells.

        Raises:
            PeerError: one failed.
        """
        for rank in self.others:
            with _told_of(rank, self._messenger.seconds):
                decode(self._messenger.receive(rank))

    def check_open(self) -> None:
        """Refuse to run after a run that failed, of which answers may still be on their way.

        Raises:
            ProgramError: the other ranks are gone.
        """
        if not self._is_open:
            raise ProgramError(
                "the ranks have ended: an earlier run of them failed",
                do="start the program again, or open the partition anew in all processes",
            )

    def ask(self, rank: int, request: Request) -> None:
        """Let a rank run."""
        inputs, fetch = dict(request.inputs), dict(request.fetch)
        told = [inputs, fetch, request.all_copies, request.partition, request.session, request.what]
        told += [list(request.batch), request.path, request.program]
        self._messenger.send(rank, encode([RUN, *told]))

    def answer(self, rank: int, log: CollectiveLog) -> Answer:
        """What a rank answers; what it logged goes into `log`."""
        blocks, told, read_bytes = decode(self._messenger.receive(rank))
        text = self._logs[rank] = self._logs[rank] if told is None else told
        log.add_text(rank, text)
        return Answer(blocks, text, read_bytes)

    def close(self) -> None:
        """Let the others end; a rank that is gone is no reason to fail now."""
        if self._is_open:
            self._is_open = False
            message = encode([CLOSE])
            for rank in self.others:
                try:
                    self._messenger.send(rank, message)
                except PeerError:
                    continue

    def abort(self, error: BaseException) -> None:
        """Tell the others that this rank failed."""
        self._is_open = False
        abort(self._messenger, error)


@contextmanager
def _told_of(rank: int, seconds: float) -> Iterator[None]:
    """Tell that a rank is waited for, should that take so long."""
    text = f"rank {rank} has not become ready in {seconds:g} s: it may still be reading its part, or hang"
    timer = threading.Timer(seconds, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def serve(messenger: Messenger, run: Callable[[Request], Answer]) -> None:
    """Do what the driver asks until it closes.

    Raises:
        IrparError: this rank failed, of which the others have been told; or another one did (`PeerError`).
    """
    try:
        messenger.send(DRIVER, encode([READY]))
        told: str | None = None
        while True:
            what, *rest = decode(messenger.receive(DRIVER))
            if what == CLOSE:
                return
            answer = run(Request(*rest))
            log, told = None if answer.log == told else answer.log, answer.log
            messenger.send(DRIVER, encode([dict(answer.blocks), log, answer.read_bytes]))
    except BaseException as error:
        abort(messenger, error)
        raise


def abort(messenger: Messenger, error: BaseException) -> None:
    """Tell all ranks that this one failed; that another one did, they know from it."""
    if isinstance(error, PeerError):
        return
    if isinstance(error, IrparError):
        reason = str(error)
    elif isinstance(error, KeyboardInterrupt):
        reason = "it was interrupted"
    else:
        reason = f"{type(error).__name__}: {error}"
    messenger.abort(reason)
