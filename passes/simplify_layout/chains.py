"""Chains of nodes that only move elements: what they do, and shorter ones that do it too."""

import math
from collections.abc import Iterable, Sequence

from irpar.analysis.weights.atoms import Atoms, follow
from irpar.ir import Builder, Module, Node, Value
from irpar.ir.annotate import hand_over
from irpar.ops import traits


def is_layout(node: Node | None) -> bool:
    """Whether a node only moves elements, by static shapes."""
    # What views do is told by the static shape of the result: elements stay in row-major order.
    if node is None or not (traits(node).view or node.identity == ("", "Transpose")):
        return False
    return node.inputs[0].is_static and node.result.is_static


def chain_of(node: Node) -> list[Node]:
    """The layout nodes that end in `node`, first to last."""
    chain: list[Node] = []
    step: Node | None = node
    while step is not None and is_layout(step) and step.graph is node.graph:
        chain.append(step)
        # What is annotated stays where it is.
        step = step.inputs[0].node if step.inputs[0].sharding is None else None
    return chain[::-1]


def goes_on(node: Node) -> bool:
    """True where the chain has exactly one way on: its end, further down, will be met later."""
    users = node.result.users
    return node.result.sharding is None and len(users) == 1 and is_layout(users[0]) and users[0].graph is node.graph


def atoms_of(chain: list[Node]) -> Atoms | None:
    """What a chain does to its source; None where the atoms cannot tell it."""
    source = chain[0].inputs[0]
    if not math.prod(source.shape):
        return None
    atoms = Atoms(source.shape)
    return atoms if all(map(atoms.apply, chain)) else None


def simplify(chain: list[Node], module: Module) -> int:
    """Let a shorter chain give what a chain gives.

    Returns:
        How many chains became shorter.
    """
    source, last = chain[0].inputs[0], chain[-1]
    atoms = atoms_of(chain)
    if atoms is None:
        return 0
    plan = atoms.plan(last.result.shape)
    if len(plan) >= len(chain) or (not plan and _lie_apart(source, last.result)):
        return 0
    assert last.graph is not None
    value = follow(plan, source, last.result.name, Builder(last.graph, module.opsets, before=last, like=last))
    name, targets = last.result.name, last.inputs[1:]
    last.replace([value])
    _forget_unread(targets)
    if plan:
        value.rename(name)
    else:
        hand_over(module, name, value.name, f"it is %{value.name}, moved there and back")
    erase_unread(chain[:-1])
    return 1


def erase_unread(chain: Sequence[Node]) -> None:
    """Take out the end of a chain that nothing reads: a node without readers would still be sharded, and sent for."""
    for node in reversed(chain):
        # Chains of several operands may begin with the same nodes.
        if node.graph is None or node.result.has_uses:
            break
        targets = node.inputs[1:]
        node.erase()
        _forget_unread(targets)


def _forget_unread(values: Iterable[Value]) -> None:
    """Drop the constants among these that nothing reads: the shapes that a Reshape asked for."""
    for value in values:
        if value.data is not None and value.graph is not None and not value.has_uses:
            value.graph.remove_constant(value)


def _lie_apart(source: Value, result: Value) -> bool:
    """True where one value cannot stand for both: they are annotated differently, or what is made of a constant is."""
    if source.is_constant and result.sharding is not None:
        return True
    return source.sharding is not None and result.sharding is not None and source.sharding != result.sharding
