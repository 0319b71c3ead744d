"""Matrix products with what follows on them: a bias and Gelu by tanh, or a bias and a residual, in one launch.

What a group of elementwise nodes does to a product is found by trying it on numbers: exports write a Gelu in many ways.
A Relu stays apart, since the library's may make 0 of NaN, and so does the exact Gelu, which the library lacks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from irpar.ir import DOMAIN, DType, Node, Value
from irpar.ir.module import IRPAR_OPSET
from irpar.kernels import lookup
from irpar.kernels.expression_reading import parse

from .groups import Group, Grouping

Role = Literal["product", "bias", "residual"]
Activation = Literal["none", "gelu_tanh"]
Array = np.ndarray[Any, Any]

_PROBES = 64
_SMOOTH = frozenset(("Add", "Div", "Gelu", "Mul", "Neg", "Pow", "Sigmoid", "Sub", "Tanh"))
"""What sums and Gelus are made of. Other operators may differ where nothing is tried, as a Min that only limits."""
_NEAR = {DType.F16: 6e-5, DType.BF16: 6e-4, DType.F32: 2e-5, DType.F64: 2e-5}
"""How far a Gelu may be from what is tried, to what it is of: its constants have a dtype's digits."""
_EQUAL = 1e-12
"""How far sums may be apart: nothing is rounded but the sums themselves."""


@dataclass(frozen=True, eq=False)
class Product:
    """Nodes that one matrix product computes.

    Attributes:
        members: they, in order; the first is a MatMul.
        bias, residual: what is added.
        activation: what is computed of the sum.
        result: what it gives.
    """

    members: tuple[Node, ...]
    bias: Value | None
    residual: Value | None
    activation: Activation
    result: Value

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def writer(self) -> Callable[[Callable[..., Node]], list[Node]]:
        """What makes the node that takes their place, also when they read nothing any more."""
        operands: list[Value | None] = [*self.members[0].operands, self.bias, self.residual]
        while operands[-1] is None:
            operands.pop()
        attributes = {} if self.activation == "none" else {"activation": self.activation}
        facts = {"results": [self.result], "domain": DOMAIN, "version": IRPAR_OPSET}
        return lambda make: [make("FusedMatMul", operands, attributes, **facts)]


def join_products(grouping: Grouping, groups: Sequence[Group]) -> list[Group | Product]:
    """Groups, and products in place of those that a product can compute at its end."""
    found: list[Group | Product] = []
    for group in groups:
        product = _product(group)
        if product is not None and grouping.is_convex(product.members):
            grouping.assign(product)
            found.append(product)
        else:
            found.append(group)
    return found


def _product(group: Group) -> Product | None:
    """The product of which a group is the end, if there is one."""
    results, operands = group.results(), group.operands()
    if group.reduced or len(results) != 1 or not 2 <= len(operands) <= 3:
        return None
    (result,) = results
    product = next((value for value in operands if _is_product(value, group)), None)
    if product is None or product.node is None or product.type != result.type:
        return None
    roles = tuple(_role(value, product) for value in operands)
    if None in roles or len(set(roles)) != len(roles) or any(value.dtype is not product.dtype for value in operands):
        return None
    activation = _what_is_done(group.expression().lines, roles, product.dtype)  # type: ignore[arg-type]
    if activation is None or (activation != "none" and "residual" in roles):
        return None
    added = dict(zip(roles, operands, strict=True))
    members = (product.node, *group.members)
    return Product(members, added.get("bias"), added.get("residual"), activation, result)


def _is_product(value: Value, group: Group) -> bool:
    """Whether a value is a matrix product that nothing but a group reads."""
    node, stretch = value.node, group.stretch
    if node is None or node.identity != ("", "MatMul") or node not in stretch.places or node in stretch.taken:
        return False
    is_read = value in stretch.kept or value in stretch.read_again
    if value.dtype not in _NEAR or is_read or any(user not in group.members for user in value.users):
        return False
    first = next(iter(group.members))
    is_alike = (node.phase, node.stage, node.place) == (first.phase, first.stage, first.place)
    return is_alike and all(operand.is_static and len(operand.shape) > 1 for operand in node.inputs)


def _role(value: Value, product: Value) -> Role | None:
    if value is product:
        return "product"
    if value.shape == product.shape:
        return "residual"
    is_row = value.shape[-1:] == product.shape[-1:] and all(size == 1 for size in value.shape[:-1])
    return "bias" if is_row and len(value.shape) <= len(product.shape) else None


@lru_cache(maxsize=1024)
def _what_is_done(lines: tuple[str, ...], roles: tuple[Role, ...], dtype: DType) -> Activation | None:
    """What an expression does to a product: a sum, and perhaps Gelu of it; None where it is neither."""
    steps = parse(lines).steps
    if any(step.op_type not in _SMOOTH for step in steps):
        return None
    numbers = _probes(roles)
    kernel = lookup(DOMAIN, "Fused", IRPAR_OPSET)
    assert kernel is not None
    (found,) = kernel(np, [numbers[role] for role in roles], {"expression": lines}, 1)
    total = sum(numbers[role] for role in roles)
    if (np.abs(found - total) < _EQUAL * (1 + np.abs(total))).all():
        return "none"
    if any(step.op_type == "Gelu" and step.attribute("approximate") == "none" for step in steps):
        return None  # Within bfloat16's bound it would pass for the one by tanh.
    near = _NEAR[dtype] * np.abs(total) + _EQUAL
    return "gelu_tanh" if (np.abs(found - _gelu_by_tanh(total)) < near).all() else None


def _probes(roles: Sequence[Role]) -> dict[Role, Array]:
    """Numbers on which an expression is tried: of sums around 1, around 10,000, and so small that an addend shows."""
    random = np.random.default_rng(0)
    found: dict[Role, Array] = {
        "bias": random.normal(size=4),
        "residual": random.normal(size=(_PROBES, 4)),
        "product": random.normal(size=(_PROBES, 4)) * np.tile([[3], [3e4], [3], [1e-3]], (_PROBES // 4, 1)),
    }
    found["product"][3::4] -= sum(
        np.broadcast_to(found[role], (_PROBES, 4))[3::4] for role in roles if role != "product"
    )
    return found


def _gelu_by_tanh(x: Any) -> Array:
    kernel = lookup("", "Gelu", 20)
    assert kernel is not None
    (found,) = kernel(np, [np.asarray(x)], {"approximate": "tanh"}, 1)
    return np.asarray(found)
