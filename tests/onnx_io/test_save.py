import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from irpar.ir import ArrayTensor, DType, ExternalTensor, Graph, Module, Node, TensorType
from irpar.onnx_io import OnnxError, load, save, to_module

from .models import external, mlp, peak_kilobytes


def results(model: bytes | str, x: np.ndarray) -> np.ndarray:
    return np.asarray(onnxruntime.InferenceSession(model).run(None, {"x": x})[0])


def test_large_constants_go_beside_the_model(tmp_path: Path) -> None:
    made = mlp()
    path = tmp_path / "m.onnx"
    save(to_module(made), path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    again = load(path)
    w, b = again.graph.value("w").data, again.graph.value("b").data
    assert isinstance(w, ExternalTensor)
    assert not isinstance(b, ExternalTensor)
    onnx.checker.check_model(path, full_check=True)
    x = np.ones((3, 32), np.float32)
    np.testing.assert_array_equal(results(str(path), x), results(made.SerializeToString(), x))


def test_saves_from_external_data_and_over_itself(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.arange(1024, dtype=np.float32).tobytes())
    (tmp_path / "m.onnx").write_bytes(external(mlp(), "w", location="w.bin").SerializeToString())
    module = load(tmp_path / "m.onnx")
    save(module, tmp_path / "m.onnx")
    again = load(tmp_path / "m.onnx")
    np.testing.assert_array_equal(again.graph.value("w").data.numpy().ravel(), np.arange(1024))  # type: ignore[union-attr]
    with pytest.raises(OnnxError, match="the file that the module reads its weights from"):
        save(again, tmp_path / "m.onnx")
    save(again, tmp_path / "other.onnx")


def three_tensors() -> Module:
    graph = Graph()
    tied = ArrayTensor(np.ones((64, 512), np.float32))
    values = [
        graph.add_constant(ArrayTensor(np.zeros(300, np.float32)), "small"),
        graph.add_constant(tied, "large"),
        graph.add_constant(tied, "tied"),
    ]
    node = graph.append(Node("Size", [values[1]], version=21))
    node.result.type = TensorType(DType.I64, ())
    graph.set_outputs([node.result], ["n"])
    return Module(graph, opsets={"": 21})


def test_layout_is_aligned_and_tied_weights_are_stored_once(tmp_path: Path) -> None:
    save(three_tensors(), tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    entries = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in proto.graph.initializer
    }
    assert {name: int(entry["offset"]) for name, entry in entries.items()} == {"small": 0, "large": 4096, "tied": 4096}
    assert os.path.getsize(tmp_path / "m.onnx.data") == 4096 + 64 * 512 * 4


def test_failure_leaves_the_old_model(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save(to_module(mlp()), path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "m.onnx").write_bytes(external(mlp(), "w", location="gone.bin").SerializeToString())
    module = load(tmp_path / "in" / "m.onnx")
    with pytest.raises(Exception, match="cannot read external data"):
        save(module, path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OnnxError, match="cannot write the model: No such file"):
        save(to_module(mlp()), tmp_path / "none" / "m.onnx")


def test_huge_sparse_weights_are_copied_with_their_holes(tmp_path: Path) -> None:
    shape = [1 << 16, 1 << 16]
    made = mlp()
    tensor = made.graph.initializer[0]
    tensor.Clear()
    tensor.name, tensor.data_type, tensor.data_location = "w", 1, 1
    tensor.dims.extend(shape)
    tensor.external_data.add(key="location", value="w.bin")
    del made.graph.output[:]
    del made.graph.node[:]
    made.graph.node.add(op_type="Size", input=["w"], output=["y"])
    made.graph.output.append(onnx.helper.make_tensor_value_info("y", 7, []))
    (tmp_path / "in.onnx").write_bytes(made.SerializeToString())
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(4 << 32)
        file.seek(123 << 20)
        file.write(b"1234")
    program = "import sys; from irpar.onnx_io import load, save; save(load(sys.argv[1]), sys.argv[2])"
    assert peak_kilobytes(program, str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")) < 400_000
    written = tmp_path / "out.onnx.data"
    assert written.stat().st_size == 4 << 32
    assert written.stat().st_blocks * 512 < 1 << 20
    with open(written, "rb") as file:
        file.seek(123 << 20)
        assert file.read(4) == b"1234"
