"""Two hosts on this machine: namespaces of their own for network, host name, memory and mounts, and a cable between."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")

_ENTER = """#!/bin/sh
# As ssh is called: options, the host, the command.
while [ "${1#-}" != "$1" ]; do shift; done
case $1 in %(first)s) name=%(name)s0 ;; *) name=%(name)s1 ;; esac
shift
exec ip netns exec $name unshare --uts --ipc --mount sh -c "hostname $name; mount -t tmpfs none /dev/shm; $*"
"""


def missing() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "making network namespaces needs root"
    if not all(map(shutil.which, ("ip", "unshare", "mount", "hostname"))):
        return "there is no ip, unshare, mount or hostname"
    name = f"irpar-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode == 0:
        tried = subprocess.run(
            ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", "mount -t tmpfs none /dev/shm"],
            capture_output=True,
            text=True,
        )
        subprocess.run(["ip", "netns", "del", name], check=True)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


class TwoHosts:
    """The hosts; `enter` runs a command on one as ssh would.

    Attributes:
        names: of their network namespaces.
        enter: a program: options, address and command.
    """

    def __init__(self, names: tuple[str, str], enter: Path) -> None:
        self.names = names
        self.enter = enter

    def received(self) -> int:
        """Bytes that the first has received from the second."""
        command = ["ip", "netns", "exec", self.names[0], "cat", "/proc/net/dev"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        (line,) = (line for line in lines if line.strip().startswith(f"{self.names[0]}v:"))
        return int(line.split(":")[1].split()[0])


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make the hosts, and remove them."""
    stem = f"irp{os.getpid() % 100000}"
    names = (f"{stem}0", f"{stem}1")
    enter = folder / "enter"
    enter.write_text(_ENTER % {"first": ADDRESSES[0], "name": stem})
    enter.chmod(0o755)
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = (f"{name}v" for name in names)
        _ip("link", "add", first, "netns", names[0], "type", "veth", "peer", "name", second, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"{name}v")
            _ip("-n", name, "link", "set", f"{name}v", "up")
        for name in names:
            _wait_for_link(name)
        yield TwoHosts(names, enter)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _wait_for_link(name: str) -> None:
    for _ in range(100):
        shown = subprocess.run(
            ["ip", "-n", name, "-br", "link", "show", f"{name}v"], check=True, capture_output=True, text=True
        )
        if " UP " in shown.stdout:
            return
        time.sleep(0.05)
    raise AssertionError(f"the link of {name} does not come up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
