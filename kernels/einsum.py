"""Einstein summation on a device, as matrix products: those of `cupy.einsum` cannot be captured in a CUDA graph.

Of several operands two at a time are contracted, in the order that numpy's `einsum_path` finds. Before that each is
summed over what it has alone. Then "bqhd,bkhd->bhqk" is, for each b and h, the product of (q, d) and (d, k).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .gemm import product
from .operands import compute_dtype, is_view, narrow, widen
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
    groups = Groups(batch, rows, columns, inner)
    apart = _summed_apart(a, b, groups, compute_dtype(dtype).itemsize)
    labels = "".join((*batch, *rows, *columns))
    shape, own_shape = groups.matrices(sizes), tuple(sizes[label] for label in labels)
    is_fit = out is not None and labels == needed and out.shape == own_shape and out.flags.c_contiguous
    target = out.reshape(shape) if out is not None and is_fit else None
    if apart is None:
        found = product(xp, groups.left(a), groups.right(b), dtype, out=target)
    else:
        parts = product(xp, apart.left(a), apart.right(b), compute_dtype(dtype))
        into = target if target is not None and target.dtype == parts.dtype else None
        found = narrow(xp.sum(parts, axis=len(batch), dtype=parts.dtype, out=into), dtype)
    if target is not None and found is target:
        return Labelled(out, labels)
    return Labelled(found.reshape(own_shape), labels)


class Groups(NamedTuple):
    """The labels of two operands, by what they are in the product of these.

    Attributes:
        batch: of the batch.
        rows, columns: of the first operand and of the second alone.
        inner: what is summed over.
    """

    batch: list[str]
    rows: list[str]
    columns: list[str]
    inner: list[str]

    def left(self, x: Labelled) -> Array:
        """The first operand as matrices; a copy where it does not lie so."""
        return _matrices(x, (*self.batch, *self.rows, *self.inner), self.rows, self.inner)

    def right(self, x: Labelled) -> Array:
        """The second one."""
        return _matrices(x, (*self.batch, *self.inner, *self.columns), self.inner, self.columns)

    def matrices(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the product."""
        return (*(sizes[label] for label in self.batch), *(_length(own, sizes) for own in (self.rows, self.columns)))

    def copied(self, a: Labelled, b: Labelled) -> int:
        """How many bytes of operands must be copied."""
        places = ((a, (self.rows, self.inner)), (b, (self.inner, self.columns)))
        return sum(x.array.nbytes for x, (first, second) in places if not self._lies_so(x, first, second))

    def _lies_so(self, x: Labelled, first: list[str], second: list[str]) -> bool:
        batch = [x.sizes[label] for label in self.batch]
        turned = _in_order(x, "".join((*self.batch, *first, *second)))
        return is_view(turned, (*batch, _length(first, x.sizes), _length(second, x.sizes)))


def _summed_apart(a: Labelled, b: Labelled, groups: Groups, itemsize: int) -> Groups | None:
    """The product of which the parts of a label's elements are summed up afterwards; None for no such label.

    Of the gradient of a convolution's weight, "bcs,bfs->cf", both operands would be copied for one product, and each
    element of the batch is one where it lies: all their products together are smaller than the copies.
    """
    copied, sizes = groups.copied(a, b), {**a.sizes, **b.sizes}
    found, least = None, copied
    for label in groups.inner if copied and len(groups.inner) > 1 else ():
        inner = [other for other in groups.inner if other != label]
        apart = groups._replace(batch=[*groups.batch, label], inner=inner)
        nbytes = apart.copied(a, b) + math.prod(apart.matrices(sizes)) * itemsize
        if nbytes < least:
            found, least = apart, nbytes
    return found


def _matrices(x: Labelled, labels: Sequence[str], first: list[str], second: list[str]) -> Array:
    """An array with its dims in an order, the last two groups of which become one dim each."""
    turned, sizes = _in_order(x, "".join(labels)), x.sizes
    batch = turned.shape[: len(labels) - len(first) - len(second)]
    return turned.reshape(*batch, _length(first, sizes), _length(second, sizes))


def _length(labels: Iterable[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[label] for label in labels)
