"""Ranks as processes of a test, started as a launcher starts them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import irpar
from irpar.runtime.launch.rank_process import free_port
from tests.patience import patient

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


PROGRAMS = "tests.runtime.groups.rank_programs"
"""The module that ranks run."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended, or a job of several.

    Attributes:
        code: exit code, of a job that of its launcher.
        out, err: what it wrote.
        at: when, as `time.time` tells it.
    """

    code: int
    out: str
    err: str
    at: float


def seconds_after_fault(*ended: Ended) -> float:
    """How long after the last time that a rank told that something happens the last one ended; 0 where none told."""
    times = [float(stamp) for each in ended for stamp in re.findall(r"^\[([0-9.]+)\]$", each.err, re.MULTILINE)]
    return max(each.at for each in ended) - max(times) if times else 0.0


def run_ranks(
    count: int,
    *words: str,
    seconds: float = 60.0,
    nccl: bool = False,
    hanging: int | None = None,
    hosts: Sequence[tuple[str, Path]] = (),
    token: str = "",
) -> list[Ended]:
    """Run `rank_programs` in so many processes.

    Args:
        count: how many.
        words: group, scenario, and words of that.
        seconds: in which they end.
        nccl: all on one GPU.
        hanging: a rank that does not end by itself; it is killed when the others have ended.
        hosts: address of each, and a program that runs a command there; none: all ranks here.
        token: the secret of the run; without one ranks of several hosts do not meet.

    Raises:
        AssertionError: one does not end in time.
    """
    port = free_port()
    ranks = []
    for rank in range(count):
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
        environ |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environ |= {"IRPAR_TOKEN": token}
        paths = [*PLACES, *filter(None, [os.environ.get("PYTHONPATH")])]
        environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        if nccl:
            environ |= SHARED_DEVICE | {"NCCL_HOSTID": f"host{rank}"}
        command = [sys.executable, "-m", PROGRAMS, *words]
        if hosts:
            share = count // len(hosts)
            address, enter = hosts[rank // share]
            environ |= {"LOCAL_RANK": str(rank % share), "LOCAL_WORLD_SIZE": str(share), "MASTER_ADDR": hosts[0][0]}
            command = [str(enter), address, *command]
        ranks.append(
            subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    deadline = time.monotonic() + patient(seconds)
    try:
        ended = {}
        for rank in sorted(range(count), key=lambda rank: rank == hanging):
            if rank == hanging:
                assert ranks[rank].poll() is None, "the rank that hangs has ended"
                ranks[rank].kill()
            out, err = ranks[rank].communicate(timeout=max(deadline - time.monotonic(), 0.1))
            ended[rank] = Ended(ranks[rank].returncode, out, err, time.time())
        return [ended[rank] for rank in range(count)]
    except subprocess.TimeoutExpired as error:
        texts = []
        for process in ranks:
            process.kill()
        for rank, process in enumerate(ranks):
            out, err = process.communicate()
            texts.append(f"rank {rank}: {out[-500:]} {err[-1500:]}")
        raise AssertionError(f"ranks did not end in {seconds:g} s\n" + "\n".join(texts)) from error
