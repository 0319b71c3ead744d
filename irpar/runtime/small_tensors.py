"""Tensors that are copied in a fraction of the time that any node takes."""

from collections.abc import Iterable

from irpar.ir import DType, Value, tensor_type

SMALL_BYTES = 16 * 1024
"""Bytes of all inputs and outputs of a segment together that are copied in a fraction of what a run takes at least."""
_NO_NUMBERS = frozenset({DType.STR})


def are_small(values: Iterable[Value]) -> bool:
    """Whether tensors have sizes that are known, are not empty, and are small together."""
    total = 0
    for value in values:
        type_ = tensor_type(value.type)
        if type_ is None or not type_.is_static or type_.dtype in _NO_NUMBERS or not type_.nbytes:
            return False
        total += type_.nbytes
    return total <= SMALL_BYTES
