"""What passes the boundaries of If, Loop and Scan, and how often bodies run."""

import pytest

from irpar.analysis.completion.flow import _TIES, Flow, Tie
from irpar.ir import Graph, Node
from irpar.ir.text.files import parse_module
from irpar.ops import OPEN_BODIES
from irpar.runtime.engines.control_flow import TRIPS
from irpar.sharding import Mesh

MESH = Mesh({"tp": 2})


def flow_of(text: str) -> Flow:
    return Flow(parse_module(text).graph, MESH)


def only(flow: Flow) -> tuple[Node, Graph]:
    (holder,) = flow.ties
    return holder, next(holder.nested_graphs())


LOOP = """
graph @g(%n: i64[], %x: f32[4, 8]) -> (%y, %ys) opset 21 {
  %y, %ys = Loop(%n, _, %x) {body=graph @b(%i: i64[], %c: bool[], %a: f32[4, 8]) -> (%d, %o, %r) {
    %d = Identity(%c) : bool[]
    %o = Tanh(%a) : f32[4, 8]
    %r = Relu(%o) : f32[4, 8]
  }} : f32[4, 8], f32[_, 4, 8]
}
"""


def test_what_a_loop_carries_and_collects() -> None:
    flow = flow_of(LOOP)
    holder, body = only(flow)
    assert flow.ties[holder] == (
        Tie(2, 0, (body.inputs[2],), ((body, 1),)),
        Tie(result=1, outputs=((body, 2),), scanned=0),
    )
    # The count is not known, and with it the size of what is collected: only the state can be sharded.
    (view,) = flow.views(holder)
    assert str(view.rule) == "([i,j],[i,j])->([i,j],[i,j])"
    assert [value.name for value in view.values if value is not None] == ["x", "o", "a", "y"]


def test_a_scan_has_a_dim_of_steps_outside() -> None:
    flow = flow_of(
        """
        graph @g(%h: f32[4], %x: f32[4, 6, 2]) -> (%y, %ys) opset 21 {
          %y, %ys = Scan(%h, %x) {num_scan_inputs=1, scan_input_axes=[-2], scan_output_axes=[1],
            body=graph @b(%a: f32[4], %t: f32[4, 2]) -> (%o, %r) {
              %o = Neg(%a) : f32[4]
              %r = Identity(%o) : f32[4]
          }} : f32[4], f32[4, 6]
        }
        """
    )
    holder, body = only(flow)
    assert [str(view.rule) for view in flow.views(holder)] == [
        "([i],[i])->([i],[i])",
        "([i,1,j])->([i,j])",
        "([i])->([i,1])",
    ]
    assert flow.trips[body] == 6


@pytest.mark.parametrize(("count", "runs"), [("= constant : i64[] 5", 5), ("= Neg(%m) : i64[]", None)])
def test_how_often_a_loop_runs(count: str, runs: int | None) -> None:
    flow = flow_of(
        f"""
        graph @g(%m: i64[], %x: f32[4]) -> (%y) opset 21 {{
          %n {count}
          %y = Loop(%n, _, %x) {{body=graph @b(%i: i64[], %c: bool[], %a: f32[4]) -> (%c, %o) {{
            %o = Scan(%a, %x) {{num_scan_inputs=1, body=graph @s(%u: f32[4], %e: f32[]) -> (%v) {{
              %v = Mul(%u, %e) : f32[4]
            }}}} : f32[4]
          }}}} : f32[4]
        }}
        """
    )
    outer, inner = list(flow.trips)[1:]
    assert (flow.trips[outer], flow.trips[inner]) == (runs, None if runs is None else 4 * runs)
    assert [flow.usual_trips_of(graph) for graph in (outer, inner)] == ([5, 20] if runs else [10, 10])


def test_branches_run_or_do_not() -> None:
    flow = flow_of(
        """
        graph @g(%p: bool[], %x: f32[4]) -> (%y) opset 21 {
          %y = If(%p) {
            then_branch=graph @t() -> (%a) { %a = Neg(%x) : f32[4] },
            else_branch=graph @e() -> (%b) { %b = Abs(%x) : f32[4] }
          } : f32[4]
        }
        """
    )
    holder, then = only(flow)
    (tie,) = flow.ties[holder]
    assert [index for _, index in tie.outputs] == [0, 0]
    assert flow.trips[then] is None
    # Who makes and reads it: the holder, and the end of the graph.
    assert set(flow.neighbours(holder.result)) == {holder, flow.graph.return_node}
    (then_result,) = then.outputs
    assert list(flow.neighbours(then_result)) == [then_result.node, holder]


def test_all_tables_of_operators_with_open_bodies_agree() -> None:
    assert set(_TIES) == OPEN_BODIES == {("", op_type) for op_type in TRIPS}


def test_bodies_of_other_operators_stay_closed() -> None:
    flow = flow_of(
        """
        graph @g(%s: seq<f32[4]>) -> (%y) opset 21 {
          %y = SequenceMap(%s) {body=graph @b(%x: f32[4]) -> (%a) { %a = Neg(%x) : f32[4] }} : seq<f32[4]>
        }
        """
    )
    assert not flow.ties
    assert [node.op_type for node in flow.nodes] == ["SequenceMap"]
