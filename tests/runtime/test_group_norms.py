"""Norms of groups of channels in parts of the image, as exporters write them below opset 21."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import irpar

CHANNELS, GROUPS, ROWS, COLUMNS = 8, 4, 12, 10
TEXT = f"""
<ir_version: 9, opset_import: ["": 18]>
norms (float[2, {CHANNELS}, {ROWS}, {COLUMNS}] x) => (float[2, {CHANNELS}, {ROWS}, {COLUMNS}] y)
<int64[3] groups = {{2, {GROUPS}, -1}}, float[{GROUPS}] one = {{1, 1, 1, 1}}, float[{GROUPS}] zero = {{0, 0, 0, 0}}> {{
  c = Conv <pads = [1, 1, 1, 1]> (x, w)
  a = Reshape (c, groups)
  n = InstanceNormalization (a, one, zero)
  size = Shape (c)
  m = Reshape (n, size)
  s = Mul (m, scale)
  y = Add (s, x)
}}
"""


@pytest.mark.parametrize(
    "spec", [[None, None, "tp", None], [None, None, None, "tp"], ["dp", None, "tp", None]], ids=str
)
@pytest.mark.parametrize("count", [2, 3])
def test_rows_and_columns_are_sharded(spec: list[str | None], count: int, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(TEXT)
    random = np.random.default_rng(0)
    for name, shape in (("w", (CHANNELS, CHANNELS, 3, 3)), ("scale", (CHANNELS, 1, 1))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(random.standard_normal(shape, np.float32), name))
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("x", spec)
    mesh = {"dp": 2, "tp": count} if "dp" in spec else {"tp": count}
    partition = irpar.partition(module, mesh)
    for engine in ("ort", "numpy"):
        partition.verify(engine=engine).check()
    plan = partition.plan
    ranks = 2 * count if "dp" in spec else count
    assert plan.totals["flops_per_rank"] < 1.25 * plan.original["flops"] / ranks
    assert {entry["kind"] for entry in plan.collectives} == {"permute", "all_reduce"}
