"""Twins: graphs that differ in sizes alone, and what is known of one for the other."""

import pytest

import irpar
from irpar import models
from irpar.analysis.memory.liveness import spans_of, uses_of
from irpar.analysis.twins import twins_of
from irpar.ir import Graph, Module, parse_module
from irpar.onnx_io import to_module
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.passes.group_segments import GroupSegments

BEFORE = DEFAULT_PIPELINE.removesuffix(",group-segments")

PROGRAM = """
mesh @m = ["x"=2]
graph local @g(%x: f32[{size}], %z: f32[4]) -> (%y) opset 21 ranks [0, 1] {{
  %c = constant : f32[] {number}
  %a = {op}(%x) : f32[{size}]
  %b = Mul(%a, %c) : f32[{size}]
  %s = irpar.AllReduce(%z) {{axes=["x"], id=0, reduce="{reduce}"}} : f32[4]
  %v = Identity(%b) : f32[{size}]
  %y = Add(%v, %{read}) : f32[{size}]
}}
"""


def graph(size: int = 4, op: str = "Exp", reduce: str = "sum", read: str = "b", number: str = "2.0") -> Graph:
    return parse_module(PROGRAM.format(size=size, op=op, reduce=reduce, read=read, number=number)).graph


def test_what_differs_in_sizes_alone_is_a_twin() -> None:
    ours, other = graph(8), graph(6)
    twins = twins_of(ours, other)
    assert twins is not None
    assert [twins[value] for value in ours.values()] == list(other.values())
    spans, same = spans_of(uses_of(ours)), spans_of(uses_of(other))
    assert spans._replace(values=[twins[value] for value in spans.values]) == same


@pytest.mark.parametrize(
    "other",
    [
        {"op": "Neg"},
        {"reduce": "max"},
        {"read": "a"},
        {"number": "3.0"},
        {"size": 4},  # There %x and %z are of one type.
        {"size": 1},  # One number is spread, of more each is read.
    ],
    ids=str,
)
def test_what_differs_in_more_is_none(other: dict[str, object]) -> None:
    assert twins_of(graph(8), graph(**{"size": 6, **other})) is None


def local_programs(pipeline: str) -> Module:
    """Programs of ranks with blocks of 51 and of 50 rows of the vocabulary."""
    module = to_module(models.build("gpt", vocab=101))
    for pattern, spec in models.annotations("gpt", "dp", "tp", vocab=101).items():
        module.shard(pattern, spec)
    return irpar.partition(module, {"dp": 2, "tp": 2}, pipeline=pipeline).module


def test_twins_are_arranged_as_each_is_alone() -> None:
    before = local_programs(BEFORE)
    ours, other = before.graphs
    assert twins_of(ours, other) is not None
    GroupSegments().run(before)
    alone = local_programs(BEFORE)
    for graph, arranged in zip(list(alone.graphs), before.graphs, strict=True):
        alone.graphs = [graph]
        GroupSegments().run(alone)
        assert [node.label for node in graph] == [node.label for node in arranged]
