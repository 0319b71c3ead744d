"""How the processes of a run find each other, and connect each to each."""

import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from irpar.runtime.groups.mpi.gather import all_gather_of
from irpar.runtime.groups.mpi.job import Job
from irpar.runtime.launch.environment import MPI_LAUNCHERS, World
from irpar.runtime.launch.token import token_of_environment
from irpar.sharding import Mesh

from .control import Control
from .mutual import ConnectError, Mutual
from .proof import key_of, nonce
from .sockets import addresses_of, listen, listen_address
from .store import Store

AllGather = Callable[[bytes], list[bytes]]
"""Gives every rank what all ranks gave, in order of rank."""


def meet(world: World, mesh: Mesh, about: Mapping[str, Any], seconds: float) -> tuple[Control, list[dict[str, Any]]]:
    """Find all other processes of the run, and connect this one to each.

    They find each other at irpar's store; over MPI where a launcher of it started them, and no MASTER_ADDR and
    MASTER_PORT tell of a store.

    Args:
        world: this process among all.
        mesh: of their ranks.
        about: see `connect`.
        seconds: how long all of it takes at most.

    Returns:
        See `connect`.

    Raises:
        ConnectError: see `connect`.
        TokenError: see `Store`.
        RunError: there is nowhere to meet, or a rank does not come.
    """
    if meets_over_mpi(world):
        job = Job.enter(mesh, seconds)
        with all_gather_of(job, seconds) as gather:
            control, all_about = connect(world, gather, about, seconds)
            job.open_groups.append(_Connected(job, control))
        return control, all_about
    deadline = time.monotonic() + seconds
    with Store.of_world(world, seconds) as store:
        rounds = 0

        def gather_by_store(mine: bytes) -> list[bytes]:
            nonlocal rounds
            rounds += 1
            store.set(f"connect/{rounds}/{world.rank}", mine)
            return [store.get(f"connect/{rounds}/{rank}", _left(deadline)) for rank in range(world.size)]

        control, all_about = connect(world, gather_by_store, about, _left(deadline), token_of_environment())
        try:
            store.barrier("connected", _left(deadline))
        except BaseException:
            control.close()
            raise
    return control, all_about


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)


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
    world: World, gather: AllGather, about: Mapping[str, Any], seconds: float, token: str = ""
) -> tuple[Control, list[dict[str, Any]]]:
    """Connect this process to all others.

    Args:
        world: this process among all.
        gather: what the ranks meet by.
        about: what the others are to know of this rank, as JSON.
        seconds: how long that takes at most.
        token: the secret of the run; empty where only ranks learn what they give each other to meet.

    Returns:
        The connections, and what the ranks say of themselves, in order of rank.

    Raises:
        ConnectError: naming the first rank with which there is no connection in time.
        RunError: a rank does not come.
    """
    deadline = time.monotonic() + seconds
    host = _own_host(world, gather)
    own = listen_address(world.rank, host)
    with listen(own, 0, world.size) as listener:
        address, port = listener.getsockname()[:2]
        card = {
            "host": address if own == host else host,
            "port": port,
            "nonce": nonce().hex(),
            "about": dict(about),
        }
        cards = [json.loads(each) for each in gather(json.dumps(card).encode())]
        # Over MPI nobody else has the nonces; over the store it is the secret that nobody else has.
        key = key_of(token, *(str(each["nonce"]) for each in cards))
        places = {rank: (str(cards[rank]["host"]), int(cards[rank]["port"])) for rank in range(world.rank)}
        connections = Mutual(world.rank, world.size, listener, key, deadline).connect(places)
    return Control(world.rank, connections), [each["about"] for each in cards]


def _own_host(world: World, gather: AllGather) -> str:
    """The name or address by which the other ranks reach this process."""
    own = {"name": socket.gethostname(), "address": ""}
    if world.rank == 0:
        own["address"] = world.master_addr or _own_address(own["name"])
    told = [json.loads(each) for each in gather(json.dumps(own).encode())]
    if len({each["name"] for each in told}) == 1 and (world.master_addr is None or world.local_size == world.size):
        return "127.0.0.1"
    master = str(own["address"] or world.master_addr or told[0]["address"])
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


def _own_address(name: str) -> str:
    """The address of a host whose own name this is."""
    try:
        return addresses_of(name)[0][1]
    except OSError as error:
        raise ConnectError(
            f"{name}, which this host is called, has no address: {error.strerror or error}",
            do="set MASTER_ADDR and MASTER_PORT, on all ranks: an address of the host of rank 0, and a free port there",
        ) from error


def _family(host: str) -> socket.AddressFamily:
    with suppress(OSError):
        return socket.AddressFamily(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][0])
    return socket.AF_INET
