"""Operators without a kernel are computed in ONNX's operators: the same numbers as ONNX Runtime gives."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from irpar.ir import ArrayTensor, Graph, Node
from irpar.kernels import lookup
from irpar.ops import definition
from irpar.runtime.engines.arrays import Arrays
from irpar.runtime.engines.bodies import Scope
from irpar.runtime.engines.opened import opened
from irpar.runtime.engines.operation import Environment
from irpar.runtime.errors import EngineError
from tests.ops.rule_proof import Array, Sample, run
from tests.ops.samples import IN_FILES
from tests.passes.test_finer_blocks import check, mlp

UNKNOWN = {"com.microsoft.GroupQueryAttention": 1}
"""How many samples of an operator cannot be said in ONNX's operators: their past is shared with the present."""


def _is_opened(sample: Sample) -> bool:
    known = definition(sample.node)
    if lookup(sample.domain, sample.op, sample.version) is not None or known is None:
        return False
    return known.decompose is not None and known.runs_decomposed


SAMPLES = [sample for sample in IN_FILES if _is_opened(sample)]


def _operands(node: Node, feeds: dict[str, Array]) -> list[Array | None]:
    return [
        None if value is None else value.data.numpy() if value.data is not None else feeds[value.name]
        for value in node.operands
    ]


def test_what_is_opened() -> None:
    operators = {sample.operator for sample in SAMPLES}
    assert {"DeformConv", *(f"com.microsoft.{name}" for name in ("MatMulNBits", "GroupQueryAttention"))} <= operators
    left = [sample.operator for sample in SAMPLES if opened(sample.node, Scope(Arrays())) is None]
    assert {operator: left.count(operator) for operator in left} == UNKNOWN


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_the_numbers_are_those_of_onnxruntime(sample: Sample) -> None:
    operation = opened(sample.node, Scope(Arrays()))
    if operation is None:
        pytest.skip("it cannot be said in ONNX's operators")
    graph = sample.node.graph
    assert graph is not None
    feeds = sample.feeds(graph)
    found: Sequence[Array] = operation(list(_operands(sample.node, feeds)), Environment())
    for array, expected in zip(found, run(graph, feeds, sample.opsets), strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(array, expected, max(sample.tolerance, 1e-3), max(sample.tolerance, 1e-3))


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_products_of_4_bits_over_two_ranks(engine: str, tmp_path: Path) -> None:
    path = mlp(tmp_path / "m.onnx", 192, 64, points="packed")
    check(path, {"up.q": ["tp", None, None]}, "tp=2", engine)


def test_what_cannot_be_opened_is_refused() -> None:
    graph = Graph("g")
    x = graph.add_input("x", ArrayTensor(np.zeros(3, np.float32)).type)
    node = graph.append(Node("Thing", [x], {}, results=1, domain="foo", version=1))
    assert opened(node, Scope(Arrays())) is None
    with pytest.raises(EngineError, match=r"no kernel for foo\.Thing"):
        Arrays().without_kernel(node)
