"""Every kernel of a training step in 16 bits is generated, at the sizes that it has on a device."""

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Node, Value
from irpar.kernels.cuda.expression_each import generate_each
from irpar.kernels.cuda.generator import generate
from irpar.kernels.cuda.layouts import Layout
from irpar.onnx_io import to_module
from irpar.runtime.program import build_program

MULTIPROCESSORS = 132
SIZES = {"layers": 1, "hidden": 96, "heads": 2, "vocab": 301, "batch": 2, "seq": 48}


def layout(value: Value) -> Layout:
    return Layout.contiguous(value.shape, np.dtype(value.dtype.numpy))


def is_generated(node: Node) -> bool:
    lines = tuple(map(str, node.attributes["expression"]))  # type: ignore[arg-type]
    times = int(node.attributes.get("times", 1))  # type: ignore[arg-type]
    operands, results = (tuple(map(layout, given[: len(given) // times])) for given in (node.inputs, node.results))
    if node.op_type == "FusedEach":
        return generate_each(lines, operands, results) is not None
    return generate(lines, operands, results, MULTIPROCESSORS) is not None


@pytest.mark.parametrize(
    "family",
    ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bert", "t5", "vit", "moe"))],
)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_no_kernel_is_left_to_arrays(family: str, precision: str) -> None:
    sizes = SIZES if family == "gpt" else {}
    module = to_module(models.build(family, **sizes))
    step = irpar.train_step(module, loss="cross_entropy", optimizer="adamw", precision=precision)
    (part,) = irpar.partition(step, "x=1").parts
    count = 0
    for segment in build_program(part.graph, writes_over=True).segments:
        for node in stand_ins(Stretch(segment.nodes, {*segment.outputs}, segment.over)):
            if node.op_type in ("Fused", "FusedEach"):
                count += 1
                assert is_generated(node), node.attributes["expression"]
    assert count > 10
