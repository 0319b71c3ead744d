"""Shape and Size of what is sharded are those of the whole, wherever they are asked."""

from pathlib import Path

import onnx
import pytest

import irpar
from irpar.onnx_io import load

PIPELINE = "infer-types,complete-sharding,insert-redistribution,localize"
"""Without fold-constants: shapes are asked at run time."""

MODELS = {
    "by nodes": """
      g (float[10, 6] x) => (float[10, 6] y, int64[1] s) {
        s = Shape<start = 0, end = 1>(x)  n = Size(x)  a = Cast<to = 1>(s)  b = Cast<to = 1>(n)
        c = Mul(x, a)  y = Add(c, b) }""",
    "in a body": """
      g (float[10, 6] x, bool[1] flag) => (float[10, 6] y) {
        asked = Squeeze(flag)
        y = If(asked) <
          then_branch = then () => (float[10, 6] t) { s = Shape<start = 0, end = 1>(x)  a = Cast<to = 1>(s)
            t = Mul(x, a) },
          else_branch = other () => (float[10, 6] e) { n = Size(x)  b = Cast<to = 1>(n)  e = Add(x, b) }> }""",
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cut", [[["p"], None], [["p"], ["q"]], [["p", "q"], None]], ids=str)
def test_sizes_are_global(name: str, cut: list[list[str] | None], tmp_path: Path) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 21]> {MODELS[name]}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    module = load(tmp_path / "model.onnx")
    module.shard("x", cut)
    module.shard("y", cut)
    partition = irpar.partition(module, irpar.Mesh({"p": 3, "q": 2}), pipeline=PIPELINE)
    for engine in ("ort", "numpy"):
        for seed in range(2):
            partition.verify(engine=engine, seed=seed).check()
    assert partition.plan.totals["sent_bytes"] <= 4, "only the predicate may be moved"
