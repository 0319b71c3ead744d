"""What engines make of a node."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from irpar.ir import Node, Value

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Environment(dict[Value, Any]):
    """What the nodes of a segment read and define, by value.

    Attributes:
        into: where results of nodes go that have a place in the arena; of a node with several a tuple of them, with
            None for what has none.
        scratch: bytes of the arena for what kernels need beside results.
    """

    __slots__ = ("into", "scratch")

    def __init__(
        self,
        held: Mapping[Value, Any] = _NOTHING,
        into: Mapping[Node, Any] = _NOTHING,
        scratch: Mapping[Node, Any] = _NOTHING,
    ) -> None:
        super().__init__(held)
        self.into = into
        self.scratch = scratch


Operation = Callable[[list[Any], Environment], Sequence[Any]]
