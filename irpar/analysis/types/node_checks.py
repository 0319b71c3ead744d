"""Whether a node has the operands, results, attributes and graphs that its operator asks for."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import onnx

from irpar.ir import Attribute, Floats, Graph, Ints, Node, RefAttribute, Strings, Tensor
from irpar.ops.effects import schema_of

from .type_merge import TypeInferenceError


class MalformedNodeError(TypeInferenceError):
    """A node that no engine could run: too many or too few operands or results, or attributes that do not fit."""


_SINGLE = onnx.defs.OpSchema.FormalParameterOption.Single


class Limits(NamedTuple):
    """How many operands and results an operator takes and gives, and which operands cannot be left out."""

    operands: tuple[int, int]
    results: tuple[int, int]
    required: tuple[int, ...]


@cache
def limits_of(domain: str, op_type: str, version: int) -> Limits | None:
    """The limits by ONNX's schema; None for an operator that ONNX does not know, or not any more."""
    schema = schema_of(domain, op_type, version)
    if schema is None or schema.deprecated:
        return None
    required = tuple(index for index, operand in enumerate(schema.inputs) if operand.option is _SINGLE)
    return Limits((schema.min_input, schema.max_input), (schema.min_output, schema.max_output), required)


def check_node(node: Node) -> None:
    """Refuse a node with too many or too few operands or results, or attributes or graphs that do not fit its operator.

    Raises:
        MalformedNodeError: saying what the operator asks for.
    """
    if node.callee is not None:
        return
    limits = limits_of(node.domain, node.op_type, node.version)
    if limits is None:
        return
    _check_count(node, "operands", len(node.operands), *limits.operands)
    _check_count(node, "results", len(node.results), *limits.results)
    if None in node.operands:
        for index in limits.required:
            if node.operands[index] is None:
                raise _refusal(node, f"operand {index} is left out, and has to be given")
    _check_attributes(node)
    if not node.domain and node.op_type in _MORE:
        _MORE[node.op_type](node)


def _check_count(node: Node, what: str, count: int, least: int, most: int) -> None:
    if not least <= count <= most:
        allowed = str(least) if least == most else f"{least} or more" if most > 1000 else f"{least} to {most}"
        raise _refusal(node, f"it has {count} {what}, {node.op_type} has {allowed}")


@cache
def _kinds_of(domain: str, op_type: str, version: int) -> tuple[dict[str, type | tuple[type, ...] | None], list[str]]:
    """What an operator's attributes are, None where anything goes; and which of them have to be given."""
    schema = schema_of(domain, op_type, version)
    assert schema is not None
    kinds = {name: _KINDS.get(attribute.type.name) for name, attribute in schema.attributes.items()}
    return kinds, [name for name, attribute in schema.attributes.items() if attribute.required]


def _check_attributes(node: Node) -> None:
    """Refuse attributes that the operator does not have, that are of another kind, or that cannot be; and missing ones.

    Bodies are left to `_MORE`, which says more of them.
    """
    kinds, required = _kinds_of(node.domain, node.op_type, node.version)
    for name, value in node.attributes.items():
        if name not in kinds:
            has = ", ".join(sorted(kinds)) or "none"
            raise _refusal(node, f'it has no attribute "{name}"', (f"attributes of {node.op_type}: {has}",))
        kind = kinds[name]
        if kind is None or isinstance(value, (RefAttribute, Graph)):
            continue
        if not isinstance(value, kind):
            raise _refusal(node, f'its attribute "{name}" is {value!r:.60}, which is of another kind')
        least = _LEAST.get(name)
        if least is not None and not node.domain:
            numbers = value if isinstance(value, Ints) else (value,)
            if any(isinstance(number, int) and number < least for number in numbers):
                raise _refusal(node, f'its attribute "{name}" is {_shown(value)}, but has to be {least} or more')
    for name in required:
        if name not in node.attributes and kinds[name] is not Graph:
            raise _refusal(node, f'its attribute "{name}" is missing')


def _shown(value: Attribute) -> str:
    return str(list(value)) if isinstance(value, Ints) else str(value)


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "INT": int,
    "FLOAT": float,
    "STRING": (str, bytes),
    "INTS": Ints,
    "FLOATS": Floats,
    "STRINGS": Strings,
    "TENSOR": Tensor,
    "GRAPH": Graph,
}
"""Kinds of attributes by ONNX's names, and what holds them."""

_LEAST: Mapping[str, int] = dict.fromkeys(
    (
        *("strides", "dilations", "kernel_shape", "group", "blocksize", "num_groups", "num_outputs", "hidden_size"),
        *("q_num_heads", "kv_num_heads"),
    ),
    1,
)
"""Attributes that no operator divides by, or makes sizes of, below this."""


def _check_if(node: Node) -> None:
    for name in ("then_branch", "else_branch"):
        _check_body(node, name, inputs=0, outputs=len(node.results))


def _check_loop(node: Node) -> None:
    body = _check_body(node, "body", inputs=len(node.operands), outputs=1 + len(node.results))
    if len(body.outputs) < len(node.operands) - 1:
        raise _refusal(node, f"it carries {len(node.operands) - 2} values, its body produces {len(body.outputs) - 1}")


def _check_scan(node: Node) -> None:
    if 0 < node.version < 9:
        return
    scanned = node.attributes.get("num_scan_inputs")
    if not isinstance(scanned, int) or not 0 < scanned <= len(node.operands):
        raise _refusal(node, f"num_scan_inputs is {scanned!r}, with {len(node.operands)} operands")
    body = _check_body(node, "body", inputs=len(node.operands), outputs=len(node.results))
    states = len(node.operands) - scanned
    if len(body.outputs) < states:
        raise _refusal(node, f"it carries {states} values, its body produces {len(body.outputs)}")
    for side, count in (("input", scanned), ("output", len(body.outputs) - states)):
        for name in (f"scan_{side}_axes", f"scan_{side}_directions"):
            stated = node.attributes.get(name)
            if isinstance(stated, Ints) and len(stated) != count:
                raise _refusal(node, f"{name} has {len(stated)} entries, {count} are needed")


def _check_sequence_map(node: Node) -> None:
    _check_body(node, "body", inputs=len(node.operands), outputs=len(node.results))


def _check_body(node: Node, name: str, *, inputs: int, outputs: int) -> Graph:
    body = node.attributes.get(name)
    if not isinstance(body, Graph):
        raise _refusal(node, f"it has no graph {name}")
    for what, count, asked in (("inputs", len(body.inputs), inputs), ("outputs", len(body.outputs), outputs)):
        if count != asked:
            raise _refusal(node, f"its {name} has {count} {what}, the node asks for {asked}", _shape_of(node))
    return body


def _shape_of(node: Node) -> tuple[str, ...]:
    return (f"the node has {len(node.operands)} operands and {len(node.results)} results",)


def _check_einsum(node: Node) -> None:
    """ONNX's own inference never ends on an equation with other characters."""
    equation = node.attributes.get("equation")
    if not isinstance(equation, RefAttribute) and not (isinstance(equation, str) and _EQUATION.fullmatch(equation)):
        raise _refusal(node, f"its equation is {equation!r:.60}, such a one as 'bij,bjk->bik' is expected")


_TERM = r"(?:[A-Za-z ]|\.\.\.)*"
_EQUATION = re.compile(rf"{_TERM}(?:,{_TERM})*(?:->{_TERM})?")

_MORE: Mapping[str, Callable[[Node], None]] = {
    "Einsum": _check_einsum,
    "If": _check_if,
    "Loop": _check_loop,
    "Scan": _check_scan,
    "SequenceMap": _check_sequence_map,
}
"""Operators of which more is asked, those that hold graphs among them: what checks these."""


def _refusal(node: Node, what: str, notes: Sequence[str] = ()) -> MalformedNodeError:
    return MalformedNodeError(
        f"{node.op_type} is malformed: {what}",
        where=f"node {node.label}" + ("" if any(True for _ in node.nested_graphs()) else f": {node!r}"),
        notes=tuple(notes),
        do="mend the model, or export it again",
    )
