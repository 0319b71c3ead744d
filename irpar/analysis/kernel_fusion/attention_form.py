"""What an Attention computes: operands as views, masks, scales; whether shapes and dtypes allow it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from irpar.ir import DType, Node, Value

VERSION = 23
"""The first version of the operator set that has Attention."""
LOW = -1e4
"""What is added to the score of a key that is not to be seen; its weight is zero then, rounded."""
LOWEST = -1e30
"""A score adds nothing to such a number, rounded."""
KEYS_BY_PLACES = (0, 1, 3, 2)
"""The order of dims in which keys are multiplied, as a Transpose of (batch, heads, keys, size)."""
FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)


@dataclass(frozen=True)
class View:
    """A value with its dims in another order; None: as they are."""

    value: Value
    order: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in that order."""
        shape = self.value.shape
        return shape if self.order is None else tuple(shape[dim] for dim in self.order)

    def transposed(self, order: Sequence[int]) -> "View":
        """With its dims in another order again."""
        before = self.order or tuple(range(len(order)))
        both = tuple(before[dim] for dim in order)
        return View(self.value, None if both == tuple(range(len(both))) else both)


@dataclass(frozen=True)
class Masked:
    """A mask.

    Attributes:
        value: flags of the keys that are seen, or numbers that are added to scores.
        negated: whether the flags are those of keys that are not seen.
        low: one number that takes the place of the scores of keys that are not seen; None: minus infinity.
    """

    value: Value
    negated: bool = False
    low: Value | None = None

    @property
    def is_added(self) -> bool:
        """Whether it is numbers, once it is written."""
        return self.low is not None or self.value.dtype is not DType.BOOL


@dataclass(frozen=True)
class Attention:
    """Nodes that one Attention computes.

    Attributes:
        members: they, in order; what they alone read is among them.
        q, k, v: (batch, heads, places, size).
        masks: all of them hold.
        is_causal: whether a query sees the keys up to its own place.
        scale, softcap: of the scores; a softcap of 0 is none.
        result: what it gives, in the order of `order`.
    """

    members: tuple[Node, ...]
    q: View
    k: View
    v: View
    masks: tuple[Masked, ...]
    is_causal: bool
    scale: float
    softcap: float
    result: View

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def attributes(self) -> dict[str, object]:
        """Those of the node."""
        found: dict[str, object] = {"scale": self.scale}
        if self.is_causal:
            found["is_causal"] = 1
        if self.softcap:
            found["softcap"] = self.softcap
        return found

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        masks = (value for mask in self.masks for value in (mask.value, mask.low) if value is not None)
        return (self.q.value, self.k.value, self.v.value, *masks)


def fit(made: Attention) -> bool:
    """Whether shapes and dtypes are an Attention's."""
    views = (made.q, made.k, made.v)
    if any(not view.value.is_static or len(view.value.shape) != 4 for view in (*views, made.result)):
        return False
    if len({view.value.dtype for view in (*views, made.result)}) > 1 or made.q.value.dtype not in FLOATS:
        return False
    (batch, heads, queries, head), (_, key_heads, keys, _), value_head = made.q.shape, made.k.shape, made.v.shape[3]
    if not key_heads or heads % key_heads or made.k.shape != (batch, key_heads, keys, head):
        return False
    if made.is_causal and queries != keys:
        return False
    scores = (batch, heads, queries, keys)
    return (
        made.v.shape == (batch, key_heads, keys, value_head)
        and made.result.shape == (batch, heads, queries, value_head)
        and all(broadcasts(mask.value, scores) for mask in made.masks)
        and len({mask.is_added for mask in made.masks}) < 2
    )


def is_for_export(made: Attention) -> bool:
    """Whether other runtimes compute it too: ONNX Runtime wants each query's mask of each key, and a scale above 0."""
    shapes = [mask.value.shape for mask in made.masks]
    is_whole = not shapes or np.broadcast_shapes(*shapes)[-2:] == (made.q.shape[2], made.k.shape[2])
    return is_whole and made.scale > 0


def broadcasts(value: Value, shape: tuple[int, ...]) -> bool:
    """Whether a mask broadcasts to the shape of scores; one of keys alone would be no Attention's."""
    if not value.is_static or not 2 <= len(value.shape) <= len(shape):
        return False
    aligned = shape[len(shape) - len(value.shape) :]
    return all(size in (1, full) for size, full in zip(value.shape, aligned, strict=True))
