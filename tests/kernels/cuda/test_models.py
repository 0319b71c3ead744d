"""All kernels that are generated for models and their training steps, on the host against the kernels step by step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Node, Value
from irpar.onnx_io import to_module

from .emulated import compiled, emulate
from .random_expressions import Array, Example
from .test_generator import NEEDS_COMPILER, launch_of

pytestmark = [pytest.mark.slow, NEEDS_COMPILER]


def kernels(module: irpar.Module) -> dict[Any, Node]:
    """The nodes irpar.Fused of a module's program, one of each kind."""
    partition = irpar.partition(module, "x=1")
    assert partition.module is not None
    graph = partition.module.graph
    nodes = stand_ins(Stretch(tuple(graph), {*graph.outputs}))
    fused = [node for node in nodes if node.op_type == "Fused"]
    return {(node.attributes["expression"], *(str(value.type) for value in node.inputs)): node for node in fused}


def numbers(value: Value, random: np.random.Generator) -> Array:
    """Positive floats, bools, or small integers, of a value's type."""
    dtype = value.dtype.numpy
    if dtype.kind == "b":
        return random.random(value.shape) > 0.5
    if dtype.kind in "iu":
        return np.asarray(random.integers(0, 5, value.shape)).astype(dtype)
    return np.asarray(np.abs(random.normal(size=value.shape)) + 0.1).astype(dtype)


@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "t5", "moe", "resnet", "unet", "vit", "dlrm"])
def test_all_kernels_are_generated_and_right(family: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    plain = kernels(to_module(models.build(family)))
    step = irpar.train_step(to_module(models.build(family)), loss="cross_entropy", optimizer="adamw")
    examples = []
    for node in {**plain, **kernels(step)}.values():
        lines = tuple(map(str, node.attributes["expression"]))  # type: ignore[arg-type]
        examples.append(Example(lines, tuple(np.asarray(numbers(value, random)) for value in node.inputs)))
    made = [[np.empty(result.shape, result.dtype) for result in example.computed()] for example in examples]
    launches = [launch_of(example, arrays) for example, arrays in zip(examples, made, strict=True)]
    library = compiled(launches, tmp_path)
    for number, (example, arrays) in enumerate(zip(examples, made, strict=True)):
        emulate(library, number, launches[number], [*example.operands, *arrays])
        for array, expected in zip(arrays, example.computed(), strict=True):
            found, wanted = array.astype(np.float64), expected.astype(np.float64)
            scale = 1e-5 * (1 + np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=scale, err_msg="\n".join(example.lines))
