"""What ranks print, passed on line by line: one thread reads all of their pipes, and writes whole lines.

    rank 0, standard output     as it is, byte for byte, so that `irpar launch ... --json | jq` works
    all others                  `[2] ` before each line, on the stream that the rank wrote to

Where the reader of these streams is slow, the ranks wait, as they would if they wrote to it themselves.
"""

import os
import select
import selectors
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

STDOUT, STDERR = 1, 2
MOST_LINE_BYTES = 1 << 20
"""A line that is longer is passed on in pieces."""
_MOST_AT_ONCE = 1 << 16
_QUIET_SECONDS = 0.2
"""Once all ranks have ended, a pipe that somebody else holds open is left after this."""
_LAST_LINES = 20


class Writable(Protocol):
    """What a relay writes to: a file without a buffer, or bytes in memory."""

    def write(self, data: memoryview, /) -> int | None:
        """Write the begin of some bytes; gives how many, or None where none can be written now."""

    def fileno(self) -> int:
        """What can be waited for."""


@dataclass(eq=False)
class _Source:
    """One stream of one rank.

    Attributes:
        begun: the begin of a line whose end has not come.
    """

    rank: int
    stream: int
    prefix: bytes
    begun: bytearray = field(default_factory=bytearray)


class Relay:
    """Passes on what ranks print, from `start` to `finish`.

    Args:
        stdout, stderr: where to; without buffers, whose locks a write that hangs would keep when the process ends.

    Attributes:
        failure: why a stream could not be written. What comes for it later is dropped, as where its reader has gone;
            the ranks go on.
    """

    def __init__(self, stdout: Writable, stderr: Writable) -> None:
        self.failure: OSError | None = None
        self._targets = {STDOUT: stdout, STDERR: stderr}
        self._dropped: set[int] = set()
        self._unended: dict[int, _Source] = {}
        self._last: dict[int, deque[bytes]] = {}
        self._own_lines: deque[bytes] = deque()
        self._sources = 0
        self._is_last_call = False
        self._woken, self._wake = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="irpar-relay", daemon=True)

    def follow(self, rank: int, stream: int, handle: int) -> None:
        """Pass on what comes out of a pipe, which is the relay's from here on; before `start`."""
        prefix = b"" if (rank, stream) == (0, STDOUT) else b"[%d] " % rank
        self._selector.register(handle, selectors.EVENT_READ, _Source(rank, stream, prefix))
        self._sources += 1

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tell(self, text: str) -> None:
        """Write lines of the launcher's own to standard error, between those of the ranks."""
        self._own_lines.append(text.encode(errors="backslashreplace") + b"\n")
        os.write(self._wake, b".")

    def finish(self, is_impatient: Callable[[], bool]) -> bool:
        """Pass on what the ranks, which have all ended, have written; then stop.

        Args:
            is_impatient: whether the user will not wait any more for who reads the output.

        Returns:
            Whether all was passed on, or dropped because nobody reads it.
        """
        self._is_last_call = True
        os.write(self._wake, b".")
        while self._thread.is_alive() and not is_impatient():
            self._thread.join(0.1)
        if self._thread.is_alive():
            return False  # It hangs in a write, and ends with the process.
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._wake)
        return True

    def last_lines(self, rank: int) -> list[str]:
        """The last lines that a rank wrote to standard error; after `finish`."""
        return [line.decode(errors="replace") for line in self._last.get(rank, ())]

    def _run(self) -> None:
        while self._sources or not self._is_last_call:
            is_last_call = self._is_last_call
            ready = self._selector.select(_QUIET_SECONDS if is_last_call else None)
            if is_last_call and not ready:
                break
            for key, _ in ready:
                if key.data is None:
                    os.read(self._woken, _MOST_AT_ONCE)
                else:
                    self._read(key.fd, key.data)
            while self._own_lines:
                self._write(STDERR, None, self._own_lines.popleft())
        for key in self._selector.get_map().values():
            if key.data is not None:
                self._pass_on(key.data, bytes(key.data.begun))

    def _read(self, handle: int, source: _Source) -> None:
        data = os.read(handle, _MOST_AT_ONCE)
        if not data:
            self._selector.unregister(handle)
            os.close(handle)
            self._sources -= 1
            self._pass_on(source, bytes(source.begun))
            return
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            self._pass_on(source, bytes(source.begun) + whole + newline)
            source.begun[:] = rest
        else:
            source.begun += data
        if len(source.begun) > MOST_LINE_BYTES:
            self._pass_on(source, bytes(source.begun))
            source.begun.clear()

    def _pass_on(self, source: _Source, data: bytes) -> None:
        """Write lines, with prefixes where they get any; these end, too."""
        if not data:
            return
        if source.stream == STDERR:
            last = self._last.setdefault(source.rank, deque(maxlen=_LAST_LINES))
            last.extend(data.splitlines()[-_LAST_LINES:])
        if source.prefix:
            lines = data.removesuffix(b"\n").replace(b"\n", b"\n" + source.prefix)
            data = source.prefix + lines + b"\n"
        self._write(source.stream, source, data)

    def _write(self, stream: int, source: _Source | None, data: bytes) -> None:
        if stream in self._dropped:
            return
        unended = self._unended.pop(stream, source)
        if unended is not source:
            data = b"\n" + data
        if source is not None and not data.endswith(b"\n"):
            self._unended[stream] = source
        try:
            _write_all(self._targets[stream], data)
        except BrokenPipeError:
            self._dropped.add(stream)
        except (OSError, ValueError) as error:  # ValueError: it is closed.
            self._dropped.add(stream)
            if isinstance(error, OSError):
                self.failure = self.failure or error


def _write_all(target: Writable, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        count = target.write(rest)
        if count is None:  # Somebody made the stream one that does not wait.
            select.select([], [target.fileno()], [])
        rest = rest[count or 0 :]
