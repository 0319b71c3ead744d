"""ONNX's own backend cases as calls of kernels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from irpar import kernels
from tests.conformance import cases as onnx_cases

# Cases whose data is not what irpar gives, and why.
EXCLUDED = {
    **dict.fromkeys(
        (
            "test_training_dropout",
            "test_training_dropout_default",
            "test_training_dropout_default_mask",
            "test_training_dropout_mask",
        ),
        "training draws random numbers; the kernel refuses it",
    ),
    **dict.fromkeys(
        (
            "test_resize_downsample_scales_linear_align_corners",
            "test_resize_downsample_scales_cubic_align_corners",
        ),
        "the data aligns the corner of a fractional length; the operator's text and ONNX Runtime align the whole one",
    ),
}

# Cases whose data was rounded to a small float at every step, where the kernels accumulate in float32: two units apart.
_BFLOAT16_RTOL = 2 * 2.0**-7
_FLOAT16_RTOL = 2 * 2.0**-10
ROUNDED_AT_EVERY_STEP = {
    "test_attention_3d_causal_bf16": _BFLOAT16_RTOL,
    "test_attention_3d_causal_bf16_expanded": _BFLOAT16_RTOL,
    "test_attention_4d_attn_mask_causal_bf16": _BFLOAT16_RTOL,
    "test_attention_4d_attn_mask_causal_bf16_expanded": _BFLOAT16_RTOL,
    "test_attention_4d_causal_bf16": _BFLOAT16_RTOL,
    "test_attention_4d_causal_bf16_expanded": _BFLOAT16_RTOL,
    "test_attention_4d_causal_fp16_expanded": _FLOAT16_RTOL,
    "test_attention_4d_causal_padded_kv_bf16": _BFLOAT16_RTOL,
    "test_attention_4d_causal_padded_kv_bf16_expanded": _BFLOAT16_RTOL,
    "test_attention_4d_padded_kv_bf16": _BFLOAT16_RTOL,
    "test_attention_4d_padded_kv_bf16_expanded": _BFLOAT16_RTOL,
}


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


def results_of_calls() -> Iterator[tuple[Call, list[Any], Sequence[Any]]]:
    """Each call of a kernel in all cases but the excluded ones: it, its operands, and what it gives of them."""
    for case in cases():
        values = dict(case.inputs)
        if case.name in EXCLUDED:
            continue
        for call in case.calls:
            operands = [values[name] if name else None for name in call.inputs]
            results = call.kernel(np, operands, call.attributes, len(call.outputs))
            yield call, operands, results
            values.update(zip(call.outputs, results, strict=True))


def cases() -> Iterator[Case]:
    """Every case whose nodes all have kernels and whose values are all tensors."""
    for case in onnx_cases.cases("node"):
        calls = _calls(case.model)
        if calls is None:
            continue
        for inputs, outputs in case.data:
            if all(isinstance(value, np.ndarray) for value in (*inputs, *outputs)):
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


def _case(case: onnx_cases.Case, calls: tuple[Call, ...], inputs: list[Any], outputs: list[Any]) -> Case:
    graph = case.model.graph
    values = {tensor.name: _frozen(numpy_helper.to_array(tensor)) for tensor in graph.initializer}
    return Case(
        name=case.name,
        calls=calls,
        inputs=values | dict(zip((value.name for value in graph.input), map(_frozen, inputs), strict=True)),
        outputs=dict(zip((value.name for value in graph.output), outputs, strict=True)),
        rtol=ROUNDED_AT_EVERY_STEP.get(case.name, max(case.rtol, 1e-3)),
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


def _frozen(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def problem(case: Case) -> str | None:
    """What kernels give other than a case expects; None where they give that."""
    try:
        results = case.run()
        for name, expected in case.outputs.items():
            onnx_cases.assert_close(results[name], expected, case.rtol, case.atol)
    except (AssertionError, ValueError) as error:
        return str(error) or type(error).__name__
    return None
