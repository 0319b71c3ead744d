"""Writes nodes that compute with channels last."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irpar.ir import Builder, DType, Graph, Node, TensorType, Value

from .layout import last, lies_alike, to_first, to_last


class Writer(Builder):
    """Inserts nodes before one, in place of another one.

    Args:
        graph: where to insert.
        opset: of ONNX's operators.
        lasts: what images are with channels last; others that are needed so are added.
        before: the node that follows.
        like: the node that the new ones stand for.
    """

    def __init__(self, graph: Graph, opset: int, lasts: dict[Value, Value], before: Node | None, like: Node) -> None:
        super().__init__(graph, {like.domain: like.version, "": opset}, before=before, like=like)
        self._lasts = lasts

    def typed(
        self,
        op_type: str,
        operands: Sequence[Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        of: TensorType,
        name: str,
        domain: str = "",
    ) -> Value:
        """Insert a node with one result of a type."""
        return self.op(op_type, operands, attributes, type=of, domain=domain, name=name)

    def last(self, value: Value) -> Value:
        """An image with channels last."""
        if value not in self._lasts:
            self._lasts[value] = self.turned(value)
        return self._lasts[value]

    def turned(self, value: Value) -> Value:
        """An image or a weight [features, channels, places...] with channels last, made of it here."""
        shape, name = value.shape, f"{value.name}_last"
        if lies_alike(shape):
            return self.reshaped(value, last(shape), name)
        of = value.tensor_type.with_shape(last(shape))
        return self.typed("Transpose", [value], {"perm": to_last(len(shape))}, of=of, name=name)

    def turn_back(self, value: Value, into: Value) -> None:
        """Let an image with channels first be made of one with channels last."""
        if lies_alike(into.shape):
            self.node("Reshape", [value, self.constant(list(into.shape), "shape")], results=[into])
        else:
            self.node("Transpose", [value], {"perm": to_first(len(into.shape))}, results=[into])

    def beside(self, value: Value, rank: int) -> Value:
        """What is broadcast to images of a rank, as it is broadcast to them with channels last."""
        shape = value.shape
        if all(size == 1 for size in shape):
            return value if len(shape) <= rank else self.reshaped(value, (), f"{value.name}_last")
        if len(shape) == rank:
            return self.last(value)
        aligned = (*(1 for _ in range(rank - len(shape))), *shape)
        if lies_alike(aligned):
            return self.reshaped(value, last(aligned), f"{value.name}_last")
        return self.turned(self.reshaped(value, aligned, f"{value.name}_image"))

    def reshaped(self, value: Value, shape: Sequence[int], name: str) -> Value:
        """The same elements in another shape."""
        sizes = self.constant(np.asarray(shape, np.int64), "shape")
        return self.typed("Reshape", [value, sizes], of=value.tensor_type.with_shape(shape), name=name)

    def row(self, value: Value, channels: int) -> Value:
        """Numbers of channels, of any shape, as one dim."""
        return value if value.shape == (channels,) else self.reshaped(value, (channels,), f"{value.name}_row")

    def cast(self, value: Value, dtype: DType) -> Value:
        """The value in another dtype."""
        if value.dtype is dtype:
            return value
        of = TensorType(dtype, value.shape)
        return self.typed("Cast", [value], {"to": dtype.value}, of=of, name=f"{value.name}_{dtype.text}")

    def number(self, number: float, dtype: DType) -> Value:
        """A scalar."""
        return self.constant(np.asarray(number).astype(dtype.numpy), "number")
