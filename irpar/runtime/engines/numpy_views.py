"""Which results NumPy gives as views of operands, and which it copies, known before anything runs."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from irpar.analysis.engines import writes_out
from irpar.ir import Node, Value, tensor_type
from irpar.kernels import lookup
from irpar.ops import traits
from irpar.ops.facts import ints_attribute

Layout = np.ndarray[Any, Any]
"""An array of a shape and strides, whose elements are not there."""


class Views:
    """What the nodes of a graph give that do not write into arrays which they are given.

    x: f32[4, 2]    t = Transpose(x)    a view    r = Reshape(t): f32[8]    a copy, for elements of t lie apart

    Args:
        nodes: in order.

    Attributes:
        copies: nodes that change a shape, and whose result is new memory.
        views: nodes that give views in any case.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.copies: set[Node] = set()
        self.views: set[Node] = set()
        self._layouts: dict[Value, Layout] = {}
        for node in nodes:
            if writes_out(node):
                continue
            if _gives_views(node):
                self.views.add(node)
            if traits(node).view and node.inputs:
                self._reshape(node)
            elif node.op_type == "Transpose" and not node.domain:
                self._permute(node)

    def _layout(self, value: Value) -> Layout | None:
        """How the elements of a value lie; None: nobody knows."""
        if value in self._layouts:
            return self._layouts[value]
        if value.node is not None:
            return _in_order(value) if writes_out(value.node) else None
        graph = value.owner
        is_in_order = value.is_constant or (graph is not None and value in graph.states)
        return _in_order(value) if is_in_order else None

    def _reshape(self, node: Node) -> None:
        layout, type_ = self._layout(node.inputs[0]), tensor_type(node.result.type)
        if layout is None or type_ is None or not type_.is_static:
            return
        try:
            self._layouts[node.result] = layout.reshape(type_.static_shape, copy=False)
            self.views.add(node)
        except ValueError:
            self.copies.add(node)
            made = _in_order(node.result)
            assert made is not None
            self._layouts[node.result] = made

    def _permute(self, node: Node) -> None:
        layout, perm = self._layout(node.inputs[0]), ints_attribute(node, "perm")
        if layout is None or (perm is not None and sorted(perm) != list(range(layout.ndim))):
            return  # The kernel refuses what is no permutation.
        self._layouts[node.result] = layout.transpose(perm)


def _gives_views(node: Node) -> bool:
    kernel = None if node.callee is not None else lookup(node.domain, node.op_type, node.version)
    return kernel is not None and kernel.gives_views


def _in_order(value: Value) -> Layout | None:
    """Elements one after the other; None where shape or dtype are not known."""
    type_ = tensor_type(value.type)
    if type_ is None or not type_.is_static:
        return None
    shape, dtype = type_.static_shape, type_.dtype.numpy
    strides = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)
