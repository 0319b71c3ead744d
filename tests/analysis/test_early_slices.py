"""Slices of what was padded, taken before it is."""

import numpy as np
import pytest

from irpar.analysis.kernel_fusion import slices_first
from irpar.ir import Module, Node, Value, parse_module, plain_attribute
from irpar.kernels import lookup
from irpar.passes.infer_types import InferTypes

PADDED = """
    graph @g(%x: f32[2, 9, 7]) -> (%y) opset 21 {
        %pads = constant : i64[6] [0, 3, -1, 0, 2, 1]
        %filler = constant : f32[] 5
        %starts = constant : i64[2] [1, -6]
        %ends = constant : i64[2] [9223372036854775807, 6]
        %axes = constant : i64[2] [-2, 2]
        %steps = constant : i64[2] [3, 2]
        %p = Pad(%x, %pads, %filler) : ?
        %y = Slice(%p, %starts, %ends, %axes, %steps) : ?
    }
"""


def turned(text: str) -> tuple[Module, list[Node], list[Value]]:
    """A graph, the nodes in place of its own, and the constants that these have besides."""
    module = parse_module(text)
    InferTypes().run(module)
    return module, *slices_first(tuple(module.graph), set(module.graph.outputs))


def computed(module: Module, nodes: list[Node], constants: list[Value]) -> np.ndarray:
    """The first result, node by node."""
    values = {value: value.data.numpy() for value in (*module.graph.constants, *constants) if value.data is not None}
    x = np.arange(np.prod(module.graph.inputs[0].shape), dtype=np.float32).reshape(module.graph.inputs[0].shape)
    values[module.graph.inputs[0]] = x
    for node in nodes:
        kernel = lookup(node.domain, node.op_type, node.version)
        assert kernel is not None
        attributes = {name: plain_attribute(value) for name, value in node.attributes.items()}
        (values[node.results[0]],) = kernel(np, [values[value] for value in node.inputs], attributes, 1)
    return values[module.graph.outputs[0]]


def test_the_slice_goes_first() -> None:
    module, nodes, constants = turned(PADDED)
    assert [node.op_type for node in nodes] == ["Slice", "Pad"]
    # Of axis 1 the places 1, 4, ..., 13 of [3 | 9 | 2]; of axis 2 the places 1, 3, 5 of what lacks its first.
    starts, ends, steps, axes, pads = (value.data.numpy().tolist() for value in constants if value.data is not None)
    assert (starts, ends, steps, axes) == ([0, 1, 2], [2, 8, 7], [1, 3, 2], [0, 1, 2])
    assert pads == [0, 1, 0, 0, 1, 0]
    assert nodes[0].results[0].shape == (2, 3, 3)
    assert nodes[1].results == module.graph.outputs
    expected = computed(module, list(module.graph), [])
    assert expected.shape == (2, 5, 3)
    np.testing.assert_array_equal(computed(module, nodes, constants), expected)


@pytest.mark.parametrize("seed", range(25))
def test_any_part_of_any_padding(seed: int) -> None:
    random = np.random.default_rng(seed)
    places: list[range] = []
    while not all(places) or not places:
        shape, steps = random.integers(1, 7, 2), random.integers(1, 4, 2)
        pads = random.integers(-1, 4, 4)
        starts, ends = random.integers(-9, 6, 2), random.integers(-3, 12, 2)
        sizes = np.maximum(shape + pads[:2] + pads[2:], 0)
        places = [range(n)[a:b:c] for n, a, b, c in zip(sizes, starts, ends, steps, strict=True)]
    text = f"""
        graph @g(%x: f32{shape.tolist()}) -> (%y) opset 21 {{
            %pads = constant : i64[4] {pads.tolist()}
            %starts = constant : i64[2] {starts.tolist()}
            %ends = constant : i64[2] {ends.tolist()}
            %axes = constant : i64[2] [0, 1]
            %steps = constant : i64[2] {steps.tolist()}
            %p = Pad(%x, %pads) : ?
            %y = Slice(%p, %starts, %ends, %axes, %steps) : ?
        }}
    """
    module, nodes, constants = turned(text)
    np.testing.assert_array_equal(computed(module, nodes, constants), computed(module, list(module.graph), []))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-> (%y)", "-> (%y, %p)"),
        ("%y = Slice", "%q = Neg(%p) : ?\n        %y = Slice"),
        ("%p = Pad(%x, %pads, %filler)", '%p = Pad(%x, %pads, %filler) {mode="reflect"}'),
        ("%steps = constant : i64[2] [3, 2]", "%steps = constant : i64[2] [3, -2]"),
        ("%starts = constant : i64[2] [1, -6]", "%starts = constant : i64[2] [12, -6]"),
    ],
    ids=["a result", "read elsewhere", "no number", "backwards", "padding alone"],
)
def test_others_stay(old: str, new: str) -> None:
    assert old in PADDED
    text = PADDED.replace(old, new)
    if "-2]" in new:
        text = text.replace("%ends = constant : i64[2] [9223372036854775807, 6]", "%ends = constant : i64[2] [20, -8]")
    module, nodes, constants = turned(text)
    assert nodes == list(module.graph)
    assert constants == []
