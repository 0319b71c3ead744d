"""The layers of a model, as `irpar inspect` tells of them: how many, how large, and where they differ."""

from collections.abc import Sequence
from dataclasses import dataclass

from irpar.analysis.equal_nodes import is_short_index, numbers_key
from irpar.analysis.layers import Layers, find_layers
from irpar.analysis.memory.liveness import value_bytes
from irpar.ir import Module, Value
from irpar.ir.annotate import glob_of

_NUMBERS = 4
"""Numbers of a setting that are shown; further layers count as `...`."""


@dataclass(frozen=True)
class LayerFact:
    """Subgraphs of one structure that the model repeats.

    Attributes:
        first: the node that the first of them begins with.
        count: how many they are.
        nodes: in each.
        parameters: elements of the weights that each has for itself.
        parameter_bytes: of these weights.
        differ: what they differ in: the weights of their own, by number, then settings with their numbers.
    """

    first: str
    count: int
    nodes: int
    parameters: int
    parameter_bytes: int
    differ: tuple[str, ...]


def layers_of(module: Module) -> tuple[LayerFact, ...]:
    """The layers of a module, those first that hold most of its nodes."""
    return tuple(_fact(layers) for layers in find_layers(module.graph))


def _fact(layers: Layers) -> LayerFact:
    columns = [column for column in zip(*layers.operands, strict=True) if len(set(column)) > 1]
    constants = [
        column for column in columns if all(value.data is not None for value in column) and not _are_indices(column)
    ]
    settings = [column for column in constants if _is_setting(column)]
    own = [column[0] for column in constants if not _is_setting(column)]
    weights = (f"{len(own)} {'weights' if len(own) > 1 else 'weight'}",) if own else ()
    return LayerFact(
        first=layers.members[0][0].label,
        count=layers.count,
        nodes=layers.size,
        parameters=sum(value.data.size for value in own if value.data is not None),
        parameter_bytes=sum(map(value_bytes, own)),
        differ=(*weights, *filter(None, map(_setting_text, settings))),
    )


def _are_indices(column: Sequence[Value]) -> bool:
    """Whether constants are shapes, axes or indices: equal in layers that are alike."""
    return all(value.data is not None and is_short_index(value.data) for value in column)


def _is_setting(column: Sequence[Value]) -> bool:
    """Whether constants are single numbers in the model itself, such as the scale of a layer."""
    return all(
        value.data is not None and value.data.size == 1 and numbers_key(value.data) is not None for value in column
    )


def _setting_text(column: Sequence[Value]) -> str:
    """`h.*.scale 0.5, 0.25`; nothing where the numbers are equal all the same."""
    numbers = [str(value.data.numpy().item()) for value in column if value.data is not None]
    if len(set(numbers)) == 1:
        return ""
    more = ", ..." if len(numbers) > _NUMBERS else ""
    return f"{glob_of(column[0].source_name)} {', '.join(numbers[:_NUMBERS])}{more}"
