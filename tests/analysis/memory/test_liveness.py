from irpar.analysis.cost.node import graph_flops, node_bytes, node_flops
from irpar.analysis.memory.by_use import bytes_by_use
from irpar.analysis.memory.liveness import peak, value_bytes
from irpar.ir.text.files import parse_module


def test_peak_of_a_chain_by_hand() -> None:
    # x 4 kB; a 4 kB while x is read; then b 4 kB beside a; x is gone after a.
    graph = parse_module(
        """
        graph @g(%x: f32[1024]) -> (%c) opset 21 {
          %w = constant : f32[1024] data("w.bin", 0, 4096)
          %a = Relu(%x) : f32[1024]
          %b = Mul(%a, %w) : f32[1024]
          %c = Neg(%b) : f32[1024]
        }
        """
    ).graph
    found = peak(graph)
    assert found.constant_bytes == 4096
    assert found.activation_bytes == 2 * 4096
    assert found.total_bytes == 3 * 4096


def test_a_value_is_held_until_its_last_reader() -> None:
    graph = parse_module(
        """
        graph @g(%x: f32[256]) -> (%d) opset 21 {
          %a = Relu(%x) : f32[256]
          %b = Neg(%a) : f32[256]
          %c = Exp(%b) : f32[256]
          %d = Add(%c, %a) : f32[256]
        }
        """
    ).graph
    # a, b and c at Exp; a, c and d at Add.
    assert peak(graph).activation_bytes == 3 * 1024


def test_views_hold_the_memory_of_their_operand() -> None:
    graph = parse_module(
        """
        graph @g(%x: f32[256]) -> (%y) opset 21 {
          %s = constant : i64[2] [16, 16]
          %a = Relu(%x) : f32[256]
          %v = Reshape(%a, %s) : f32[16, 16]
          %y = Neg(%v) : f32[16, 16]
        }
        """
    ).graph
    assert peak(graph).activation_bytes == 2 * 1024


def test_what_is_never_read_is_freed_at_once() -> None:
    graph = parse_module(
        """
        graph @g(%x: f32[256], %unused: f32[256]) -> (%y) opset 21 {
          %a = Relu(%x) : f32[256]
          %y = Neg(%x) : f32[256]
        }
        """
    ).graph
    assert peak(graph).activation_bytes == 2 * 1024
    assert peak(graph).node is None  # Both inputs are there before the first node, and later never more.


def test_bodies_count_while_their_holder_runs() -> None:
    graph = parse_module(
        """
        graph @g(%x: f32[256], %p: bool[]) -> (%y) opset 21 {
          %y = If(%p) {then_branch=graph() -> (%t) { %h = Neg(%x) : f32[256] %t = Abs(%h) : f32[256] }, else_branch=graph() -> (%e) { %e = Abs(%x) : f32[256] }} : f32[256]
        }
        """
    ).graph
    # x, y, and inside h and t; the predicate takes a byte.
    assert peak(graph).activation_bytes == 4 * 1024 + 1


def test_state_is_held_to_the_end_where_there_is_no_update() -> None:
    graph = parse_module(
        """
        graph @g(%x: f32[256], state cache %c: f32[256], state parameter %w: f32[256], state moment of "w" %m: f32[256]) -> (%y, %c_1 replaces %c, %m_1 replaces %m) opset 21 {
          %k = constant : f32[] 2.0
          %c_1 = Mul(%c, %x) : f32[256]
          %m_1 = Add(%m, %w) : f32[256]
          %a = Mul(%m_1, %k) : f32[256]
          %y = Neg(%a) : f32[256]
        }
        """
    ).graph
    # c, w and m; what replaces c and m; a, and y made of it. x is not read any more.
    assert peak(graph).activation_bytes == 7 * 1024
    uses = bytes_by_use(graph, peak(graph))
    assert uses == {"parameters": 1024 + 4, "gradients": 0, "optimizer": 2048, "activations": 2048, "buffers": 2048}
    assert sum(uses.values()) == peak(graph).total_bytes


def test_sizes_that_are_not_known_count_nothing() -> None:
    graph = parse_module("graph @g(%x: f32[n, 4]) -> (%y) opset 21 { %y = Relu(%x) : f32[n, 4] }").graph
    assert value_bytes(graph.inputs[0]) == 0
    assert peak(graph).activation_bytes == 0
    assert graph_flops(graph) == 0


def test_flops_and_bytes_of_a_matmul() -> None:
    graph = parse_module(
        "graph @g(%a: f32[8, 64], %b: f32[64, 32]) -> (%y) opset 21 { %y = MatMul(%a, %b) : f32[8, 32] }"
    ).graph
    (node,) = graph
    assert node_flops(node) == graph_flops(graph) == 2 * 8 * 64 * 32
    assert node_bytes(node) == 4 * (8 * 64 + 64 * 32 + 8 * 32)


def test_a_piece_on_the_host_holds_what_it_takes_until_its_end() -> None:
    """ONNX Runtime is given both states, and gives both new ones; what it makes on the way it frees itself."""
    graph = parse_module(
        """
        mesh @m = ["d"=1]
        graph local @g(%g: f32[64] in host, state moment %a: f32[64] in host, state moment %b: f32[64] in host) -> (%loss, %c replaces %a, %d replaces %b) opset 21 ranks [0] {
          %loss = ReduceSum(%g) {keepdims=0 | phase=forward, place=host} : f32[] in host
          %c = Sub(%a, %g) {| phase=optimizer, place=host} : f32[64] in host
          %d = Sub(%b, %g) {| phase=optimizer, place=host} : f32[64] in host
        }
        """
    ).graph
    assert peak(graph, memory="host").activation_bytes == 5 * 256 + 4
