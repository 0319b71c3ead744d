"""Random graphs of repeated random layers come back as they were, and their layers are found."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.ir import Graph, Module, Node, TensorType, dtype_of_text
from irpar.ir.tensor import ArrayTensor

from .test_extract_layers import round_trip

F32 = TensorType(dtype_of_text("f32"), (2, 2))
UNARY = ("Tanh", "Exp", "Relu", "Sigmoid", "Sin")
BINARY = ("Add", "Mul", "Sub", "MatMul")


def _layer(draw: random.Random, size: int, straight: float) -> list[tuple[str, tuple[int, ...]]]:
    """Operators, each with what it reads: earlier ones by place, -1 the stream, -2 a weight, -3 what all share."""
    made: list[tuple[str, tuple[int, ...]]] = []
    for place in range(size):
        choices = [*range(place), -1, -2, -3]
        first = place - 1 if draw.random() < straight else draw.choice(choices)
        if draw.random() < 0.4:
            made.append((draw.choice(UNARY), (first,)))
        else:
            made.append((draw.choice(BINARY), (first, draw.choice(choices))))
    made.append(("Add", (size - 1, -1)))
    return made


def _append(graph: Graph, operator: str, operands: list[object]) -> object:
    node = graph.append(Node(operator, operands, version=21))  # type: ignore[arg-type]
    node.result.type = F32
    return node.result


def _module(draw: random.Random, kinds: int, layers: int, size: int, noise: float, straight: float) -> Module:
    graph = Graph("g")
    module = Module(graph, opsets={"": 21})
    stream = graph.add_input("x", F32)
    shared = graph.add_input("mask", F32)
    bodies = [_layer(draw, size, straight) for _ in range(kinds)]
    ends = []
    for number in range(layers):
        weight = graph.add_constant(ArrayTensor([[float(number), 1.0], [0.0, 1.0]]), f"w{number}")
        weight.type = F32
        weight.data = ArrayTensor(weight.data.numpy().astype("float32"))
        values: list[object] = []
        for operator, read in bodies[draw.randrange(kinds)]:
            outside = {-1: stream, -2: weight, -3: shared}
            values.append(_append(graph, operator, [outside[at] if at < 0 else values[at] for at in read]))
            if draw.random() < noise:
                ends.append(_append(graph, draw.choice(UNARY), [draw.choice(values)]))
        stream = values[-1]  # type: ignore[assignment]
    ends.extend(value for node in graph for value in node.results if not value.has_uses and value is not stream)
    graph.set_outputs([stream, *dict.fromkeys(ends)])  # type: ignore[list-item]
    return module


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 9), st.integers(2, 8), st.sampled_from([0, 0.1, 0.5]))
@settings(max_examples=120, deadline=None)
def test_random_layers_come_back_as_they_were(seed, kinds, layers, size, noise):
    round_trip(_module(random.Random(seed), kinds, layers, size, noise, 0.5))


@given(st.integers(0, 2**32), st.integers(2, 9), st.integers(4, 8))
@settings(max_examples=60, deadline=None)
def test_all_layers_of_one_kind_are_found(seed, layers, size):
    module = _module(random.Random(seed), 1, layers, size, 0, 1)
    assert round_trip(module) == {"layers": 1, "calls": layers, "nodes": len(module.graph)}
