"""Products of the same few rows, as those for queries, keys and values: one node for all of them.

    %q = MatMul(%x, %a)                             %q, %k = SharedMatMul(%x, %a, %b)
    %k = MatMul(%x, %b)                       ->
    %g, %u = MatMul(%x, %c), MatMul(%x, %d)         %y = SharedMatMul(%x, %c, %d) {gate="silu"}
    %y = Mul(Mul(%g, Sigmoid(%g)), %u)

Such products take as long as reading their matrices: one launch that reads all of them waits once.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from irpar.ir import DOMAIN, DType, Node, Value
from irpar.ir.module import IRPAR_OPSET
from irpar.kernels import lookup
from irpar.kernels.cuda.few_rows import FEWEST_BYTES, MOST_MATRICES, MOST_ROWS
from irpar.kernels.expression_reading import parse

from .groups import Group, Grouping, Stretch
from .products import Product

Gate = Literal["none", "silu", "gelu_tanh"]

_DTYPES = frozenset((DType.F16, DType.BF16, DType.F32))
_CHUNK_BYTES = 16
_SMOOTH = frozenset(("Add", "Div", "Gelu", "Mul", "Neg", "Pow", "Sigmoid", "Sub", "Swish", "Tanh"))
_PROBES = 256
_NEAR = 1e-6
"""Gelu by tanh and the exact one are further apart."""


@dataclass(frozen=True, eq=False)
class SharedProduct:
    """Nodes that one product of the same rows with several matrices computes.

    Attributes:
        members: they, in order.
        rows: what is multiplied.
        matrices: with what; where there is a gate, its own is the first.
        gate: what is computed of the first product before it is multiplied by the other.
        results: what is given.
    """

    members: tuple[Node, ...]
    rows: Value
    matrices: tuple[Value, ...]
    gate: Gate
    results: tuple[Value, ...]

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def writer(self) -> Callable[[Callable[..., Node]], list[Node]]:
        """What makes the node that takes their place, also when they read nothing any more."""
        attributes = {} if self.gate == "none" else {"gate": self.gate}
        facts = {"results": [*self.results], "domain": DOMAIN, "version": IRPAR_OPSET}
        return lambda make: [make("SharedMatMul", [self.rows, *self.matrices], attributes, **facts)]


def share_products(grouping: Grouping, units: Sequence[Group | Product]) -> list[Group | Product | SharedProduct]:
    """Units, with one in place of products of the same few rows, and of what multiplies two of them."""
    stretch = grouping.stretch
    left = [node for node in stretch.nodes if node not in grouping.unit and _is_such(node, stretch)]
    found: list[Group | Product | SharedProduct] = []
    for unit in units:
        shared = _gated(unit, left) if isinstance(unit, Group) else None
        if shared is not None and grouping.is_convex(shared.members):
            grouping.assign(shared)
            left = [node for node in left if node not in shared.members]
        else:
            shared = None
        found.append(shared or unit)
    alike: dict[Hashable, list[Node]] = {}
    for node in left:
        alike.setdefault((node.operands[0], node.phase, node.stage, node.place), []).append(node)
    for nodes in alike.values():
        for begin in range(0, len(nodes), MOST_MATRICES):
            members = tuple(nodes[begin : begin + MOST_MATRICES])
            if len(members) > 1 and grouping.is_convex(members):
                made = _shared(members, members, "none", tuple(node.results[0] for node in members))
                grouping.assign(made)
                found.append(made)
    return found


def _shared(
    members: tuple[Node, ...], products: Sequence[Node], gate: Gate, results: tuple[Value, ...]
) -> SharedProduct:
    rows, *_ = products[0].inputs
    return SharedProduct(members, rows, tuple(node.inputs[1] for node in products), gate, results)


def _is_such(node: Node, stretch: Stretch) -> bool:
    """Whether a node is a product of few rows with a large matrix that was there before, in whole chunks."""
    if node.identity != ("", "MatMul") or node in stretch.taken or not all(value.is_static for value in node.inputs):
        return False
    rows, matrix = (value.tensor_type for value in node.inputs)
    if rows.dtype not in _DTYPES or matrix.dtype is not rows.dtype or node.inputs[1].node in stretch.places:
        return False
    if len(rows.static_shape) < 2 or len(matrix.static_shape) != 2 or matrix.nbytes < FEWEST_BYTES:
        return False
    is_few = 0 < math.prod(rows.static_shape[:-1]) <= MOST_ROWS
    return is_few and matrix.static_shape[1] * rows.dtype.numpy.itemsize % _CHUNK_BYTES == 0


def _gated(group: Group, products: Sequence[Node]) -> SharedProduct | None:
    """What a group and two products are together, of which it multiplies the one with what it makes of the other."""
    operands, results = group.operands(), group.results()
    if group.reduced or len(operands) != 2 or len(results) != 1:
        return None
    needed = group.stretch.kept | group.stretch.read_again
    pair = [value.node for value in operands if value.node in products and value not in needed]
    if len(pair) != 2 or any(user not in group.members for value in operands for user in value.users):
        return None
    first, second = (node for node in pair if node is not None)
    last = group.last
    is_alike = all(
        (node.phase, node.stage, node.place) == (last.phase, last.stage, last.place) for node in pair if node
    )
    if first.operands[0] is not second.operands[0] or not is_alike:
        return None
    types = {value.tensor_type for value in (*operands, *results)}
    found = _gate(group.expression().lines) if len(types) == 1 else None
    if found is None:
        return None
    gate, place = found
    members = (*sorted((first, second), key=group.stretch.places.__getitem__), *group.members)
    return _shared(members, (first, second) if place == 0 else (second, first), gate, tuple(results))


@lru_cache(maxsize=256)
def _gate(lines: tuple[str, ...]) -> tuple[Gate, int] | None:
    """What an expression of two operands computes of one of them before it multiplies it with the other; and of which.

    Found by trying it on numbers, as gates are written in many ways.
    """
    if any(step.op_type not in _SMOOTH for step in parse(lines).steps):
        return None
    numbers = [np.random.default_rng(place).normal(scale=4, size=_PROBES) for place in range(2)]
    (found,) = _run(DOMAIN, "Fused", IRPAR_OPSET, numbers, expression=lines)
    for place, (gated, other) in enumerate((numbers, numbers[::-1])):
        (silu,) = _run("", "Swish", 24, [gated])
        (gelu,) = _run("", "Gelu", 20, [gated], approximate="tanh")
        gates: tuple[tuple[Gate, Any], ...] = (("silu", silu), ("gelu_tanh", gelu))
        for gate, opened in gates:
            if np.allclose(found, opened * other, rtol=_NEAR, atol=_NEAR):
                return gate, place
    return None


def _run(domain: str, op_type: str, version: int, operands: Sequence[Any], **attributes: Any) -> tuple[Any, ...]:
    kernel = lookup(domain, op_type, version)
    assert kernel is not None
    return kernel(np, operands, attributes, 1)
