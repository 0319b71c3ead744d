"""TCP sockets between ranks, all set up alike: messages go at once, and a peer whose host vanished is noticed."""

import ipaddress
import socket
from contextlib import suppress

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Seconds until, and between, and number of probes: a host that vanished is noticed after about 35 s."""


def listen(host: str, port: int, size: int) -> socket.socket:
    """A listening socket: on the loopback where the ranks look for this one there, else on all addresses.

    The name that the others use may be that of a service or a gateway, and no address of this host; and a host may
    know its own name as a loopback address where others do not.

    Args:
        host: the name or address by which the others reach this process.
        port: 0: any that is free.
        size: ranks of the run, which may all connect at once.

    Raises:
        OSError: the port is in use, or may not be used.
    """
    address, is_v6 = "", socket.has_dualstack_ipv6()
    if _is_loopback(host):
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        address, is_v6 = str(found[0]), family == socket.AF_INET6
    listener = socket.create_server(
        (address, port),
        family=socket.AF_INET6 if is_v6 else socket.AF_INET,
        backlog=max(size, 128),
        dualstack_ipv6=is_v6 and not address,
    )
    set_up(listener)  # Accepted connections inherit it.
    return listener


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def set_up(connection: socket.socket) -> None:
    """Let messages go at once, and notice a peer whose host vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, number in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
