"""Lists that are written out: what is taken of one at a known place is a tensor.

s = SplitToSequence(x, 4) {axis=1}    z = SequenceAt(s, 1)        p, z = Split(x, [4, 4]) {axis=1}
s = SequenceConstruct(a, b)           z = SequenceAt(s, 1)        z is b
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from irpar.ir import Builder, Node, TensorType, Value, with_dim
from irpar.ops.facts import int_attribute, operand

_SIZES_ARE_READ = 13
"""The first opset in which Split reads the sizes, which it had as an attribute before."""
_MOST = 1024
"""Pieces of one tensor."""


class Lists:
    """What lists hold, each looked at once.

    Attributes:
        nameless: pieces that stand for nothing yet that has a name in the model.
    """

    def __init__(self) -> None:
        self._pieces: dict[Node, list[Value]] = {}
        self.nameless: set[Value] = set()

    def taken(self, node: Node, opsets: Mapping[str, int]) -> Value | None:
        """What a node takes of a list; None for any other node, and where the list or the place is not known."""
        if node.identity != ("", "SequenceAt"):
            return None
        place, source = node.inputs[1].data, node.inputs[0].node
        if place is None or source is None or source.graph is not node.graph:
            return None
        held = list(source.inputs) if source.identity == ("", "SequenceConstruct") else self._split(source, opsets)
        number = int(place.numpy().reshape(()))
        return held[number] if held is not None and -len(held) <= number < len(held) else None

    def _split(self, node: Node, opsets: Mapping[str, int]) -> list[Value] | None:
        """The pieces that a SplitToSequence lists, made by a Split before it."""
        if node not in self._pieces:
            sizes = _sizes(node)
            if sizes is None:
                return None
            self._pieces[node] = _written(node, sizes, opsets)
            self.nameless.update(self._pieces[node])
        return self._pieces[node]


def _sizes(node: Node) -> list[int] | None:
    """The sizes of the pieces of a SplitToSequence; None for another node, and where they are not known."""
    if node.identity != ("", "SplitToSequence") or not node.inputs[0].is_static or not node.inputs[0].shape:
        return None
    shape, split = node.inputs[0].shape, operand(node, 1)
    axis = int_attribute(node, "axis", 0)
    if not -len(shape) <= axis < len(shape):
        return None
    size = shape[axis]
    if split is None:
        sizes = [1] * size
    elif split.data is None or not (split.shape or int_attribute(node, "keepdims", 1)):
        return None  # Of one size for all, ONNX Runtime drops the dim where that is 1, and ONNX's text keeps it.
    else:
        numbers = split.data.numpy()
        each = int(numbers.reshape(-1)[0]) if numbers.size else 0
        if numbers.ndim:
            sizes = [int(number) for number in numbers]
        elif each < 1:
            return None
        else:
            sizes = [min(each, size - start) for start in range(0, size, each)]
    return sizes if sum(sizes) == size and 0 < len(sizes) <= _MOST and min(sizes) >= 0 else None


def _written(node: Node, sizes: list[int], opsets: Mapping[str, int]) -> list[Value]:
    assert node.graph is not None
    data, builder = node.inputs[0], Builder(node.graph, opsets, before=node, like=node)
    axis = int_attribute(node, "axis", 0) % len(data.shape)
    results = [Value(node.result.name, data.tensor_type.with_shape(with_dim(data.shape, axis, size))) for size in sizes]
    attributes: dict[str, Any] = {"axis": axis}
    operands = [data]
    if opsets.get("", 0) < _SIZES_ARE_READ:
        attributes["split"] = sizes
    else:
        operands.append(builder.constant(np.asarray(sizes, np.int64), "sizes"))
    pieces = list(builder.node("Split", operands, attributes, results=results).results)
    if operand(node, 1) is not None or int_attribute(node, "keepdims", 1):
        return pieces
    shape = (*data.shape[:axis], *data.shape[axis + 1 :])
    target = builder.constant(np.asarray(shape, np.int64), "shape")
    type_ = TensorType(data.dtype, shape)
    return [builder.op("Reshape", [piece, target], type=type_, name=piece.name) for piece in pieces]
