"""Rows that are added by index, without a table of zeros."""

import numpy as np
import pytest

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Module, Node, parse_module
from irpar.passes.infer_types import InferTypes
from tests.passes.fuse_kernels.texts import computed

ADDED = """
    graph @g(%ids: i64[2, 3], %rows: f32[2, 3, 4], %x: f16[9, 4]) -> (%y) opset 21 {
        %zero = constant : f32[] 0.0
        %shape = constant : i64[2] [9, 4]
        %last = constant : i64[1] [-1]
        %zeros = Expand(%zero, %shape) : ?
        %places = Unsqueeze(%ids, %last) : ?
        %s = ScatterND(%zeros, %places, %rows) {reduction="add"} : ?
        %c = Cast(%s) {to=10} : ?
        %y = Add(%x, %c) : ?
    }
"""


def added(text: str) -> tuple[Module, list[Node]]:
    module = parse_module(text)
    InferTypes().run(module)
    return module, stand_ins(Stretch(list(module.graph), set(module.graph.outputs)))


@pytest.mark.parametrize("gives", ["%y", "%y, %c"], ids=["added to others", "put into zeros"])
def test_rows_are_added_without_zeros(gives: str) -> None:
    module, nodes = added(ADDED.replace("-> (%y)", f"-> ({gives})"))
    assert [node.op_type for node in nodes if node.domain] == ["AddRows", *(["Fused"] if "%c" in gives else [])]
    assert not {"Expand", "ScatterND"} & {node.op_type for node in nodes}
    random = np.random.default_rng(0)
    ids = np.array([[1, -1, 1], [0, 8, 8]])
    inputs = [ids, *(random.standard_normal(v.shape).astype(v.dtype.numpy) for v in module.graph.inputs[1:])]
    for found, right in zip(computed(module, inputs, nodes), computed(module, inputs), strict=True):
        np.testing.assert_allclose(found.astype(np.float64), right.astype(np.float64), rtol=2e-3, atol=2e-3)


TWICE = """
    graph @g(%ids: i64[3], %more: i64[2], %rows: f32[3, 4], %others: f32[2, 4]) -> (%y) opset 21 {
        %zero = constant : f32[] 0.0
        %shape = constant : i64[2] [9, 4]
        %last = constant : i64[1] [-1]
        %zeros = Expand(%zero, %shape) : ?
        %places = Unsqueeze(%ids, %last) : ?
        %s = ScatterND(%zeros, %places, %rows) {reduction="add"} : ?
        %others_places = Unsqueeze(%more, %last) : ?
        %t = ScatterND(%zeros, %others_places, %others) {reduction="add"} : ?
        %y = Add(%s, %t) : ?
    }
"""


def test_rows_of_two_readers_that_are_added_to_each_other() -> None:
    module, nodes = added(TWICE)
    assert [node.op_type for node in nodes].count("AddRows") == 1
    random = np.random.default_rng(0)
    inputs = [
        np.array([1, -1, 1]),
        np.array([8, 1]),
        *(random.standard_normal((n, 4)).astype(np.float32) for n in (3, 2)),
    ]
    for found, right in zip(computed(module, inputs, nodes), computed(module, inputs), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6)


PLACED = """
    graph @g(%rows: f32[3, 4]) -> (%c) opset 21 {
        %zeros = constant : f32[3, 4] ZEROS
        %places = constant : i64[3, 1] [[0], [1], [2]]
        %s = ScatterND(%zeros, %places, %rows) {reduction="add"} : ?
        %c = Cast(%s) {to=10} : ?
    }
""".replace("ZEROS", str([[0.0] * 4] * 3))


def test_rows_that_are_put_where_they_stand() -> None:
    module, nodes = added(PLACED)
    assert [node.op_type for node in nodes] == ["Fused"]
    inputs = [np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)]
    np.testing.assert_array_equal(computed(module, inputs, nodes), computed(module, inputs))
    _, nodes = added(PLACED.replace("[[0], [1], [2]]", "[[0], [2], [1]]"))
    assert "ScatterND" in {node.op_type for node in nodes}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("f32[] 0.0", "f32[] 1.0"),
        ('{reduction="add"}', '{reduction="max"}'),
        ("-> (%y)", "-> (%y, %s)"),
        ("%places = Unsqueeze(%ids, %last) : ?", "%p = Unsqueeze(%ids, %last) : ?\n        %places = Neg(%p) : ?"),
    ],
    ids=["no zeros", "no sums", "sums that are read", "other places"],
)
def test_what_stays(old: str, new: str) -> None:
    assert old in ADDED
    _, nodes = added(ADDED.replace(old, new))
    assert "ScatterND" in {node.op_type for node in nodes}


def test_indices_that_are_not_there() -> None:
    module = parse_module(ADDED)
    InferTypes().run(module)
    places = next(node for node in module.graph if node.op_type == "Unsqueeze")
    rest = [node for node in module.graph if node is not places]
    (ids, *_) = module.graph.inputs
    for nodes, has_rows in ((rest, False), ([places, *rest], True)):
        made = stand_ins(Stretch(nodes, set(module.graph.outputs)))
        assert any(node.op_type == "AddRows" for node in made) == has_rows
        assert any(ids in node.inputs for node in made) == has_rows
