"""Weights that are taken apart of products of integers, as quantizers write them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import irpar

WIDE, HIDDEN = 16, 48
BEFORE = """
<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>
g (float[2, 6, 16] x) => (float[2, 6, 16] y) {
  q, s, z = DynamicQuantizeLinear (x)
"""
AFTER = """
  a, b, c = Split <axis = 2> (h)
  m = Mul (a, b)
  y = Sub (m, c)
}
"""
FORMS = {
    "with the scale behind the product": """
  i = MatMulInteger (q, w, z, wz)
  f = Cast <to = 1> (i)
  r = Mul (s, ws)
  p = Mul (f, r)
  h = Add (b0, p)
""",
    "with all in one node": "  h = com.microsoft.MatMulIntegerToFloat (q, w, s, ws, z, wz, b0)\n",
    "that quantises its data": "  h = com.microsoft.DynamicQuantizeMatMul (x, w, ws, wz, b0)\n",
}


def model(form: str, *, is_by_columns: bool) -> onnx.ModelProto:
    made = onnx.parser.parse_model(BEFORE + FORMS[form] + AFTER)
    random = np.random.default_rng(3)
    count = [HIDDEN] if is_by_columns else []
    weights = {
        "w": random.integers(0, 256, (WIDE, HIDDEN)).astype(np.uint8),
        "ws": random.uniform(0.01, 0.02, count).astype(np.float32),
        "wz": random.integers(100, 150, count).astype(np.uint8),
        "b0": random.standard_normal(HIDDEN).astype(np.float32),
    }
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    return made


@pytest.mark.parametrize(
    ("form", "is_by_columns"), [*((form, False) for form in FORMS), *((form, True) for form in list(FORMS)[1:])]
)
def test_sections_of_products_of_integers(form: str, is_by_columns: bool, tmp_path: Path) -> None:
    onnx.save(model(form, is_by_columns=is_by_columns), tmp_path / "m.onnx")
    module = irpar.load(tmp_path / "m.onnx")
    module.shard("w", [None, "tp"])
    partition = irpar.partition(module, {"tp": 2})
    partition.verify(seed=1).check()
    assert not partition.plan.collectives
    assert partition.plan.totals["flops_per_rank"] < 0.75 * partition.plan.original["flops"]
    local = partition.module.graphs[0]
    assert sum(node.op_type in ("MatMulInteger", "MatMulIntegerToFloat") for node in local) == 1
