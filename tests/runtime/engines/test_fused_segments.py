"""Segments with channels last: what the engine cupy runs in place of their nodes, and what becomes of constants."""

from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Module, Value, plain_attribute
from irpar.kernels import lookup
from irpar.onnx_io import to_module
from irpar.runtime.engines.base import Constants
from irpar.runtime.engines.computed_constants import take_computed
from irpar.runtime.engines.fused_segments import fused
from irpar.runtime.instructions import Segment
from irpar.runtime.program import build_program
from irpar.verification.inputs import random_inputs
from tests.runtime.devices import strict_device
from tests.runtime.programs import module

Array = np.ndarray[Any, Any]


def whole(family: str, **settings: Any) -> tuple[Segment, Constants]:
    """A model's program of one segment."""
    (part,) = irpar.partition(to_module(models.build(family, **settings)), "x=1").parts
    (segment,) = build_program(part.graph).segments
    return segment, Constants(part)


def results(segment: Segment, constants: Constants, inputs: list[Array]) -> list[Array]:
    """What a segment gives, node by node."""
    values: dict[Value, Array] = dict(zip(segment.inputs, inputs, strict=True))
    values |= {value: constants.array(value) for value in segment.constants}
    for node in segment.nodes:
        kernel = lookup(node.domain, node.op_type, node.version)
        assert kernel is not None, node
        operands = [None if value is None else values[value] for value in node.operands]
        attributes = {name: plain_attribute(value) for name, value in node.attributes.items()}
        values.update(zip(node.results, kernel(np, operands, attributes, len(node.results)), strict=True))
    return [values[value] for value in segment.outputs]


@pytest.mark.parametrize("family", ["resnet", pytest.param("unet", marks=pytest.mark.slow)])
def test_weights_are_turned_and_normalised_once(family: str) -> None:
    segment, constants = whole(family)
    text = str(segment.graph)
    made, computed = fused(segment, constants)
    assert str(segment.graph) == text
    assert made.outputs == segment.outputs
    assert made.inputs == segment.inputs
    convolutions = [node for node in made.nodes if node.op_type == "ConvChannelsLast"]
    assert convolutions
    for node in convolutions:
        assert all(value in computed or value in segment.constants for value in node.inputs[1:] if value.is_constant)
        assert node.inputs[1] in computed
    assert not any(node.inputs and all(value.is_constant for value in node.inputs) for node in made.nodes)
    shared = {*segment.constants} & {*made.constants}
    assert shared.isdisjoint(node.inputs[1] for node in segment.nodes if node.op_type == "Conv")
    assert all({user.graph for user in value.users} == {segment.graph} for value in shared)
    random = np.random.default_rng(0)
    inputs = [random.normal(size=value.shape).astype("f4") for value in segment.inputs]
    for found, wanted in zip(results(made, constants, inputs), results(segment, constants, inputs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", [{"x": 1}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_the_engine_computes_the_same(mesh: dict[str, int]) -> None:
    loaded = to_module(models.build("resnet"))
    partition = irpar.partition(loaded, irpar.Mesh(mesh))
    expected_by = partition.executor("numpy")
    inputs = random_inputs(expected_by.inputs, loaded.graph)
    expected = expected_by.run(inputs)
    with strict_device():
        executor = partition.executor("cupy")
        got = executor.run(inputs)
    assert executor.notes == ()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family", ["t5", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*models.FAMILIES} - {"t5"}))]
)
def test_what_runs_of_a_step_is_computed_before_it_is_read(family: str) -> None:
    step = irpar.train_step(models.build(family), loss="mse", optimizer="adamw")
    (part,) = irpar.partition(step, "x=1").parts
    for segment in build_program(part.graph, writes_over=True).segments:
        made, computed = fused(segment, Constants(part))
        known = {*made.inputs, *made.constants, *computed}
        for node in made.nodes:
            assert known.issuperset(node.inputs), node
            known.update(node.results)
        assert known.issuperset(made.outputs)


def test_segments_without_convolutions_are_as_before() -> None:
    segment, constants = whole("mlp")
    made, computed = fused(segment, constants)
    stretch = Stretch(segment.nodes, {*segment.outputs}, segment.over)
    assert [node.op_type for node in made.nodes] == [node.op_type for node in stand_ins(stretch)]
    assert made.constants == segment.constants
    assert not computed


def of_constants(*lines: str, **resources: Array) -> Module:
    body = "\n".join(f"  {line}" for line in lines)
    return module(f"graph @g(%x: f32[4, 2]) -> (%y) opset 21 {{\n{body}\n}}\n", **resources)


def test_what_is_made_of_constants_is_computed_when_it_is_asked_for() -> None:
    w = np.arange(8, dtype="f4").reshape(2, 4)
    graph = of_constants(
        '%w = constant : f32[2, 4] data("#w", 0, 32)',
        "%two = constant : f32[] 2.0",
        "%t = Transpose(%w) : f32[4, 2]",
        "%s = Mul(%t, %two) : f32[4, 2]",
        "%a = Add(%x, %s) : f32[4, 2]",
        "%y = Mul(%a, %t) : f32[4, 2]",
        w=w,
    ).graph
    asked: list[str] = []

    def numbers(value: Value) -> Array:
        asked.append(value.name)
        assert value.data is not None
        return value.data.numpy()

    made = take_computed(graph, numbers)
    assert [node.op_type for node in graph] == ["Add", "Mul"]
    assert not asked
    for value, wanted in zip(made, (w.T, 2 * w.T), strict=True):
        assert value.data is not None
        found = value.data.numpy()
        np.testing.assert_array_equal(found, wanted)
        assert found.flags.c_contiguous
    assert set(asked) == {"w", "two"}


@pytest.mark.parametrize(
    "lines",
    [
        (  # It is larger than what it is made of.
            "%one = constant : f32[1, 2] [1.0, 2.0]",
            "%sizes = constant : i64[2] [64, 2]",
            "%t = Expand(%one, %sizes) : f32[64, 2]",
            "%m = MatMul(%x, %k) : f32[4, 64]",
            "%y = MatMul(%m, %t) : f32[4, 2]",
        ),
        (  # It is another one each time.
            "%p = constant : f32[4, 2] [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]",
            "%b = Bernoulli(%p) : f32[4, 2]",
            "%y = Add(%x, %b) : f32[4, 2]",
        ),
        (  # It is a result.
            "%p = constant : f32[4, 2] [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]",
            "%y = Exp(%p) : f32[4, 2]",
        ),
    ],
)
def test_what_stays_a_node(lines: tuple[str, ...]) -> None:
    graph = of_constants('%k = constant : f32[2, 64] data("#k", 0, 512)', *lines, k=np.zeros((2, 64), "f4")).graph
    before = [*graph]
    assert take_computed(graph, lambda value: np.zeros(0)) == []
    assert [*graph] == before


@pytest.mark.parametrize("number", [0, 1])
def test_bodies_read_what_is_made_around_them(number: int) -> None:
    random = np.random.default_rng(1)
    weights = {"w": random.normal(size=(8, 8, 3, 3)).astype("f4"), "b": random.normal(size=8).astype("f4")}
    loaded = module(
        """
        graph @g(%x: f32[1, 8, 16, 16], %n: i64[]) -> (%y) opset 21 {
          %w = constant : f32[8, 8, 3, 3] data("#w", 0, 2304)
          %b = constant : f32[8] data("#b", 0, 32)
          %half = constant : f32[] 0.5
          %t = Cast(%n) {to=9} : bool[]
          %a = Conv(%x, %w, %b) {pads=[1, 1, 1, 1]} : f32[1, 8, 16, 16]
          %y = If(%t) {then_branch=graph @t() -> (%p) {
            %p = Mul(%a, %half) : f32[1, 8, 16, 16]
          }, else_branch=graph @e() -> (%q) {
            %q = Add(%x, %a) : f32[1, 8, 16, 16]
          }} : f32[1, 8, 16, 16]
        }
        """,
        **weights,
    )
    inputs = {"x": random.normal(size=(1, 8, 16, 16)).astype("f4"), "n": np.asarray(number)}
    partition = irpar.partition(loaded, "x=1")
    expected = partition.run(inputs, engine="numpy")["y"]
    (segment,) = build_program(partition.parts[0].graph).segments
    made, _ = fused(segment, Constants(partition.parts[0]))
    assert "ConvChannelsLast" in {node.op_type for node in made.nodes}
    with strict_device():
        found = partition.executor("cupy").run(inputs)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
