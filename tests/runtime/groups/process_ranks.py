"""Ranks in processes of their own, which do what a test tells them."""

import multiprocessing
import os
import secrets
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
import pytest

from irpar.runtime.groups import Call, Collective, make_group
from irpar.runtime.groups.processes import ProcessGroup
from irpar.runtime.groups.shared_memory.segment import SegmentLayout
from irpar.sharding import Mesh
from tests.patience import patient

Given = tuple[Collective, np.ndarray]
"""A collective, and a rank's operand."""


def world(rank: int, size: int, run: str) -> dict[str, str]:
    """The environment that a launcher makes."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "IRPAR_RUN_ID": run,
    }


def _serve(rank: int, size: int, run: str, connection: Connection) -> None:
    os.environ.update(world(rank, size, run))
    connection.send((True, "ready"))
    while True:
        try:
            work, options = connection.recv()
        except EOFError:
            return
        try:
            told = True, work(**options)
        except BaseException as error:
            error.add_note(traceback.format_exc())
            told = False, error
        connection.send(told)


class Ranks:
    """Processes that wait for work, one a rank.

    Args:
        size: how many.

    Attributes:
        run_id: of the run that they make.
    """

    def __init__(self, size: int) -> None:
        # Forked from a process that has imported all this, and has no threads: half a second of each rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.run_id = secrets.token_hex(8)
        self.processes, self.connections = [], []
        for rank in range(size):
            mine, its = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self.run_id, its), daemon=True)
            process.start()
            its.close()
            self.processes.append(process)
            self.connections.append(mine)
        self.answers(120)

    def start(self, work: Callable[..., Any], options: Sequence[dict[str, Any]]) -> None:
        """Let each rank do something with options of its own."""
        for connection, each in zip(self.connections, options, strict=True):
            connection.send((work, each))

    def answers(self, seconds: float = 60, *, but: int | None = None) -> list[Any]:
        """What each gave or raised, or None for a process that is gone, and for the one not to wait for."""
        found = []
        for rank, connection in enumerate(self.connections):
            if rank == but:
                found.append(None)
                continue
            assert connection.poll(patient(seconds)), "a rank hangs"
            try:
                found.append(connection.recv()[1])
            except EOFError:
                found.append(None)
        return found

    def run(self, work: Callable[..., Any], options: Sequence[dict[str, Any]]) -> list[Any]:
        """Start, and wait for what comes.

        Raises:
            Exception: a rank's.
        """
        self.start(work, options)
        found = self.answers()
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found

    def close(self) -> None:
        """End them."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_GROUPS: dict[str, ProcessGroup] = {}


def joined(mesh: Mesh, seconds: float = 20, layout: SegmentLayout | None = None) -> ProcessGroup:
    """The group of this process; the same one the next time.

    Args:
        mesh: the mesh of all ranks.
        seconds: how long a rank waits.
        layout: of the shared memory; None: as it is made for so many ranks.
    """
    key = f"{mesh} {layout}"
    if key not in _GROUPS:
        with pytest.MonkeyPatch.context() as patch:
            if layout is not None:
                patch.setattr(SegmentLayout, "of", lambda _: layout)
            group = make_group("processes", mesh, seconds)
        assert isinstance(group, ProcessGroup)
        _GROUPS[key] = group
    return _GROUPS[key]


def exchange_all(
    mesh: Mesh, given: Sequence[Given], order: Sequence[int] | None = None, times: int = 1, **options: Any
) -> list[np.ndarray]:
    """One collective after the other; or start all, and wait for them in some order. Then all of it again, some times.

    The results of the last time; those of the others were equal to the last bit, and are still what they were.
    """
    group = joined(mesh, **options)
    kept = [_exchange_once(group, mesh, given, order) for _ in range(times)]
    for found in kept[:-1]:
        for one, other in zip(found, kept[-1], strict=True):
            assert one.tolist() == other.tolist() if one.dtype == np.object_ else one.tobytes() == other.tobytes()
    return kept[-1]


def _exchange_once(
    group: ProcessGroup, mesh: Mesh, given: Sequence[Given], order: Sequence[int] | None
) -> list[np.ndarray]:
    calls = [Call(group.rank, mesh.coords(group.rank), collective, operand) for collective, operand in given]
    if order is not None:
        for call in calls:
            group.start(call)
    found = {index: group.exchange({group.rank: calls[index]})[group.rank] for index in order or range(len(calls))}
    return [found[index] for index in range(len(calls))]
