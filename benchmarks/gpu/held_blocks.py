"""Which blocks a pool has given out at the moment at which they are most, and what asked for them."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from irpar.ir import Node

_PACKAGE = "irpar."
_FUNCTIONS = 3
"""So many functions of irpar are named, the innermost first."""
_LOCALS = ("node", "one", "self")
"""What functions of irpar call what they are at: a node, or what has one."""


@dataclass(frozen=True)
class Block:
    """Memory that was asked for.

    Attributes:
        nbytes: as it is rounded up.
        functions: of irpar, that asked.
        node: that was computed; empty where none was.
    """

    nbytes: int
    functions: str
    node: str


class HeldBlocks:
    """The blocks that a pool has given out; to be told of each block that any pool gives out or takes back.

    Args:
        used_bytes: what of the pool is given out now.

    Attributes:
        most: the most bytes that were since `begin`.
        at_most: the blocks that these were.
    """

    def __init__(self, used_bytes: Callable[[], int]) -> None:
        self._used_bytes = used_bytes
        self._counted = used_bytes()
        self._blocks: dict[int, Block] = {}
        self.begin()

    def begin(self) -> None:
        """Forget what was the most."""
        self._counted = self.most = self._used_bytes()
        self.at_most = tuple(self._blocks.values())

    def given(self, block: int) -> None:
        """A block was given out; it is this pool's where that has given out more than before."""
        grown, self._counted = self._used_bytes() - self._counted, self._used_bytes()
        if grown > 0:
            self._blocks[block] = _asked(grown, sys._getframe(1))
        if self._counted > self.most:
            self.most, self.at_most = self._counted, tuple(self._blocks.values())

    def taken_back(self, block: int) -> None:
        """A block was taken back."""
        self._counted = self._used_bytes()
        self._blocks.pop(block, None)


def _asked(nbytes: int, frame: FrameType | None) -> Block:
    functions: list[str] = []
    node = ""
    while frame is not None and not (node and len(functions) == _FUNCTIONS):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_PACKAGE):
            if len(functions) < _FUNCTIONS:
                functions.append(f"{module.removeprefix(_PACKAGE)}.{frame.f_code.co_name}")
            node = node or _node_of(frame)
        frame = frame.f_back
    return Block(nbytes, " < ".join(functions), node)


def _node_of(frame: FrameType) -> str:
    """The node that a function is at."""
    local = frame.f_locals
    for found in (local.get(name) for name in _LOCALS):
        for node in (found, getattr(found, "node", None), getattr(found, "_node", None)):
            if isinstance(node, Node):
                return f"{node.op_type} {node.label}"
    return ""


def rows(blocks: Iterable[Block], most: int) -> list[dict[str, Any]]:
    """Those that the same functions asked for in one row: bytes, how many, and the node of the largest."""
    groups: defaultdict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        groups[block.functions].append(block)
    made = []
    for functions, asked in groups.items():
        largest = max(asked, key=lambda block: block.nbytes)
        made.append(
            {
                "bytes": sum(block.nbytes for block in asked),
                "blocks": len(asked),
                "functions": functions,
                "largest": largest.nbytes,
                "node": largest.node,
            }
        )
    return sorted(made, key=lambda row: -row["bytes"])[:most]
