"""Weight stores: deterministic values, flat memory, files that cost nothing."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from irpar.models import build
from irpar.models.weights import ALIGNMENT, ExternalWeights, InlineWeights, PlaceholderWeights


def test_chunks_do_not_change_the_values(monkeypatch):
    whole = InlineWeights(seed=3).tensor("w", (7, 11), "float32", 0.0, 1.0)
    monkeypatch.setattr("irpar.models.weights.CHUNK", 5)
    assert InlineWeights(seed=3).tensor("w", (7, 11), "float32", 0.0, 1.0) == whole


def test_values_depend_on_name_and_seed_alone():
    short, deep = (
        {tensor.name: numpy_helper.to_array(tensor) for tensor in build("gpt", layers=layers).graph.initializer}
        for layers in (1, 2)
    )
    np.testing.assert_array_equal(short["wte.weight"], deep["wte.weight"])
    assert np.abs(deep["h.0.attn.q.weight"] - deep["h.1.attn.q.weight"]).max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_mean_and_deviation_are_as_asked(dtype):
    values = numpy_helper.to_array(InlineWeights().tensor("w", (100, 100), dtype, 1.0, 0.5)).astype(np.float64)
    assert abs(values.mean() - 1) < 0.02
    assert abs(values.std() - 0.5) < 0.02


def test_external_tensors_start_on_pages(tmp_path):
    with ExternalWeights(tmp_path / "data") as store:
        tensors = [store.tensor(name, (3, 5), "float16", 0.0, 1.0) for name in "abc"]
    assert store.parameters == 45
    assert store.weight_bytes == 90
    offsets = [int(entry.value) for tensor in tensors for entry in tensor.external_data if entry.key == "offset"]
    assert offsets == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert (tmp_path / "data").stat().st_size == 2 * ALIGNMENT + 30
    for name, tensor in zip("abc", tensors, strict=True):
        inline = numpy_helper.to_array(InlineWeights().tensor(name, (3, 5), "float16", 0.0, 1.0))
        np.testing.assert_array_equal(numpy_helper.to_array(tensor, str(tmp_path)), inline)


def test_a_placeholder_takes_no_disk_and_reads_as_zeros(tmp_path):
    with PlaceholderWeights(tmp_path / "data") as store:
        store.tensor("huge", (1 << 20, 1 << 14), "bfloat16", 0.0, 1.0)
        last = store.tensor("last", (4,), "float32", 1.0, 1.0)
    status = (tmp_path / "data").stat()
    assert status.st_size == 2**35 + 16
    assert status.st_blocks * 512 < 2**20
    np.testing.assert_array_equal(numpy_helper.to_array(last, str(tmp_path)), np.zeros(4, np.float32))


def test_an_external_tensor_passes_the_checker(tmp_path):
    with ExternalWeights(tmp_path / "data") as store:
        tensor = store.tensor("w", (2, 2), "float32", 0.0, 1.0)
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 2])
    graph = onnx.helper.make_graph([node], "g", [], [output], [tensor])
    onnx.save(onnx.helper.make_model(graph, ir_version=10), tmp_path / "m.onnx")
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
