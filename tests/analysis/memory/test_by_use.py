"""What memory is for: gradients and gathered parameters apart from other activations."""

from irpar.analysis.memory.by_use import bytes_by_use
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
