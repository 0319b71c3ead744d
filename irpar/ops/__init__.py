"""One definition per operator: types, sharding rule, cost; a module per family."""

from .registry import OpDef, define, definition, definitions, factor_rule, flops
from .rule import FactorRule, Kind, RuleBuilder, broadcast_rule, reshape_factors, whole

__all__ = [
    "FactorRule",
    "Kind",
    "OpDef",
    "RuleBuilder",
    "broadcast_rule",
    "define",
    "definition",
    "definitions",
    "factor_rule",
    "flops",
    "reshape_factors",
    "whole",
]
