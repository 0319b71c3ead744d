"""The whole way: model, annotations, partition, run, compared with ONNX Runtime on the original."""

from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest

import irpar
from irpar import models
from irpar.api import Engine
from irpar.runtime.engines.base import ENGINES
from irpar.runtime.errors import ProgramError
from tests.budget import pairs

MESHES = [{"dp": 2}, {"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}]
BLOCKS = {"mlp": 1, "gpt": 2 * 2, "llama": 2 * 2}
"""All-reduces that Megatron's plan has: one for each attention and each MLP."""


def built(family: str, folder: Path, **overrides: object) -> Path:
    path = folder / f"{family}.onnx"
    onnx.save(models.build(family, **overrides), path)
    return path


def annotated(path: Path, annotations: dict[str, list], mesh: dict[str, int], **bind: int) -> irpar.Module:
    """The model with the annotations, less the axes that the mesh lacks."""
    module = irpar.load(path, bind=bind or None)
    for name, spec in annotations.items():
        module.shard(name, [[axis for axis in dim or () if axis in mesh] or None for dim in spec])
    return module


def check_plan(partition: irpar.Partition, family: str, annotations: dict[str, list]) -> None:
    """The figures that the plan promises: FLOPs, weight bytes, collectives."""
    plan, mesh = partition.plan, partition.plan.mesh["axes"]
    ranks = np.prod(list(mesh.values()))
    assert plan.totals["flops_per_rank"] <= 1.1 / ranks * plan.original["flops"]
    tp = mesh.get("tp", 1)
    if tp == 1:
        assert plan.totals["collectives"] == 0
    else:
        assert {kind: row["collectives"] for kind, row in plan.totals["by_kind"].items()} == {
            "all_reduce": BLOCKS[family]
        }
    for part in partition.parts:
        whole = held = 0
        for value in part.graph.constants:
            if any(fnmatch(value.source or "", name) and any(spec) for name, spec in annotations.items()):
                whole += int(np.prod(value.whole_shape)) * value.dtype.bits // 8
                held += part.tensor(value).nbytes
        assert held <= 1.05 / tp * whole


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", ["mlp", "gpt", "llama"])
def test_built_families(family: str, mesh: dict[str, int], tmp_path: Path) -> None:
    annotations = models.annotations(family)
    module = annotated(built(family, tmp_path), annotations, mesh)
    partition = irpar.partition(module, irpar.Mesh(mesh))
    partition.verify(tolerance=1e-4).check()
    check_plan(partition, family, annotations)


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_saved_and_opened(engine: str, tmp_path: Path) -> None:
    mesh = {"dp": 2, "tp": 2}
    module = annotated(built("gpt", tmp_path), models.annotations("gpt"), mesh)
    made = irpar.partition(module, irpar.Mesh(mesh))
    made.save(tmp_path / "out")
    opened = irpar.Partition.open(tmp_path / "out")
    opened.verify(engine=engine).check()
    assert opened.plan == made.plan
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["part0", "part1", "plan.json"]
    for part in ("part0", "part1"):
        onnx.checker.check_model(str(tmp_path / "out" / part / "model.onnx"), full_check=True)


def test_the_runtime_executes_what_the_plan_says(tmp_path: Path) -> None:
    mesh = {"dp": 2, "tp": 2}
    partition = irpar.partition(
        annotated(built("llama", tmp_path), models.annotations("llama"), mesh), irpar.Mesh(mesh)
    )
    partition.verify()
    assert len(partition.plan.collectives) == BLOCKS["llama"]
    assert partition.executor().log.differences(partition.plan.collectives) == []
    closed = partition.executor()
    closed.close()
    with pytest.raises(ProgramError, match=r"the executor is closed\n  do: get a new one with Partition.executor"):
        closed.run({})
    assert partition.executor() is not closed
    partition.verify().check()


ODD_MESHES = ({"tp": 3}, {"dp": 2, "tp": 3}, {"dp": 3}, {"a": 2, "dp": 2, "tp": 2})


@pytest.mark.parametrize(("family", "mesh"), pairs(["mlp", "gpt", "llama"], ODD_MESHES), ids=str)
def test_sizes_that_do_not_divide(family: str, mesh: dict[str, int], tmp_path: Path) -> None:
    module = annotated(built(family, tmp_path, batch=5), models.annotations(family), mesh)
    partition = irpar.partition(module, irpar.Mesh(mesh))
    partition.verify().check()


@pytest.mark.parametrize("variant", [{"fused_qkv": True}, {"tied": True}, {"dynamic": True}])
def test_gpt_variants(variant: dict[str, bool], tmp_path: Path) -> None:
    mesh = {"dp": 2, "tp": 2}
    bind = {"batch": 4, "seq": 32} if variant.get("dynamic") else {}
    annotations = models.annotations("gpt", **variant)
    module = annotated(built("gpt", tmp_path, **variant), annotations, mesh, **bind)
    irpar.partition(module, irpar.Mesh(mesh)).verify().check()


def test_device_orders_other_than_row_major(tmp_path: Path) -> None:
    mesh = irpar.Mesh({"dp": 2, "tp": 2}, devices=(3, 1, 0, 2))
    module = annotated(built("gpt", tmp_path), models.annotations("gpt"), dict(mesh.axes))
    partition = irpar.partition(module, mesh)
    partition.verify().check()
    assert partition.plan.mesh["devices"] == [3, 1, 0, 2]


def test_the_module_stays_as_it_is(tmp_path: Path) -> None:
    module = annotated(built("mlp", tmp_path), models.annotations("mlp"), {"tp": 2})
    before = str(module)
    irpar.partition(module, irpar.Mesh({"tp": 2}))
    assert str(module) == before
    irpar.partition(module, irpar.Mesh({"tp": 4})).verify().check()


def test_unbound_symbols_are_listed(tmp_path: Path) -> None:
    module = annotated(built("gpt", tmp_path, dynamic=True), models.annotations("gpt"), {"tp": 2})
    with pytest.raises(irpar.IrparError, match="2 sizes are not known: batch, seq"):
        irpar.partition(module, irpar.Mesh({"tp": 2}))


def test_wrong_numbers_are_found_and_bisected(tmp_path: Path) -> None:
    mesh = {"tp": 2}
    partition = irpar.partition(annotated(built("gpt", tmp_path), models.annotations("gpt"), mesh), irpar.Mesh(mesh))
    assert partition.bisect().first is None
    assert partition.module is not None
    # Break one node: the MLP's MatMul of layer 1 reads the weights of layer 0.
    graph = partition.module.graph
    wrong, right = graph.value("h.1.mlp.c_fc.weight"), graph.value("h.0.mlp.c_fc.weight")
    wrong.replace_uses(right)
    broken = irpar.Partition(partition.plan, module=partition.module)
    assert not broken.verify()
    with pytest.raises(irpar.IrparError, match="1 of 1 outputs differ"):
        broken.verify().check()
    found = broken.bisect()
    assert found.first is not None
    assert found.node == "/h.1/mlp/c_fc/MatMul"


def test_the_engines_that_python_names_are_those_of_the_runtime() -> None:
    assert get_args(Engine) == tuple(ENGINES)


def test_token_ids_that_no_row_has_give_no_plausible_numbers(tmp_path: Path) -> None:
    # ONNX Runtime refuses them; a vocabulary-parallel lookup finds them in nobody's block.
    module = irpar.load(built("gpt", tmp_path))
    module.shard("wte.weight", ["tp", None])
    partition = irpar.partition(module, {"tp": 2})
    ids = np.zeros((4, 32), np.int64)
    assert np.isfinite(partition.run({"input_ids": ids})["logits"]).all()
    assert np.isnan(partition.run({"input_ids": ids + 5000})["logits"]).all()


def test_another_model_is_not_the_original(tmp_path: Path) -> None:
    models.save(tmp_path / "gpt.onnx", "gpt", weights="external")
    module = irpar.load(tmp_path / "gpt.onnx")
    irpar.annotate(module, models.annotations("gpt", dp_axis=None))
    partition = irpar.partition(module, "tp=2")
    models.save(tmp_path / "other.onnx", "gpt", seed=7)
    with pytest.raises(irpar.IrparError, match="not the model that was partitioned"):
        partition.verify(model=tmp_path / "other.onnx")
    partition.save(tmp_path / "out")
    saved = irpar.Partition.open(tmp_path / "out")
    data = tmp_path / "gpt.onnx.data"
    data.write_bytes(data.read_bytes())
    assert "was written after" in str(saved.verify())  # It has weights of its own.
    with pytest.raises(irpar.IrparError, match="the file was written to after its model was partitioned"):
        partition.verify()
    data.write_bytes(b"")
    for each in (saved, partition):
        with pytest.raises(irpar.IrparError, match="not the external data that was partitioned"):
            each.verify()


def test_a_result_far_beyond_rounding_is_different(tmp_path: Path) -> None:
    # A sum of many numbers of both signs: orders of summation differ in its last digits.
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Mul", ["p", "big"], ["y"])],
        "noisy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 512])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 8])],
        [
            onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((512, 8)).astype(np.float32), "w"),
            onnx.numpy_helper.from_array(np.float32(1.0), "big"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    module = irpar.load(tmp_path / "m.onnx")
    module.shard("w", ["tp", None])
    partition = irpar.partition(module, "tp=2")
    # A wrong result is far beyond any noise.
    assert partition.verify()
    right = partition.executor().run
    partition.executor().run = lambda inputs, **more: (made := right(inputs, **more)) | {"y": made["y"] + 0.5}  # type: ignore[method-assign]
    assert not partition.verify()


def test_the_reason_names_the_annotation_of_the_axis_that_moves(tmp_path: Path) -> None:
    module = irpar.load(built("mlp", tmp_path))
    module.shard("x", ["dp", None])
    module.shard("fc1.weight", [None, "tp"])
    module.shard("fc2.weight", [None, "tp"])
    partition = irpar.partition(module, "dp=2,tp=2")
    (gather,) = partition.plan.collectives
    assert gather["kind"] == "all_gather"
    assert gather["axes"] == ["tp"]
    assert 'annotated "fc1.weight"' in gather["reason"]


def test_forms_of_a_mesh(tmp_path: Path) -> None:
    module = irpar.load(built("mlp", tmp_path))
    module.shard("fc1.weight", [None, "tp"])
    texts = {str(irpar.partition(module, mesh).module) for mesh in ("tp=2", {"tp": 2}, irpar.Mesh({"tp": 2}))}
    assert len(texts) == 1
    assert "over tp=2: 2 ranks" in repr(irpar.partition(module, "tp=2"))
    with pytest.raises(irpar.IrparError, match="axes is "):
        irpar.Mesh("tp=2")


def test_what_is_whole_and_why_is_in_the_plan(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["x"], ["r"], "relu"),
            helper.make_node("NonZero", ["r"], ["n"], "nonzero"),
        ],
        "whole",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [10])],
        [helper.make_tensor_value_info("n", TensorProto.INT64, [1, None])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    module = irpar.load(tmp_path / "m.onnx")
    module.shard("x", ["tp"])
    partition = irpar.partition(module, "tp=6")
    partition.verify().check()
    assert partition.plan.replicated == [
        {"op": "nonzero", "bytes": None, "why": "the size of its result depends on data"}
    ]
    assert "NonZero nonzero needs it in full" in partition.plan.collectives[0]["reason"]


def test_a_converted_model_is_bisected_by_the_names_of_the_original() -> None:
    # onnx's converter adds values of its own to this opset 9 model.
    light = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / "light_squeezenet.onnx"
    found = irpar.partition(irpar.load(light), "tp=1").bisect()
    assert found.first is None
    assert found.compared > 60
