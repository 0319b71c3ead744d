"""ONNX's own backend cases as calls of one kernel each."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from irpar import kernels

NESTED = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


@dataclass(frozen=True)
class Case:
    """One call of a kernel with what it must give.

    Attributes:
        name: the case's name in ONNX.
        kernel: the kernel of its only node.
        inputs: read-only operands, None where absent.
        attributes: as Python values.
        results: what the node's named results must be, None where the node leaves a result out.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """

    name: str
    kernel: kernels.Kernel
    inputs: tuple[np.ndarray | None, ...]
    attributes: Mapping[str, Any]
    results: tuple[np.ndarray | None, ...]
    rtol: float
    atol: float

    def run(self) -> tuple[np.ndarray, ...]:
        """The kernel's results."""
        return self.kernel(np, self.inputs, self.attributes, len(self.results))


def cases() -> Iterator[Case]:
    """Every case of one node whose operator has a kernel and whose values are all tensors."""
    with warnings.catch_warnings():
        # making the case data divides by zero and overflows on purpose
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        loaded = load_model_tests(kind="node")
    for case in loaded:
        if case.model is None or len(case.model.graph.node) != 1 or case.data_sets is None:
            continue
        node = case.model.graph.node[0]
        kernel = kernels.lookup(node.domain, node.op_type, _version(case.model, node.domain))
        if kernel is None or any(attribute.type in NESTED for attribute in node.attribute):
            continue
        for inputs, outputs in case.data_sets:
            if all(_is_tensor(value) for value in (*inputs, *outputs)):
                yield _case(case, node, kernel, inputs, outputs)


def _case(case: Any, node: onnx.NodeProto, kernel: kernels.Kernel, inputs: Any, outputs: Any) -> Case:
    graph = case.model.graph
    values = dict(zip((value.name for value in graph.input), map(_array, inputs), strict=True))
    values |= {tensor.name: _array(tensor) for tensor in graph.initializer}
    results = dict(zip((value.name for value in graph.output), map(_array, outputs), strict=True))
    return Case(
        name=case.name,
        kernel=kernel,
        inputs=tuple(values[name] if name else None for name in node.input),
        attributes={attribute.name: python_value(attribute) for attribute in node.attribute},
        results=tuple(results.get(name) for name in node.output),
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


def _version(model: onnx.ModelProto, domain: str) -> int:
    return next(entry.version for entry in model.opset_import if entry.domain == domain)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic, onnx.TensorProto))


def _array(value: Any) -> np.ndarray:
    array = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)
    if array.dtype.kind in "US":
        array = array.astype(object)
    array = array.copy()
    array.flags.writeable = False
    return array
