"""Look-ups in tables whose rows several devices hold."""

from typing import Any

import numpy as np
import onnx.parser
import pytest

import irpar

INDICES = {"Gather": (8,), "GatherElements": (8, 8), "GatherND": (8, 1)}


@pytest.mark.parametrize("dtype", ["float", "float16", "double"])
@pytest.mark.parametrize("operator", INDICES)
def test_negative_zeros_keep_their_sign(operator: str, dtype: str) -> None:
    # On numpy's kernels: ONNX Runtime's Where gives 0.0 for -0.0.
    shape = INDICES[operator]
    model: Any = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> g ({dtype}[12,8] w, int64{list(shape)} i) => ({dtype}[8,8] y)'
        f" {{ y = {operator}(w, i) }}"
    )
    module = irpar.load(model)
    irpar.annotate(module, {"w": [["p"], None]})
    part = irpar.partition(module, "p=4")
    kinds = {"float": np.float32, "float16": np.float16, "double": np.float64}
    given = {"w": np.full((12, 8), -0.0, kinds[dtype]), "i": np.full(shape, 3)}
    assert part.plan.collectives, "the table is not sharded"
    found = part.run(given, engine="numpy")["y"]
    assert not found.any()
    assert np.signbit(found).all()
