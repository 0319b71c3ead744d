"""Gradient models of all samples: valid, right in stock ONNX Runtime, and in float64 throughout where the model is."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import irpar
from irpar.ir import DType, Module, Node, tensor_type
from irpar.onnx_io import to_proto
from irpar.passes.autodiff import GRAD
from irpar.passes.infer_types import InferTypes
from irpar.runtime.engines.ort_versions import newest_opset
from tests.budget import every, of_each
from tests.ops.gradients.proof import feeds_of, gradients_of, is_float, module_of, run
from tests.ops.gradients.test_samples import has_gradient
from tests.ops.rule_proof import Sample
from tests.ops.samples import SAMPLES

Array = np.ndarray[Any, Any]

TOLERANCE, TOLERANCE_OF_HALVES = 1e-4, 2e-3
"""Of the largest element."""
ONNX_HAS_NO_FLOAT64 = frozenset(
    (
        *("CausalConvWithState", "Celu", "DequantizeLinear", "LinearAttention", "RotaryEmbedding"),
        *("FeatureVectorizer", "LinearRegressor", "Normalizer", "Scaler"),
    )
)
"""Operators whose gradients are compared with irpar's kernels in float32."""
NOT_IN_ONNX_RUNTIME: Mapping[str, str] = {}
"""Operators whose gradients ONNX Runtime cannot run on CPU, and what it prints. There are none."""
FEWEST_OPERATORS = 155


def _short(sample: Sample) -> Sample:
    """The sample without operands left out at the end: at a LayerNormalization that has some, ONNX Runtime crashes."""
    operands = list(sample.operands)
    while operands[-1] is None:
        operands.pop()
    return replace(sample, operands=tuple(operands))


# An Upsample of a model is a Resize by the time that it is differentiated.
CASES = [_short(sample) for sample in SAMPLES if has_gradient(sample) and sample.op != "Upsample"]
FEW = of_each(lambda sample: sample.operator, CASES)
"""One of each operator, where not all are tried."""


def in_float64(sample: Sample) -> Any:
    """The dtype of what irpar's kernels compute; None: that of the sample."""
    return None if sample.op in ONNX_HAS_NO_FLOAT64 else np.float64


@pytest.mark.parametrize("sample", every(2, FEW), ids=str)
def test_onnxruntime_computes_the_gradients(sample: Sample) -> None:
    module, feeds = module_of(sample, None), feeds_of(sample, None)
    wrt = [name for name, array in feeds.items() if is_float(array) and array.size]
    outputs = [value.name for value in module.graph.outputs if value.dtype.is_float]
    made = irpar.gradients(module, wrt=wrt, outputs=outputs)
    feeds.update(seeds(made, sample.whole))
    model = to_proto(made)
    onnx.checker.check_model(model, full_check=True)
    if sample.operator in NOT_IN_ONNX_RUNTIME:
        with pytest.raises(Exception, match=NOT_IN_ONNX_RUNTIME[sample.operator]):
            _run_onnxruntime(model, feeds)
        return
    if sample.version > newest_opset():
        pytest.skip(f"ONNX Runtime {ort.__version__} does not load operator set {sample.version}")
    found = _run_onnxruntime(model, feeds)
    dtype = in_float64(sample)
    reference = gradients_of(module_of(sample, dtype), wrt, outputs)
    expected = run(
        reference, {value.name: feeds[value.name].astype(value.dtype.numpy) for value in reference.graph.inputs}
    )
    assert found.keys() == expected.keys() == {GRAD + name for name in wrt}
    for name in wrt:
        gradient, exact = found[GRAD + name], expected[GRAD + name].astype(np.float64)
        assert gradient.dtype == feeds[name].dtype
        assert gradient.shape == exact.shape == feeds[name].shape
        tolerance = TOLERANCE if gradient.dtype.itemsize >= 4 else TOLERANCE_OF_HALVES
        largest = float(np.abs(exact).max())
        error = float(np.abs(gradient.astype(np.float64) - exact).max())
        assert error <= tolerance * largest + 1e-9, f"grad.{name} is off by {error}, its largest element is {largest}"


@pytest.mark.parametrize("sample", every(2, [case for case in FEW if in_float64(case) is not None]), ids=str)
def test_gradients_of_float64_are_computed_in_float64(sample: Sample) -> None:
    module, feeds = module_of(sample), feeds_of(sample)
    wrt = [name for name, array in feeds.items() if is_float(array) and array.size]
    outputs = [value.name for value in module.graph.outputs if value.dtype is DType.F64]
    made = irpar.gradients(module, wrt=wrt, outputs=outputs)
    InferTypes().run(made)
    narrow = {
        value.name
        for node in made.graph.walk()
        for value in _read_or_used(node)
        if (type_ := tensor_type(value.type)) is not None and type_.dtype.is_float and type_.dtype is not DType.F64
    }
    assert narrow == set()


def test_most_operators_are_tried() -> None:
    assert len({sample.operator for sample in CASES}) >= FEWEST_OPERATORS


def _read_or_used(node: Node) -> list[Any]:
    """Operands and used results; the scales of a Resize are float32 in ONNX."""
    operands = node.operands[:1] if node.op_type == "Resize" else node.operands
    return [*(value for value in operands if value is not None), *(value for value in node.results if value.has_uses)]


def seeds(module: Module, whole: Sequence[Array]) -> dict[str, Array]:
    """What the outputs are weighted with; outputs are named y0, y1 ..."""
    random = np.random.default_rng(0)
    return {
        value.name: random.standard_normal(whole[int(value.name.removeprefix(f"{GRAD}y"))].shape).astype(
            value.dtype.numpy
        )
        for value in module.graph.inputs
        if value.name.startswith(GRAD)
    }


def _run_onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
    return dict(zip([value.name for value in session.get_outputs()], results, strict=True))
