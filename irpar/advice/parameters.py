"""Parameters of a model, by name and by use, layers together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from irpar.analysis.memory.liveness import value_bytes
from irpar.ir import Module, Node, Value, tensor_type
from irpar.ir.annotate import glob_of

from .uses import Use, uses_of

_MOST_USES = 4
"""How many uses of one parameter are reported; the same in other layers counts once."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that differ only in numbers inside their names, and are used alike.

    Attributes:
        pattern: their name with `*` for these numbers.
        tensors: how many they are.
        type: of all of them; several types joined by " or ".
        elements, bytes: of all together.
        scope: where they are first used, with `*` for numbers; empty where the model does not tell.
        uses: what computes with them, such as `B of MatMul /h.*/attn/q/MatMul: [in 64, out 64]`.
        names: all of them, in order.
    """

    pattern: str
    tensors: int
    type: str
    elements: int
    bytes: int
    scope: str
    uses: tuple[str, ...]
    names: tuple[str, ...]


def parameters_of(module: Module) -> tuple[ParameterGroup, ...]:
    """All constants of a module, in order."""
    groups: dict[tuple[object, ...], list[Value]] = {}
    for graph in module.all_graphs():
        for value in graph.constants:
            key = (glob_of(value.source_name), _scope_of_value(value), use_texts(value))
            groups.setdefault(key, []).append(value)
    return tuple(map(_group, groups.values()))


def use_texts(value: Value) -> tuple[str, ...]:
    """What a constant is for, with `*` for the numbers of layers; nothing for other values."""
    return _said(value, Use.text)


def exact_use_texts(value: Value) -> tuple[str, ...]:
    """The same with the numbers."""
    return _said(value, Use.exact_text)


def _said(value: Value, say: Callable[[Use, tuple[object, ...]], str]) -> tuple[str, ...]:
    type_ = tensor_type(value.type)
    if not value.is_constant or type_ is None or type_.shape is None:
        return ()
    found = list(dict.fromkeys(say(use, type_.shape) for use in uses_of(value)))
    more = len(found) - _MOST_USES
    return (*found[:_MOST_USES], f"{more} more") if more > 0 else tuple(found)


def scope_of(node: Node) -> str:
    """The scope of a node, with `*` for numbers."""
    return glob_of(node.scope or "")


def _scope_of_value(value: Value) -> str:
    nodes = [use.node for use in uses_of(value)] or [node for node in value.users if not node.is_return]
    return scope_of(nodes[0]) if nodes else ""


def _group(values: Sequence[Value]) -> ParameterGroup:
    types = list(dict.fromkeys(str(value.type) for value in values))
    names = tuple(value.source_name for value in values)
    return ParameterGroup(
        # A single tensor keeps its own name.
        pattern=names[0] if len(names) == 1 else glob_of(names[0]),
        tensors=len(values),
        type=" or ".join(types[:3]) + (" or ..." if len(types) > 3 else ""),
        elements=sum(value.data.size for value in values if value.data is not None),
        bytes=sum(map(value_bytes, values)),
        scope=_scope_of_value(values[0]),
        uses=use_texts(values[0]) if len(values) > 1 else exact_use_texts(values[0]),
        names=names,
    )
