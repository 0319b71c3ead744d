"""Operator definitions: one place that says how an op types, shards and costs, and how its local form differs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from irpar.ir import Builder, Node, Type

from .rule import FactorRule

Infer = Callable[[Node], Sequence[Type] | None]
Rule = Callable[[Node], FactorRule | None]
Cost = Callable[[Node], int]
Localize = Callable[[Node, Node, Builder], None]

FAMILIES = (
    "elementwise",
    "matmul",
    "reduction",
    "normalization",
    "shape",
    "indexing",
    "attention",
    "collectives",
)


@dataclass(frozen=True)
class OpDef:
    """What irpar knows of one operator.

    Attributes:
        domain, name: the operator; versions are told apart inside the functions by `node.version`.
        infer: result types from operand types, constants and attributes; None where it cannot tell.
        rule: the factor rule of a node with static operand and result types; None: only whole tensors.
        flops: floating-point operations of a node with static types (an add or a multiply counts 1).
        localize: mends the local copy of a node (operands, attributes) where the rule does not say it all; called
            as `localize(whole, local, builder)` after the local types are set.
    """

    domain: str
    name: str
    infer: Infer | None = None
    rule: Rule | None = None
    flops: Cost | None = None
    localize: Localize | None = None


_DEFINITIONS: dict[tuple[str, str], OpDef] = {}


def define(definition: OpDef) -> OpDef:
    """Register a definition.

    Raises:
        ValueError: the op has one already.
    """
    key = (definition.domain, definition.name)
    if key in _DEFINITIONS:
        raise ValueError(f"{definition.domain or 'ai.onnx'}.{definition.name} is defined twice")
    _DEFINITIONS[key] = definition
    return definition


@cache
def _load() -> None:
    """Import all families, and those of other packages (entry point group `irpar.ops`)."""
    for family in FAMILIES:
        import_module(f"{__package__}.{family}")
    for entry in entry_points(group="irpar.ops"):
        entry.load()


def definition(node: Node) -> OpDef | None:
    """The definition of a node's operator, or None."""
    _load()
    return None if node.callee is not None else _DEFINITIONS.get((node.domain, node.op_type))


def definitions() -> tuple[OpDef, ...]:
    """All definitions."""
    _load()
    return tuple(_DEFINITIONS.values())


def factor_rule(node: Node) -> FactorRule | None:
    """The factor rule of a node with static types, or None: every operand and result must be whole."""
    found = definition(node)
    return found.rule(node) if found is not None and found.rule is not None else None


def flops(node: Node) -> int:
    """Floating-point operations of a node with static types; 0 for ops without a definition."""
    found = definition(node)
    return found.flops(node) if found is not None and found.flops is not None else 0
