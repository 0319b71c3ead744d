"""Nodes written in place of one, and constants in place of others."""

from collections.abc import Iterable, Sequence

from irpar.ir import Builder, Module, Node, Tensor, TensorType, Value, with_dim


class NodeWriter:
    """Writes nodes before one, and lets values stand for its results.

    Attributes:
        builder: inserts before the node, and says that what it makes comes from where that comes from.
    """

    def __init__(self, module: Module, node: Node) -> None:
        assert node.graph is not None
        opsets = {**module.opsets, node.domain: node.version}
        self.builder = Builder(node.graph, opsets, before=node, like=node)
        self._node = node

    def op(
        self,
        op_type: str,
        operands: Sequence[Value | None],
        type_: TensorType,
        name: str,
        attributes: dict[str, int] | None = None,
        *,
        domain: str = "",
    ) -> Value:
        """The result of a node."""
        return self.builder.op(op_type, operands, attributes, type=type_, domain=domain, name=name)

    def split(self, value: Value, sizes: Sequence[int], dim: int = -1) -> list[Value]:
        """Parts of a value along a dim."""
        dim %= len(value.shape)
        types = [value.tensor_type.with_shape(with_dim(value.shape, dim, size)) for size in sizes]
        results = [Value(f"{value.name}_{number}", type_) for number, type_ in enumerate(types)]
        counts = self.builder.constant(list(sizes), "sizes")
        return list(self.builder.node("Split", [value, counts], {"axis": dim}, results=results).results)

    def squeeze(self, value: Value) -> Value:
        """Without its first dim, of 1."""
        axes = self.builder.constant([0], "axes")
        return self.op("Squeeze", [value, axes], value.tensor_type.with_shape(value.shape[1:]), value.name)

    def unsqueeze(self, value: Value) -> Value:
        """With a first dim of 1."""
        axes = self.builder.constant([0], "axes")
        return self.op("Unsqueeze", [value, axes], value.tensor_type.with_shape((1, *value.shape)), value.name)

    def take_place(self, values: Iterable[Value]) -> None:
        """Let values stand for the results of the node, with their names, and take the node out."""
        found, names = list(values), [old.name for old in self._node.results]
        for old, new in zip(self._node.results, found, strict=True):
            new.memory, new.doc = old.memory, old.doc
        self._node.replace(found)
        for name, new in zip(names, found, strict=True):
            new.rename(name)


def constant_like(value: Value, data: Tensor) -> Value:
    """A constant beside another, of the same source, sharding and memory, with other data."""
    assert value.graph is not None
    made = value.graph.add_constant(data, value.name, value.source)
    made.sharding, made.memory, made.doc = value.sharding, value.memory, value.doc
    return made


def stand_for(value: Value, heir: Value) -> None:
    """Take out a constant if nothing reads it any more; the first that stands for it then has its name.

    With it goes what the module knows by that name.
    """
    if value.graph is not None and not value.has_uses:
        name = value.name
        value.graph.remove_constant(value)
        heir.rename(name)
