"""Merged dims are taken apart: operators work on the parts of a dim that was merged before them.

m = Reshape(q : [4, 8, 6, 16]) : [32, 6, 16]
n = Reshape(k : [4, 8, 16, 6]) : [32, 16, 6]        s' = MatMul(q, k) : [4, 8, 6, 6]
s = MatMul(m, n) : [32, 6, 6]                       s = Reshape(s') : [32, 6, 6]

Of a merged dim only the major part can be sharded freely: blocks of batch and of heads together are no block of
batch x heads. The Reshape wanders down until one that splits the dim again takes it away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from irpar.analysis.weights.atoms import Atoms, follow, joined
from irpar.ir import ArrayTensor, Builder, Ints, Module, Node, TensorType, Value
from irpar.ops.dims_apart import DimsApart, Places, Split, Spread, dims_apart, free_dims
from irpar.ops.op_def import traits

from .chains import atoms_of, chain_of, erase_unread, is_layout


@dataclass(frozen=True)
class _Merged:
    """An operand that a chain of layout nodes made, some of its dims of several.

    Attributes:
        chain: the nodes, first to last.
        atoms: what the chain does.
        splits: the merged dims: the sizes of their parts.
    """

    chain: list[Node]
    atoms: Atoms
    splits: dict[int, Split]

    @property
    def source(self) -> Value:
        """What the chain starts from."""
        return self.chain[0].inputs[0]


def _merged(value: Value) -> _Merged | None:
    """How a value was merged, or None; what is annotated stays as it is."""
    if value.node is None or value.sharding is not None or not is_layout(value.node):
        return None
    chain = chain_of(value.node)
    atoms = atoms_of(chain)
    if atoms is None:
        return None
    parts = [tuple(size for _, _, size in joined(found)) for found in atoms.dims]
    splits = {dim: split for dim, split in enumerate(parts) if len(split) > 1}
    return _Merged(chain, atoms, splits) if splits else None


class MergedDims:
    """Takes dims apart, node by node in the order of a graph.

    Attributes:
        module: whose nodes.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._apart: dict[tuple[Value, tuple[int, ...]], Value] = {}
        """What was made of an operand, by its shape: several nodes read it."""

    def take_apart(self, node: Node) -> bool:
        """Let a node work on dims that its operands merge, and merge them after it.

        Returns:
            Whether there was something to do.
        """
        if node.strategy is not None:
            return False
        merged = {value: found for value in node.inputs if (found := _merged(value)) is not None}
        way = dims_apart(node) if merged and all(map(has_elements, (*node.inputs, *node.results))) else None
        if way is None:
            return False
        chosen = {
            place: split
            for places in free_dims(node, way)
            if (split := _split_of(node, places, merged)) is not None
            for place in places
        }
        if not chosen:
            return False
        self._rebuild(node, way, way.spreads(node, chosen), merged)
        return True

    def _rebuild(self, node: Node, way: DimsApart, spreads: Sequence[Spread], merged: Mapping[Value, _Merged]) -> None:
        assert node.graph is not None
        builder = Builder(node.graph, {**self.module.opsets, node.domain: node.version}, before=node, like=node)
        operands = [
            None if value is None else self._operand(value, merged.get(value), spread, way, builder)
            for value, spread in zip(node.operands, spreads, strict=True)
        ]
        renamed = way.names(node, spreads)
        for index, numbers in renamed.ints.items():
            operands.extend([None] * (index + 1 - len(operands)))
            operands[index] = _ints(node, index, numbers, builder)
        names = [value.name for value in node.results]
        values = [
            with_shape(value, result, builder)
            for value, result in zip(
                _written(node, operands, {**node.attributes, **renamed.attributes}, builder), node.results, strict=True
            )
        ]
        node.replace(values)
        for value, name in zip(values, names, strict=True):
            value.rename(name)
        for found in merged.values():
            erase_unread(found.chain)

    def _operand(self, value: Value, merged: _Merged | None, spread: Spread, way: DimsApart, builder: Builder) -> Value:
        """An operand with its dims apart."""
        target = spread.shape
        ahead = len(target) - len(value.shape)
        if target == value.shape or (way.broadcasts is not None and target == (1,) * ahead + value.shape):
            return value
        known = self._apart.get((value, target))
        # What nothing reads any more was taken out.
        if known is None or (known.node is not None and known.node.graph is None):
            if merged is not None:
                known = follow(merged.atoms.plan(target), merged.source, value.name, builder)
            else:
                known = follow([("Reshape", target)], value, value.name, builder)
            self._apart[value, target] = known
        return known


def has_elements(value: Value) -> bool:
    """Whether a value is a tensor of known sizes, none of which is 0."""
    return value.is_static and 0 not in value.shape


def _split_of(node: Node, places: Places, merged: Mapping[Value, _Merged]) -> Split | None:
    """How all operands that have a dim merge it; None where they do not, or not in one way."""
    found: set[Split] = set()
    for index, dim in places:
        value = node.operands[index]
        assert value is not None
        if value in merged and dim in merged[value].splits:
            found.add(merged[value].splits[dim])
        elif not value.is_constant or value.sharding is not None:
            return None
    return found.pop() if len(found) == 1 else None


def _written(
    node: Node, operands: Sequence[Value | None], attributes: Mapping[str, object], builder: Builder
) -> list[Value]:
    """What a node gives of other operands, with attributes for these."""
    if node.op_type == "Gemm" and not node.domain:
        return [_product(node, operands, builder)]
    names = [Value(value.name) for value in node.results]
    made = builder.node(node.op_type, operands, attributes, domain=node.domain, results=names)
    _infer(made)
    return list(made.results)


def _infer(node: Node) -> None:
    """Set the types of results."""
    infer = traits(node).infer
    found = infer(node) if infer is not None else None
    assert found is not None, f"{node.op_type} with its dims apart has no type"
    for value, type_ in zip(node.results, found, strict=True):
        value.type = type_


def with_shape(value: Value, like: Value, builder: Builder) -> Value:
    """A value in the shape of another."""
    if value.shape == like.shape or not (like.has_uses or like.sharding):
        return value
    target = builder.constant(Ints(like.shape), "shape")
    return builder.op("Reshape", [value, target], type=like.type, name=like.name)


def _ints(node: Node, index: int, numbers: Sequence[int], builder: Builder) -> Value:
    """A constant operand with other numbers; one that was left out is a list like the operand before it."""
    before = node.operands[index] if index < len(node.operands) else None
    like = before or node.operands[1]
    assert like is not None
    array = np.asarray(numbers, like.dtype.numpy)
    if before is not None:
        array = array.reshape(before.shape if len(numbers) == 1 else -1)
        if before.data is not None and np.array_equal(array, before.data.numpy()):
            return before
    return builder.constant(ArrayTensor(array), like.name)


def _product(node: Node, operands: Sequence[Value | None], builder: Builder) -> Value:
    """A Gemm over more than two dims: MatMul and Add."""
    left, right, *rest = operands
    assert left is not None
    assert right is not None
    if node.attributes.get("transB"):
        right = follow([("Transpose", (1, 0))], right, right.name, builder)
    bias = rest[0] if rest else None
    name = node.result.name
    type_ = TensorType(node.result.dtype, (*left.shape[:-1], node.result.shape[-1]))
    product = builder.op("MatMul", [left, right], type=type_, name=name if bias is None else f"{name}_product")
    return product if bias is None else builder.op("Add", [product, bias], type=type_, name=name)
