"""How the processes of a run find each other, and connect each to each."""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from importlib.util import find_spec
from typing import Any

from irpar.sharding import Mesh

from ..environment import MPI_LAUNCHERS, World
from ..errors import RunError
from .control import Control
from .mpi_gather import all_gather_of
from .mpi_job import Job
from .sockets import listen, set_up
from .store import Store

AllGather = Callable[[bytes], list[bytes]]
"""Gives every rank what all ranks gave, in order of rank."""

_TOKEN_BYTES = 16


class ConnectError(RunError):
    """Processes that find each other, but cannot connect."""


def meet(world: World, mesh: Mesh, about: Mapping[str, Any], seconds: float) -> tuple[Control, list[dict[str, Any]]]:
    """Find all other processes of the run, and connect this one to each.

    They find each other at irpar's store; over MPI where a launcher of it started them, and no MASTER_ADDR and
    MASTER_PORT tell of a store.

    Args:
        world: this process among all.
        mesh: of their ranks.
        about: see `connect`.
        seconds: see `connect`.

    Returns:
        See `connect`.

    Raises:
        ConnectError: see `connect`.
        RunError: there is nowhere to meet, or a rank does not come.
    """
    if meets_over_mpi(world):
        job = Job.enter(mesh, seconds)
        with all_gather_of(job, seconds) as gather:
            control, all_about = connect(world, gather, about, seconds)
            job.open_groups.append(_Connected(job, control))
        return control, all_about
    with Store.of_world(world, seconds) as store:
        rounds = 0

        def gather_by_store(mine: bytes) -> list[bytes]:
            nonlocal rounds
            rounds += 1
            store.set(f"connect/{rounds}/{world.rank}", mine)
            return [store.get(f"connect/{rounds}/{rank}") for rank in range(world.size)]

        control, all_about = connect(world, gather_by_store, about, seconds)
        try:
            store.barrier("connected")
        except BaseException:
            control.close()
            raise
    return control, all_about


def meets_over_mpi(world: World) -> bool:
    """Whether processes that connect find each other over MPI."""
    is_known = world.master_addr is not None and world.store_port is not None
    return not is_known and world.launcher in MPI_LAUNCHERS and find_spec("mpi4py") is not None


@dataclass(frozen=True)
class _Connected:
    """Connections of a process of an MPI job: when it ends, they tell whether MPI can wait for all ranks."""

    job: Job
    control: Control

    def abort(self, reason: str) -> None:
        """See `Messenger.abort`."""
        if self.control.is_open:
            self.control.tell_failed(self.control.rank, reason)

    def close(self) -> None:
        """See `Group.close`."""
        self.job.has_failed |= self.control.is_broken
        self.job.open_groups.remove(self)
        self.control.close()


def connect(
    world: World, gather: AllGather, about: Mapping[str, Any], seconds: float
) -> tuple[Control, list[dict[str, Any]]]:
    """Connect this process to all others.

    Args:
        world: this process among all.
        gather: what the ranks meet by.
        about: what the others are to know of this rank, as JSON.
        seconds: how long that takes at most.

    Returns:
        The connections, and what the ranks say of themselves, in order of rank.

    Raises:
        ConnectError: naming the first rank with which there is no connection in time.
        RunError: a rank does not come.
    """
    deadline = time.monotonic() + seconds
    host = _own_host(world, gather)
    token = secrets.token_bytes(_TOKEN_BYTES)
    with listen(host, 0, world.size) as listener:
        port = listener.getsockname()[1]
        card = {"host": host, "port": port, "token": token.hex(), "about": dict(about)}
        cards = [json.loads(each) for each in gather(json.dumps(card).encode())]
        connections: dict[int, socket.socket] = {}
        try:
            for rank in range(world.rank):
                connections[rank] = _call(world.rank, rank, cards[rank], deadline)
            while len(connections) < world.size - 1:
                missing = [rank for rank in range(world.rank + 1, world.size) if rank not in connections]
                found = _answer(listener, token, missing, deadline)
                if found is not None:
                    connections[found[0]] = found[1]
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
    return Control(world.rank, connections), [each["about"] for each in cards]


def _own_host(world: World, gather: AllGather) -> str:
    """The address by which the other ranks reach this process."""
    names = gather(socket.gethostname().encode())
    if len(set(names)) == 1 and (world.master_addr is None or world.local_size == world.size):
        return "127.0.0.1"
    master = world.master_addr or names[0].decode()
    if world.rank == 0:
        return master
    # The address of the interface by which rank 0 is reached; a datagram socket sends nothing to find it.
    with socket.socket(_family(master), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, world.store_port or 9))
        except OSError as error:
            raise ConnectError(
                f"rank {world.rank} does not reach the host of rank 0, {master}: {error.strerror or error}",
                do="set MASTER_ADDR, on all ranks, to an address of the host of rank 0 that all hosts reach",
            ) from error
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    with suppress(OSError):
        return socket.AddressFamily(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][0])
    return socket.AF_INET


def _call(own: int, rank: int, card: Mapping[str, Any], deadline: float) -> socket.socket:
    """Connect to a rank that listens."""
    place = f"{card['host']}:{card['port']}"
    connection = None
    try:
        connection = socket.create_connection((card["host"], card["port"]), _left(deadline))
        connection.sendall(bytes.fromhex(card["token"]) + own.to_bytes(8, "little"))
        set_up(connection)
        return connection
    except OSError as error:
        if connection is not None:
            connection.close()
        raise ConnectError(
            f"rank {own} cannot connect to rank {rank} at {place}: {error.strerror or error}",
            do="let the hosts of all ranks reach each other on all TCP ports; MASTER_ADDR is how they reach rank 0",
        ) from error


def _answer(
    listener: socket.socket, token: bytes, missing: list[int], deadline: float
) -> tuple[int, socket.socket] | None:
    """The next rank that connects; None where it was somebody else."""
    try:
        listener.settimeout(_left(deadline))
        connection, _ = listener.accept()
    except TimeoutError:
        raise ConnectError(
            f"rank {missing[0]} did not connect",
            notes=(f"it was to connect to {os.uname().nodename}, port {listener.getsockname()[1]}",),
            do="see what that rank does; let the hosts of all ranks reach each other on all TCP ports",
        ) from None
    try:
        connection.settimeout(min(_left(deadline), 5.0))
        told = b""
        while len(told) < _TOKEN_BYTES + 8 and (more := connection.recv(_TOKEN_BYTES + 8 - len(told))):
            told += more
    except OSError:
        told = b""
    rank = int.from_bytes(told[_TOKEN_BYTES:], "little")
    if not compare_digest(told[:_TOKEN_BYTES], token) or rank not in missing:
        connection.close()
        return None
    return rank, connection


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)
