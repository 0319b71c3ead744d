"""Annotations: exact names before globs, kept until there is a mesh, refusals that help."""

import pytest

from irpar.ir import AnnotationError, Module, parse_module
from irpar.ir.annotate import annotate, glob_of, matching
from irpar.ir.annotation import Annotation
from irpar.sharding import Mesh

TEXT = """
graph @g(%x: f32[8, 64] from "x") -> (%y_1 as "y") opset 21 {
  %w0 = constant : f32[64, 64] data("w", 0, 16384) from "h.0.weight"
  %w1 = constant : f32[64, 64] data("w", 16384, 16384) from "h.1.weight"
  %star = constant : f32[2] [1.0, 2.0] from "h.*"
  %a = MatMul(%x, %w0) : f32[8, 64]
  %s = Op(%x) : seq<f32[2]>
  %y_1 = MatMul(%a, %w1) : f32[8, 64]
}
"""
MESH = Mesh({"dp": 2, "tp": 4})


def with_mesh() -> Module:
    module = parse_module(TEXT)
    module.set_mesh(MESH)
    return module


def spec(module: Module, name: str) -> object:
    sharding = module.graph.value(name).sharding
    return None if sharding is None else sharding.spec()


def test_globs_match_source_names_and_results_by_their_outer_names() -> None:
    module = with_mesh()
    assert module.shard("h.*.weight", [None, "tp"]) == 2
    assert spec(module, "w0") == spec(module, "w1") == [None, ["tp"]]
    assert module.shard("y", [["dp", "?"], None]) == 1
    assert spec(module, "y_1") == [["dp", "?"], None]
    assert module.shard("a", [None, None]) == 1
    assert set(module.decisions) == {"w0", "w1", "y_1", "a"}


def test_an_exact_name_goes_before_a_glob() -> None:
    module = with_mesh()
    assert module.shard("h.*", [None]) == 1
    assert spec(module, "star") == [None]
    assert spec(module, "w0") is None


def test_annotations_wait_for_a_mesh() -> None:
    module = parse_module(TEXT)
    assert module.shard("h.?.weight", [None, "tp"]) == 2
    assert len(module.annotations) == 1
    assert spec(module, "w0") is None
    module.set_mesh(MESH)
    assert module.annotations == []
    assert spec(module, "w0") == [None, ["tp"]]


def test_an_annotation_that_does_not_fit_waits_too_and_then_says_where_it_stands() -> None:
    module = parse_module(TEXT)
    annotate(module, Annotation("h.?.weight", (None, "mp"), "shardings.yaml, line 7"))
    with pytest.raises(AnnotationError) as caught:
        module.set_mesh(MESH)
    text = str(caught.value)
    assert 'no axis "mp" in mesh dp=2,tp=4' in text
    assert "shardings.yaml, line 7" in text
    assert "the first: w0 f32[64, 64]" in text


@pytest.mark.parametrize(
    ("pattern", "dims", "message"),
    [
        ("h.0.wieght", [None], r'no tensor matches "h.0.wieght"(?s:.*)nearest names: h.0.weight'),
        ("nothing*", [None], 'no tensor matches "nothing'),
        ("x", [None], "the annotation has 1 dims, but x is"),
        ("s", [None], "only tensors of known rank can be sharded"),
        ("x", [["dp"], ["dp"]], "mesh axis dp is used twice"),
        ("x", [["dp", "priority=-1"], None], r'"-1" is no priority(?s:.*)\["dp", "priority=-1"\]'),
        ("x", [["dp", "priority=1", "priority=2"], None], "has 2 priorities"),
    ],
)
def test_refusals(pattern: str, dims: list[None], message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        with_mesh().shard(pattern, dims)


def test_priorities_of_whole_tensors() -> None:
    module = with_mesh()
    module.shard("h.0.weight", [None, "tp"], priority=1)
    module.shard("x", [["dp", "priority=2"], ["?"]], priority=3)
    assert {value.name: str(value.sharding) for value in module.graph.values() if value.sharding is not None} == {
        "w0": "[_, @tp!1]",
        "x": "[@dp!2, ?!3]",
    }
    for priority in (-1, "high"):
        with pytest.raises(AnnotationError, match=r'is no priority\n  "h.1.weight"'):
            module.shard("h.1.weight", [None, "tp"], priority=priority)  # type: ignore[arg-type]


def test_two_annotations_of_one_tensor_agree_or_are_refused() -> None:
    module = with_mesh()
    module.shard("h.0.weight", [None, "tp"])
    module.shard("h.*.weight", [None, ["tp"]])
    with pytest.raises(AnnotationError, match="is annotated twice"):
        module.shard("h.0.weight", ["tp", None])


def test_a_name_goes_before_a_glob_in_either_order() -> None:
    for order in (("h.0.weight", "h.*.weight"), ("h.*.weight", "h.0.weight")):
        module = with_mesh()
        for pattern in order:
            module.shard(pattern, ["tp", None] if pattern == "h.0.weight" else [None, "tp"])
        value = next(
            value for value in module.graph.values() if value.source == "h.0.weight" or value.name == "h.0.weight"
        )
        assert value.sharding is not None
        assert value.sharding.spec() == [["tp"], None]
        decision = module.decision(value.name)
        assert decision is not None
        assert decision.why == 'annotated "h.0.weight"'


def test_a_wrong_number_of_dims_is_told_before_there_is_a_mesh() -> None:
    module = parse_module("graph @g(%x: f32[8, 4]) -> (%x) opset 21 { }")
    with pytest.raises(AnnotationError, match="the annotation has 1 dims, but x is f32"):
        module.shard("x", ["tp"])


def test_a_second_mesh_of_the_same_name_must_agree() -> None:
    module = with_mesh()
    module.set_mesh(Mesh({"dp": 2, "tp": 4}))
    with pytest.raises(Exception, match="does not agree with mesh"):
        module.set_mesh(Mesh({"dp": 4, "tp": 2}))


def test_names_match_exactly_or_as_globs() -> None:
    known = {"w[0]": [1], "w0": [2], "b": [3, 4]}
    assert matching("w[0]", known) == [1]
    assert matching("w*", known) == [1, 2]
    assert matching("[b]", known) == [3, 4]
    assert matching("c", known) == matching("c*", known) == []


def test_a_glob_for_all_layers() -> None:
    assert glob_of("h.0.attn.fc1.weight") == "h.*.attn.fc1.weight"
    assert glob_of("/MatMul_12") == "/MatMul_*"
