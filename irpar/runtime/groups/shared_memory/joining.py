"""How the ranks of a run find each other on one machine: over a socket that has a name, but no file.

Rank 0 waits at the name of the run until all others have come, and gives each the file of the shared memory, and ends
of pipes: each rank holds the one writing end of its own pipe, and all others the reading end, which tells them when it
is gone, however it ended. Nobody but the same user is let in. The name goes with rank 0; it is of a kind that only
Linux has (abstract), seen by processes of the same network namespace.
"""

import errno
import hashlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from irpar.runtime.launch.environment import LAUNCHERS, World
from irpar.runtime.launch.guard import sees_processes
from irpar.sharding import IrparError, Mesh, option

from ...errors import PeerError
from ..base import rank_text
from .segment import Segment, SegmentLayout
from .system import parent_of, start_of

_PAUSE = 0.01
_PATIENCE = 5.0
"""Seconds that whoever comes has to say who it is: a rank does so at once."""
_LONGEST = 1 << 16
"""Bytes that it has for that."""
_MOST_NEW = 64
"""How many may be about to say so; more wait in the queue."""
_MOST_RANKS = 240
"""The kernel passes 253 open files at a time."""
_CREDENTIALS = struct.Struct("3i")
_DO = (
    "see that all ranks are started, on one machine and by one launcher; where ranks are started by hand, give all "
    "of them one IRPAR_RUN_ID"
)


@dataclass(frozen=True)
class Joined:
    """What a rank has of the others.

    Attributes:
        segment: the memory that they share.
        own: the end of this rank's pipe that the others see closed when it is gone.
        others: rank to the end of its pipe.
    """

    segment: Segment
    own: int
    others: dict[int, int]


def join(mesh: Mesh, world: World, seconds: float) -> Joined:
    """Meet the other ranks of the run.

    Raises:
        IrparError: not all came, or they do not fit together.
    """
    if world.size > _MOST_RANKS:
        raise IrparError(
            f"{option('group', 'processes')} takes up to {_MOST_RANKS} ranks", do=f"run with {option('group', 'mpi')}"
        )
    name = "\0irpar-" + hashlib.blake2b(_run_key(world).encode(), digest_size=16).hexdigest()
    until = time.monotonic() + seconds
    return _Host(mesh, name, until, seconds).meet() if world.rank == 0 else _visit(mesh, world, name, until, seconds)


def _run_key(world: World) -> str:
    """What the ranks of this run have in common with no other on this machine."""
    known = f"{world.run_id} {world.master_port or ''}".strip()
    return f"{os.getuid()} {world.launcher} {world.size} {known or _starter(world.launcher)}"


def _starter(launcher: str) -> str:
    """The process that gave ranks their numbers: the nearest ancestor that has none itself, and when it started."""
    names = next((each.rank for each in LAUNCHERS if each.name == launcher), ())
    process = os.getppid()
    while sees_processes():
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            break
        if not any(each.startswith(f"{name}=".encode()) for each in variables for name in names):
            break
        process = parent_of(process)
    return f"{process} {start_of(process)}"


def _own_uid(connection: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())


@dataclass
class _Newcomer:
    """Somebody who has not yet said who it is.

    Attributes:
        until: when it is sent away.
        told: what it has said.
    """

    until: float
    told: bytearray = field(default_factory=bytearray)


class _Host:
    """Rank 0, which the others come to."""

    def __init__(self, mesh: Mesh, name: str, until: float, seconds: float) -> None:
        self._mesh = mesh
        self._name = name
        self._until = until
        self._seconds = seconds
        self._came: dict[int, socket.socket] = {}
        self._new: dict[socket.socket, _Newcomer] = {}

    def meet(self) -> Joined:
        """Wait for all, and give each what it needs."""
        with ExitStack() as stack:
            stack.callback(self._hang_up)
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                    self._bind(listener)
                    listener.listen(self._mesh.size + _MOST_NEW)
                    while len(self._came) < self._mesh.size - 1:
                        self._wait(listener)
                # The name is free from here on, for the next time that these ranks meet.
                return self._share()
            except BaseException as error:
                self._refuse(error)
                raise

    def _bind(self, listener: socket.socket) -> None:
        try:
            listener.bind(self._name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise IrparError(
                    f"ranks cannot meet: {error.strerror}", do=f"run with {option('group', 'mpi')}"
                ) from error
            raise IrparError(
                "another run of the same name has its ranks meet at this moment",
                do="give each run an IRPAR_RUN_ID of its own, or let the launcher name it",
            ) from error

    def _wait(self, listener: socket.socket) -> None:
        """Let one more in, or see that one has gone; nobody who says nothing keeps the others out."""
        now = time.monotonic()
        for each in [each for each, newcomer in self._new.items() if now > newcomer.until]:
            del self._new[each]
            each.close()
        if now >= self._until:
            missing = [rank for rank in range(1, self._mesh.size) if rank not in self._came]
            raise _absent(self._mesh, missing, self._seconds)
        known = {connection: rank for rank, connection in self._came.items()}
        door = [listener] if len(self._new) < _MOST_NEW else []
        ready, _, _ = select.select([*door, *self._new, *known], [], [], min(self._until - now, 1))
        for each in ready:
            if each in known:
                rank = known[each]
                raise PeerError(f"{rank_text(self._mesh, rank)} ended before all ranks had met", rank=rank)
            if each is listener:
                connection = listener.accept()[0]
                connection.settimeout(_PATIENCE)
                self._new[connection] = _Newcomer(time.monotonic() + _PATIENCE)
            else:
                self._hear(each)

    def _hear(self, connection: socket.socket) -> None:
        """Take what a newcomer says; it is known, or sent away, at the end of its line."""
        told = self._new[connection].told
        try:
            part = connection.recv(_LONGEST)
        except OSError:
            part = b""
        told += part
        if not part or b"\n" in told or len(told) >= _LONGEST:
            del self._new[connection]
            self._admit(connection, told)

    def _admit(self, connection: socket.socket, told: bytearray) -> None:
        """Let a rank in."""
        try:
            rank, mesh = json.loads(told) if _own_uid(connection) else (0, "")
        except (OSError, ValueError, TypeError, RecursionError):
            rank, mesh = 0, ""
        if type(rank) is not int or not 0 < rank < self._mesh.size:
            connection.close()  # Somebody else, or a rank that was ended just now, and comes no more.
        elif mesh != str(self._mesh) or rank in self._came:
            what = f"rank {rank} has come twice" if rank in self._came else f"rank {rank} runs on mesh {mesh}"
            error = IrparError(
                f"{what}, and rank 0 on mesh {self._mesh}: they are not of one run",
                do="give each run an IRPAR_RUN_ID of its own, and all ranks one partition",
            )
            _tell(connection, {"error": _told(error)})
            connection.close()
            if rank not in self._came:
                raise error
        else:
            self._came[rank] = connection

    def _share(self) -> Joined:
        layout = SegmentLayout.of(self._mesh.size)
        handle = Segment.create(layout)
        with ExitStack() as stack:
            keep = os.dup(handle)
            stack.callback(os.close, keep)
            segment = Segment(layout, handle)
            segment.start()
            pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(self._mesh.size)]
            reading, writing = zip(*pipes, strict=True)
            # Each process keeps one writing end, its own; of the reading ends all but its own.
            for end in (reading[0], *writing[1:]):
                stack.callback(os.close, end)
            for rank, connection in self._came.items():
                others = [end for other, end in enumerate(reading) if other != rank]
                _tell(connection, {"layout": layout.numbers()}, [keep, writing[rank], *others])
        return Joined(segment, writing[0], dict(list(enumerate(reading))[1:]))

    def _hang_up(self) -> None:
        for connection in (*self._came.values(), *self._new):
            connection.close()

    def _refuse(self, error: BaseException) -> None:
        told = _told(error) if isinstance(error, IrparError) else _told(IrparError("rank 0 failed"))
        for connection in self._came.values():
            _tell(connection, {"error": told})


def _visit(mesh: Mesh, world: World, name: str, until: float, seconds: float) -> Joined:
    """Come to rank 0, and get what it gives."""
    with _connected(mesh, name, until, seconds) as connection:
        connection.settimeout(max(until - time.monotonic(), 0) + 5)  # Rank 0 tells who is missing.
        try:
            connection.sendall(json.dumps([world.rank, str(mesh)]).encode() + b"\n")
            data, handles, _, _ = socket.recv_fds(connection, 1 << 16, world.size + 2, socket.MSG_CMSG_CLOEXEC)
            told = json.loads(data) if data else {}
            if not isinstance(told, dict):
                raise ValueError("it is no rank of irpar")
        except (OSError, ValueError, RecursionError) as error:
            raise PeerError(f"{rank_text(mesh, 0)} did not answer: {error}", rank=0, do=_DO) from error
    if "error" in told:
        raise _error(told["error"])
    if "layout" not in told:
        raise PeerError(f"{rank_text(mesh, 0)} ended before all ranks had met", rank=0)
    file, own, *ends = handles
    others = [rank for rank in range(mesh.size) if rank != world.rank]
    return Joined(Segment(SegmentLayout(**told["layout"]), file), own, dict(zip(others, ends, strict=True)))


def _connected(mesh: Mesh, name: str, until: float, seconds: float) -> socket.socket:
    """A connection to rank 0, once it is there."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(name)
            if _own_uid(connection):
                return connection
            raise IrparError(
                "the name that the ranks meet at belongs to another user", do="give the run an IRPAR_RUN_ID of its own"
            )
        except (ConnectionRefusedError, BlockingIOError):
            connection.close()
        except BaseException:
            connection.close()
            raise
        if time.monotonic() > until:
            raise _absent(mesh, [0], seconds)
        time.sleep(_PAUSE)


def _absent(mesh: Mesh, missing: list[int], seconds: float) -> PeerError:
    who = ", ".join(rank_text(mesh, rank) for rank in missing[:8])
    who += f" and {len(missing) - 8} more ranks" if len(missing) > 8 else ""
    return PeerError(f"{who} did not come in {seconds:g} s", rank=missing[0], do=_DO)


def _tell(connection: socket.socket, what: dict[str, Any], handles: "list[int] | None" = None) -> None:
    # One that is gone is found out by its pipe.
    with suppress(OSError):
        socket.send_fds(connection, [json.dumps(what).encode()], handles or [])


def _told(error: IrparError) -> list[Any]:
    return [error.rank if isinstance(error, PeerError) else None, error.what, error.where, error.notes, error.do]


def _error(told: list[Any]) -> IrparError:
    rank, what, where, notes, do = told
    make: Callable[..., IrparError] = IrparError
    options = {} if rank is None else {"rank": rank}
    if options:
        make = PeerError
    return make(what, where=where, notes=tuple(notes), do=do, **options)
