"""Small models for tests of training, their samples, and their steps on meshes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import irpar
from irpar.ir import ArrayTensor, Module, clone_module
from irpar.ir.text.files import parse_module
from irpar.output.checkpoint import Checkpoint

Array = np.ndarray[Any, Any]
Cuts = Mapping[str, Sequence[Any]]

CLASSIFIER = """
graph @classifier(%x: f32[8, 6], %w: f32[6, 5] from "w", %b: f32[5] from "b", %u: f32[5, 3] from "u", %c: f32[3] from "c") -> (%y) opset 21 {
  %h = MatMul(%x, %w) : f32[8, 5]
  %i = Add(%h, %b) : f32[8, 5]
  %a = Tanh(%i) : f32[8, 5]
  %k = MatMul(%a, %u) : f32[8, 3]
  %y = Add(%k, %c) : f32[8, 3]
}
"""
"""Sizes that two ranks do not share evenly: 5 hidden, 3 classes."""
MESHES: Mapping[str, Cuts] = {
    "d=1": {},
    "dp=2": {"x": ["dp", None], "target": ["dp"]},
    "tp=2": {"w": [None, "tp"], "u": ["tp", None], "w.m": [None, "tp"]},
    "dp=2,tp=2": {"x": ["dp", None], "w": [None, "tp"], "u": ["tp", None]},
    "z=2": {"x": ["z", None], "w": ["z", None], "u": [None, "z"], "c": ["z"]},
}
SAMPLES = 20


def with_weights(text: str, **given: Any) -> Module:
    """A model whose inputs that have a name of their own (`from`) are initializers: seeded normals, if not given."""
    module = parse_module(text)
    random = np.random.default_rng(7)
    for value in list(module.graph.inputs):
        type_ = value.tensor_type
        data = random.standard_normal(type_.static_shape).astype(type_.dtype.numpy)
        if value.source is not None:
            data = np.asarray(given.get(value.source_name, data), type_.dtype.numpy)
            module.graph.inputs_to_constants({value: ArrayTensor(data)})
    return module


def classifier(**options: Any) -> Module:
    """A step of training of the classifier."""
    return irpar.train_step(with_weights(CLASSIFIER), **{"optimizer": "momentum", "learning_rate": 0.1, **options})


def on_mesh(step: Module, mesh: str) -> irpar.Partition:
    """A step of the classifier on one of MESHES."""
    module = clone_module(step)
    known = {value.source_name for value in module.graph.inputs}
    for name, cut in MESHES[mesh].items():
        if name in known:
            module.shard(name, cut)
    return irpar.partition(module, mesh)


def samples(count: int = SAMPLES) -> dict[str, Array]:
    """Samples of the classifier, whose classes can be learned."""
    random = np.random.default_rng(3)
    x = random.standard_normal((count, 6)).astype(np.float32)
    return {"x": x, "target": np.argmax(x[:, :3], axis=1)}


def batch(number: int = 0) -> dict[str, Array]:
    """Eight samples for a step."""
    return {name: array[number : number + 8] for name, array in samples().items()}


def data_file(folder: Path, count: int = SAMPLES) -> Path:
    """The samples as a file."""
    np.savez(folder / "data.npz", **samples(count))
    return folder / "data.npz"


def state_in(checkpoint: Checkpoint) -> dict[str, Array]:
    """The whole state of a checkpoint."""
    return checkpoint.read(list(checkpoint.tensors), {})


def same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Check that two states are equal, bit by bit."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)
