"""What definitions read of a node."""

from pathlib import Path

import onnx
import onnx.parser
import pytest

import irpar

READERS = {
    "Tile": "(float[8,6] x) => (float[8,12] y) <int64[2] c={1,2}> { y = Tile(x, c) }",
    "ReduceSum": "(float[8,6,4] x) => (float[8] y) <int64[2] c={1,2}> { y = ReduceSum<keepdims=0>(x, c) }",
    "Resize by scales": "(float[4,2,6,6] x) => (float[4,2,12,12] y) <float[4] c={1,1,2,2}> { y = Resize(x, , c) }",
    "Resize by sizes": "(float[4,2,6,6] x) => (float[4,2,9,9] y) <int64[4] c={4,2,9,9}> { y = Resize(x, , , c) }",
    "Slice": "(float[8,6] x) => (float[8,4] y) <int64[2] s={0,1}, int64[2] c={8,5}> { y = Slice(x, s, c) }",
    "Split": "(float[8,6] x) => (float[8,2] y, float[8,4] z) <int64[2] c={2,4}> { y, z = Split<axis=1>(x, c) }",
}


@pytest.mark.parametrize("graph", READERS.values(), ids=list(READERS))
def test_numbers_of_a_constant_that_is_cut_are_known_where_they_are_brought_together(
    graph: str, tmp_path: Path
) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {graph}')
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("c", ["tp"])
    module.shard("x", ["tp", *[None] * (len(model.graph.input[0].type.tensor_type.shape.dim) - 1)])
    partition = irpar.partition(module, {"tp": 2})
    partition.verify().check()
    # The data stays cut: nothing but the list of numbers is sent.
    assert partition.plan.totals["sent_bytes"] <= 32
    partition.save(tmp_path / "out")
    irpar.Partition.open(tmp_path / "out").verify().check()
