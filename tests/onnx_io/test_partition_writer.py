import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import irpar
import irpar.onnx_io
from irpar import models
from irpar.output import fresh, writer


@pytest.fixture
def made(tmp_path: Path) -> irpar.Partition:
    models.save(tmp_path / "gpt.onnx", "gpt", weights="external")
    module = irpar.load(tmp_path / "gpt.onnx")
    irpar.annotate(module, models.annotations("gpt"))
    return irpar.partition(module, irpar.Mesh({"dp": 2, "tp": 2}))


def test_replicas_share_a_part_and_parts_hold_their_slices_only(made: irpar.Partition, tmp_path: Path) -> None:
    made.save(tmp_path / "out")
    assert [rank["part"] for rank in made.plan.ranks] == [0, 1, 0, 1]
    whole = onnx.load(tmp_path / "gpt.onnx")
    weight = next(t for t in whole.graph.initializer if t.name == "h.0.mlp.c_fc.weight")
    columns = np.split(onnx.numpy_helper.to_array(weight), 2, axis=1)
    for part in (0, 1):
        model = onnx.load(tmp_path / "out" / f"part{part}" / "model.onnx")
        held = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
        np.testing.assert_array_equal(held["h.0.mlp.c_fc.weight"], columns[part])
        facts = {entry.key: entry.value for entry in model.metadata_props}
        assert facts["irpar.mesh"] == "dp=2,tp=2"
        assert json.loads(facts["irpar.ranks"]) == [part, part + 2]


def test_parts_with_the_same_graph_differ_in_constants_and_ranks_only(made: irpar.Partition, tmp_path: Path) -> None:
    assert made.module is not None
    # What has the name of an output gets another one when it is written: the same in all parts.
    graph = made.module.graph
    graph.outputs[0].rename("last")
    value = next(value for value in graph.values() if value.node is not None and value not in graph.outputs)
    value.rename(graph.output_names[0])
    made.save(tmp_path / "out")
    one, other = (onnx.load(tmp_path / "out" / f"part{part}" / "model.onnx") for part in (0, 1))
    assert one.graph.initializer != other.graph.initializer
    for model in (one, other):
        del model.graph.initializer[:], model.metadata_props[:]
    assert one == other


def test_the_sizes_of_many_pieces_stand_in_the_model(tmp_path: Path) -> None:
    """Shape inference does not look for them in weights.bin: neither ONNX Runtime nor irpar could run the part."""
    pieces = [f"piece_{place}" for place in range(200)]
    nodes = [
        helper.make_node("Add", ["x", "x"], ["sum"]),
        helper.make_node("Split", ["sum", "sizes"], pieces, axis=1),
        helper.make_node("Concat", pieces[::-1], ["y"], axis=1),
    ]
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 200]) for name in "xy")
    sizes = onnx.numpy_helper.from_array(np.ones(200, np.int64), "sizes")
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], [sizes]), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    onnx.save(model, tmp_path / "model.onnx")
    made = irpar.partition(irpar.load(tmp_path / "model.onnx"), "dp=2")
    made.save(tmp_path / "out")
    onnxruntime.InferenceSession(tmp_path / "out" / "part0" / "model.onnx")
    irpar.Partition.open(tmp_path / "out").verify().check()
    irpar.onnx_io.save(irpar.load(tmp_path / "model.onnx"), tmp_path / "saved.onnx")
    onnxruntime.InferenceSession(tmp_path / "saved.onnx")


def test_weights_none_writes_programs_only(made: irpar.Partition, tmp_path: Path) -> None:
    made.save(tmp_path / "out", weights="none")
    assert sorted(path.name for path in (tmp_path / "out" / "part0").iterdir()) == ["model.onnx"]
    opened = irpar.Partition.open(tmp_path / "out")
    with pytest.raises(irpar.IrparError, match=r"weights\.bin"):
        opened.verify()


def test_an_existing_folder_is_replaced_only_when_asked_and_only_if_it_is_a_partition(
    made: irpar.Partition, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    made.save(out)
    with pytest.raises(irpar.IrparError, match="exists already"):
        made.save(out)
    (out / "part9").mkdir()
    made.save(out, force=True)
    assert not (out / "part9").exists()
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(irpar.IrparError, match="holds no partition of irpar"):
        made.save(other, force=True)
    assert (other / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("failing", ["weights.bin", "model.onnx"])
def test_a_failure_leaves_nothing_half_written(
    made: irpar.Partition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    out = tmp_path / "out"
    made.save(out)
    before = sorted(str(path) for path in tmp_path.rglob("*"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if failing == "weights.bin":
        monkeypatch.setattr(writer.DataFile, "write", full)
    else:
        monkeypatch.setattr(writer, "serialized", full)
    with pytest.raises(irpar.IrparError, match="the disk ran full: No space left"):
        made.save(out, force=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    irpar.Partition.open(out).verify().check()


def test_too_little_room_is_said_before_anything_is_written(
    made: irpar.Partition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = fresh.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(fresh.shutil, "disk_usage", lambda _: type(usage)(usage.total, usage.used, 1000))
    with pytest.raises(irpar.IrparError, match="the disk has 1,000 free"):
        made.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_the_system_refuses(
    made: irpar.Partition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(irpar.IrparError, match="the partition cannot be written: File name too long") as caught:
        made.save("x" * 5000)
    assert len(str(caught.value)) < 600
    (tmp_path / "file").touch()
    with pytest.raises(irpar.IrparError, match="there is a file of that name"):
        made.save(tmp_path / "file" / "out")

    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writer, "serialized", failing)
    with pytest.raises(irpar.IrparError, match="the partition cannot be written: Input/output error"):
        made.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_external_data_that_is_gone(made: irpar.Partition, tmp_path: Path) -> None:
    os.remove(tmp_path / "gpt.onnx.data")
    with pytest.raises(irpar.IrparError, match=r"cannot read external data: No such file .*\n.*gpt\.onnx\.data"):
        made.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_progress_reaches_the_total(made: irpar.Partition, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    made.save(tmp_path / "out", progress=lambda done, total: steps.append((done, total)))
    done, total = steps[-1]
    assert 0 < done <= total
    assert [count for count, _ in steps] == sorted(count for count, _ in steps)
