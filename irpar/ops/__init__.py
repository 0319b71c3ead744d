"""One definition per operator: types, sharding rule, cost; a module per family."""

from . import collectives, memory_copies  # noqa: F401 - the verifier's checks are there as soon as operators are
from .bodies import OPEN_BODIES, called_communication, has_open_bodies, holds_collectives
from .op_def import OpDef, definition, definitions, traits, traits_of_operator
from .registry import (
    define,
    factor_rule,
    flops,
    infers_by_operands,
    kind_of_rule,
    other_rules,
    program_factors,
    program_of,
    what_is_uncovered,
)
from .replicate_only import why_replicated
from .rule import FactorRule, Kind, RuleBuilder, broadcast_rule, reshape_factors, whole

__all__ = [
    "OPEN_BODIES",
    "FactorRule",
    "Kind",
    "OpDef",
    "RuleBuilder",
    "broadcast_rule",
    "called_communication",
    "define",
    "definition",
    "definitions",
    "factor_rule",
    "flops",
    "has_open_bodies",
    "holds_collectives",
    "infers_by_operands",
    "kind_of_rule",
    "other_rules",
    "program_factors",
    "program_of",
    "reshape_factors",
    "traits",
    "traits_of_operator",
    "what_is_uncovered",
    "whole",
    "why_replicated",
]
