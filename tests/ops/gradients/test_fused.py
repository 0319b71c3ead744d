"""Gradients of com.microsoft's operators: symbolic dims, refusals, and that no such operator is left."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from irpar.differentiation import gradients
from irpar.onnx_io import save
from irpar.onnx_io.load import to_module
from irpar.passes.autodiff.refusals import GradientError
from tests.ops.draws import floats, ints
from tests.ops.gradients.proof import check_sample, module_of
from tests.ops.rule_proof import Sample
from tests.ops.samples_microsoft import made

BATCH_AND_STEPS = {(place, dim): name for place in range(9) for dim, name in enumerate(("batch", "steps"))}
"""Operands [batch, steps, ...]."""


def _rows() -> Iterator[tuple[Sample, set[int]]]:
    """Samples, and which operands have batch and steps."""
    data = (floats(2, 3, 8), floats(2, 3, 8), floats(2, 3, 8))
    mask = np.asarray([[1, 1, 0], [1, 1, 1]], np.int32)
    causal = {"num_heads": 2, "unidirectional": 1}
    yield made("MultiHeadAttention", *data, floats(24), mask, **causal), {0, 1, 2, 4}
    lengths, total = np.asarray([2, 1], np.int32), np.asarray(3, np.int32)
    groups = {"num_heads": 2, "kv_num_heads": 1, "local_window_size": 2, "do_rotary": 1}
    caches = (floats(4, 2), floats(4, 2))
    yield made("GroupQueryAttention", floats(2, 3, 16), None, None, None, None, lengths, total, *caches, **groups), {0}
    yield made("Attention", floats(2, 3, 4), floats(4, 24), floats(24), num_heads=2), {0}
    yield made("RotaryEmbedding", data[0], ints(2, 3, low=0, high=4), *caches, num_heads=2), {0, 1}
    yield made("SkipLayerNormalization", *data[:2], floats(8), floats(8)), {0, 1}
    words = ints(2, 3, low=0, high=5).astype(np.int32)
    tables = (floats(5, 4), floats(6, 4))
    yield made("EmbedLayerNormalization", words, None, *tables, None, floats(4), floats(4), results=2), {0}
    heads = {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": "gated_delta"}
    gates = (None, floats(2, 3, 2, low=-1, high=0), floats(2, 3, 2, low=0, high=1))
    yield made("LinearAttention", data[0], floats(2, 3, 4), data[1], *gates, **heads), {0, 1, 2, 4, 5}


@pytest.mark.parametrize(("sample", "places"), list(_rows()), ids=lambda given: getattr(given, "op", ""))
def test_batch_and_steps_may_be_symbolic(sample: Sample, places: set[int]) -> None:
    check_sample(sample, symbols={key: name for key, name in BATCH_AND_STEPS.items() if key[0] in places})


def _refused() -> Iterator[tuple[Sample, str]]:
    rows = (floats(1, 1, 8), floats(1, 1, 4), floats(1, 1, 4))
    cache = (floats(1, 1, 3, 4), floats(1, 1, 3, 4))
    counts = (np.asarray([2], np.int32), np.asarray(3, np.int32))
    heads = {"num_heads": 2, "kv_num_heads": 1}
    yield made("GroupQueryAttention", *rows, *cache, *counts, **heads), "its cache is as long as a length"
    starts = np.asarray([3, 2, 0, 1], np.int32)
    packed = (floats(2, 3, 4), floats(4, 12), floats(12))
    yield made("Attention", *packed, starts, num_heads=1), "its mask lists starts and ends"
    data, weights = floats(3, 5, 6), ints(6, 4, dtype=np.uint8, low=0)
    one = np.asarray(0.5, np.float32)
    yield made("DynamicQuantizeMatMul", data, weights, one), "it rounds floats to integers"


@pytest.mark.parametrize(("sample", "why"), list(_refused()), ids=lambda given: getattr(given, "op", ""))
def test_what_has_no_gradient_says_why(sample: Sample, why: str) -> None:
    with pytest.raises(GradientError, match=f"{sample.op} has no gradient: because {why}"):
        gradients(module_of(sample, None), wrt=["x0"], outputs=["y0"])


FUSED = """
    <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    fused (float[2, 3, 8] x) => (float[2, 3, 8] y)
    <float[8] scale = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] more = {1, 1, 1, 1, 1, 1, 1, 1}> {
      before = SimplifiedLayerNormalization (x, more)
      a = com.microsoft.MultiHeadAttention <num_heads = 2> (before, before, before)
      g = com.microsoft.Gelu (a)
      y = com.microsoft.SkipSimplifiedLayerNormalization (g, x, scale)
    }"""


def test_operators_before_the_weight_are_plain_too(tmp_path: Path) -> None:
    made_of = gradients(to_module(onnx.parser.parse_model(FUSED)), wrt=["scale"])
    save(made_of, tmp_path / "grads.onnx")
    proto = onnx.load(tmp_path / "grads.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} == {""}
    assert [entry.domain for entry in proto.opset_import] == [""]
    session = ort.InferenceSession(tmp_path / "grads.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": floats(2, 3, 8), "grad.y": floats(2, 3, 8)})
    assert found.shape == (8,)
    assert np.isfinite(found).all()
