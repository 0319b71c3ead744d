"""Gradients of operators whose operands have sizes that no type tells: right, or refused."""

from typing import Any

import numpy as np
import pytest

from irpar.analysis.types.type_merge import TypeInferenceError
from irpar.ir import UNKNOWN, Builder, DType, Module, TensorType
from irpar.kernels import lookup
from irpar.passes.autodiff import GradientError
from irpar.passes.infer_types import InferTypes
from tests.budget import of_each, pairs
from tests.ops.gradients.proof import check_module, decomposed, feeds_of, is_float, module_of
from tests.ops.gradients.test_samples import has_gradient
from tests.ops.rule_proof import Sample
from tests.ops.samples import SAMPLES

SIZES = ".sizes"
NEED_SIZES = frozenset(
    [
        "AffineGrid",
        "Attention",
        "AveragePool",
        "BatchNormalization",
        "BiasSplitGelu",
        "CausalConvWithState",
        "CenterCropPad",
        "ComplexMul",
        "ComplexMulConj",
        "Conv",
        "ConvTranspose",
        "CumProd",
        "DFT",
        "DequantizeLinear",
        "Det",
        "FusedConv",
        "GatherND",
        "GridSample",
        "GroupNorm",
        "GroupNormalization",
        "Irfft",
        "LinearAttention",
        "LpPool",
        "MRotaryEmbedding",
        "MatMulNBits",
        "MaxPool",
        "Pad",
        "Resize",
        "Rfft",
        "RoiAlign",
        "RotaryEmbedding",
        "RouterGateUpProj",
        "STFT",
        "SkipGroupNorm",
        "Slice",
        "SwiGLU",
        "Upsample",
    ]
)
"""Operators of which some gradient is refused where sizes are not known."""


def hide_sizes(module: Module, known: int) -> None:
    """Let each input pass a Reshape to sizes that are an input as well; of so many dims the type tells the size."""
    graph = module.graph
    for node in graph.walk():
        for result in node.results:
            result.type = UNKNOWN
    for value in [value for value in graph.inputs if len(value.shape) > known]:
        rank = len(value.shape)
        sizes = graph.add_input(value.name + SIZES, TensorType(DType.I64, (rank,)))
        builder = Builder(graph, module.opsets, before=graph.first)
        type_ = value.tensor_type.with_shape((*value.shape[:known], *[None] * (rank - known)))
        hidden = builder.op("Reshape", [sizes, sizes], {"allowzero": 1}, type=type_)
        value.replace_uses(hidden)
        assert hidden.node is not None
        hidden.node.set_operands([value, sizes])
    InferTypes().run(module)


def hidden_module(sample: Sample, dtype: Any, known: int) -> Module | None:
    """The sample's module with unknown sizes, in operators that have kernels; None where it has no such module."""
    try:
        module = module_of(sample, dtype)
        hide_sizes(module, known)
        if lookup(sample.domain, sample.op, sample.version) is None:
            made = decomposed(module)
            if made is None:
                return None
            module = made
            InferTypes().run(module)
    except TypeInferenceError:  # ONNX has Celu and a few others for float32 alone.
        return None
    return module if any(value.dtype.numpy == dtype for value in module.graph.outputs) else None


@pytest.mark.parametrize(
    ("sample", "known"),
    pairs(of_each(lambda sample: sample.operator, [*filter(has_gradient, SAMPLES)]), [0, 2]),
    ids=str,
)
def test_gradient_without_sizes_is_right_or_refused(sample: Sample, known: int) -> None:
    for dtype in (np.float64, np.float32):
        module = hidden_module(sample, dtype, known)
        if module is None:
            continue
        feeds = feeds_of(sample, dtype)
        wrt = [name for name, array in feeds.items() if is_float(array) and array.size]
        for value in module.graph.inputs:
            if value.name.endswith(SIZES):
                feeds[value.name] = np.int64(feeds[value.name.removesuffix(SIZES)].shape)
        try:
            check_module(module, feeds, wrt)
        except GradientError:
            assert sample.op in NEED_SIZES
        return
    pytest.skip("no engine runs it in floats whose sizes are not known")
