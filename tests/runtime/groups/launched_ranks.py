"""Ranks as processes of a test, started as a launcher starts them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import irpar

ROOT = Path(__file__).parents[3]
PLACES = (str(Path(irpar.__file__).parents[1]), str(ROOT))
"""Where irpar is, which may be a folder of links, and where its tests are."""
SHARED_DEVICE = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""With these, and a host id of its own for each rank, NCCL takes several ranks on one GPU."""


@dataclass
class Ended:
    """A rank that has ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str


def run_ranks(
    count: int,
    *words: str,
    seconds: float = 60.0,
    nccl: bool = False,
    hanging: int | None = None,
    hosts: Sequence[tuple[str, Path]] = (),
) -> list[Ended]:
    """Run `wired_ranks` in so many processes.

    Args:
        count: how many.
        words: of the command.
        seconds: in which they end.
        nccl: all on one GPU.
        hanging: a rank that does not end by itself; it is killed when the others have ended.
        hosts: address of each, and a program that runs a command there; none: all ranks here.

    Raises:
        AssertionError: one does not end in time.
    """
    port = free_port()
    ranks = []
    for rank in range(count):
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
        environ |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        paths = [*PLACES, *filter(None, [os.environ.get("PYTHONPATH")])]
        environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        if nccl:
            environ |= SHARED_DEVICE | {"NCCL_HOSTID": f"host{rank}"}
        command = [sys.executable, "-m", "tests.runtime.groups.wired_ranks", *words]
        if hosts:
            share = count // len(hosts)
            address, enter = hosts[rank // share]
            environ |= {"LOCAL_RANK": str(rank % share), "LOCAL_WORLD_SIZE": str(share), "MASTER_ADDR": hosts[0][0]}
            command = [str(enter), address, *command]
        ranks.append(
            subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    deadline = time.monotonic() + seconds
    try:
        ended = {}
        for rank in sorted(range(count), key=lambda rank: rank == hanging):
            if rank == hanging:
                assert ranks[rank].poll() is None, "the rank that hangs has ended"
                ranks[rank].kill()
            out, err = ranks[rank].communicate(timeout=max(deadline - time.monotonic(), 0.1))
            ended[rank] = Ended(ranks[rank].returncode, out, err)
        return [ended[rank] for rank in range(count)]
    except subprocess.TimeoutExpired as error:
        texts = []
        for process in ranks:
            process.kill()
        for rank, process in enumerate(ranks):
            out, err = process.communicate()
            texts.append(f"rank {rank}: {out[-500:]} {err[-1500:]}")
        raise AssertionError(f"ranks did not end in {seconds:g} s\n" + "\n".join(texts)) from error


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
