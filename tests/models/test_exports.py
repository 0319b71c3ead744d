"""The PyTorch exports of gpt and llama: valid, right, and annotated so that columns and rows fit each other.

All exports are partitioned in tests/test_exports.py.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.budget import every

FIXTURES = Path(__file__).parent.parent / "fixtures"
EXPORTS = sorted(path.stem for name in ("gpt", "llama") for path in FIXTURES.glob(f"{name}_*.onnx"))


def cuts_of(stem):
    return json.loads((FIXTURES / f"{stem}.shardings.json").read_text())["tensors"]


def data_of(stem):
    return np.load(FIXTURES / f"{stem.split('_')[0]}.npz")


def test_both_exporters_are_there_for_both_models_and_both_kinds_of_dims():
    stems = {f"{m}_{e}_{d}" for m in ("gpt", "llama") for e in ("torchscript", "dynamo") for d in ("fixed", "dynamic")}
    assert set(EXPORTS) == stems
    assert all(path.stat().st_size < 200_000 for path in FIXTURES.iterdir())


@pytest.mark.parametrize("stem", EXPORTS)
def test_exports_compute_what_pytorch_does(stem, run_model):
    data = data_of(stem)
    logits = run_model(onnx.load(FIXTURES / f"{stem}.onnx"), {"input_ids": data["input_ids"]})
    np.testing.assert_allclose(logits, data["logits"], rtol=1e-4, atol=1e-5)
    assert logits.std() > 0.3


@pytest.mark.parametrize("stem", [stem for stem in EXPORTS if stem.endswith("dynamic")])
def test_dynamic_exports_take_other_sizes(stem, run_model):
    data = data_of(stem)
    model = onnx.load(FIXTURES / f"{stem}.onnx")
    assert [dim.dim_param for dim in model.graph.input[0].type.tensor_type.shape.dim] == ["batch", "seq"]
    assert {"Shape", "Concat", "Reshape"} <= {node.op_type for node in model.graph.node}
    logits = run_model(model, {"input_ids": data["input_ids"][:3, :10]})
    np.testing.assert_allclose(logits, data["logits"][:3, :10], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stem", EXPORTS)
def test_annotated_tensors_exist_and_divide(stem):
    model = onnx.load(FIXTURES / f"{stem}.onnx")
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    cuts = cuts_of(stem)
    assert cuts.pop("input_ids") == [["dp"], None]
    assert len(cuts) == (2 * 10 + 1 if stem.startswith("gpt") else 2 * 7 + 1)
    for name, cut in cuts.items():
        assert [axes for axes in cut if axes] == [["tp"]]
        assert all(dim % 4 == 0 for dim, axes in zip(shapes[name], cut, strict=True) if axes)


@pytest.mark.parametrize("stem", every(4, EXPORTS))
def test_what_one_rank_holds_is_all_that_its_row_blocks_need(stem, run_model, keep_blocks):
    """As the test of the same name over the builders: a rank's rows see only what its columns compute."""
    model = onnx.load(FIXTURES / f"{stem}.onnx")
    feeds = {"input_ids": data_of(stem)["input_ids"]}
    cuts = cuts_of(stem)
    del cuts["input_ids"]
    head = next(name for node in model.graph.node if "logits" in node.output for name in node.input if name in cuts)
    assert cuts.pop(head) == [None, ["tp"]], "the last weight is sharded by vocabulary"
    rows = [name for name, cut in cuts.items() if cut[0] and len(cut) == 2]
    assert len(rows) == 2 * 2, "one attention output and one feed-forward output per layer"
    for rank in (0, 3):
        only_rows = run_model(keep_blocks(model, dict.fromkeys(rows, rank), cuts, 4), feeds)
        both = run_model(keep_blocks(model, dict.fromkeys(cuts, rank), cuts, 4), feeds)
        np.testing.assert_allclose(both, only_rows, rtol=1e-5, atol=1e-5)
        for name in [name for name in cuts if name not in rows and not name.endswith("k.bias")]:
            wrong = run_model(keep_blocks(model, {**dict.fromkeys(cuts, rank), name: (rank + 1) % 4}, cuts, 4), feeds)
            assert np.abs(wrong - only_rows).max() > 1e-4, f"{name} does not matter"
