"""Small tensors in and out of ONNX Runtime through buffers that are bound once."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnxruntime

from irpar.ir import Value
from irpar.runtime.instructions import Segment

from .base import Array


class Buffers:
    """Buffers of all inputs and outputs of a session, and what binds them.

    Args:
        session: that.
        segment: which it computes.
        inputs, outputs: C-contiguous, of the types that the segment says; None: of its own.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        segment: Segment,
        inputs: Sequence[Array] | None = None,
        outputs: Sequence[Array] | None = None,
    ) -> None:
        self.binding: Any = session.io_binding()
        self.outputs = list(map(_buffer, segment.outputs)) if outputs is None else outputs
        inputs = list(map(_buffer, segment.inputs)) if inputs is None else inputs
        self.inputs = [(buffer, buffer.shape, buffer.dtype) for buffer in inputs]
        for value, buffer in zip(segment.inputs, inputs, strict=True):
            self.binding.bind_input(value.name, "cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)
        for value, buffer in zip(segment.outputs, self.outputs, strict=True):
            self.binding.bind_output(value.name, "cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)

    def runs(self, session: onnxruntime.InferenceSession) -> Callable[[], object]:
        """What runs the session, of which these are, without checks that only a device needs; as long as these live."""
        inner, binding = getattr(session, "_sess", None), getattr(self.binding, "_iobinding", None)
        if inner is None or binding is None:
            return partial(session.run_with_iobinding, self.binding)
        return partial(inner.run_with_iobinding, binding, None)


def _buffer(value: Value) -> Array:
    return np.empty(value.shape, value.dtype.numpy)


class Bindings(threading.local):
    """The buffers of the thread that asks, as all threads have that run a session.

    Attributes:
        buffers: those; a thread's are made when it first asks for them.
    """

    def __init__(self, session: onnxruntime.InferenceSession, segment: Segment) -> None:
        self.buffers = Buffers(session, segment)
