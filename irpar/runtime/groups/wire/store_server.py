"""The store's server: a thread of rank 0, which holds the values and knows which ranks are there."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from irpar.sharding import listed

from .proof import is_shown, nonce
from .store_wire import (
    GREETING,
    HELLO,
    MOST_BYTES,
    MOST_KEY_BYTES,
    RANK,
    REPLY,
    REQUEST,
    Answer,
    Ask,
    StoreError,
    proof_of_rank,
)

_HELLO_SECONDS = 10.0
"""Whoever connects and has not shown by then that it is a rank is let go."""
_MOST_NEW = 64
"""Beside the ranks, so many may be about to show it; then the one goes that has been at it longest."""

Reply = tuple[Answer, bytes]


class StoreServer:
    """Serves one run until `close`.

    Args:
        listener: a listening socket; the server's from here on.
        size: ranks of the run.
        key: what clients must know.

    Raises:
        StoreError: the server cannot start.
    """

    def __init__(self, listener: socket.socket, size: int, key: bytes) -> None:
        self._listener = listener
        self._size = size
        self._key = key
        self._values: dict[str, bytes] = {}
        self._at_barrier: dict[str, set[int]] = {}
        self._gave_up: dict[str, set[int]] = {}
        self._changes: dict[str, asyncio.Event] = {}
        self._there: set[int] = set()
        self._left: set[int] = set()
        self._failure: Reply | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._new: dict[asyncio.Task[None], None] = {}
        self._linger = 0.0
        self._started = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="irpar-store", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._problem is not None:
            raise StoreError(
                f"rank 0 cannot serve the store: {self._problem}",
                where="rank 0 has the store, at which all ranks meet",
                do="let rank 0 have more open files and more memory (ulimit -a tells what it may have)",
            ) from self._problem

    def close(self, linger: float) -> None:
        """Stop, as soon as the other ranks have left, or after `linger` seconds."""
        self._linger = linger
        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # -- connections ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._problem = error
        finally:
            self._listener.close()
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._meet, sock=self._listener)
        self._started.set()
        await self._stop.wait()
        server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=self._linger)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._admit(task)
        rank = None
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                rank = await self._greet(reader, writer)
            del self._new[task]
            if rank is not None:
                self._connections.add(task)
                await self._answer_all(rank, reader, writer)
        except (OSError, EOFError, ValueError):
            pass  # Gone, or no client of ours.
        finally:
            self._new.pop(task, None)
            self._connections.discard(task)
            if rank is not None and rank not in self._left:
                self._fail(rank, f"rank {rank} ended without leaving the run")
            writer.close()

    def _admit(self, task: asyncio.Task[None]) -> None:
        """Let one more show who it is: those who only hold connections open keep no rank out."""
        while len(self._new) >= _MOST_NEW + self._size:
            oldest = next(iter(self._new))
            del self._new[oldest]
            oldest.cancel()
        self._new[task] = None

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """The rank of a client that knows the run; None for all others, who are told so."""
        own = nonce()
        writer.write(GREETING + own)
        greeting, other, rank, size, shown = HELLO.unpack(await reader.readexactly(HELLO.size))
        if greeting != GREETING:
            return None
        nonces = own + other
        if not is_shown(proof_of_rank(self._key, "client", nonces, rank, size), shown):
            await _send(writer, (Answer.OTHER_RUN, b""))
            return None
        problem = self._misfit(rank, size)
        if problem:
            await _send(writer, _told(Answer.REFUSED, set(), problem))
            return None
        self._there.add(rank)
        try:
            await _send(writer, (Answer.OK, proof_of_rank(self._key, "server", nonces, rank, size)))
        except BaseException:
            self._there.discard(rank)  # It has not heard that it is in, and comes again.
            raise
        return int(rank)

    def _misfit(self, rank: int, size: int) -> str:
        if size != self._size:
            return f"rank {rank} was started as one of {size}, rank 0 as one of {self._size}"
        if rank in self._there:
            return f"there are two processes that were started as rank {rank}"
        return ""

    async def _answer_all(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while rank not in self._left:
            what, key_bytes, seconds, value_bytes = REQUEST.unpack(await reader.readexactly(REQUEST.size))
            if key_bytes > MOST_KEY_BYTES or value_bytes > MOST_BYTES:
                raise ValueError("a request that no client of ours makes")
            key = (await reader.readexactly(key_bytes)).decode(errors="surrogateescape")
            value = await reader.readexactly(value_bytes)
            # A client says nothing while it waits: what comes then is its end.
            asked = asyncio.ensure_future(_ACTIONS[Ask(what)](self, rank, key, value, seconds))
            ended = asyncio.ensure_future(reader.readexactly(1))
            try:
                await asyncio.wait((asked, ended), return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    return
                await _send(writer, asked.result())
            finally:
                for future in (asked, ended):
                    future.cancel()
                await asyncio.gather(asked, ended, return_exceptions=True)

    # -- what clients ask for -------------------------------------------------------------------------------------

    async def _set(self, _: int, key: str, value: bytes, __: float) -> Reply:
        self._values[key] = value
        self._change(f"value {key}")
        return Answer.OK, b""

    async def _get(self, _: int, key: str, __: bytes, seconds: float) -> Reply:
        failed = await self._until(f"value {key}", lambda: key in self._values, seconds)
        if failed is not None:
            return failed
        if key in self._values:
            return Answer.OK, self._values[key]
        absent = set(range(self._size)) - self._there
        return _told(Answer.TIMED_OUT, absent, f"nobody has set {key!r} in {_seconds_text(seconds)}{_absent(absent)}")

    async def _barrier(self, rank: int, name: str, _: bytes, seconds: float) -> Reply:
        came = self._at_barrier.setdefault(name, set())
        came.add(rank)
        if len(came) == self._size:
            # The name is free for the next barrier at once; who waits holds this one's set.
            del self._at_barrier[name]
            self._gave_up.pop(name, None)
            self._change(f"barrier {name}")
        failed = await self._until(f"barrier {name}", lambda: len(came) == self._size, seconds, came)
        if failed is not None:
            return failed
        everyone = set(range(self._size))
        if came == everyone:
            return Answer.OK, b""
        # A rank that gave up was there: others are who is missing.
        gave_up = self._gave_up.setdefault(name, set())
        gave_up.add(rank)
        came.discard(rank)
        missing = everyone - came - gave_up or everyone - came - {rank}
        absent = _absent(everyone - self._there)
        told = f"{_ranks(missing)} did not come to {name!r} in {_seconds_text(seconds)}{absent}"
        return _told(Answer.TIMED_OUT, missing, told)

    async def _abort(self, rank: int, _: str, value: bytes, __: float) -> Reply:
        self._fail(rank, f"rank {rank} failed: {value.decode(errors='replace')}")
        return await self._leave(rank, "", b"", 0.0)

    async def _leave(self, rank: int, _: str, __: bytes, ___: float) -> Reply:
        self._left.add(rank)
        for name, came in self._at_barrier.items():
            if rank not in came:
                self._change(f"barrier {name}")
        return Answer.OK, b""

    async def _until(
        self, topic: str, is_so: Callable[[], bool], seconds: float, came: set[int] | None = None
    ) -> Reply | None:
        """Wait until something is so, or the time is over; the answer where a rank makes that impossible."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_so():
                    if self._failure is not None:
                        return self._failure
                    if came is not None and self._left - came:
                        left = self._left - came
                        return _told(Answer.FAILED, left, f"{_ranks(left)} left the run before {topic}")
                    await self._changes.setdefault(topic, asyncio.Event()).wait()
        return None

    def _change(self, topic: str) -> None:
        """Wake who waits for a value or at a barrier."""
        event = self._changes.pop(topic, None)
        if event is not None:
            event.set()

    def _fail(self, rank: int, text: str) -> None:
        """Wake everybody: nothing that others wait for needs to come any more. The first failure counts."""
        self._failure = self._failure or _told(Answer.FAILED, {rank}, text)
        for topic in list(self._changes):
            self._change(topic)


_ACTIONS: dict[Ask, Callable[[StoreServer, int, str, bytes, float], Coroutine[Any, Any, Reply]]] = {
    Ask.SET: StoreServer._set,
    Ask.GET: StoreServer._get,
    Ask.BARRIER: StoreServer._barrier,
    Ask.ABORT: StoreServer._abort,
    Ask.LEAVE: StoreServer._leave,
}


async def _send(writer: asyncio.StreamWriter, reply: Reply) -> None:
    answer, value = reply
    writer.write(REPLY.pack(answer, len(value)) + value)
    await writer.drain()


def _told(answer: Answer, ranks: set[int], text: str) -> Reply:
    """An answer with a text, and the first of the ranks that are to blame."""
    return answer, RANK.pack(min(ranks, default=-1)) + text.encode(errors="replace")


def _seconds_text(seconds: float) -> str:
    """What is left of a bound is no round number."""
    return f"{max(round(seconds, 1), 0.1):g} s"


def _absent(absent: set[int]) -> str:
    return f"; not connected: {_ranks(absent)}" if absent else ""


def _ranks(ranks: set[int], most: int = 8) -> str:
    """`rank 3`, `ranks 1, 2`, the first few of many."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(list(map(str, sorted(ranks))), most)}"
