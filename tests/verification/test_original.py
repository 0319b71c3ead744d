"""The original, as ONNX Runtime takes it: external sizes, operators that it lacks."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import irpar
from irpar.verification import VerificationError

SHAPED = """<ir_version: 10, opset_import: ["" : 21]>
g (float[4, 8] x) => (float[8, 4] y) <int64[2] shape = {8, 4}, float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}> {
  a = Mul(x, w)
  y = Reshape(a, shape)
}"""


def test_a_shape_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = onnx.parser.parse_model(SHAPED)
    onnx.save(model, path, save_as_external_data=True, all_tensors_to_one_file=True, location="w.bin", size_threshold=0)
    module = irpar.load(path)
    module.shard("x", ["d", None])
    partition = irpar.partition(module, "d=2")
    assert partition.verify().is_equal
    assert partition.bisect().first is None


def test_an_operator_that_onnx_runtime_lacks(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    words = SHAPED.replace('["" : 21]', '["" : 21, "my" : 1]').replace("a = Mul(x, w)", "b = Mul(x, w) a = my.Gelo(b)")
    onnx.save(onnx.parser.parse_model(words.replace("y = Reshape(a, shape)", "y = Reshape(b, shape)")), path)
    with pytest.raises(VerificationError, match="ONNX Runtime does not run the original") as caught:
        irpar.verification.Original.of_file(path, {}).run({"x": np.ones((4, 8), np.float32)})
    assert (
        caught.value.do == "ONNX Runtime lacks this operator: compare the results of irpar run with numbers of your own"
    )
