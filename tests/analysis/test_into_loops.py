"""What stands before a loop for it alone is moved into its body."""

from irpar.analysis.into_loops import layouts_for_loops, move_into_loops
from irpar.ir import parse_module

TEXT = """
graph @g(%w: f32[4, 4], %s: f32[4, 4], %x: f32[3, 4, 4]) -> (%end) opset 21 {
  %t = Transpose(%w) {perm=[1, 0]} : f32[4, 4]
  %u = Transpose(%t) {perm=[1, 0]} : f32[4, 4]
  %v = Transpose(%s) {perm=[1, 0]} : f32[4, 4]
  %k = Transpose(%w) {perm=[1, 0]} : f32[4, 4]
  %o = Transpose(%s) {perm=[1, 0]} : f32[4, 4]
  %end = Scan(%k, %x) {body=graph @body(%sum: f32[4, 4], %slice: f32[4, 4]) -> (%next) {
    %a = MatMul(%slice, %sum) : f32[4, 4]
    %b = MatMul(%a, %u) : f32[4, 4]
    %c = MatMul(%b, %v) : f32[4, 4]
    %d = MatMul(%c, %t) : f32[4, 4]
    %next = Sum(%d, %v, %o) : f32[4, 4]
  }, num_scan_inputs=1} : f32[4, 4]
}
"""


def test_each_stands_right_before_the_first_that_reads_it() -> None:
    graph = parse_module(TEXT).graph
    assert move_into_loops(graph, layouts_for_loops(graph))
    (scan,) = (node for node in graph if node.op_type == "Scan")
    (body,) = scan.nested_graphs()
    assert [node.result.name for node in graph] == ["k", "end"]
    assert [node.result.name for node in body] == ["a", "t", "u", "b", "v", "c", "d", "o", "next"]


def test_of_several_with_one_reader_each_stands_before_those_that_read_it() -> None:
    graph = parse_module(
        TEXT.replace("Sum(%d, %v, %o)", "Sum(%d, %u, %t, %o)").replace("MatMul(%a, %u)", "Relu(%a)")
    ).graph
    assert move_into_loops(graph, layouts_for_loops(graph))
    (body,) = graph.last.nested_graphs()
    assert [node.result.name for node in body] == ["a", "b", "v", "c", "t", "d", "o", "u", "next"]


def test_what_a_loop_takes_or_gives_back_stays() -> None:
    graph = parse_module(TEXT.replace("-> (%next)", "-> (%u)")).graph
    move_into_loops(graph, layouts_for_loops(graph))
    assert "u" in [node.result.name for node in graph]
