"""Operator definitions: one place that says how an op types, shards and costs, and how its local form differs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from irpar.ir import Builder, Node, Type, Value, tensor_type
from irpar.sharding import IrparError

from .facts import CannotTellError, refers_to_call
from .local_programs.program import LocalProgram
from .rule import FactorRule, Kind

Infer = Callable[[Node], Sequence[Type] | None]
Rule = Callable[[Node], FactorRule | None]
Cost = Callable[[Node], int]
Localize = Callable[[Node, Node, Builder], Sequence[Value] | None]
"""Mends the local copy of a node; see `OpDef.localize`."""

FAMILIES = (
    "elementwise",
    "matmul",
    "reduction",
    "normalization",
    "shape",
    "position",
    "indexing",
    "attention",
    "convolution",
    "pooling",
    "resize",
    "vision",
    "signal",
    "recurrent",
    "linear_attention",
    "quantized",
    "loss",
    "optimizer",
    "text",
    "classic",
    "fused",
    "fused_attention",
    "fused_products",
    "gated",
    "block_quantized",
    "qlinear",
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
        localize: mends the local copy of a node where the rule does not say it all. Called as
            `localize(whole, local, builder)` after the local types are set: `whole` is the node of the global view,
            whose operands carry whole types and the shardings that the node runs with; `local` stands in the local
            graph already; `builder` inserts before it. Returns None when it only changed operands or attributes of
            `local`, else one value for each result of `local`, of the same type: the caller lets these take over
            uses, names and facts of the results and erases `local`.
        local_program: what it does for factors that take more than to run on blocks.
        other_programs: more of them: with rules of their own (`LocalProgram.rule`), or for nodes along whose dims
            `local_program` does not work.
    """

    domain: str
    name: str
    infer: Infer | None = None
    rule: Rule | None = None
    flops: Cost | None = None
    localize: Localize | None = None
    local_program: LocalProgram | None = None
    other_programs: tuple[LocalProgram, ...] = ()


_DEFINITIONS: dict[tuple[str, str], OpDef] = {}


def define(definition: OpDef) -> OpDef:
    """Register a definition. Where its `infer` or `rule` raises CannotTellError, the registered one gives None.

    A rule is asked only about tensors of known, static, non-empty shape.

    Raises:
        ValueError: the op has one already.
    """
    key = (definition.domain, definition.name)
    if key in _DEFINITIONS:
        raise ValueError(f"{definition.domain or 'ai.onnx'}.{definition.name} is defined twice")
    guarded = replace(
        definition,
        infer=definition.infer and _guarded_infer(definition.infer),
        rule=definition.rule and _guarded_rule(definition.rule),
        other_programs=tuple(
            replace(program, rule=program.rule and _guarded_rule(program.rule)) for program in definition.other_programs
        ),
    )
    _DEFINITIONS[key] = guarded
    return guarded


class MisfitError(IrparError):
    """Operands, attributes and results of a node that do not fit each other."""


@contextmanager
def _malformed(node: Node) -> Iterator[None]:
    """Let a definition that cannot tell give no answer, and tell of a node that it cannot make sense of.

    Raises:
        MisfitError: naming the node.
    """
    try:
        yield
    except CannotTellError:
        return
    except (ArithmeticError, LookupError, TypeError, ValueError, AssertionError) as error:
        raise MisfitError(
            f"the operands, attributes and results of {node.op_type} do not fit each other",
            where=f"node {node.label}: {node!r}",
            notes=tuple(f"%{value.name} : {value.type}" for value in (*node.inputs, *node.results)),
            do="mend the model, or export it again; if ONNX Runtime runs it, this is a bug in irpar: report it",
        ) from error


def _guarded_infer(infer: Infer) -> Infer:
    def answer(node: Node) -> Sequence[Type] | None:
        if refers_to_call(node):
            return None
        with _malformed(node):
            types = infer(node)
            if types is not None and len(types) != len(node.results):
                raise ValueError(f"{len(types)} types for {len(node.results)} results")
            return types
        return None

    return answer


def _guarded_rule(rule: Rule) -> Rule:
    def answer(node: Node) -> FactorRule | None:
        values = (*node.inputs, *node.results)
        if refers_to_call(node) or not all(_is_plain(value) or _is_empty_list(value) for value in values):
            return None
        with _malformed(node):
            found = rule(node)
            if found is not None:
                _check_ranks(found, node)
            return found
        return None

    return answer


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
    """The factors along which the rule's local program works: those that it needs whole may be cut all the same."""
    if program is None:
        return frozenset()
    standing = [factor for dim in _dims(program, node) or () for factor in rule.operands[program.operand][dim]]
    return frozenset(factor for factor in standing if rule.kinds[factor] is not Kind.PASS)


def flops(node: Node) -> int:
    """Floating-point operations of a node with static types; 0 where its definition cannot tell, or there is none."""
    found = definition(node)
    if found is not None and found.flops is not None:
        with _malformed(node):
            return found.flops(node)
    return 0
