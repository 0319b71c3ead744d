"""What memory is for: gradients and gathered parameters apart from other activations."""

from irpar.analysis.memory.by_use import bytes_by_use, uses_by_value
from irpar.analysis.memory.liveness import peak
from irpar.ir import parse_module

LOCAL = """
mesh @m = ["dp"=2]
graph local @step(%x: f32[64] of [128@dp], state parameter %w: f32[128] of [256@dp], state moment of "w" %m: f32[128] of [256@dp]) -> (%l as "loss", %w_1 replaces %w) opset 21 ranks [0, 1] {
  %full = irpar.AllGather(%w) {axes=["dp"], dim=0, id=0 | phase=forward} : f32[256] of [256] replicated
  %l = Concat(%x, %full) {axis=0 | phase=forward} : f32[320] of [384]
  %d = Neg(%full) {| phase=backward} : f32[256] of [256] partial(sum: dp)
  %g = irpar.ReduceScatter(%d) {axes=["dp"], dim=0, reduce="sum", id=1 | phase=backward} : f32[128] of [256@dp]
  %c = Add(%g, %m) {| phase=optimizer} : f32[128] of [256@dp]
  %w_1 = Sub(%w, %c) {| phase=optimizer} : f32[128] of [256@dp]
}
"""


def test_gradients_and_what_is_gathered_stand_apart() -> None:
    graph = parse_module(LOCAL).graph
    most = peak(graph)
    assert most.node is not None
    assert most.node.result.name == "d"
    # While d is made there are w and m, the gathered w, l and d itself; x is not read any more.
    assert most.activation_bytes == 4 * (128 + 128 + 256 + 320 + 256)
    assert bytes_by_use(graph, most) == {
        "parameters": 4 * 128,
        "optimizer": 4 * 128,
        "gradients": 4 * 128,
        "buffers": 4 * (256 + 256),
        "activations": 4 * 320,
    }


def test_what_is_held_at_once_counts_though_it_is_not_at_the_peak() -> None:
    text = LOCAL.replace(
        "%l = Concat(%x, %full)",
        "%x4 = Concat(%x, %x, %x, %x) {axis=0 | phase=forward} : f32[256] of [512@dp]\n  %l = Concat(%x4, %full)",
    )
    text = text.replace("f32[320] of [384]", "f32[512] of [768]")
    graph = parse_module(text).graph
    found = bytes_by_use(graph, peak(graph))
    assert found["gradients"] == 4 * 128
    assert sum(found.values()) >= peak(graph).total_bytes


def test_a_gathered_gradient_counts_once_and_gathered_constants_are_no_parameters() -> None:
    text = LOCAL.replace("%d = Neg(%full) {| phase=backward} : f32[256] of [256] partial(sum: dp)\n", "")
    graph = parse_module(text.replace("(%d)", "(%full)").replace("  %g = ", "%g = ").replace("%g = ", "  %g = ")).graph
    found = bytes_by_use(graph, peak(graph))
    assert (found["gradients"], found["buffers"]) == (4 * 128, 4 * 256)
    assert min(found.values()) >= 0
    constant = LOCAL.replace("irpar.AllGather(%w)", "irpar.AllGather(%k)").replace(
        "  %full", '  %k = constant : f32[128] of [256@dp] data("none", 0, 512)\n  %full', 1
    )
    graph = parse_module(constant, resources={"none": bytes(512)}).graph
    assert bytes_by_use(graph, peak(graph))["buffers"] == 4 * 256  # The gradient before it is reduced.


def test_programs_without_state_have_weights_and_activations_alone() -> None:
    graph = parse_module(
        """
        graph @g(%x: f32[4]) -> (%y) opset 21 {
          %k = constant : f32[] 2.0
          %y = Mul(%x, %k) : f32[4]
        }
        """
    ).graph
    found = bytes_by_use(graph, peak(graph))
    assert found == {"parameters": 4, "gradients": 0, "optimizer": 0, "activations": 32, "buffers": 0}


LOOP = """
graph local @step(%xs: f32[4, 64], state parameter %w: f32[64]) -> (%l as "loss", %w_1 replaces %w) opset 21 {
  %z = constant : f32[] 0.0
  %n = constant : i64[1] [64]
  %zeros = Expand(%z, %n) {| phase=backward} : f32[64]
  %g = Scan(%zeros, %xs) {body=graph(%sum: f32[64], %x: f32[64]) -> (%added) {
    %h = Mul(%x, %w) {| phase=forward} : f32[64]
    %d = Neg(%h) {| phase=backward} : f32[64]
    %added = Add(%sum, %d) {| phase=backward} : f32[64]
  }, num_scan_inputs=1 | phase=backward} : f32[64]
  %l = ReduceSum(%g) {keepdims=0 | phase=backward} : f32[]
  %w_1 = Sub(%w, %g) {| phase=optimizer} : f32[64]
}
"""


def test_what_a_loop_adds_up_is_no_activation() -> None:
    graph = parse_module(LOOP).graph
    most = peak(graph)
    assert most.node is not None
    assert most.node.op_type == "Scan"
    found = bytes_by_use(graph, most)
    # The sum is one block, that of what the loop gives; at the peak h and d beside it, and what all trips read.
    assert found["gradients"] == 4 * 64
    assert found["buffers"] == 0
    assert found["activations"] == 4 * (4 * 64 + 2 * 64)
    # The new parameter is written over the old one: what the loop gives is computed, no view of it.
    assert sum(found.values()) == most.total_bytes
    (body,) = next(node for node in graph if node.op_type == "Scan").nested_graphs()
    used = {value.name: use for value, use in {**uses_by_value(graph), **uses_by_value(body)}.items()}
    assert {name: used.get(name) for name in ("zeros", "sum", "added", "g", "d")} == {
        "zeros": "buffers",
        "sum": "buffers",
        "added": "buffers",
        "g": "gradients",
        "d": None,
    }


def test_what_is_copied_from_another_memory_is_for_what_it_is_a_copy_of() -> None:
    text = """
mesh @m = ["dp"=1]
graph local @step(%x: f32[4] of [4], state parameter %w: f32[64] of [64], state moment of "w" %m: f32[64] of [64] in host) -> (%w_1 replaces %w, %m_1 replaces %m) opset 21 ranks [0] {
  %k = constant : f32[4] of [4] in host data("none", 0, 16)
  %s = irpar.CopyStart(%k) {id=0, to="device" | phase=forward} : inflight<f32[4]> of [4]
  %kd = irpar.Wait(%s) {id=0 | phase=forward} : f32[4] of [4]
  %y = Add(%x, %kd) {| phase=forward} : f32[4] of [4]
  %g = Concat(%y, %w) {axis=0 | phase=backward} : f32[68] of [68]
  %gh = irpar.Copy(%g) {id=1, to="host" | phase=optimizer} : f32[68] of [68] in host
  %p, %q = Split(%gh) {axis=0, num_outputs=2 | phase=optimizer, place=host} : f32[34] of [34] in host, f32[34] of [34] in host
  %m_0 = Concat(%p, %p) {axis=0 | phase=optimizer, place=host} : f32[68] of [68] in host
  %md = irpar.Copy(%m) {id=2, to="device" | phase=optimizer} : f32[64] of [64]
  %w_1 = Sub(%w, %md) {| phase=optimizer} : f32[64] of [64]
  %m_1 = Neg(%m) {| phase=optimizer, place=host} : f32[64] of [64] in host
}
"""
    graph = parse_module(text, resources={"none": bytes(16)}).graph
    found = bytes_by_use(graph, peak(graph))
    assert found["parameters"] == 4 * (64 + 64)  # Old and new.
    assert found["optimizer"] == 4 * 64
    assert found["gradients"] == 4 * 68
    names = {value.name: use for value, use in uses_by_value(graph).items()}
    assert {name: names[name] for name in ("kd", "g", "md")} == {
        "kd": "parameters",
        "g": "gradients",
        "md": "optimizer",
    }
