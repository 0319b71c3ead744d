"""docs/shardings.md, Where to annotate and What goes first: each line of the tables, with the figures that it tells."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import irpar
from irpar.onnx_io import to_module

PAGE = Path(__file__).parent.parent / "docs" / "shardings.md"
MLP = "g (float[64,128] x) => (float[64,128] y) { h = MatMul(x, w1)  a = Relu(h)  y = MatMul(a, w2) }"
ROWS = """g (float[8,16,64] x) => (float[128,64] y) <int64[2] s={128,64}> {
  h = MatMul(x, w)  r = Reshape(h, s)  y = Relu(r) }"""
WIDE = "g (float[64,128] x) => (float[64,1024] y) { h = MatMul(x, w1)  a = Relu(h)  y = MatMul(a, w2) }"
MODELS: dict[str, tuple[str, dict[str, tuple[int, int]]]] = {
    "weights": (MLP, {"w1": (128, 512), "w2": (512, 128)}),
    "reshape": (ROWS, {"w": (64, 64)}),
    "boundary": (WIDE, {"w1": (128, 128), "w2": (128, 1024)}),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("weights", {"w1": [None, ["tp"]]}),
    ("weights", {"x": [None, ["tp"]]}),
    ("reshape", {"x": [None, ["tp"], None]}),
    ("reshape", {"x": [None, ["tp"], None], "y": [["tp"], None]}),
    ("weights", {"x": [["tp"], None], "w1": [None, ["tp"]]}),
    ("weights", {"x": {"cut": [["tp"], None], "priority": 1}, "w1": [None, ["tp"]]}),
    ("boundary", {"x": [["tp"], None]}),
    ("boundary", {"x": [["tp"], None], "w2": [None, ["tp"]]}),
]


@pytest.mark.parametrize(("name", "cuts"), CASES, ids=str)
def test_the_page_tells_what_comes_out(name: str, cuts: dict[str, Any], tmp_path: Path) -> None:
    text, weights = MODELS[name]
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    random = np.random.default_rng(0)
    for weight, shape in weights.items():
        numbers = random.standard_normal(shape).astype(np.float32) / 8
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, weight))
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    irpar.annotate(module, cuts)
    partition = irpar.partition(module, irpar.Mesh({"tp": 4}))
    partition.verify().check()
    plan = partition.plan
    kinds = ", ".join(plan.totals["by_kind"]) or "nothing"
    share = plan.totals["flops_per_rank"] / plan.original["flops"]
    weight_share = max(part["weight_bytes"] for part in plan.parts) / plan.original["weight_bytes"]
    written = "; ".join(f"`{tensor}: {_written(spec)}`" for tensor, spec in cuts.items())
    line = f"| {written} | {kinds} | {plan.totals['sent_bytes']:,} | {share:.0%} | {weight_share:.0%} |"
    assert re.sub(r" +", " ", line) in re.sub(r" +", " ", PAGE.read_text()), line


def test_the_reason_that_names_the_priority() -> None:
    text = MLP.replace("x)", "x, float[128,512] w1, float[512,128] w2)", 1)
    module = to_module(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'))
    irpar.annotate(module, next(cuts for _, cuts in CASES if isinstance(cuts.get("x"), dict)))
    module.set_mesh(irpar.Mesh({"tp": 4}))
    irpar.PassManager.parse("infer-types,complete-sharding").run(module)
    told = module.decision("h", "tp")
    assert told is not None
    assert f"    %h {told.why}\n" in PAGE.read_text()


def _written(spec: Any) -> str:
    """An annotation as the page writes it."""
    if isinstance(spec, dict):
        return f"{{cut: {_written(spec['cut'])}, priority: {spec['priority']}}}"
    return f"[{', '.join('tp' if dim else 'null' for dim in spec)}]"
