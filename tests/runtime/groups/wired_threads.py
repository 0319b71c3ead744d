"""Ranks as threads of one process, each with real connections to the others."""

import socket
import threading
from collections.abc import Callable
from typing import Any

from irpar.runtime.groups.wire.control import Control
from tests.patience import patient


def controls(count: int) -> list[Control]:
    """The connections of so many ranks."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one in range(count):
        for two in range(one):
            ends[one][two], ends[two][one] = socket.socketpair()
    return [Control(rank, connections) for rank, connections in enumerate(ends)]


def run_threads(count: int, run: Callable[[int], Any]) -> tuple[list[Any], dict[int, BaseException]]:
    """What each rank gives, and what ranks raised."""
    given: list[Any] = [None] * count
    raised: dict[int, BaseException] = {}

    def rank_thread(rank: int) -> None:
        try:
            given[rank] = run(rank)
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=rank_thread, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(60))
        assert not thread.is_alive(), "a rank hangs"
    return given, raised
