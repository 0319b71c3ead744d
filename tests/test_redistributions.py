"""Programs that only move a tensor from one sharding to another: partitioned, saved, opened, run and verified."""

import random
from pathlib import Path

import numpy as np
import onnx
import pytest

import irpar
from tests.budget import every

from .analysis.redistribution.machine import prime_parts, shardings
from .written import model_of_text

Spec = list[list[str] | None]

MESHES = [{"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}]
SHAPES = [(8, 12), (7, 9), (10, 6), (5, 12), (3, 8), (6, 5, 4), (9,), (16,)]


def partitioned(folder: Path, mesh: irpar.Mesh, shape: tuple[int, ...], source: Spec, target: Spec) -> irpar.Partition:
    size = ",".join(map(str, shape))
    model = model_of_text(f"g (float[{size}] x) => (float[{size}] y) {{ h = Neg(x)  y = Neg(h) }}")
    onnx.save(model, folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    for name, spec in {"x": source, "h": source, "y": target}.items():
        module.shard(name, spec)
    return irpar.partition(module, mesh)


def drawn(seed: int) -> tuple[irpar.Mesh, tuple[int, ...], Spec, Spec]:
    draw = random.Random(seed)
    mesh = irpar.Mesh(draw.choice(MESHES))
    shape = draw.choice(SHAPES)
    atoms = [part for name, size in mesh.axes.items() for part in prime_parts(name, size)]
    every = shardings(mesh, atoms, len(shape))
    return mesh, shape, draw.choice(every).spec(), draw.choice(every).spec()


@pytest.mark.parametrize("seed", every(2, range(40)))
def test_a_tensor_gets_from_one_sharding_to_another(seed: int, tmp_path: Path) -> None:
    mesh, shape, source, target = drawn(seed)
    partition = partitioned(tmp_path, mesh, shape, source, target)
    inputs = {"x": np.random.default_rng(seed).standard_normal(shape).astype(np.float32)}
    assert partition.verify(inputs=inputs).is_equal
    partition.save(tmp_path / "out")
    again = irpar.Partition.open(tmp_path / "out").run(inputs)
    np.testing.assert_array_equal(again["y"], inputs["x"])


UNEVEN = [
    ({"x": 2, "y": 2}, (7, 9), [["x"], ["y"]], [["y"], ["x"]]),
    ({"x": 2, "y": 2}, (7,), [["x", "y"]], [["y", "x"]]),
    ({"x": 2, "y": 2, "z": 2}, (10, 6), [["z"], ["y"]], [["x"], ["z"]]),
]


@pytest.mark.parametrize(("sizes", "shape", "source", "target"), UNEVEN)
def test_uneven_blocks_change_places(
    sizes: dict[str, int], shape: tuple[int, ...], source: Spec, target: Spec, tmp_path: Path
) -> None:
    partition = partitioned(tmp_path, irpar.Mesh(sizes), shape, source, target)
    (entry,) = partition.plan.collectives
    assert entry["kind"] == "permute"
    inputs = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    partition.save(tmp_path / "out")
    np.testing.assert_array_equal(irpar.Partition.open(tmp_path / "out").run(inputs)["y"], inputs["x"])
    assert partition.verify(inputs=inputs).is_equal
