"""The relay: whatever pieces lines come in, they go out whole and in order."""

import io
import os
import re
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from irpar.runtime.launch.relay import STDERR, STDOUT, Relay

STREAMS = [(rank, stream) for rank in range(3) for stream in (STDOUT, STDERR)]


def relayed(pieces: list[tuple[int, bytes]]) -> tuple[bytes, bytes]:
    """What comes out where each stream writes its pieces, one after the other."""
    out, err = io.BytesIO(), io.BytesIO()
    relay = Relay(out, err)
    writers = []
    for rank, stream in STREAMS:
        read, write = os.pipe()
        writers.append(write)
        relay.follow(rank, stream, read)
    relay.start()
    for index, piece in pieces:
        os.write(writers[index], piece)
    for write in writers:
        os.close(write)
    assert relay.finish(lambda: False)
    return out.getvalue(), err.getvalue()


def of_rank(rank: int, stream: int, printed: bytes) -> Iterator[bytes]:
    """The lines of one rank in what was printed on a stream."""
    prefix = b"" if (rank, stream) == (0, STDOUT) else b"[%d] " % rank
    for line in printed.removesuffix(b"\n").split(b"\n"):
        if prefix and line.startswith(prefix):
            yield line.removeprefix(prefix)
        elif not prefix and not re.match(rb"\[[12]\] ", line):
            yield line


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\0\xff"]), min_size=1))))
def test_lines_of_each_rank_stay_whole_and_in_order(drawn: list[tuple[int, list[bytes]]]) -> None:
    pieces = [(index, b"".join(parts)) for index, parts in drawn]
    printed = dict(zip((STDOUT, STDERR), relayed(pieces), strict=True))
    for index, (rank, stream) in enumerate(STREAMS):
        written = b"".join(piece for at, piece in pieces if at == index)
        found = b"\n".join(of_rank(rank, stream, printed[stream]))
        assert found == written.removesuffix(b"\n")


def test_the_streams_of_rank_0_alone_are_as_they_were() -> None:
    assert relayed([(0, b"a\nb"), (1, b"c\n")]) == (b"a\nb", b"[0] c\n")


def test_a_line_without_end_gets_one_before_that_of_another_rank() -> None:
    out, _ = relayed([(0, b"a"), (2, b"b")])
    assert out in (b"a\n[1] b\n", b"[1] b\na")


def test_the_launchers_own_lines_stand_by_themselves() -> None:
    out, err = io.BytesIO(), io.BytesIO()
    relay = Relay(out, err)
    relay.start()
    relay.tell("careful \udc80")
    assert relay.finish(lambda: False)
    assert (out.getvalue(), err.getvalue()) == (b"", b"careful \\udc80\n")


def test_the_last_lines_of_standard_error_are_kept() -> None:
    relay = Relay(io.BytesIO(), io.BytesIO())
    read, write = os.pipe()
    relay.follow(1, STDERR, read)
    relay.start()
    os.write(write, b"".join(b"%d\n" % line for line in range(100)) + b"end")
    os.close(write)
    assert relay.finish(lambda: False)
    assert relay.last_lines(1)[-2:] == ["99", "end"]
    assert len(relay.last_lines(1)) == 20
    assert relay.last_lines(0) == []
