"""How the processes of a run find each other, and connect each to each."""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hmac import compare_digest
from importlib.util import find_spec
from typing import Any

from ..environment import World
from ..errors import RunError
from .control import Control
from .store import Store

AllGather = Callable[[bytes], list[bytes]]
"""Gives every rank what all ranks gave, in order of rank."""

_MPI_LAUNCHERS = ("Open MPI", "MPICH")
_TOKEN_BYTES = 16
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Seconds until, and between, and number of probes: a host that vanished is noticed after about 35 s."""


class ConnectError(RunError):
    """Processes that find each other, but cannot connect."""


@contextmanager
def meeting_place(world: World, seconds: float) -> Iterator[AllGather]:
    """Where the ranks of a world tell each other what they need to connect: irpar's store, or MPI.

    MPI is asked where a launcher of it started the ranks, and no MASTER_ADDR and MASTER_PORT tell of a store.

    Raises:
        RunError: there is no such place, or a rank does not come.
    """
    is_known = world.master_addr is not None and world.store_port is not None
    if not is_known and world.launcher in _MPI_LAUNCHERS and find_spec("mpi4py") is not None:
        with _mpi() as gather:
            yield gather
        return
    with Store.of_world(world, seconds) as store:
        rounds = 0

        def gather_by_store(mine: bytes) -> list[bytes]:
            nonlocal rounds
            rounds += 1
            store.set(f"connect/{rounds}/{world.rank}", mine)
            return [store.get(f"connect/{rounds}/{rank}") for rank in range(world.size)]

        yield gather_by_store
        store.barrier("connected")


@contextmanager
def _mpi() -> Iterator[AllGather]:
    """MPI, for as long as it takes to meet: a process that has ended MPI does not wait at exit for one that died."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    was_there = MPI.Is_initialized()
    if not was_there:
        MPI.Init()
    yield MPI.COMM_WORLD.allgather
    if not was_there:
        MPI.Finalize()


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
    with _listen(host, world.size) as listener:
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


def _listen(host: str, size: int) -> socket.socket:
    """On the loopback where that is how the ranks reach each other; else on all addresses of this host."""
    if host.startswith("127."):
        return socket.create_server((host, 0), backlog=max(size, 128))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=max(size, 128), dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=max(size, 128))


def _call(own: int, rank: int, card: Mapping[str, Any], deadline: float) -> socket.socket:
    """Connect to a rank that listens."""
    place = f"{card['host']}:{card['port']}"
    connection = None
    try:
        connection = socket.create_connection((card["host"], card["port"]), _left(deadline))
        connection.sendall(bytes.fromhex(card["token"]) + own.to_bytes(8, "little"))
        _set_up(connection)
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
    _set_up(connection)
    return rank, connection


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)


def _set_up(connection: socket.socket) -> None:
    """Send small frames at once, and notice a peer whose host vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, number in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
