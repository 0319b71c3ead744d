"""Segments that plan.json lists are those that run."""

import pytest

import irpar
from irpar import models
from irpar.analysis.segments import segment_entries
from irpar.ir import parse_module
from irpar.onnx_io import to_module
from irpar.runtime.program import build_program

UNNEEDED = """
mesh @m = ["x"=2]
graph local @g(%x: f32[4]) -> (%y) opset 21 ranks [0, 1] {
  %a = Exp(%x) : f32[4]
  %r = irpar.AllReduce(%a) {axes=["x"], id=0, reduce="sum"} : f32[4]
  %dead = Exp(%r) : f32[4]
  %s = irpar.AllReduce(%r) {axes=["x"], id=1, reduce="sum"} : f32[4]
  %worse = Exp(%dead) : f32[4]
  %y = Neg(%s) : f32[4]
}
"""


def runs(graph) -> list[tuple[str, str, int]]:
    segments = build_program(graph).segments
    return [(each.nodes[0].label, each.nodes[-1].label, len(each.nodes)) for each in segments]


def listed(graph) -> list[tuple[str, str, int]]:
    return [(each["first"], each["last"], each["nodes"]) for each in segment_entries(graph)]


def test_what_nothing_needs_is_in_no_segment() -> None:
    graph = parse_module(UNNEEDED).graph
    assert runs(graph) == listed(graph)
    assert len(listed(graph)) == 2


@pytest.mark.parametrize("family", ["gpt", "moe", "resnet", "control"])
def test_what_is_listed_runs(family: str) -> None:
    module = to_module(models.build(family))
    irpar.annotate(module, models.annotations(family, "dp", "tp"))
    for graph in irpar.partition(module, irpar.Mesh({"dp": 2, "tp": 2})).module.graphs:
        assert runs(graph) == listed(graph)
