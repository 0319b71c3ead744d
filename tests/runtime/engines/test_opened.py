"""Operators without a kernel are computed in ONNX's operators: the same numbers as ONNX Runtime gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
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
from tests.test_microsoft_models import decoder


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
    assert {
        "DeformConv",
        *(f"com.microsoft.{name}" for name in ("MultiHeadAttention", "GroupQueryAttention")),
    } <= operators
    assert all(opened(sample.node, Scope(Arrays())) is not None for sample in SAMPLES)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_the_numbers_are_those_of_onnxruntime(sample: Sample) -> None:
    operation = opened(sample.node, Scope(Arrays()))
    assert operation is not None
    graph = sample.node.graph
    assert graph is not None
    feeds = sample.feeds(graph)
    found: Sequence[Array] = operation(list(_operands(sample.node, feeds)), Environment())
    for array, expected in zip(found, run(graph, feeds, sample.opsets), strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(array, expected, max(sample.tolerance, 1e-3), max(sample.tolerance, 1e-3))


def _cached(steps: int, held: int, lengths: Sequence[int], *, rotates: bool = False, **how: Any) -> Sample:
    """Attention of four heads in two groups behind a cache; the rows have so many keys and values in the end."""
    random = np.random.default_rng(steps + held)

    def floats(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32)

    batch, size, total = len(lengths), 16, max(lengths)
    last = np.asarray(lengths, np.int32) - 1
    angles = (floats(32, size // 2), floats(32, size // 2)) if rotates else ()
    caches = (floats(batch, 2, held, size), floats(batch, 2, held, size))
    data = (floats(batch, steps, 4 * size), floats(batch, steps, 2 * size), floats(batch, steps, 2 * size))
    operands = (*data, *caches, last, np.asarray(total, np.int32), *angles)
    sizes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": int(rotates), **how}
    return Sample("GroupQueryAttention", operands, sizes, version=1, results=3, domain="com.microsoft")


CACHED = [
    _cached(1, 5, [6, 6]),
    _cached(1, 5, [6, 4], rotates=True),
    _cached(1, 5, [3, 6, 1], rotates=True, rotary_interleaved=1),
    _cached(1, 9, [6, 4], rotates=True),
    _cached(4, 0, [4, 4], rotates=True),
    _cached(4, 6, [4, 4], rotates=True),
    _cached(1, 7, [8, 5], local_window_size=3, softcap=5.0),
    _cached(1, 7, [8, 5], smooth_softmax=1, scale=0.3),
    _cached(3, 5, [8], rotates=True),
]


@pytest.mark.parametrize("sample", CACHED, ids=str)
def test_a_cache_of_which_each_row_has_its_length(sample: Sample) -> None:
    graph = sample.node.graph
    assert graph is not None
    feeds = sample.feeds(graph)
    operation = opened(sample.node, Scope(Arrays()))
    assert operation is not None
    found = operation(list(_operands(sample.node, feeds)), Environment())
    for array, expected in zip(found, run(graph, feeds, sample.opsets), strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(array, expected, 1e-4, 1e-4)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_decoder_of_4_bits_runs_without_onnxruntime(is_packed: bool, tmp_path: Path) -> None:
    module = irpar.load(decoder(tmp_path / "decoder.onnx", is_packed=is_packed))
    for name in ("qkv", "gate", "up") if is_packed else ("q", "k", "v", "gate", "up"):
        module.shard(f"{name}.weight", ["tp", None, None])
    partition = irpar.partition(module, {"tp": 2})
    random = np.random.default_rng(0)
    inputs = {spec["name"]: random.standard_normal(spec["shape"]).astype(np.float32) for spec in partition.plan.inputs}
    expected = partition.executor("ort").run(inputs)
    for name, array in partition.executor("numpy").run(inputs).items():
        np.testing.assert_allclose(array, expected[name], 1e-3, 1e-3)


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
