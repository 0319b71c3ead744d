"""The order between the streams of ranks and those of others."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from irpar.kernels.cuda import cublas_lt
from irpar.runtime.engines.lanes import Lanes


class Streams:
    """What CuPy's streams were told, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made = 0
        self.outer = Stream(self, "outer")
        self.cuda = SimpleNamespace(
            Stream=self.make,
            Event=lambda disable_timing: Event(),
            Device=self.device,
            get_current_stream=lambda: self.outer,
        )

    def make(self, non_blocking: bool) -> "Stream":
        self.made += 1
        return Stream(self, f"stream {self.made}")

    @contextmanager
    def device(self, number: int) -> Iterator[None]:
        yield


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_event(self, event: "Event") -> None:
        self.streams.log.append(f"{self.name} waits for {event.stream.name}")

    def synchronize(self) -> None:
        self.streams.log.append(f"the host waits for {self.name}")

    def __enter__(self) -> None:
        self.streams.log.append(f"work on {self.name}")

    def __exit__(self, *_: Any) -> None:
        pass


class Event:
    stream: Stream

    def record(self, stream: Stream) -> None:
        self.stream = stream


@pytest.mark.parametrize("meets_others", [False, True])
def test_a_rank_computes_after_and_before_what_others_do(meets_others: bool) -> None:
    streams = Streams()
    lanes = Lanes(streams, lambda rank: 0, meets_others)
    with lanes.of(0):
        pass
    work = ["work on stream 1"]
    around = ["stream 1 waits for outer", *work, "outer waits for stream 1"]
    assert streams.log == (around if meets_others else work)


def test_what_the_current_stream_is_given_comes_in_order_too() -> None:
    streams = Streams()
    lanes = Lanes(streams, lambda rank: 0, True)
    with lanes.of(0):
        pass
    streams.log.clear()
    with lanes.beside(0):
        assert streams.log == []  # It comes after the rank's own stream already.
    streams.outer = Stream(streams, "another")
    with lanes.beside(0), lanes.beside(0):
        assert streams.log == ["another waits for outer"]
    streams.log.clear()
    with pytest.raises(KeyError), lanes.of(0):
        raise KeyError
    with lanes.beside(0):
        pass
    assert streams.log == ["stream 1 waits for another", "work on stream 1", "another waits for stream 1"]


def test_each_rank_has_a_stream_and_what_all_read_is_waited_for() -> None:
    streams = Streams()
    lanes = Lanes(streams, lambda rank: rank, False)
    with lanes.preparing(0):
        pass
    for rank in (0, 1, 0):
        with lanes.of(rank):
            pass
    assert streams.log == [
        *("work on stream 1", "the host waits for stream 1"),
        *("work on stream 2", "work on stream 3", "work on stream 2"),
    ]


def test_arrays_of_other_devices_are_copied() -> None:
    lanes = Lanes(Streams(), lambda rank: rank, False)
    here, there = (SimpleNamespace(data=SimpleNamespace(device_id=number), copy=lambda: "a copy") for number in (1, 0))
    with lanes.of(1):
        assert lanes.adopt(here) is here
        assert lanes.adopt(there) == "a copy"


def test_tf32_is_for_what_ranks_compute() -> None:
    lanes = Lanes(Streams(), lambda rank: rank, False, is_tf32=True)
    assert not cublas_lt.PRECISION.is_tf32
    with lanes.of(0):
        assert cublas_lt.PRECISION.is_tf32
    assert not cublas_lt.PRECISION.is_tf32
