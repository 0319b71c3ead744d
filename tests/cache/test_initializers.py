import onnx
import pytest

from irpar import models
from irpar.cache.initializers import initializer_ranges


def test_the_bytes_at_the_ranges(tmp_path):
    model = models.build("gpt")
    path = tmp_path / "gpt.onnx"
    onnx.save(model, path)
    data, ranges = path.read_bytes(), initializer_ranges(path)
    raw = {tensor.name: tensor.raw_data for tensor in model.graph.initializer if tensor.HasField("raw_data")}
    assert len(raw) > 10
    assert {name: data[offset : offset + length] for name, (offset, length) in ranges.items()} == raw


@pytest.mark.parametrize("content", [b"no protobuf", b"\x3a\x7f\x0a", b"\x3a"])
def test_what_is_no_protobuf(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="byte"):
        initializer_ranges(path)
