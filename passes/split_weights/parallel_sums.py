"""Two products that are added to a third value one after the other are added to each other first.

a = Add(x, p)    y = Add(a, q)      becomes    s = Add(p, q)    y = Add(x, s)

Where both are sums in parts, as attention and feed-forward are that run beside each other, s is reduced once;
otherwise p would be, before it is added to what lies in full.
"""

from collections.abc import Callable

from irpar.analysis.cost.model import Cost
from irpar.ir import Builder, Module, Node, Value, clone_module
from irpar.ops.linear import carriers
from irpar.sharding import IrparError

_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "Conv"})
_STEPS = 6
"""Nodes between a product and the sum."""


def add_products_first(module: Module, cost_of: Callable[[Module], Cost]) -> int:
    """Add products first where less is sent then.

    Args:
        module: in global view.
        cost_of: what a module would send, which it changes.

    Returns:
        How often that was done.
    """
    if not any(value.sharding is not None for value in module.graph.constants) or not _found(module):
        return 0
    now, then = clone_module(module), clone_module(module)
    for node in _found(then):
        _write(node)
    try:
        if cost_of(then) >= cost_of(now):
            return 0
    except IrparError:
        return 0  # Completion refuses the module, and tells why.
    found = _found(module)
    for node in found:
        _write(node)
    return len(found)


def _found(module: Module) -> list[Node]:
    """The second of two such sums."""
    return [node for node in module.graph if _parts(node) is not None]


def _parts(node: Node) -> tuple[Node, Value, Value, Value] | None:
    """The first sum, what is added in it, the product in it, and the other product; None for another node."""
    if not _is_sum(node):
        return None
    for first, q in (node.inputs, node.inputs[::-1]):
        maker = first.node
        if maker is None or not _is_sum(maker) or len(first.uses) != 1 or first.sharding is not None:
            continue
        made = [_is_product(value) for value in maker.inputs]
        if _is_product(q) and sum(made) == 1 and maker.graph is node.graph:
            p, x = maker.inputs if made[0] else maker.inputs[::-1]
            return maker, x, p, q
    return None


def _is_sum(node: Node) -> bool:
    """Whether a node adds two values of one type, which is that of the result."""
    if node.identity != ("", "Add") or node.strategy is not None or node.phase is not None:
        return False
    return node.result.is_static and node.result.dtype.is_float and all(v.type == node.result.type for v in node.inputs)


def _is_product(value: Value) -> bool:
    """Whether a value that nothing else reads is a product, or what carries its parts on."""
    for _ in range(_STEPS):
        node = value.node
        if node is None or len(value.uses) != 1 or value.sharding is not None:
            return False
        if not node.domain and node.op_type in _PRODUCTS:
            return True
        if not node.inputs or not carriers(node, "sum"):
            return False
        value = next((each for each in node.inputs if not each.is_constant), node.inputs[0])
    return False


def _write(node: Node) -> None:
    parts = _parts(node)
    assert parts is not None
    assert node.graph is not None
    first, x, p, q = parts
    builder = Builder(node.graph, {"": node.version}, before=node, like=node)
    added = builder.op("Add", [p, q], type=node.result.type, name=node.result.name)
    node.set_operands([x, added])
    first.erase()
