"""Nodes that take the place of an attention's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from irpar.ir import DType, Node, TensorType, Value

from .attention_form import VERSION, Attention, Masked, View

Make = Callable[..., Node]
"""`make(op_type, operands, attributes, results=..., version=...)`: a node of ONNX's."""


@dataclass
class Writer:
    """Makes the nodes of a unit, in order.

    Attributes:
        make: a node.
        version: that they follow.
        name: what the names of new values begin with.
        nodes: those that were made.
    """

    make: Make
    version: int
    name: str
    nodes: list[Node] = field(default_factory=list)

    def op(self, op_type: str, operands: Sequence[Value], type_: TensorType, **attributes: object) -> Value:
        """Make a node with one result, which is new."""
        value = Value(f"{self.name}_{op_type.lower()}", type_)
        self.node(op_type, operands, attributes, [value])
        return value

    def node(
        self,
        op_type: str,
        operands: Sequence[Value],
        attributes: Mapping[str, object],
        results: Sequence[Value],
        **facts: object,
    ) -> None:
        """Make a node with given results."""
        self.nodes.append(
            self.make(op_type, operands, attributes, results=results, **{"version": self.version, **facts})
        )

    def moved(self, view: View) -> Value:
        """A view as a value."""
        if view.order is None:
            return view.value
        type_ = view.value.tensor_type.with_shape(view.shape)
        return self.op("Transpose", [view.value], type_, perm=view.order)

    def masks(self, attention: Attention) -> list[Value]:
        """One mask of all, or none."""
        return [_joined([_mask(mask, self.op) for mask in attention.masks], self.op)] if attention.masks else []


def written(attention: Attention, make: Make) -> list[Node]:
    """Nodes that take the place of an attention's, in order; the last gives the result."""
    view = attention.result
    w = Writer(make, attention.last.version, view.value.name)
    operands = [w.moved(one) for one in (attention.q, attention.k, attention.v)]
    operands += w.masks(attention)
    attributes = attention.attributes()
    y = view.value
    if view.order is not None:
        y = Value(f"{view.value.name}_heads", view.value.tensor_type.with_shape(view.shape))
    w.node("Attention", operands, attributes, [y], version=max(w.version, VERSION))
    if view.order is not None:
        back = tuple(view.order.index(dim) for dim in range(len(view.order)))
        w.node("Transpose", [y], {"perm": back}, [view.value])
    return w.nodes


def _mask(mask: Masked, op: Callable[..., Value]) -> Value:
    value = mask.value
    if value.dtype is not DType.BOOL or (mask.low is None and not mask.negated):
        return value
    if mask.negated == (mask.low is None):
        value = op("Not", [value], value.tensor_type)
    if mask.low is None:
        return value
    low = mask.low
    number = op("Cast", [value], TensorType(low.dtype, value.shape), to=low.dtype.value)
    return op("Mul", [number, low], number.tensor_type)


def _joined(masks: list[Value], op: Callable[..., Value]) -> Value:
    """One mask of all: flags that all hold, or the sum of numbers."""
    whole = masks[0]
    for mask in masks[1:]:
        shape = tuple(np.broadcast_shapes(whole.shape, mask.shape))
        whole = op("And" if whole.dtype is DType.BOOL else "Add", [whole, mask], TensorType(whole.dtype, shape))
    return whole
