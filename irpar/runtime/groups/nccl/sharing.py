"""What has to be the same for all ranks, and which of them share a device: they are refused where NCCL would."""

import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from irpar.sharding import IrparError

CAPTURES = "IRPAR_CAPTURE_COLLECTIVES"
"""The environment variable that lets collectives be captured in CUDA graphs where it is "1", for all ranks alike."""
_SHARED_DEVICE_NCCL = 23000
"""NCCL 2.30, the first that lets ranks share a device, if asked to."""


def about_device(cupy: Any, device: int) -> dict[str, Any]:
    """What decides whether ranks can share a device."""
    return {
        "device": bytes(cupy.cuda.runtime.getDeviceProperties(device)["uuid"]).hex(),
        "host": os.uname().nodename,
        "host_id": os.environ.get("NCCL_HOSTID", ""),
        "nccl": cupy.cuda.nccl.get_version(),
        "captures": os.environ.get(CAPTURES) == "1",
        "shares": os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "") == "1",
    }


def check_devices(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks that share a device where NCCL would.

    Raises:
        IrparError: naming two of them.
    """
    for rank, about in enumerate(ranks):
        if about["nccl"] != ranks[0]["nccl"]:
            raise IrparError(
                f"rank 0 has NCCL {_version(ranks[0]['nccl'])}, and rank {rank} has NCCL {_version(about['nccl'])}",
                do="install one version of NCCL (nvidia-nccl-cu12, nvidia-nccl-cu13) on all hosts",
            )
        if about["captures"] != ranks[0]["captures"]:
            raise IrparError(f"ranks 0 and {rank} differ in {CAPTURES}", do="set it to 1 for all ranks, or for none")
    for (one, first), (two, second) in combinations(enumerate(ranks), 2):
        if first["device"] != second["device"]:
            continue
        hosts = first["host_id"], second["host_id"]
        may_share = first["nccl"] >= _SHARED_DEVICE_NCCL and first["shares"] and second["shares"]
        if may_share or (all(hosts) and hosts[0] != hosts[1]):
            continue
        raise IrparError(
            f"ranks {one} and {two} have one GPU of {first['host']}, which NCCL {_version(first['nccl'])} refuses",
            do="start at most as many ranks on a host as it has GPUs; to try a partition on one GPU, see "
            'docs/clusters.md, "Several ranks on one GPU"',
        )


def _version(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
