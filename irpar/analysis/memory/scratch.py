"""Scratch: what the kernels of a processor need at most beside operands and results, while a node runs."""

from collections.abc import Hashable, Iterator

from irpar.analysis.engines import gives_new_arrays
from irpar.analysis.equal_nodes import attribute_key
from irpar.ir import Graph, Node, Value, plain_attribute, tensor_type
from irpar.kernels import Kernel, Shaped, lookup
from irpar.kernels.registry import ScratchBytes
from irpar.ops import traits


def needed_bytes(node: Node) -> int:
    """What the kernel of a node needs at most: what it takes where it is told to, and what it allocates itself."""
    return scratch_bytes(node) + temporary_bytes(node)


class Needs:
    """As `needed_bytes`, of the nodes of graphs that stay as they are: of those that are alike one is asked about."""

    def __init__(self) -> None:
        self._found: dict[Hashable, int] = {}
        self._told: dict[Value, int] = {}
        self._numbers: dict[Hashable, int] = {}

    def of(self, node: Node) -> int:
        """What the kernel of a node needs at most."""
        kernel = _kernel(node)
        if kernel is None or (kernel.scratch is None and kernel.temporaries is None):
            return 0
        key = self._likeness(node)
        found = None if key is None else self._found.get(key)
        if found is None:
            found = needed_bytes(node)
            if key is not None:
                self._found[key] = found
        return found

    def _likeness(self, node: Node) -> Hashable:
        """All that a kernel is told of a node; None where an attribute is no short one."""
        attributes = []
        for name, attribute in node.attributes.items():
            key = attribute_key(attribute)
            if key is None:
                return None
            attributes.append((name, key))
        told = self._told
        values = [
            None if value is None else told[value] if value in told else self._tell(value)
            for value in (*node.operands, *node.results)
        ]
        return node.domain, node.op_type, node.version, tuple(attributes), len(node.results), tuple(values)

    def _tell(self, value: Value) -> int:
        """A number for all that a kernel is told of a value: types are compared once rather than at each reader."""
        facts = value.type, _is_strided(value), value.is_constant
        found = self._told[value] = self._numbers.setdefault(facts, len(self._numbers))
        return found


def scratch_bytes(node: Node) -> int:
    """What the kernel of a node takes at most; 0 where it takes none, or nobody knows before it runs."""
    kernel = _kernel(node)
    return 0 if kernel is None or kernel.scratch is None else _bound(node, kernel.scratch_bytes)


def temporary_bytes(node: Node) -> int:
    """What the kernel of a node allocates at most itself; 0 where that is little, or nobody knows before it runs."""
    kernel = _kernel(node)
    return 0 if kernel is None or kernel.temporaries is None else _bound(node, kernel.temporary_bytes)


def _kernel(node: Node) -> Kernel | None:
    return None if node.callee is not None else lookup(node.domain, node.op_type, node.version)


def _bound(node: Node, declared: ScratchBytes) -> int:
    """What is declared of a kernel, for the operands, results and attributes of a node."""
    operands = [None if value is None else _shaped(value) for value in node.operands]
    results = [_shaped(value) for value in node.results]
    known = [found for found in results if found is not None]
    is_known = all(found is not None for value, found in zip(node.operands, operands, strict=True) if value is not None)
    if not is_known or len(known) < len(results):
        return 0
    try:
        attributes = {name: plain_attribute(value) for name, value in node.attributes.items()}
    except TypeError:  # The caller of its function knows one; or it is a graph, where no kernel takes one.
        return 0
    return declared(operands, known, attributes)


def most_scratch(graph: Graph) -> int:
    """The most that a node of a graph needs, those in bodies and in called functions included."""
    return max((needed_bytes(node) for inner in _with_called(graph) for node in inner.walk()), default=0)


def nested_scratch(node: Node) -> int:
    """The most that a node in the bodies of a node needs."""
    return max((most_scratch(nested) for nested in node.nested_graphs()), default=0) if node.attributes else 0


def _with_called(graph: Graph) -> Iterator[Graph]:
    yield graph
    yield from dict.fromkeys(node.callee.graph for node in graph.walk() if node.callee is not None)


def _shaped(value: Value) -> Shaped | None:
    type_ = tensor_type(value.type)
    if type_ is None or not type_.is_static:
        return None
    return Shaped(type_.static_shape, type_.dtype.numpy, _is_strided(value), value.is_constant)


def _is_strided(value: Value) -> bool:
    """Whether elements may lie otherwise than one after the other: in an input, and in what may be a view."""
    while value.node is not None:
        if gives_new_arrays(value.node):
            return False
        if not (traits(value.node).view and value.node.inputs):
            return True
        value = value.node.inputs[0]
    graph = value.owner
    return not (value.is_constant or (graph is not None and value in graph.states))
