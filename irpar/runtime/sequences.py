"""Sequence and optional operators of the numpy engine: a sequence is a list, an absent optional is None."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Operation = Callable[[Sequence[Any], Mapping[str, Any]], Any]


def _position(value: Any) -> int:
    return int(np.asarray(value).reshape(()))


def _place(index: Any, length: int, limit: int) -> int:
    """An index that may be negative, checked: 0 .. limit - 1."""
    position = _position(index)
    place = position + length if position < 0 else position
    if not 0 <= place < limit:
        raise ValueError(f"position {position} is outside a sequence of {length}")
    return place


def _construct(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    return list(inputs)


def _empty(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    return []


def _at(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    sequence, index = inputs
    return sequence[_place(index, len(sequence), len(sequence))]


def _insert(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    sequence, tensor, *rest = inputs
    index = rest[0] if rest else None
    place = len(sequence) if index is None else _place(index, len(sequence), len(sequence) + 1)
    return [*sequence[:place], tensor, *sequence[place:]]


def _erase(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    sequence, *rest = inputs
    index = rest[0] if rest else None
    place = len(sequence) - 1 if index is None else _place(index, len(sequence), len(sequence))
    return [*sequence[:place], *sequence[place + 1 :]]


def _length(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return np.asarray(len(inputs[0]), np.int64)


def _concat(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    (sequence,) = inputs
    join = np.stack if attributes.get("new_axis", 0) else np.concatenate
    return join(sequence, axis=attributes["axis"])


def _split(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    tensor, *rest = inputs
    split = rest[0] if rest else None
    axis = attributes.get("axis", 0)
    size = tensor.shape[axis]
    if split is None:
        pieces = np.split(tensor, size, axis) if size else []
        return pieces if attributes.get("keepdims", 1) else [piece.squeeze(axis) for piece in pieces]
    if split.ndim == 0:
        block = int(split)
        if block < 1:
            raise ValueError(f"blocks of {block} cannot be split off")
        ends = list(range(block, size, block))
    else:
        if int(split.sum()) != size:
            raise ValueError(f"blocks {split.tolist()} do not fill dim {axis} of size {size}")
        ends = np.cumsum(split)[:-1].tolist()
    return list(np.split(tensor, ends, axis))


def _optional(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return inputs[0] if inputs else None


def _has_element(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return np.asarray(bool(inputs) and inputs[0] is not None)


def _get_element(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if inputs[0] is None:
        raise ValueError("the optional is empty")
    return inputs[0]


def _identity(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return inputs[0]


SEQUENCE_OPS: dict[str, Operation] = {
    "Identity": _identity,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceAt": _at,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceLength": _length,
    "ConcatFromSequence": _concat,
    "SplitToSequence": _split,
    "Optional": _optional,
    "OptionalHasElement": _has_element,
    "OptionalGetElement": _get_element,
}
"""Operators of ai.onnx on sequences and optionals (Identity takes either): inputs and attributes to result."""
