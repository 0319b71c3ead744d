"""Attribute values: plain Python, with typed tuples so that an empty list still knows what it is a list of."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from .tensor import ArrayTensor, Tensor
from .types import OptionalType, SequenceType, TensorType, Type

if TYPE_CHECKING:
    from .graph import Graph


class Ints(tuple[int, ...]):
    """A list of ints."""

    __slots__ = ()


class Floats(tuple[float, ...]):
    """A list of floats."""

    __slots__ = ()


class Strings(tuple["str | bytes", ...]):
    """A list of strings (bytes where they are not UTF-8)."""

    __slots__ = ()


class Tensors(tuple[Tensor, ...]):
    """A list of tensors."""

    __slots__ = ()


class Graphs(tuple["Graph", ...]):
    """A list of nested graphs."""

    __slots__ = ()


class Types(tuple[Type, ...]):
    """A list of types."""

    __slots__ = ()


@dataclass(frozen=True)
class RefAttribute:
    """Inside a function: the attribute of the call with the name `name`; `kind` is ONNX's AttributeType number."""

    name: str
    kind: int


Attribute = Union[
    int, float, str, bytes, Tensor, "Graph", Type, Ints, Floats, Strings, Tensors, Graphs, Types, RefAttribute
]

_LISTS: tuple[tuple[type | tuple[type, ...], type], ...] = (
    (int, Ints),
    (float, Floats),
    ((str, bytes), Strings),
    (Tensor, Tensors),
    ((TensorType, SequenceType, OptionalType), Types),
)


def attribute(value: Any) -> Attribute:
    """Any Python value as an attribute value: lists become typed tuples (an empty one: ints), arrays become tensors.

    Raises:
        TypeError: the value cannot be an attribute.
    """
    if type(value) in _READY:
        return value  # type: ignore[no-any-return]
    if isinstance(value, (bool, np.integer)):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, np.ndarray):
        return ArrayTensor(value)
    if isinstance(value, (list, tuple)) and type(value) not in _TYPED:
        return _typed_list([attribute(item) for item in value])
    if isinstance(value, (Tensor, *_TYPED, TensorType, SequenceType, OptionalType)) or _is_graph(value):
        return value  # type: ignore[no-any-return]
    raise TypeError(f"{value!r} cannot be an attribute")


_READY = frozenset({int, float, str, bytes, Ints, Floats, Strings, ArrayTensor, RefAttribute})
_TYPED = (Ints, Floats, Strings, Tensors, Graphs, Types)


def _is_graph(value: object) -> bool:
    from .graph import Graph

    return isinstance(value, Graph)


def _typed_list(items: list[Any]) -> Attribute:
    if not items:
        return Ints()
    if all(isinstance(item, (int, float)) for item in items) and any(isinstance(item, float) for item in items):
        return Floats(float(item) for item in items)
    for kind, made in _LISTS:
        if all(isinstance(item, kind) for item in items):
            return made(items)  # type: ignore[no-any-return]
    if all(_is_graph(item) for item in items):
        return Graphs(items)
    raise TypeError(f"a list of mixed kinds cannot be an attribute: {items!r}")


def same_attribute(a: Attribute, b: Attribute) -> bool:
    """True where two attribute values mean the same (nested graphs: only where they are one object)."""
    if type(a) is not type(b) and not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.equals(b)
    if isinstance(a, (Tensors, Graphs)) and isinstance(b, (Tensors, Graphs)):
        return len(a) == len(b) and all(map(same_attribute, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return a is b or a == b


def plain_attribute(value: Attribute) -> Any:
    """An attribute value as kernels take it: a number, text, a type, a tuple of these, or arrays.

    Raises:
        TypeError: it is a graph, or stands for an attribute of a call.
    """
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, Tensors):
        return tuple(tensor.numpy() for tensor in value)
    if isinstance(value, (RefAttribute, Graphs)) or _is_graph(value):
        raise TypeError(f"a kernel cannot take {value!r}")
    return tuple(value) if isinstance(value, tuple) else value


def attributes(values: Mapping[str, Any] | Iterable[tuple[str, Any]] | None) -> dict[str, Attribute]:
    """A dict of attribute values from plain Python values; None leaves an attribute out."""
    if not values:
        return {}
    items = values.items() if isinstance(values, Mapping) else values
    return {name: attribute(value) for name, value in items if value is not None}
