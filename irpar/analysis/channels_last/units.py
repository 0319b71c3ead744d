"""What can be computed with channels last, a node or several at a time, and what that is worth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from irpar.ir import Node, TensorType, Value, tensor_type
from irpar.ops.facts import CannotTellError

from .layout import LEAST_RANK, MOST_RANK
from .writer import Writer

Write = Callable[[Writer], Sequence[Value]]
"""Writes nodes that compute the results of a unit; gives those with channels last, then the others."""

LAUNCH_BYTES = 1 << 22
"""What a GPU's memory moves while a kernel starts, about a microsecond."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Nodes that are computed together with channels last, or as they are.

    Attributes:
        members: the nodes, in order.
        reads: operands that are then read with channels last.
        makes: results that are then made with channels last.
        keeps: results that lie as they did.
        saved: bytes that fewer are moved then; below zero: that more are.
        write: what writes them then.
        is_fused: whether a kernel computes them that reads a turned image as a view, and so elements that lie apart;
            others copy it in order.
    """

    members: tuple[Node, ...]
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    write: Write
    saved: int = 0
    keeps: tuple[Value, ...] = ()
    is_fused: bool = False

    @property
    def last(self) -> Node:
        """The last of the nodes, in whose place the others are computed."""
        return self.members[-1]


def image(value: Value | None) -> TensorType:
    """The type of an image: a tensor of static shape with batch, channels and one to three places.

    Raises:
        CannotTellError: it is none.
    """
    found = None if value is None else tensor_type(value.type)
    if found is None or not found.is_static or not LEAST_RANK <= len(found.static_shape) <= MOST_RANK:
        raise CannotTellError("no image")
    if 0 in found.static_shape:
        raise CannotTellError("an empty image")
    return found


def moved(*values: Value | None) -> int:
    """Bytes of tensors of static shape."""
    return sum(value.tensor_type.nbytes for value in values if value is not None)


def turning(value: Value) -> int:
    """What it costs to put the channels of an image last, or back."""
    return 2 * moved(value) + LAUNCH_BYTES
