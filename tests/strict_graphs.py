"""CUDA graphs of the stand-in for CuPy: what a stream is given is noted, undone, and done again at each launch.

A capture computes as it goes, so that shapes are known, and puts back at its end what it wrote: nothing has happened.
Numbers that kernels were given as arguments stay in the graph as they were; arrays are read where they lie. Memory of a
pool of graphs is poisoned before each launch; memory that was let go is not read but reported.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

POISON = 0xA5


class RefusedError(RuntimeError):
    """What CuPy refuses while a stream captures."""


class _Current(threading.local):
    """What a thread is at: the capture that it makes, and where its arrays lie."""

    capture: "Capture | None" = None
    allocate: Any = None


CURRENT = _Current()


def root_of(array: np.ndarray) -> np.ndarray:
    """The array whose memory a view lies in."""
    base = array
    while (base := getattr(base, "base", None)) is not None:  # What as_strided gives stands on an object of its own.
        array = base if isinstance(base, np.ndarray) else array
    return array


def bytes_of(root: np.ndarray) -> np.ndarray:
    """All bytes of an array that owns its memory, in whatever order it has them."""
    return np.frombuffer((ctypes.c_uint8 * root.nbytes).from_address(root.ctypes.data), np.uint8)


def address_of(array: np.ndarray) -> int:
    """Where an array lies, or will lie when what is captured is launched."""
    root = root_of(array)
    _, address = ({} if CURRENT.capture is None else CURRENT.capture.lent).get(id(root), (root, root.ctypes.data))
    return address + array.ctypes.data - root.ctypes.data


class Place:
    """Where an array lies, without holding its memory."""

    def __init__(self, array: np.ndarray) -> None:
        root = root_of(array)
        self._root = weakref.ref(root)
        self._offset = array.ctypes.data - root.ctypes.data
        self._form = array.shape, array.dtype, array.strides
        self._lent = None
        if address_of(root) != root.ctypes.data:
            self._lent = (ctypes.c_uint8 * root.nbytes).from_address(address_of(root))

    def array(self) -> np.ndarray:
        if self._lent is not None:
            shape, dtype, strides = self._form
            return np.ndarray(shape, dtype, self._lent, self._offset, strides)
        root = self._root()
        assert root is not None, "a graph reads or writes memory that was let go"
        shape, dtype, strides = self._form
        if not root.nbytes:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, bytes_of(root), self._offset, strides)


def mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """A value with a function of all that is of some kind in it, inside of tuples, lists and dicts too."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(item, kind, function) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, kind, function) for item in value))
    return type(value)(mapped(item, kind, function) for item in value) if isinstance(value, tuple | list) else value


def arrays_in(value: Any) -> list[np.ndarray]:
    """All arrays in a value."""
    found: list[np.ndarray] = []
    mapped(value, np.ndarray, found.append)
    return found


class Capture:
    """What a stream was given since its capture began.

    Attributes:
        lent: where memory lies that an allocator has of others, when what is captured is launched.
    """

    def __init__(self) -> None:
        self.lent: dict[int, tuple[np.ndarray, int]] = {}
        self.done: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.pools: list[Pool] = []
        self.is_invalid = False
        self._before: list[tuple[np.ndarray, np.ndarray]] = []
        self._made: list[np.ndarray] = []

    def will_write(self, array: np.ndarray) -> None:
        root = root_of(array)
        if root.nbytes:
            self._before.append((root, bytes_of(root).copy()))

    def note(self, function: Callable[..., Any], arguments: Any, keywords: Any, results: Any) -> None:
        """Note a launch; what gives views of its operands is none."""
        given = arrays_in((arguments, keywords))
        fresh = [array for array in arrays_in(results) if not any(np.may_share_memory(array, one) for one in given)]
        written = keywords.get("out") is not None or getattr(function, "writes", False)
        if not fresh and not written:
            return
        pool, is_done = getattr(CURRENT.allocate, "__self__", None), not getattr(function, "only_allocates", False)
        for root in map(root_of, fresh):
            self._made += [root] if is_done else []
            if isinstance(pool, Pool):
                address = pool.take(root)
                if address is not None:
                    self.lent[id(root)] = root, address
                self.pools = [*dict.fromkeys((*self.pools, pool))]
        if not is_done:
            return
        noted = mapped((arguments, keywords, None if written else results), np.ndarray, Place)
        self.done.append((function, *noted))

    def undo(self) -> None:
        for root, before in reversed(self._before):
            bytes_of(root)[:] = before
        for root in self._made:
            _poison(root)
        self._made.clear()
        self.lent.clear()


class Graph:
    """A capture that can be launched.

    Attributes:
        launches: how often any was.
    """

    launches = 0

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def launch(self, stream: Any) -> None:
        assert CURRENT.capture is None
        Graph.launches += 1
        for pool in self._capture.pools:
            pool.poison()
        for function, arguments, keywords, results in self._capture.done:
            places = mapped((arguments, keywords), Place, Place.array)
            with np.errstate(all="ignore"):
                found = mapped(function(*places[0], **places[1]), np.generic, np.asarray)
            if results is not None:
                for place, array in zip(_places_in(results), arrays_in(found), strict=True):
                    np.copyto(place.array(), array)


class Pool:
    """A memory pool, of graphs or the module's.

    Attributes:
        holding: those that took memory, and hold it until they are told to free what is free, also when they are gone.
    """

    holding: ClassVar[set["Pool"]] = set()

    def __init__(self, grow: Callable[[int], Any] | None = None) -> None:
        self._grow = grow
        self._roots: list[np.ndarray] = []

    def malloc(self, size: int) -> Any:
        if self._grow is None:
            return SimpleNamespace(mem=SimpleNamespace(size=size))
        self.holding.add(self)
        return self._grow(size)

    def free_all_blocks(self) -> None:
        self.holding.discard(self)

    def take(self, root: np.ndarray) -> int | None:
        """Memory for an array: where it lies, if it is of others; None: where it lies already."""
        self._roots.append(root)
        return getattr(self.malloc(root.nbytes).mem, "ptr", None) if root.nbytes else None

    def poison(self) -> None:
        for root in self._roots:
            _poison(root)


def launch(function: Callable[..., Any], arguments: Any, keywords: Any, writes: np.ndarray | None = None) -> Any:
    """Do what the device is given, and note it where its stream captures."""
    capture = CURRENT.capture
    if capture is None:
        return function(*arguments, **keywords)
    if writes is not None:
        capture.will_write(writes)
    try:
        results = function(*arguments, **keywords)
    except IndexError:  # A device reads no index while it captures: anything may lie there.
        results = function(*mapped(arguments, np.ndarray, _first_places), **keywords)
    results = mapped(results, np.generic, np.asarray)
    capture.note(function, arguments, keywords, results)
    return results


def _first_places(array: np.ndarray) -> np.ndarray:
    """Numbers that are in every range, where they may be indices."""
    return np.zeros_like(array) if array.dtype.kind in "iu" else array


def refuse_in_capture(what: str) -> None:
    """Raise as CuPy does for what it refuses while a stream captures."""
    if CURRENT.capture is not None:
        raise RefusedError(f"the current stream is capturing, so {what} disallowed")


def begin_capture() -> None:
    assert CURRENT.capture is None
    CURRENT.capture = Capture()


def end_capture() -> Graph:
    """The graph of a capture; an error if something has made the capture invalid."""
    capture, CURRENT.capture = CURRENT.capture, None
    assert capture is not None
    capture.undo()
    if capture.is_invalid:
        raise RefusedError("cudaErrorStreamCaptureInvalidated")
    return Graph(capture)


@contextmanager
def using_allocator(allocate: Any) -> Iterator[None]:
    """In here what a capture makes lies where an allocator says."""
    before, CURRENT.allocate = CURRENT.allocate, allocate
    try:
        yield
    finally:
        CURRENT.allocate = before


def _places_in(value: Any) -> list[Place]:
    found: list[Place] = []
    mapped(value, Place, found.append)
    return found


def _poison(root: np.ndarray) -> None:
    if root.nbytes:
        bytes_of(root)[:] = POISON
