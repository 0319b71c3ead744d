"""Sequence and optional operators of array engines: a sequence is a list, an absent optional is None."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .arrays import Arrays

Operation = Callable[[Arrays, Sequence[Any], Mapping[str, Any]], Any]


def _position(arrays: Arrays, value: Any) -> int:
    return int(arrays.host(value).reshape(()))


def _place(arrays: Arrays, index: Any, length: int, limit: int) -> int:
    """An index that may be negative, checked: 0 .. limit - 1."""
    position = _position(arrays, index)
    place = position + length if position < 0 else position
    if not 0 <= place < limit:
        raise ValueError(f"position {position} is outside a sequence of {length}")
    return place


def _construct(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    return list(inputs)


def _empty(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    return []


def _at(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    sequence, index = inputs
    return sequence[_place(arrays, index, len(sequence), len(sequence))]


def _insert(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    sequence, tensor, *rest = inputs
    index = rest[0] if rest else None
    place = len(sequence) if index is None else _place(arrays, index, len(sequence), len(sequence) + 1)
    return [*sequence[:place], tensor, *sequence[place:]]


def _erase(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    sequence, *rest = inputs
    index = rest[0] if rest else None
    place = len(sequence) - 1 if index is None else _place(arrays, index, len(sequence), len(sequence))
    return [*sequence[:place], *sequence[place + 1 :]]


def _length(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return arrays.keep(np.asarray(len(inputs[0]), np.int64))


def _concat(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    xp, items = arrays.together(inputs[0])
    join = xp.stack if attributes.get("new_axis", 0) else xp.concatenate
    return arrays.keep(join(items, axis=attributes["axis"]))


def _split(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    (xp, (tensor,)), *rest = arrays.together(inputs[:1]), *inputs[1:]
    axis = attributes.get("axis", 0)
    size = tensor.shape[axis]
    if not rest or rest[0] is None:
        pieces = xp.split(tensor, size, axis) if size else []
        if not attributes.get("keepdims", 1):
            pieces = [piece.squeeze(axis) for piece in pieces]
    else:
        pieces = xp.split(tensor, _ends(arrays.host(rest[0]), size, axis), axis)
    return [arrays.keep(piece) for piece in pieces]


def _ends(split: "np.ndarray[Any, Any]", size: int, axis: int) -> list[int]:
    """Where the blocks but the last end: of one size (a number), or of sizes of their own."""
    if split.ndim == 0:
        block = int(split)
        if block < 1:
            raise ValueError(f"blocks of {block} cannot be split off")
        return list(range(block, size, block))
    if int(split.sum()) != size:
        raise ValueError(f"blocks {split.tolist()} do not fill dim {axis} of size {size}")
    ends: list[int] = np.cumsum(split)[:-1].tolist()
    return ends


def _optional(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return inputs[0] if inputs else None


def _has_element(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return arrays.keep(np.asarray(bool(inputs) and inputs[0] is not None))


def _get_element(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if inputs[0] is None:
        raise ValueError("the optional is empty")
    return inputs[0]


def _identity(arrays: Arrays, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
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
"""Operators of ai.onnx on sequences and optionals; Identity takes either. Given arrays, inputs, attributes."""
