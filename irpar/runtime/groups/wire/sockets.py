"""TCP sockets between ranks, all set up alike: messages go at once, and a peer whose host vanished is noticed.

A process listens at one address, by which the others reach it: never at all that its host has.
"""

import errno
import ipaddress
import os
import socket
from contextlib import suppress

LISTEN = "IRPAR_LISTEN"
"""Names the address at which rank 0 listens, where the name that the others use is that of a service or a gateway."""
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Seconds until, and between, and number of probes: a host that vanished is noticed after about 35 s."""
_LEAST_BACKLOG = 128
_FAR = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that no host has (RFC 5737, RFC 3849): the way to them goes out by the interface to other hosts."""


def listen(host: str, port: int, size: int) -> socket.socket:
    """A listening socket, at the first address of that name which this host has.

    Args:
        host: the name or address at which to listen, see `listen_address`.
        port: 0: any that is free.
        size: ranks of the run, which may all connect at once.

    Raises:
        OSError: the port is in use, or may not be used; or the name is of no address of this host (EADDRNOTAVAIL).
    """
    refused: OSError | None = None
    for family, address in addresses_of(host):
        try:
            listener = socket.create_server((address, port), family=family, backlog=max(size, _LEAST_BACKLOG))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            refused = error
            continue
        set_up(listener)  # Accepted connections inherit it.
        return listener
    raise refused or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def listen_address(rank: int, host: str) -> str:
    """The name or address at which a rank listens.

    Args:
        rank: of this process; `IRPAR_LISTEN` is for rank 0 alone, as MASTER_ADDR names that alone.
        host: the name or address by which the others reach it; where that is the loopback, it is what it listens at.
    """
    said = os.environ.get(LISTEN, "").strip()
    return said if said and rank == 0 and not names_loopback(host) else host


def addresses_of(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses by which ranks reach a host of that name.

    A host may know its own name as a loopback address, where others do not: that of its interface to the others stands
    for it, for all processes of that host.

    Raises:
        OSError: the name is not known.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    known = [(socket.AddressFamily(family), str(place[0])) for family, _, _, _, place in found]
    if names_loopback(host):
        return known
    outward = [entry for entry in known if not names_loopback(entry[1])]
    return outward or _outward() or known


def names_loopback(host: str) -> bool:
    """Whether a name or address means the host itself, which other hosts do not reach by it."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return host == "localhost"


def _outward() -> list[tuple[socket.AddressFamily, str]]:
    """The addresses of this host's interface to other hosts."""
    found = []
    for family, far in _FAR:
        # A datagram socket sends nothing to find its way.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            found.append((family, str(probe.getsockname()[0])))
    return [entry for entry in found if not names_loopback(entry[1])]


def set_up(connection: socket.socket) -> None:
    """Let messages go at once, and notice a peer whose host vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, number in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
