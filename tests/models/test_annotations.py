"""Annotations: they name what exists, and the cuts by columns and rows fit each other."""

from fnmatch import fnmatchcase

import numpy as np
import pytest

from irpar.models import annotations, build
from tests.budget import every

from .variants import VARIANTS

PAIRED = [("mlp", {}), ("gpt", {}), ("llama", {}), ("llama", {"preset": "gqa"}), ("bert", {}), ("vit", {}), ("t5", {})]
"""Models in which every weight that is sharded by columns feeds one that is sharded by rows."""


@pytest.mark.parametrize(
    ("name", "settings"), [*VARIANTS, ("control", {"kind": "scan"}), ("llama", {"preset": "fused"})]
)
def test_every_name_matches_and_every_cut_divides(name, settings):
    model = build(name, **settings)
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    for value in (*model.graph.input, *model.graph.output):
        shapes[value.name] = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    for pattern, cuts in annotations(name, **settings).items():
        matches = [shape for tensor, shape in shapes.items() if fnmatchcase(tensor, pattern)]
        assert matches, pattern
        for shape in matches:
            assert len(cuts) == len(shape)
            assert all(dim % 4 == 0 for dim, axes in zip(shape, cuts, strict=True) if axes)


def test_axes_are_named_as_asked_and_none_leaves_them_out():
    assert annotations("mlp", dp_axis=None, tp_axis="model") == {
        "fc1.weight": [None, ["model"]],
        "fc1.bias": [["model"]],
        "fc2.weight": [["model"], None],
        "y": [None, None],
    }
    assert annotations("gpt", dp_axis="data", tp_axis=None) == {"input_ids": [["data"], None]}
    assert annotations("llama", dp_axis=None, tp_axis=None) == {}


@pytest.mark.parametrize(("name", "settings"), every(2, PAIRED))
def test_what_one_rank_holds_is_all_that_its_row_blocks_need(name, settings, run_model, keep_blocks, inputs):
    """A rank's rows of the second layer see only what the rank's columns of the first ones compute.

    So with the rows kept of one rank alone, zeroing the columns of all others must not change the result, and zeroing
    a rank's own columns must.
    """
    model = build(name, **settings)
    cuts = annotations(name, dp_axis=None, **settings)
    for name_of_result_or_head in ("lm_head.weight", "y"):
        cuts.pop(name_of_result_or_head, None)
    rows = [pattern for pattern, cut in cuts.items() if cut[0] and len(cut) == 2]
    # A bias of the keys shifts all scores of a query alike, which the softmax takes out again.
    columns = [pattern for pattern in cuts if pattern not in rows and not pattern.endswith(("k.bias", "key.bias"))]
    for rank in (0, 3):
        only_rows = run_model(keep_blocks(model, dict.fromkeys(rows, rank), cuts, 4), inputs[name])
        both = run_model(keep_blocks(model, dict.fromkeys(cuts, rank), cuts, 4), inputs[name])
        np.testing.assert_allclose(both, only_rows, rtol=1e-5, atol=1e-5)
        for pattern in columns:
            wrong = {**dict.fromkeys(cuts, rank), pattern: (rank + 1) % 4}
            different = run_model(keep_blocks(model, wrong, cuts, 4), inputs[name])
            assert np.abs(different - only_rows).max() > 1e-3, f"{pattern} does not matter"
