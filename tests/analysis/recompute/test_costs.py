"""What nodes and programs take: all trips of loops, what is sent in them too, and the slower of two branches."""

from irpar.analysis.cost.model import in_femtoseconds
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.recompute.costs import ASSUMED, Costs, timed
from irpar.ir.text.files import parse_module
from irpar.sharding import Axis

TEXT = """
mesh @m = ["tp"=2]
module {network="%s"}
graph local @g(%%s: f32[64] of [64], %%x: f32[3, 64] of [3, 64], %%c: bool[] of []) -> (%%y) opset 21 ranks [0, 1] {
  %%y = Scan(%%s, %%x) {body=graph @body(%%t: f32[64], %%i: f32[64]) -> (%%u) {
    %%a = irpar.AllReduce(%%i) {axes=["tp"], id=0, reduce="sum"} : f32[64] of [64]
    %%b = If(%%c) {then_branch=graph @then() -> (%%p) {
      %%p = Exp(%%a) : f32[64]
    }, else_branch=graph @else() -> (%%q2) {
      %%q = Exp(%%a) : f32[64]
      %%q2 = Exp(%%q) : f32[64]
    }} : f32[64]
    %%u = Add(%%t, %%b) : f32[64]
  }, num_scan_inputs=1} : f32[64]
}
"""


def test_a_program_takes_what_its_bodies_take_in_all_trips() -> None:
    module = parse_module(TEXT % ASSUMED)
    costs, network = Costs(module), network_of(ASSUMED)
    nodes = {node.results[0].name: node for node in module.graph.walk() if node.results}
    sent = in_femtoseconds(network.seconds("all_reduce", [Axis("tp")], 256, module.mesh))
    assert sent > 0
    assert costs.of_node(nodes["a"]) == 3 * sent
    assert costs.of_node(nodes["p"]) == costs.of_node(nodes["q"]) > 0
    once = parse_module("graph @one(%i: f32[64]) -> (%p) opset 21 {\n  %p = Exp(%i) : f32[64]\n}\n")
    assert costs.of_node(nodes["p"]) == 3 * costs.of_node(next(iter(once.graph)))
    assert costs.of_graph(module.graph) == sum(costs.of_node(nodes[name]) for name in ("a", "q", "q2", "u"))


def test_a_network_that_does_not_know_devices_and_links_is_not_taken() -> None:
    assert timed("bytes") is network_of(ASSUMED)
    assert timed("a100-pcie") is network_of("a100-pcie")
