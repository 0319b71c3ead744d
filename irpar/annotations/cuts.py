"""Cut counts of an operator, MindSpore's way of writing a strategy, matched to the axes of a mesh.

`/fc1/MatMul: {"in": [[2, 1], [1, 4]]}` on the mesh dp=2,tp=4 means x [dp, _] and w [_, tp].
"""

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from irpar.ir import Node, Value, tensor_type
from irpar.ir.annotation import spec_json
from irpar.ops import factor_rule
from irpar.sharding import DimSpec, IrparError, Mesh

from .device_matrix import axes_by_device_matrix

Counts = tuple[int, ...]
"""Per dim, into how many blocks it is sharded."""
Axes = tuple[str, ...]


class CutsError(IrparError):
    """Cut counts that fit the mesh in no way, or in several."""


@dataclass(frozen=True)
class CutTensor:
    """An operand or result of the operator, and its cut counts.

    Attributes:
        value: the tensor.
        counts: one count a dim.
        dims: per dim what it is in the operator's rule; dims that are the same have the same cut.
    """

    value: Value
    counts: Counts
    dims: tuple[Hashable, ...]

    def spec(self, chosen: Mapping[Hashable, Axes]) -> list[DimSpec]:
        """The sharding by axes, as an annotation writes it."""
        return [list(chosen.get(dim, ())) or None for dim in self.dims]


def match_cuts(node: Node, given: Sequence[tuple[Value, int, Counts]], mesh: Mesh) -> list[tuple[Value, list[DimSpec]]]:
    """Find the axes that cut counts mean.

    Dims that are one factor of the operator's rule get the same axes, different factors different axes: the operator
    then runs without communication. Where several choices of axes have the right sizes, the one whose axes come in the
    order of the mesh from the first cut dim to the last is meant. Where there is no such choice, the counts mean the
    devices that MindSpore gives them, along parts of axes where need be. Without a rule each tensor is matched by
    itself.

    Args:
        node: the operator.
        given: (tensor, its place among all operands and then results, counts).
        mesh: the mesh.

    Returns:
        Each tensor with its sharding by axes.

    Raises:
        CutsError: a tensor has another number of dims, counts contradict each other, or the axes cannot be told.
    """
    tensors = [_tensor(node, value, place, counts) for value, place, counts in given]
    if factor_rule(node) is not None:
        chosen = _solve(node, tensors, mesh)
        return [(tensor.value, tensor.spec(chosen)) for tensor in tensors]
    return [(tensor.value, tensor.spec(_solve(node, [tensor], mesh))) for tensor in tensors]


def _tensor(node: Node, value: Value, place: int, counts: Counts) -> CutTensor:
    type_ = tensor_type(value.type)
    if type_ is None or type_.shape is None or len(type_.shape) != len(counts):
        raise CutsError(
            f"the cuts {list(counts)} are for {len(counts)} dims, but {value.name} is {value.type}",
            do="write one number for each dim, 1 where it is not sharded",
        )
    rule = factor_rule(node)
    dims: list[Hashable] = [(place, dim) for dim in range(len(counts))]
    if rule is not None:
        factors = (*rule.operands, *rule.results)[place]
        # The major factor stands for a dim of several: it is the one that is sharded first.
        dims = [parts[0] if parts else own for parts, own in zip(factors, dims, strict=True)]
    return CutTensor(value, counts, tuple(dims))


def _solve(node: Node, tensors: Sequence[CutTensor], mesh: Mesh) -> Mapping[Hashable, Axes]:
    """The axes of each cut dim."""
    counts = _agreed_counts(tensors)
    axes = {axis: size for axis, size in mesh.axes.items() if size > 1}
    choices: list[dict[Hashable, Axes]] = list(_choices(list(counts.items()), axes))
    if len(choices) == 1:
        return choices[0]
    ordered = [choice for choice in choices if _is_row_major(choice, mesh)]
    if len(ordered) == 1:
        return ordered[0]
    known = [dim for tensor in tensors for dim in tensor.dims]
    by_devices = [
        {dim: tuple(map(str, of_dim)) for dim, of_dim in placed.items()}
        for placed in axes_by_device_matrix(node, counts, known, mesh)
    ]
    if len(by_devices) == 1:
        return by_devices[0]
    if by_devices or choices:
        raise _ambiguous(node, tensors, mesh, by_devices or ordered or choices)
    raise _none(node, tensors, mesh)


def _agreed_counts(tensors: Sequence[CutTensor]) -> dict[Hashable, int]:
    """How often each dim of the operator is sharded; only what is sharded at all.

    Raises:
        CutsError: two tensors cut the same dim of the operator differently.
    """
    known: dict[Hashable, tuple[int, str]] = {}
    for tensor in tensors:
        for place, (dim, count) in enumerate(zip(tensor.dims, tensor.counts, strict=True)):
            here = f"dim {place} of {tensor.value.name}"
            count_before, there = known.setdefault(dim, (count, here))
            if count_before != count:
                raise CutsError(
                    f"the cuts do not agree: {there} is sharded into {count_before}, {here} into {count}, "
                    "and they are one dim of the operator",
                    do="cut both the same, or annotate the tensors by axes",
                )
    return {dim: count for dim, (count, _) in known.items() if count > 1}


def _choices(counts: Sequence[tuple[Hashable, int]], axes: Mapping[str, int]) -> Iterator[dict[Hashable, Axes]]:
    """All ways to give every cut dim axes of its own whose sizes multiply to its count."""
    if not counts:
        yield {}
        return
    (dim, count), rest = counts[0], counts[1:]
    for number in range(1, len(axes) + 1):
        for taken in itertools.combinations(axes, number):
            if math.prod(axes[axis] for axis in taken) == count:
                left = {axis: size for axis, size in axes.items() if axis not in taken}
                yield from ({dim: taken, **others} for others in _choices(rest, left))


def _is_row_major(choice: Mapping[Hashable, Axes], mesh: Mesh) -> bool:
    order = [mesh.axis_names.index(axis) for axes in choice.values() for axis in axes]
    return order == sorted(order)


def _none(node: Node, tensors: Sequence[CutTensor], mesh: Mesh) -> CutsError:
    cuts = ", ".join(str(list(tensor.counts)) for tensor in tensors)
    return CutsError(
        f"no axes of the mesh {mesh} have the sizes that the cuts {cuts} of {node.label} need",
        do='use a mesh with axes of these sizes, or name sub-axes under "tensors", such as ["tp:(1)2"]',
    )


def _ambiguous(
    node: Node, tensors: Sequence[CutTensor], mesh: Mesh, choices: Sequence[Mapping[Hashable, Axes]]
) -> CutsError:
    cuts = ", ".join(str(list(tensor.counts)) for tensor in tensors)
    spellings = tuple(
        ", ".join(
            f'"{tensor.value.source or tensor.value.name}": {spec_json(tensor.spec(choice))}' for tensor in tensors
        )
        for choice in choices[:4]
    )
    return CutsError(
        f"the cuts {cuts} of {node.label} fit the mesh {mesh} in {len(choices)} ways",
        notes=spellings,
        do='write one of these lines under "tensors"',
    )
