"""What kernels found wrong of numbers on a device, told where the device is waited for."""

import threading
from typing import Any

import numpy as np

from irpar.ir import Node
from irpar.runtime.errors import NodeError

_WORDS = 1024
"""Words of one piece of memory."""


class _Piece:
    """Words in pinned memory of the host, which devices write to as well."""

    def __init__(self, cupy: Any, device: int) -> None:
        memory = cupy.cuda.alloc_pinned_memory(_WORDS)
        self.host = np.frombuffer(memory, np.bool_, _WORDS)
        self.host[:] = False
        seen = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.ptr, _WORDS, memory, device), 0)
        self.device = cupy.ndarray((_WORDS,), np.bool_, seen)
        self.told: list[tuple[Node, str]] = []


class DeviceFaults:
    """The problems of all nodes with what they read, a word for each.

    A node's kernel sets the word when it runs on the device; whoever has waited for that looks whether any is set.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._pieces: dict[int, list[_Piece]] = {}
        self._known: dict[tuple[int, Node, str], Any] = {}
        self._lock = threading.Lock()

    def word(self, device: int, node: Node, problem: str) -> Any:
        """The word of a problem of a node on a device: an array of one truth there."""
        key = (device, node, problem)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._new(*key)
            return self._known[key]

    def _new(self, device: int, node: Node, problem: str) -> Any:
        pieces = self._pieces.setdefault(device, [])
        if not pieces or len(pieces[-1].told) == _WORDS:
            pieces.append(_Piece(self._cupy, device))
        place = len(pieces[-1].told)
        pieces[-1].told.append((node, problem))
        return pieces[-1].device[place : place + 1]

    def check(self) -> None:
        """Tell of the first problem of which a device has told, and forget all.

        Raises:
            NodeError: there is one.
        """
        for pieces in tuple(self._pieces.values()):
            for piece in pieces:
                if piece.host.any():
                    node, problem = piece.told[int(piece.host.argmax())]
                    piece.host[:] = False
                    raise NodeError(f"{node.operator} failed: {problem}", where=f"node {node.label}")
