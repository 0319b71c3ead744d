"""ONNX's own backend cases as calls of kernels."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from irpar import kernels


@dataclass(frozen=True)
class Call:
    """One node: its kernel, the names of its operands and results ("" where absent), its attributes."""

    kernel: kernels.Kernel
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A graph, usually of one node, with values for its inputs and what its outputs must be.

    Attributes:
        name: the case's name in ONNX.
        calls: the nodes in order.
        inputs: read-only arrays.
        outputs: the expected arrays.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """

    name: str
    calls: tuple[Call, ...]
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    rtol: float
    atol: float

    def run(self) -> dict[str, np.ndarray]:
        """What the kernels give for each output."""
        values = dict(self.inputs)
        for call in self.calls:
            operands = [values[name] if name else None for name in call.inputs]
            results = call.kernel(np, operands, call.attributes, len(call.outputs))
            values.update(zip(call.outputs, results, strict=True))
        return {name: values[name] for name in self.outputs}


def cases() -> Iterator[Case]:
    """Every case whose nodes all have kernels and whose values are all tensors."""
    with warnings.catch_warnings():
        # making the case data divides by zero and overflows on purpose
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        loaded = load_model_tests(kind="node")
    for case in loaded:
        calls = _calls(case.model)
        if calls is None:
            continue
        for inputs, outputs in case.data_sets:
            if all(_is_tensor(value) for value in (*inputs, *outputs)):
                yield _case(case, calls, inputs, outputs)


def _calls(model: onnx.ModelProto) -> tuple[Call, ...] | None:
    versions = {entry.domain: entry.version for entry in model.opset_import}
    calls = []
    for node in model.graph.node:
        kernel = kernels.lookup(node.domain, node.op_type, versions.get(node.domain, 1))
        if kernel is None:
            return None
        attributes = {attribute.name: python_value(attribute) for attribute in node.attribute}
        calls.append(Call(kernel, tuple(node.input), attributes, tuple(node.output)))
    return tuple(calls)


def _case(case: Any, calls: tuple[Call, ...], inputs: Any, outputs: Any) -> Case:
    graph = case.model.graph
    values = {tensor.name: _array(tensor) for tensor in graph.initializer}
    return Case(
        name=case.name,
        calls=calls,
        inputs=values | dict(zip((value.name for value in graph.input), map(_array, inputs), strict=True)),
        outputs=dict(zip((value.name for value in graph.output), map(_array, outputs), strict=True)),
        rtol=max(case.rtol, 1e-3),
        atol=max(case.atol, 1e-5),
    )


def python_value(attribute: onnx.AttributeProto) -> Any:
    """An attribute as int, float, str, a tuple of those, or an array."""
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, (int, float)):
        return value
    return tuple(item.decode() if isinstance(item, bytes) else item for item in value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic, onnx.TensorProto))


def _array(value: Any) -> np.ndarray:
    array = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)
    array = array.astype(object) if array.dtype.kind in "US" else array.copy()
    array.flags.writeable = False
    return array
