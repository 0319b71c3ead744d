"""Einstein summation on a device, as matrix products: those of `cupy.einsum` cannot be captured in a CUDA graph.

Of several operands two at a time are contracted, in the order that numpy's `einsum_path` finds. Before that each is
summed over what it has alone. Then "bqhd,bkhd->bhqk" is, for each b and h, the product of (q, d) and (d, k).
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .gemm import product
from .operands import compute_dtype, narrow, widen
from .registry import Array, ArrayModule

_DOTS = 0x2460
"""The first of the labels that stand for the dims of "...": none is a letter."""


class Labelled(NamedTuple):
    """An array with a label for each dim, no two of which are the same."""

    array: Array
    labels: str

    @property
    def sizes(self) -> dict[str, int]:
        """Of each label."""
        return dict(zip(self.labels, self.array.shape, strict=True))


def einsum(xp: ArrayModule, equation: str, operands: Sequence[Array], out: Array | None = None) -> Array:
    """The einsum of operands of one dtype; in `out` where it comes about in that order, else new or a view of new.

    Args:
        xp: the array module.
        equation: without spaces.
        operands: those.
        out: of the result's shape and dtype.
    """
    terms, result = terms_of(equation, [x.ndim for x in operands])
    dtype = operands[0].dtype
    left = _broadcast([_diagonal(xp, x, term) for x, term in zip(operands, terms, strict=True)])
    if len(left) == 1:
        found = narrow(_in_order(_summed(left[0], result), result), dtype)
        return found.copy() if xp.may_share_memory(found, operands[0]) else found
    for group in _path(left, result):
        members = [left.pop(place) for place in sorted(group, reverse=True)]
        while len(members) > 1:
            pair = members.pop(), members.pop()
            needed = "".join(dict.fromkeys(result + "".join(x.labels for x in (*left, *members))))
            if left or members:
                members.append(_contracted(xp, *pair, needed, compute_dtype(dtype)))
            else:
                members.append(_last(xp, *pair, result, dtype, out))
        left += members
    return _in_order(left[0], result)


def terms_of(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The labels of each operand and of the result, one for each dim.

    Raises:
        ValueError: the equation does not fit operands of these ranks.
    """
    sides, arrow, result = equation.partition("->")
    terms = sides.split(",")
    if len(terms) != len(ranks):
        raise ValueError(f"equation {equation!r} has {len(terms)} terms for {len(ranks)} operands")
    hidden = [rank - len(term.replace("...", "", 1)) for term, rank in zip(terms, ranks, strict=True)]
    most = max((0, *(more for term, more in zip(terms, hidden, strict=True) if "..." in term)))
    dots = "".join(map(chr, range(_DOTS, _DOTS + most)))
    named = [term.replace("...", dots[most - max(0, more) :], 1) for term, more in zip(terms, hidden, strict=True)]
    letters = "".join(named)
    once = sorted(label for label in set(letters) - set(dots) if letters.count(label) == 1)
    made = result.replace("...", dots, 1) if arrow else dots + "".join(once)
    fits = all(len(term) == rank for term, rank in zip(named, ranks, strict=True))
    if not fits or not set(made) <= set(letters) or len(set(made)) < len(made):
        raise ValueError(f"equation {equation!r} does not fit operands of ranks {', '.join(map(str, ranks))}")
    return named, made


def _diagonal(xp: ArrayModule, x: Array, labels: str) -> Labelled:
    """The elements whose places in dims of one label are the same: (3, 3) of "ii" is 3 of "i"."""
    unique = "".join(dict.fromkeys(labels))
    if unique == labels:
        return Labelled(x, labels)
    places = {label: [place for place, own in enumerate(labels) if own == label] for label in unique}
    sizes = {label: {x.shape[place] for place in own} for label, own in places.items()}
    if any(len(found) > 1 for found in sizes.values()):
        raise ValueError(f"dims of one label have different sizes in an operand of shape {x.shape}")
    shape = tuple(found.pop() for found in sizes.values())
    strides = tuple(sum(x.strides[place] for place in own) for own in places.values())
    return Labelled(xp.lib.stride_tricks.as_strided(x, shape, strides), unique)


def _broadcast(operands: list[Labelled]) -> list[Labelled]:
    """Operands without the dims of one element that others have more of."""
    most: dict[str, int] = {}
    for x in operands:
        for label, size in x.sizes.items():
            known = most.setdefault(label, size)
            if 1 not in (known, size) and known != size:
                raise ValueError(f"dims of one label have sizes {known} and {size}")
            most[label] = size if known == 1 else known
    made = []
    for x in operands:
        index = tuple(0 if size == 1 != most[label] else slice(None) for label, size in x.sizes.items())
        labels = "".join(label for label, own in zip(x.labels, index, strict=True) if own != 0)
        made.append(Labelled(x.array[index], labels))
    return made


def _summed(x: Labelled, kept: Collection[str]) -> Labelled:
    """Summed over the dims of all other labels, in the compute dtype."""
    axes = tuple(place for place, label in enumerate(x.labels) if label not in kept)
    if not axes:
        return x
    array = widen(x.array).sum(axis=axes, dtype=compute_dtype(x.array.dtype))
    return Labelled(array, "".join(label for label in x.labels if label in kept))


def _in_order(x: Labelled, labels: str) -> Array:
    return x.array if x.labels == labels else x.array.transpose([x.labels.index(label) for label in labels])


def _path(operands: Sequence[Labelled], result: str) -> list[tuple[int, ...]]:
    """Which operands are contracted, step by step; what is made of them comes last."""
    if len(operands) == 2:
        return [(0, 1)]
    numbers = {label: place for place, label in enumerate(dict.fromkeys("".join(x.labels for x in operands)))}
    arguments: list[Any] = []
    for x in operands:
        arguments += [np.broadcast_to(np.float32(0), x.array.shape), [numbers[label] for label in x.labels]]
    path, _ = np.einsum_path(*arguments, [numbers[label] for label in result], optimize="greedy")
    return [tuple(step) for step in path[1:]]


def _last(
    xp: ArrayModule, a: Labelled, b: Labelled, result: str, dtype: "np.dtype[Any]", out: Array | None
) -> Labelled:
    """The last contraction, in the order of the result where a product can have it."""
    own = [label for label in result if (label in a.labels) != (label in b.labels)]
    if own and own[0] in b.labels:
        a, b = b, a
    return _contracted(xp, a, b, result, dtype, out)


def _contracted(
    xp: ArrayModule,
    a: Labelled,
    b: Labelled,
    needed: str,
    dtype: "np.dtype[Any]",
    out: Array | None = None,
) -> Labelled:
    """The product of two operands, summed over all labels that are not needed."""
    a, b = _summed(a, {*needed, *b.labels}), _summed(b, {*needed, *a.labels})
    sizes = {**a.sizes, **b.sizes}
    order = [*(label for label in needed if label in sizes), *(label for label in sizes if label not in needed)]
    shared = [label for label in order if label in a.labels and label in b.labels]
    batch, inner = [x for x in shared if x in needed], [x for x in shared if x not in needed]
    rows, columns = ([x for x in order if x in own.labels and x not in shared] for own in (a, b))

    def shaped(x: Labelled, *groups: list[str]) -> Array:
        array = x.array.transpose([x.labels.index(label) for group in (batch, *groups) for label in group])
        return array.reshape(*lengths(batch), *(math.prod(lengths(group)) for group in groups))

    def lengths(group: Iterable[str]) -> list[int]:
        return [sizes[label] for label in group]

    labels = "".join((*batch, *rows, *columns))
    shape = (*lengths(batch), math.prod(lengths(rows)), math.prod(lengths(columns)))
    own_shape = tuple(lengths(labels))
    is_fit = out is not None and labels == needed and out.shape == own_shape and out.flags.c_contiguous
    target = out.reshape(shape) if out is not None and is_fit else None
    found = product(xp, shaped(a, rows, inner), shaped(b, inner, columns), dtype, out=target)
    if target is not None and found is target:
        return Labelled(out, labels)
    return Labelled(found.reshape(own_shape), labels)
