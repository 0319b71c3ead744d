"""Products with a weight that has a dim of heads: their equations, and the products of matrices that they are.

columns   "abk,khd->abhd"    Reshape(MatMul(x, Reshape(w, [k, h * d])), [a, b, h, d])
rows      "abhd,hdk->abk"    MatMul(Reshape(x, [a, b, h * d]), Reshape(w, [h * d, k]))
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import TypeVar

from irpar.ir import Node
from irpar.ops.facts import text_attribute

T = TypeVar("T")

_CONTRACTED, _HEADS, _EACH = "k", "h", "d"
_APART = _HEADS + _EACH
_LEADING = "".join(letter for letter in ascii_lowercase if letter not in _CONTRACTED + _APART)
_EQUATION = re.compile(f"([{_LEADING}]*)({_CONTRACTED}|{_APART}),({_CONTRACTED}{_APART}|{_APART}{_CONTRACTED})->(.*)")
MOST_LEADING = len(_LEADING)
"""Dims before those that are contracted, or are heads."""


@dataclass(frozen=True)
class ByHeads:
    """Such a product.

    Attributes:
        leading: dims of data and result that the weight does not have.
        are_columns: the heads are columns of the weight, which the result has; else rows, which are contracted.
        is_turned: the weight has its columns before its rows.
    """

    leading: int
    are_columns: bool
    is_turned: bool

    @property
    def equation(self) -> str:
        """As Einsum has it."""
        leading = _LEADING[: self.leading]
        rows, columns = (_CONTRACTED, _APART) if self.are_columns else (_APART, _CONTRACTED)
        weight = columns + rows if self.is_turned else rows + columns
        return f"{leading}{rows},{weight}->{leading}{columns}"


def by_heads(node: Node) -> ByHeads | None:
    """What an Einsum is, if it is such a product."""
    if node.identity != ("", "Einsum"):
        return None
    found = _EQUATION.fullmatch(text_attribute(node, "equation"))
    if found is None:
        return None
    leading, rows, weight, _ = found.groups()
    made = ByHeads(len(leading), are_columns=rows == _CONTRACTED, is_turned=not weight.startswith(rows))
    return made if made.equation == found[0] else None


def without_heads(spec: Sequence[T], shape: Sequence[int], of: Sequence[int]) -> tuple[T, ...]:
    """What is said dim by dim of a tensor with a dim of heads, said of the one that it is in the model.

    Args:
        spec: an entry for each dim of `shape`.
        shape: with heads and their elements, [768, 12, 64]; or any other, of which all is said as it is.
        of: with columns, [768, 768].
    """
    dim = dim_of_heads(shape, of)
    return tuple(spec) if dim is None else (*spec[: dim + 1], *spec[dim + 2 :])


def dim_of_heads(shape: Sequence[int], of: Sequence[int]) -> int | None:
    """The dim of heads that a tensor has, or a section of it, and not in the model; arguments of `without_heads`."""
    dim = next((dim for dim, size in enumerate(of) if shape[dim] != size), None) if len(shape) == len(of) + 1 else None
    return dim if dim is not None and tuple(shape[dim + 2 :]) == tuple(of[dim + 1 :]) else None
