"""Which values an engine with a device has on the host: those whose numbers shape what the device computes."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence, Set

from irpar.ir import Node, Value, captured_or_read
from irpar.kernels import Kernel, lookup
from irpar.ops.op_def import traits


class HostValues:
    """Decides for a body which values lie on the host.

    What follows from shapes and constants is computed there where it is small. What follows from numbers that come in
    is, where it is small and something needs it there: a kernel that reads an operand on the host, or a body's trip.

    Args:
        elements: how many a small tensor has at most.
        around: values around the body that lie on the host.
    """

    def __init__(self, elements: int, around: Set[Value] = frozenset()) -> None:
        self._elements = elements
        self._around = around

    def of_segment(self, inputs: Collection[Value], nodes: Sequence[Node]) -> set[Value]:
        """Of a segment, whose inputs come from the host wherever they are needed there."""
        able = self._able(inputs, nodes)
        return self._needed(nodes, able, {*able, *inputs}, ())

    def of_body(self, inputs: Collection[Value], nodes: Sequence[Node], outputs: Iterable[Value]) -> set[Value]:
        """Of a nested graph or a function, which takes and gives small integers on the host."""
        able = self._able(inputs, nodes)
        return self._needed(nodes, able, able, outputs)

    def _able(self, inputs: Iterable[Value], nodes: Iterable[Node]) -> dict[Value, bool]:
        """What can be computed on the host; and whether it must be, as it follows from shapes and constants."""
        found = dict.fromkeys(self._around, False)
        found |= {value: False for value in inputs if self._is_small_integer(value)}
        for node in nodes:
            if self._is_for_host(node, found):
                kernel = kernel_of(node)
                is_fixed = kernel is not None and all(found.get(value, True) for value in _numbers(node, kernel))
                found |= dict.fromkeys(node.results, is_fixed)
        return found

    def _needed(
        self, nodes: Sequence[Node], able: dict[Value, bool], sources: Collection[Value], outputs: Iterable[Value]
    ) -> set[Value]:
        """Of what can be computed on the host what must be."""
        needed = {value for value, is_fixed in able.items() if is_fixed} | able.keys() & {*outputs}
        for node in reversed(nodes):
            kernel = kernel_of(node)
            if kernel is None:
                needed.update(value for value in captured_or_read(node) if value in able)
                continue
            is_on_host = not needed.isdisjoint(node.results)
            if is_on_host:
                needed.update(node.results)
            read = _numbers(node, kernel) if is_on_host else read_on_host(node, kernel)
            needed.update(value for value in read if value in sources)
        return needed

    def _is_for_host(self, node: Node, able: Collection[Value]) -> bool:
        kernel = kernel_of(node)
        if kernel is None:  # Bodies, functions and sequences give what they are given.
            return all(self._is_small_integer(value) for value in node.results)
        if not (traits(node).reads_sizes or all(self._is_small(value) for value in node.results)):
            return False
        return all(value in able or (value.is_constant and self._is_small(value)) for value in _numbers(node, kernel))

    def _is_small_integer(self, value: Value) -> bool:
        return self._is_small(value) and value.dtype.numpy.kind in "iub"

    def _is_small(self, value: Value) -> bool:
        return value.is_static and math.prod(value.shape) <= self._elements


def kernel_of(node: Node) -> Kernel | None:
    """The kernel that computes a node; None of calls, bodies, sequences, and what has none."""
    return lookup(node.domain, node.op_type, node.version) if node.callee is None else None


def read_on_host(node: Node, kernel: Kernel) -> Iterator[Value]:
    """The operands whose numbers a node's kernel reads on the host, wherever it computes."""
    places = kernel.signature.host
    return (value for place, value in enumerate(node.operands) if value is not None and place in places)


def _numbers(node: Node, kernel: Kernel) -> Iterator[Value]:
    """The operands whose numbers a node's kernel reads."""
    apart = kernel.signature.shape_only
    return (value for place, value in enumerate(node.operands) if value is not None and place not in apart)
