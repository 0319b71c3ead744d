"""Gradient models of all samples, with any one tensor sharded: the numbers are those of the model that is not."""

import random
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.ir import Module
from irpar.ir.clone import clone_module
from tests.ops.gradients.proof import feeds_of, is_float, module_of, run
from tests.ops.gradients.test_onnxruntime import CASES, FEW, in_float64, seeds
from tests.ops.rule_proof import Sample

Array = np.ndarray[Any, Any]

MESHES = ({"x": 2}, {"x": 3}, {"x": 2, "y": 2})
EACH = 4
"""So many dims between the ends of a model are passed over for one that is sharded; more where they are very many."""
BETWEEN = 50
"""That many dims there, at most, spread evenly: a model of hundreds of nodes takes two minutes so, and no longer."""
TOLERANCES = {np.dtype(np.float64): 1e-9}
"""Of the largest element; others: 1e-4."""


def made(sample: Sample) -> tuple[Module, dict[str, Array]]:
    """The gradient model of a sample, in float64 where the operator has that, and what it is run on."""
    dtype = in_float64(sample)
    module = module_of(sample, dtype)
    feeds = feeds_of(sample, dtype)
    wrt = [name for name, array in feeds.items() if is_float(array) and array.size]
    outputs = [value.name for value in module.graph.outputs if value.dtype.is_float]
    gradients = irpar.gradients(module, wrt=wrt, outputs=outputs)
    feeds.update(seeds(gradients, sample.whole))
    return gradients, {value.name: feeds[value.name] for value in gradients.graph.inputs}


def dims_of(module: Module) -> list[tuple[str, int, int]]:
    """Every dim of every tensor that may be sharded: the tensor's name and rank, the dim."""
    tensors = [value for value in module.graph.values() if value.is_static]
    return [
        (value.name, len(value.shape), dim) for value in tensors for dim, size in enumerate(value.shape) if size > 1
    ]


def check(module: Module, feeds: dict[str, Array], cuts: list[tuple[str, int, int, str]], mesh: dict[str, int]) -> None:
    """Fail where the partition computes other numbers."""
    work = clone_module(module)
    for name in {name for name, *_ in cuts}:
        (rank,) = {rank for other, rank, *_ in cuts if other == name}
        axes = {dim: axis for other, _, dim, axis in cuts if other == name}
        work.shard(name, [axes.get(dim) for dim in range(rank)])
    found = irpar.partition(work, mesh).run(feeds, engine="numpy")
    for name, expected in run(module, feeds).items():
        tolerance = TOLERANCES.get(expected.dtype, 1e-4) * max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=tolerance, err_msg=f"{name} of {cuts} on {mesh}")


@pytest.mark.parametrize("sample", FEW[::4], ids=str)
def test_some_sharding(sample: Sample) -> None:
    module, feeds = made(sample)
    choices, chance = dims_of(module), random.Random(str(sample))
    if choices:
        mesh = chance.choice(MESHES)
        cuts = {chance.choice(choices): axis for axis in mesh}
        check(module, feeds, [(*each, axis) for each, axis in cuts.items()], mesh)


@pytest.mark.slow
@pytest.mark.parametrize("sample", CASES, ids=str)
def test_every_dim_of_what_goes_in_and_comes_out_and_of_some_between(sample: Sample) -> None:
    module, feeds = made(sample)
    ends = {value.name for value in (*module.graph.inputs, *module.graph.outputs)}
    choices = dims_of(module)
    for each in [each for each in choices if each[0] in ends] + choices[:: max(EACH, -(-len(choices) // BETWEEN))]:
        check(module, feeds, [(*each, "x")], {"x": 2})
