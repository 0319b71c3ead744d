"""An einsum of two operands as one batch of matrix products on a processor, step by step as `numpy.einsum` takes them.

What NumPy copies on the way, and the product where its dims are permuted afterwards, lie in memory that is used again.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .operands import compute_dtype, contiguous_result
from .registry import Array, Shaped
from .scratch import SCRATCH, piece_bytes

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Side:
    """One operand of the product.

    Attributes:
        order: its dims, permuted: batch, rows and inner ones, or batch, inner ones and columns.
        shape: of the operand as matrices.
    """

    order: Ints
    shape: Ints

    @property
    def is_permuted(self) -> bool:
        """Whether its dims change places."""
        return self.order != tuple(range(len(self.order)))


@dataclass(frozen=True)
class Contraction:
    """How an einsum is a product of matrices: the second operand times the first.

    Attributes:
        left, right: the second and the first operand.
        product: the shape of the product, dim by dim.
        order: the dims of the product in the order of the result.
    """

    left: Side
    right: Side
    product: Ints
    order: Ints

    @property
    def is_permuted(self) -> bool:
        """Whether the dims of the product change places."""
        return self.order != tuple(range(len(self.order)))

    @property
    def shape(self) -> Ints:
        """The shape of the result."""
        return tuple(self.product[axis] for axis in self.order)


@functools.lru_cache(maxsize=1024)
def contraction_of(equation: str, first: Ints, second: Ints) -> Contraction | None:
    """The product that an einsum of two operands is; None where it is something else.

    "bqhd,bkhd->bhqk": the left side is (b, h, k, d), the right side (b, h, d, q), and the product (b, h, k, q).
    """
    sides, arrow, out = equation.partition("->")
    labels, comma, of_left = sides.partition(",")
    of_right = labels
    if not (arrow and comma) or not all(map(str.isalpha, {*of_left, *of_right, *out})):
        return None
    if any(len(set(text)) != len(text) for text in (of_left, of_right, out)):
        return None
    if len(of_left) != len(second) or len(of_right) != len(first) or not set(out) <= {*of_left, *of_right}:
        return None
    sizes = dict(zip(of_left, second, strict=True))
    if any(sizes.setdefault(label, size) != size for label, size in zip(of_right, first, strict=True)):
        return None
    shared = [label for label in of_left if label in of_right]
    batch, inner = [x for x in shared if x in out], [x for x in shared if x not in out]
    rows, columns = [x for x in of_left if x not in shared], [x for x in of_right if x not in shared]
    if not math.prod(sizes.values()) or math.prod(sizes[x] for x in inner) == 1 or not {*rows, *columns} <= set(out):
        return None
    made = [*batch, *rows, *columns]

    def side(labels: str, *groups: list[str]) -> Side:
        order = tuple(labels.index(label) for group in groups for label in group)
        leading = tuple(sizes[label] for label in groups[0])
        return Side(order, (*leading, *(math.prod(sizes[label] for label in group) for group in groups[1:])))

    left, right = side(of_left, batch, rows, inner), side(of_right, batch, inner, columns)
    return Contraction(left, right, tuple(sizes[x] for x in made), tuple(made.index(x) for x in out))


def contracted(found: Contraction, first: Array, second: Array, out: Array | None) -> Array:
    """The einsum of two operands of one dtype, which is that of the result; in `out`, where it fits there."""
    left, right = _matrices(second, found.left, "left"), _matrices(first, found.right, "right")
    y = contiguous_result(out, found.shape, first.dtype)
    shape = (*left.shape[:-1], right.shape[-1])
    if not found.is_permuted:
        np.matmul(left, right, out=y.reshape(shape))
        return y
    product = SCRATCH.array("product", shape, first.dtype)
    np.matmul(left, right, out=product)
    np.copyto(y, product.reshape(found.product).transpose(found.order))
    return y


def _matrices(x: Array, side: Side, purpose: str) -> Array:
    """An operand as matrices, copied where its elements do not lie for that."""
    permuted = x.transpose(side.order)
    try:
        return permuted.reshape(side.shape, copy=False)
    except ValueError:
        copy = SCRATCH.array(purpose, permuted.shape, x.dtype)
        np.copyto(copy, permuted)
        return copy.reshape(side.shape)


def scratch_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For copies of the operands and the product, each where it may be needed."""
    if len(operands) != 2 or operands[0] is None or operands[1] is None:
        return 0
    first, second = operands[0], operands[1]
    found = contraction_of(str(attributes["equation"]).replace(" ", ""), first.shape, second.shape)
    if found is None:
        return 0
    itemsize = compute_dtype(first.dtype).itemsize
    copied = [
        x.elements for x, side in ((second, found.left), (first, found.right)) if x.is_strided or side.is_permuted
    ]
    if found.is_permuted:
        copied.append(math.prod(found.product))
    return sum(piece_bytes(elements, itemsize) for elements in copied)
