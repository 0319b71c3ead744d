"""Models of float64: all of their floats are, and so is all that irpar's kernels compute."""

from typing import Any

import numpy as np
import onnx
import pytest

from irpar.ir import DType, Module, Value, tensor_type
from irpar.kernels.registry import Kernel
from irpar.models import FAMILIES, ConfigError, build
from irpar.onnx_io import to_module
from irpar.passes.infer_types import InferTypes
from tests.budget import of_each, pairs
from tests.ops.gradients.proof import run

from .variants import VARIANTS

CASES = [*VARIANTS, ("control", {"kind": "scan"}), ("unet", {"dynamic": True})]
FEW = of_each(lambda case: (case[0], case[1].get("kind")), CASES)
"""One of each family and kind, where not all are tried."""
OPSETS = (18, 21, 23, 26)


def feeds_of(name: str, settings: dict[str, Any], inputs: dict[str, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The inputs of a family; a scan's x has steps."""
    if settings.get("kind") == "scan":
        return {"x": np.random.default_rng(2).standard_normal((4, 4, 32)).astype(np.float32)}
    return inputs[name]


def widened(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in feeds.items()}


def floats_of_another_dtype(module: Module) -> set[str]:
    """Names of values that are read and are floats, but not float64; without scales, which are float32 in ONNX."""
    InferTypes().run(module)
    read = {value for node in module.graph.walk() for value in node.operands if value is not None}
    return {value.name for value in {*read, *module.graph.outputs} if _is_narrow(value) and not _is_scales(value)}


def _is_narrow(value: Value) -> bool:
    type_ = tensor_type(value.type)
    return type_ is not None and type_.dtype.is_float and type_.dtype is not DType.F64


def _is_scales(value: Value) -> bool:
    return bool(value.uses) and all(node.op_type == "Resize" and place == 2 for node, place in value.uses)


def test_every_family_is_tried():
    assert {name for name, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize(("case", "opset"), pairs(FEW, OPSETS))
def test_all_floats_are_float64(case, opset, inputs, monkeypatch):
    name, settings = case
    found = set()

    def record(kernel, xp, operands, *rest, **named):
        results = original(kernel, xp, operands, *rest, **named)
        found.update((kernel.op_type, x.dtype) for x in results if x is not None and x.dtype.kind == "f")
        return results

    original = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", record)
    model = build(name, dtype="float64", **{"opset": opset, **settings})
    onnx.checker.check_model(model, full_check=True)
    module = to_module(model)
    assert floats_of_another_dtype(module) == set()
    run(module, widened(feeds_of(name, settings, inputs)))
    assert {dtype for _, dtype in found} == {np.dtype(np.float64)}, found


@pytest.mark.parametrize(("name", "settings"), FEW)
def test_results_are_those_of_float32(name, settings, inputs):
    double, single = (to_module(build(name, dtype=dtype, **settings)) for dtype in ("float64", "float32"))
    InferTypes().run(double), InferTypes().run(single)
    expected = run(single, feeds_of(name, settings, inputs))
    for output, result in run(double, widened(feeds_of(name, settings, inputs))).items():
        assert result.dtype == np.float64
        np.testing.assert_allclose(result, expected[output], rtol=2e-5, atol=2e-5)
        assert np.abs(result - expected[output]).max() > 0, "a result of float32"


def test_onnx_has_no_rotary_embedding_of_float64():
    with pytest.raises(ConfigError, match="RotaryEmbedding"):
        build("llama", preset="fused", dtype="float64")
