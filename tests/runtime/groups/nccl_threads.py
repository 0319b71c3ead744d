"""Ranks of the group of GPUs as threads, without a GPU: against calls that are noted."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.runtime.groups import Call, Collective
from irpar.runtime.groups.nccl.group import NcclGroup
from irpar.runtime.groups.nccl.lane import DeviceChannel
from irpar.sharding import Axis, Mesh

from .fake_cupy import FakeCupy, Network
from .wired_threads import controls, run_threads

PAIR = Mesh({"x": 2})


def groups(mesh: Mesh, network: Network | None = None, seconds: float = 5.0):
    """Makes the group of a rank, which is closed in the end; its `cupy` has noted the calls."""
    joined, shared = controls(mesh.size), network or Network()
    return lambda rank: closing(NcclGroup(mesh, rank, seconds, joined[rank], DeviceChannel(FakeCupy(shared), 0)))


def call_of(rank: int, number: int = 0, kind: str = "AllReduce") -> Call:
    """A rank of `PAIR` that comes to a collective."""
    return Call(rank, (rank,), Collective(kind, number, (Axis("x"),)), np.ones(3, np.float32))


def meet(group: Any, rank: int, number: int = 0, kind: str = "AllReduce") -> None:
    """Come to a collective, and wait for it."""
    group.exchange({rank: call_of(rank, number, kind)})


@dataclass(frozen=True)
class Outcome:
    """What came of the ranks of `PAIR`.

    Attributes:
        given: by each.
        raised: rank to error.
        calls: of each, as its `cupy` has noted them.
    """

    given: Sequence[Any]
    raised: Mapping[int, BaseException]
    calls: Mapping[int, Sequence[tuple]]


def run_pair(work: Callable[[Any, int], Any], seconds: float = 5.0, network: Network | None = None) -> Outcome:
    """Let the ranks of `PAIR` do something.

    Args:
        work: with the group of a rank, and its number.
        seconds: how long a rank waits for others.
        network: between them; None: one that works.
    """
    make = groups(PAIR, network, seconds)
    calls: dict[int, Sequence[tuple]] = {}

    def run(rank: int) -> Any:
        with make(rank) as group:
            calls[rank] = group.cupy.calls
            return work(group, rank)

    return Outcome(*run_threads(PAIR.size, run), calls)
