"""The steps of a program, told by the names of what each of them makes."""

from collections.abc import Sequence

import pytest

from irpar.analysis.storage.items import items_of
from irpar.analysis.storage.steps import steps_of_layers
from irpar.ir.text.files import parse_module

HEAD = """mesh @m = ["dp"=2]
graph local @g(%h0: f32[8, 8] of [8, 8], state parameter %w0: f32[8, 8] of [8, 8],
    state parameter %w1: f32[8, 8] of [8, 8]) -> (%n0 replaces %w0, %n1 replaces %w1) opset 21 ranks [0, 1] {
"""
MADE = "f32[8, 8]"
FORWARD = ["h1 = MatMul(%h0, %w0) {| phase=forward}", "h2 = MatMul(%h1, %w1) {| phase=forward}"]
BACKWARD = {
    # The gradient of a weight before that of what it is multiplied by, which reads the weight.
    "weights first": [
        "dw1 = MatMul(%h1, %h2)",
        "d1 = MatMul(%h2, %w1)",
        "dw0 = MatMul(%h0, %d1)",
        "d0 = MatMul(%d1, %w0)",
    ],
    "weights last": [
        "d1 = MatMul(%h2, %w1)",
        "dw1 = MatMul(%h1, %h2)",
        "d0 = MatMul(%d1, %w0)",
        "dw0 = MatMul(%h0, %d1)",
    ],
    # As memory-order may leave them.
    "weights at the end": [
        "d1 = MatMul(%h2, %w1)",
        "d0 = MatMul(%d1, %w0)",
        "dw1 = MatMul(%h1, %h2)",
        "dw0 = MatMul(%h0, %d1)",
    ],
}
SUMMED = [f'p{n} = irpar.AllReduce(%dw{n}) {{axes=["dp"] | phase=backward}}' for n in range(2)]
NORM = [
    "q0 = ReduceSumSquare(%dw0) {keepdims=0 | phase=optimizer} : f32[]",
    "q1 = ReduceSumSquare(%dw1) {keepdims=0 | phase=optimizer} : f32[]",
    "q = Sum(%q0, %q1) {| phase=optimizer} : f32[]",
    "f0 = Mul(%dw0, %q) {| phase=optimizer}",
    "n0 = Sub(%w0, %f0) {| phase=optimizer}",
    "f1 = Mul(%dw1, %q) {| phase=optimizer}",
    "n1 = Sub(%w1, %f1) {| phase=optimizer}",
]
UPDATES = [
    "f0 = Neg(%dw0) {| phase=optimizer}",
    "n0 = Add(%w0, %f0) {| phase=optimizer}",
    "f1 = Neg(%dw1) {| phase=optimizer}",
    "n1 = Add(%w1, %f1) {| phase=optimizer}",
]


def steps(lines: Sequence[str]) -> list[str]:
    """What each step makes, a step for each string."""
    text = "\n".join(f"  %{line}" if ":" in line else f"  %{line} : {MADE}" for line in lines)
    graph = parse_module(HEAD + text + "\n}").graph
    found = steps_of_layers(graph, items_of(graph, 1))
    names = [node.results[0].name for node in graph]
    ends = [*found.firsts[1:], found.nodes]
    return [" ".join(names[first:end]) for first, end in zip(found.firsts, ends, strict=True)]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("weights first", ["h1", "h2", "dw1 d1", "dw0 d0"]),
        ("weights last", ["h1", "h2", "d1 dw1", "d0 dw0"]),
        ("weights at the end", ["h1", "h2", "d1", "d0", "dw1", "dw0"]),
    ],
)
def test_what_makes_a_gradient_belongs_to_its_layer(order: str, expected: list[str]) -> None:
    backward = [f"{line} {{| phase=backward}}" for line in BACKWARD[order]]
    assert steps([*FORWARD, *backward, *UPDATES]) == [*expected, "f0 n0", "f1 n1"]
    assert steps([*FORWARD, *backward, *NORM]) == [*expected, "q0", "q1 q", "f0 n0", "f1 n1"]


def test_sums_over_ranks_belong_to_the_layer_of_what_they_sum() -> None:
    backward = [f"{line} {{| phase=backward}}" for line in BACKWARD["weights at the end"]]
    summed = [line.replace("%dw", "%p") for line in UPDATES]
    found = steps([*FORWARD, *backward, *SUMMED, *summed])
    assert found == ["h1", "h2", "d1", "d0", "dw1", "dw0 p0", "p1", "f0 n0", "f1 n1"]


def test_what_updates_of_two_layers_read_is_of_neither() -> None:
    shared = [line.replace("%dw1", "%dw0") for line in UPDATES]
    backward = [f"{line} {{| phase=backward}}" for line in BACKWARD["weights at the end"]]
    assert steps([*FORWARD, *backward, *shared]) == ["h1", "h2", "d1", "d0 dw1 dw0", "f0 n0", "f1 n1"]
