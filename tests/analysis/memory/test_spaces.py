"""What each memory holds, and until when, where values are copied between them."""

import pytest

from irpar.analysis.memory.by_use import bytes_by_use
from irpar.analysis.memory.liveness import bytes_at_rest, held_bytes, memories_of, peak
from irpar.analysis.memory.replaced import written_over
from irpar.ir import Graph, Memory, parse_module

HEAD = 'mesh @m = ["x"=1]\n'
COPIES = """\
graph local @g(%x: f32[4], %h: f32[4] in host) -> (%y) opset 21 ranks [0] {
  %s = irpar.CopyStart(%h) {id=0, to="device"} : inflight<f32[4]>
  %a = Neg(%x) : f32[4]
  %b = irpar.CopyStart(%a) {id=1, to="disk"} : inflight<f32[4]> in disk
  %d = irpar.Wait(%s) {id=0} : f32[4]
  %c = Add(%d, %d) : f32[4]
  %e = irpar.Wait(%b) {id=1} : f32[4] in disk
  %f = irpar.Copy(%e) {id=2, to="host"} : f32[4] in host
  %g = Add(%f, %h) {| place=host} : f32[4] in host
  %i = irpar.Copy(%g) {id=3, to="device"} : f32[4]
  %y = Add(%c, %i) : f32[4]
}
"""


def _graph(text: str) -> Graph:
    return parse_module(HEAD + text).graph


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        # Tensors of 16 bytes. What a copy makes is there from its start, what it reads until the wait.
        #          begin s  a  b  d  c  e  f  g  i  y
        ("device", [1, 2, 3, 2, 2, 3, 2, 1, 1, 2, 3]),
        ("host", [1, 1, 1, 1, 1, 1, 1, 2, 3, 1, 0]),
        ("disk", [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]),
    ],
)
def test_each_memory_by_itself(memory: Memory, expected: list[int]) -> None:
    graph = _graph(COPIES)
    assert [held // 16 for _, held in held_bytes(graph, memory=memory)] == expected
    assert peak(graph, memory=memory).total_bytes == 16 * max(expected)
    assert memories_of(graph) == ("device", "host", "disk")
    assert bytes_at_rest(graph, memory="disk") == 16


def test_constants_count_where_they_lie() -> None:
    graph = _graph(
        "graph local @g() -> (%y) opset 21 ranks [0] {\n"
        "  %w = constant : f32[2] [1.0, 2.0]\n"
        "  %v = constant : f32[4] in host [1.0, 2.0, 3.0, 4.0]\n"
        '  %d = irpar.Copy(%v) {id=0, to="device"} : f32[4]\n'
        "  %c = Concat(%w, %d) {axis=0} : f32[6]\n"
        "  %y = Neg(%c) : f32[6]\n}\n"
    )
    most = peak(graph)
    assert (most.constant_bytes, peak(graph, memory="host").constant_bytes) == (8, 16)
    assert bytes_by_use(graph, most)["parameters"] == 8 + 16  # With the copy of the other one.


STEP = """\
graph local @g(%x: f32[4], state parameter %w: f32[4]) -> (%loss, %w1 replaces %w, %kept) opset 21 ranks [0] {
  %loss = ReduceSum(%x) {keepdims=0, noop_with_empty_axes=0} : f32[]
  %s = irpar.CopyStart(%w) {id=0, to="host"} : inflight<f32[4]> in host
EARLY  %w1 = Sub(%w, %x) {| phase=optimizer} : f32[4]
LATE}
"""
WAIT = "  %kept = irpar.Wait(%s) {id=0} : f32[4] in host\n"


@pytest.mark.parametrize(("early", "late", "is_over"), [(WAIT, "", True), ("", WAIT, False)])
def test_nothing_is_written_over_what_is_being_copied(early: str, late: str, is_over: bool) -> None:
    graph = _graph(STEP.replace("EARLY", early).replace("LATE", late))
    assert bool(written_over(graph)) == is_over


def test_on_the_host_nothing_is_written_over() -> None:
    text = STEP.replace("EARLY", WAIT).replace("LATE", "")
    assert written_over(_graph(text))
    moved = (
        text.replace("%w: f32[4])", "%w: f32[4] in host)")
        .replace('  %s = irpar.CopyStart(%w) {id=0, to="host"}', '  %s = irpar.CopyStart(%x) {id=0, to="host"}')
        .replace(
            "Sub(%w, %x) {| phase=optimizer} : f32[4]",
            "Sub(%w, %kept) {| phase=optimizer, place=host} : f32[4] in host",
        )
    )
    assert written_over(_graph(moved)) == {}
