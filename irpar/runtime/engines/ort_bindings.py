"""Small tensors in and out of ONNX Runtime through buffers that are bound once."""

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnxruntime

from irpar.ir import DType, Value, tensor_type
from irpar.runtime.instructions import Segment

from .base import Array

SMALL_BYTES = 16 * 1024
"""Bytes of all inputs and outputs together that are copied in a fraction of the time that a run takes at least."""
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


class Buffers:
    """Buffers of all inputs and outputs of a session, and what binds them."""

    def __init__(self, session: onnxruntime.InferenceSession, segment: Segment) -> None:
        self.binding: Any = session.io_binding()
        self.outputs = [_buffer(value) for value in segment.outputs]
        inputs = [_buffer(value) for value in segment.inputs]
        self.inputs = [(buffer, buffer.shape, buffer.dtype) for buffer in inputs]
        for value, buffer in zip(segment.inputs, inputs, strict=True):
            self.binding.bind_input(value.name, "cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)
        for value, buffer in zip(segment.outputs, self.outputs, strict=True):
            self.binding.bind_output(value.name, "cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)


def _buffer(value: Value) -> Array:
    return np.empty(value.shape, value.dtype.numpy)


class Bindings(threading.local):
    """The buffers of the thread that asks, as all threads have that run a session.

    Attributes:
        buffers: those; a thread's are made when it first asks for them.
    """

    def __init__(self, session: onnxruntime.InferenceSession, segment: Segment) -> None:
        self.buffers = Buffers(session, segment)
