"""Streams of records: all come, in order and whole, however little room a ring has."""

import itertools
import os
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.runtime.groups.shared_memory.segment import Segment, SegmentLayout
from irpar.runtime.groups.shared_memory.streams import Streams
from tests.budget import budget


def two_streams(ring: int) -> tuple[Streams, Streams]:
    """Both ends, in one process."""
    layout = SegmentLayout(2, ring=ring, slot=64, slots=2, pooled=0, cores=2)
    handle = Segment.create(layout)
    first, second = Segment(layout, os.dup(handle)), Segment(layout, handle)
    first.start()
    return Streams(first, 0), Streams(second, 1)


def take(came: list[Any], peer: int, flag: int, numbers: tuple[int, int, int], payload: memoryview) -> None:
    came.append((peer, flag, numbers, bytes(payload)))


@settings(max_examples=budget(50), deadline=None)
@given(
    st.sampled_from([4096, 8256]),
    st.lists(st.tuples(st.booleans(), st.one_of(st.integers(0, 1024), st.just(0))), max_size=120),
    st.integers(0, 99),
)
def test_records_come_in_order_and_whole(ring: int, sent: list[tuple[bool, int]], seed: int) -> None:
    ends = two_streams(ring)
    drawn = random.Random(seed)
    came: tuple[list[Any], list[Any]] = ([], [])

    def poll(which: int) -> None:
        ends[which].poll((take,) * 4, came[which])

    expected: tuple[list[Any], list[Any]] = ([], [])
    for number, (is_first, size) in enumerate(sent):
        source = 0 if is_first else 1
        payload = drawn.randbytes(size)
        ends[source].send(1 - source, number % 4, number % 2, (number, -number, 2**60), payload)
        expected[1 - source].append((source, number % 2, (number, -number, 2**60), payload))
        if drawn.random() < 0.2:
            poll(drawn.randrange(2))
    for _ in range(200):
        poll(0)
        poll(1)
    assert came == expected
    assert ends[0].is_flushed
    assert ends[1].is_flushed


def test_what_is_full_is_told_and_forgotten() -> None:
    first, _ = two_streams(4096)
    for _ in range(10):
        first.send(1, 1, 0, (0, 0, 0), bytes(1000))
    assert first.full == [1]
    first.forget([1])
    assert first.is_flushed


def test_a_record_wakes_its_receiver() -> None:
    first, second = two_streams(4096)
    second.quiet()
    first.send(1, 1, 0, (0, 0, 0))
    second.sleep(60)  # Comes back at once.
    assert second.poll((take,) * 2, [])


def test_the_longest_record_comes_wherever_the_ring_stands() -> None:
    """Nothing is sent back but credits: these must leave room for it beside what is lost at the ring's end."""
    for number, size in itertools.product(range(64), (0, 100, 300)):
        first, second = two_streams(3072)
        came: list[Any] = []
        for _ in range(number):
            first.send(1, 0, 0, (0, 0, 0), bytes(size))
            second.poll((take,), came)
            first.poll((take,), came)
        first.send(1, 0, 0, (0, 0, 0), bytes(first.longest))
        for _ in range(2):
            second.poll((take,), came)
            first.poll((take,), came)
        assert len(came) == number + 1
