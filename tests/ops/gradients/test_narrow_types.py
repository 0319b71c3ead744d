"""Gradients of narrow floats: ONNX has the operators that they are written in, in these dtypes."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from irpar.analysis.types.type_merge import TypeInferenceError
from irpar.ir import Module
from irpar.kernels import lookup
from irpar.passes.infer_types import InferTypes
from tests.budget import of_each, pairs
from tests.ops.gradients.proof import decomposed, feeds_of, gradients_of, is_float, module_of
from tests.ops.gradients.test_samples import has_gradient
from tests.ops.rule_proof import Sample
from tests.ops.samples import SAMPLES

NEW = 23
"""An opset in which most of ONNX's operators have bfloat16."""


def narrow_module(sample: Sample, dtype: Any) -> Module | None:
    """The sample's module in a narrow dtype, at the newest opset; None where ONNX has no such operator."""
    opset = max(NEW, sample.version)
    version = onnx.defs.get_schema(sample.op, opset, "").since_version
    try:
        module = module_of(replace(sample, version=version), dtype)
    except TypeInferenceError:
        return None
    module.opsets[""] = opset
    if lookup("", sample.op, version) is not None:
        return module
    made = decomposed(module)
    if made is not None:
        InferTypes().run(made)
    return made


CURRENT = [each for each in SAMPLES if not each.domain and each.version >= 13 and onnx.defs.has(each.op, "")]


@pytest.mark.parametrize(
    ("sample", "dtype"),
    pairs(of_each(lambda sample: sample.operator, [*filter(has_gradient, CURRENT)]), [np.float16, ml_dtypes.bfloat16]),
    ids=str,
)
def test_gradients_have_types(sample: Sample, dtype: Any) -> None:
    module = narrow_module(sample, dtype)
    if module is None:
        return
    wrt = [name for name, array in feeds_of(sample, dtype).items() if is_float(array) and array.size]
    outputs = [value.name for value in module.graph.outputs if value.dtype.numpy == dtype]
    made = gradients_of(module, wrt, outputs)
    assert [value.dtype.numpy for value in made.graph.outputs] == [feeds_of(sample, dtype)[name].dtype for name in wrt]
