"""Gradients of nodes that hold graphs: If, Loop, Scan."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from irpar.ir import Node, Value
from irpar.ops.gradients.writer import GradientWriter

if TYPE_CHECKING:
    from .reverse import Reverse

OfBodies = Callable[["Reverse", Node, Sequence[Value | None], GradientWriter], Iterator[tuple[Value, Value | None]]]

OF_BODIES: dict[tuple[str, str], OfBodies] = {}
