"""Registering operators, and what their definitions say of a node."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from irpar.ir import DType, Ints, Node, Tensor, Type, Value, tensor_type
from irpar.sharding import IrparError

from .effects import redistributes
from .facts import CannotTellError, data_of, is_at_hand, refers_to_call
from .linear import carrying
from .local_programs.program import LocalProgram
from .op_def import DEFINITIONS, Infer, OpDef, Rule, definition, traits
from .rule import FactorRule, Kind

_MOST_KNOWN = 1024
"""Answers of a rule that are kept: of a model of many layers a few."""
_MOST_ELEMENTS = 64
"""Of a constant that makes nodes alike by its numbers."""
_NOT_ASKED = object()
_OWN: set[tuple[str, str]] = set()
"""Operators whose rules and local programs read nothing beside what `_likeness` tells."""
_RULES: dict[tuple[str, str], Rule] = {}
"""As they were defined: they say what they cannot tell."""
_FOREIGN: set[tuple[str, str]] = set()
"""Operators whose result types others than irpar infer."""


def define(made: OpDef) -> OpDef:
    """Register a definition. Where its `infer` or `rule` raises CannotTellError, the registered one gives None.

    A rule is asked only about tensors of known, static, non-empty shape.

    Raises:
        ValueError: the op has one already.
    """
    key = (made.domain, made.name)
    if key in DEFINITIONS:
        raise ValueError(f"{made.domain or 'ai.onnx'}.{made.name} is defined twice")
    guarded = replace(
        made,
        infer=made.infer and _guarded_infer(made.infer),
        rule=made.rule and _guarded_rule(made.rule),
        other_programs=tuple(
            replace(program, rule=program.rule and _guarded_rule(program.rule)) for program in made.other_programs
        ),
    )
    DEFINITIONS[key] = guarded
    if made.rule is not None:
        _RULES[key] = made.rule
    program = made.local_program
    is_told = program is None or not (program.reads_elements or program.rule)
    if made.rule is not None and _is_own(made.rule) and is_told and not made.other_programs:
        _OWN.add(key)
    if made.infer is not None and not _is_own(made.infer):
        _FOREIGN.add(key)
    return guarded


def _is_own(answer: Rule | Infer) -> bool:
    """Rules of irpar itself read nothing beside what `_likeness` tells; what those of others read nobody knows."""
    return getattr(answer, "__module__", "").startswith(f"{__package__}.")


class MisfitError(IrparError):
    """Operands, attributes and results of a node that do not fit each other."""


_MISFITS = (ArithmeticError, LookupError, TypeError, ValueError, AssertionError)
"""What a definition raises that cannot make sense of a node."""


def _misfit(node: Node) -> MisfitError:
    return MisfitError(
        f"the operands, attributes and results of {node.op_type} do not fit each other",
        where=f"node {node.label}: {node!r}",
        notes=tuple(f"%{value.name} : {value.type}" for value in (*node.inputs, *node.results)),
        do="mend the model, or export it again; if ONNX Runtime runs it, this is a bug in irpar: report it",
    )


def _guarded_infer(infer: Infer) -> Infer:
    def answer(node: Node) -> Sequence[Type] | None:
        if refers_to_call(node):
            return None
        try:
            types = infer(node)
            if types is not None and len(types) != len(node.results):
                raise ValueError(f"{len(types)} types for {len(node.results)} results")
            return types
        except CannotTellError:
            return None
        except _MISFITS as error:
            raise _misfit(node) from error

    return answer


def _guarded_rule(rule: Rule) -> Rule:
    def answer(node: Node) -> FactorRule | None:
        values = (*node.inputs, *node.results)
        if refers_to_call(node) or not all(_is_plain(value) or _is_empty_list(value) for value in values):
            return None
        try:
            found = rule(node)
            if found is not None:
                _check_ranks(found, node)
            return found
        except CannotTellError:
            return None
        except _MISFITS as error:
            raise _misfit(node) from error

    return _remembered(answer) if _is_own(rule) else answer


def _remembered(rule: Rule) -> Rule:
    """A rule that is asked once of nodes that are alike: those of all layers, and of every look at a graph."""
    known: dict[Hashable, Any] = {}

    def answer(node: Node) -> FactorRule | None:
        key = _likeness(node)
        if key is None:
            return rule(node)
        found: FactorRule | None = known.get(key, _NOT_ASKED)
        if found is _NOT_ASKED:
            if len(known) == _MOST_KNOWN:
                known.clear()
            found = known[key] = rule(node)
        return found

    return answer


def _likeness(node: Node) -> Hashable | None:
    """What a rule reads of a node: version, attributes, types, numbers of constants. None where that is too much."""
    if traits(node).rule_looks_back:
        return None
    attributes = []
    for name, attribute in node.attributes.items():
        if type(attribute) not in (int, str, bytes, Ints, float):
            return None
        # 1 and 1.0 are equal in Python, and 0.0 and -0.0.
        attributes.append((name, type(attribute), attribute.hex() if isinstance(attribute, float) else attribute))
    operands: list[Hashable] = []
    for value in node.operands:
        if value is not None and (value.data is not None or (value.node is not None and redistributes(value.node))):
            data = data_of(value)
            if value.data is not None or data is not None:
                told = None if data is None or data is not value.data else _told(data, node)
                if told is None:
                    return None
                operands.append(told)
        operands.append(None if value is None else value.type)
    return node.version, tuple(attributes), tuple(operands), tuple([value.type for value in node.results])


def _told(data: Tensor, node: Node) -> Hashable | None:
    """What a rule reads of a constant; None where that is too much, or lies in a file.

    Rules read indices, and of other numbers those that there are for each dim, such as the scales of a Resize: of
    weights only that they are there.
    """
    if not data.dtype.is_index and data.dtype is not DType.STR and data.size > _rank_of_result(node):
        return data.shape
    return (data.shape, data.raw()) if is_at_hand(data, _MOST_ELEMENTS) else None


def _rank_of_result(node: Node) -> float:
    type_ = tensor_type(node.results[0].type) if node.results else None
    return math.inf if type_ is None or type_.rank is None else type_.rank


def _check_ranks(rule: FactorRule, node: Node) -> None:
    """Refuse a rule that is for tensors of other ranks than the node's.

    Raises:
        ValueError: naming the tensor.
    """
    for value, dims in zip((*node.operands, *node.results), (*rule.operands, *rule.results), strict=True):
        if value is not None and len(dims) != len(value.tensor_type.static_shape):
            raise ValueError(f"the rule is for a %{value.name} of {len(dims)} dims")


def _is_plain(value: Value) -> bool:
    """True for tensors of static shape with at least one element."""
    found = tensor_type(value.type)
    return found is not None and found.is_static and 0 not in found.static_shape


def _is_empty_list(value: Value) -> bool:
    """True for a constant such as `axes = []`."""
    return value.data is not None and value.data.shape == (0,)


def kind_of_rule(node: Node) -> Hashable | None:
    """Equal for nodes that have the same rule, shapes and local program, if any, and that carry the same parts on.

    None where that is not known.
    """
    if node.callee is not None or node.identity not in _OWN:
        return None
    found, alike = definition(node), _likeness(node)
    return None if found is None or alike is None else (node.identity, found.rule, alike, carrying(node))


def infers_by_operands(node: Node) -> bool:
    """Whether a node's result types are inferred of its operator, attributes and operands; of others nobody knows."""
    return definition(node) is None or node.identity not in _FOREIGN


def factor_rule(node: Node) -> FactorRule | None:
    """The factor rule of a node with static types, or None: every operand and result must be whole."""
    found = definition(node)
    return found.rule(node) if found is not None and found.rule is not None else None


def what_is_uncovered(node: Node) -> str:
    """What of a node without a factor rule its operator's rule does not cover; "" where that is not told."""
    rule = _RULES.get(node.identity)
    try:
        if rule is not None:
            rule(node)
    except CannotTellError as error:
        return str(error)
    except _MISFITS:
        pass
    return ""


def other_rules(node: Node) -> tuple[FactorRule, ...]:
    """The rules of a node's other local programs: more ways to run it, of which none is followed by completion."""
    found = definition(node)
    programs = () if found is None else found.other_programs
    return tuple(rule for program in programs if program.rule is not None and (rule := program.rule(node)) is not None)


def program_of(node: Node, rule: FactorRule) -> LocalProgram | None:
    """The local program that works along factors of one of a node's rules."""
    found = definition(node)
    if found is None:
        return None
    programs = (found.local_program, *found.other_programs)
    for program in programs:
        if program is not None and program.rule is not None and program.rule(node) == rule:
            return program
    for program in programs:
        if program is not None and program.rule is None and _dims(program, node) is not None:
            return program
    return None


def _dims(program: LocalProgram, node: Node) -> Sequence[int] | None:
    try:
        return program.dims(node)
    except CannotTellError:
        return None


def program_factors(node: Node, rule: FactorRule, program: LocalProgram | None) -> frozenset[int]:
    """The factors along which the rule's local program works: those that it needs whole may be sharded all the same."""
    if program is None:
        return frozenset()
    standing = [factor for dim in _dims(program, node) or () for factor in rule.operands[program.operand_of(node)][dim]]
    return frozenset(factor for factor in standing if rule.kinds[factor] is not Kind.PASS)


def flops(node: Node) -> int:
    """Floating-point operations of a node with static types; 0 where its definition cannot tell, or there is none."""
    found = definition(node)
    if found is not None and found.flops is not None:
        try:
            return found.flops(node)
        except CannotTellError:
            return 0
        except _MISFITS as error:
            raise _misfit(node) from error
    return 0
