"""Random inputs that a model can take."""

import ml_dtypes
import numpy as np
import pytest

from irpar import models
from irpar.onnx_io import to_module
from irpar.runtime.specs import input_specs
from irpar.sharding import IrparError, asked_by_command
from irpar.verification.input_bounds import index_bounds
from irpar.verification.inputs import random_inputs
from tests.runtime.programs import module


def drawn(text: str, seed: int = 0) -> dict[str, np.ndarray]:
    graph = module(text).graph
    return random_inputs(input_specs(graph), graph, seed)


def test_each_dtype() -> None:
    types = "%f: f32[1000], %h: bf16[3], %b: bool[100], %s: str[50], %c: c64[2], %u: u8[1000], %z: f32[0], %n: i64[]"
    inputs = drawn(f"graph @g({types}) -> (%f) opset 21 {{\n}}")
    assert abs(inputs["f"].mean()) < 0.2
    assert 0.8 < inputs["f"].std() < 1.2
    assert inputs["h"].dtype == ml_dtypes.bfloat16
    assert set(inputs["b"].tolist()) == {True, False}
    assert set(inputs["s"].tolist()) == {"a", "b"}
    assert inputs["c"].dtype == np.complex64
    assert len(set(inputs["u"].tolist())) > 200
    assert inputs["z"].shape == (0,)
    assert inputs["n"].shape == ()


def test_equal_seeds_give_equal_inputs() -> None:
    text = "graph @g(%a: f32[9], %b: f32[9]) -> (%a) opset 21 {\n}"
    first, again, other = drawn(text), drawn(text), drawn(text, seed=1)
    np.testing.assert_array_equal(first["a"], again["a"])
    assert not np.array_equal(first["a"], first["b"])
    assert not np.array_equal(first["a"], other["a"])


@pytest.mark.parametrize(
    ("use", "is_square"),
    [
        ("%y = Sqrt(%v) : f32[50]", True),
        ("%k = Mul(%rest, %v) : f32[50]\n %a = Add(%k, %g) : f32[50]\n %y = Sqrt(%a) : f32[50]", True),
        (
            "%y, %m1, %v1 = irpar.AdamW(%g, %g, %g, %v, %rest, %rest, %rest, %rest, %rest) : f32[50], f32[50], f32[50]",
            True,
        ),
        ("%k = Mul(%v, %v) : f32[50]\n %y = Sqrt(%k) : f32[50]", False),
        ("%k = Sub(%v, %rest) : f32[50]\n %y = Sqrt(%k) : f32[50]", False),
        ("%k = Div(%rest, %v) : f32[50]\n %y = Sqrt(%k) : f32[50]", False),
        ("%y = Tanh(%v) : f32[50]", False),
    ],
)
def test_what_a_root_is_taken_of_is_not_below_zero(use: str, is_square: bool) -> None:
    inputs = drawn(f'graph @g(%v: f32[50], %g: f32[50], %rest: f32[]) -> (%y) opset 21, "irpar" 1 {{\n {use}\n}}')
    assert (inputs["v"] >= 0).all() == is_square


@pytest.mark.parametrize(
    ("use", "low", "high"),
    [
        ("%y = Gather(%t, %i) {axis=1} : f32[3, 20, 7]", 0, 5),
        (
            "%c = Cast(%i) {to=7} : i64[20]\n %d = Reshape(%c, %s) : i64[4, 5]\n %y = Gather(%t, %d) : f32[4, 5, 5, 7]",
            0,
            3,
        ),
        ("%p = Add(%i, %two) : i32[20]\n %y = Gather(%t, %p) {axis=2} : f32[3, 5, 20]", 0, 5),
        ("%p = Sub(%i, %two) : i32[20]\n %y = Gather(%t, %p) {axis=2} : f32[3, 5, 20]", 2, 9),
        ("%a = Gather(%t, %i) {axis=2} : f32[3, 5, 20]\n %y = Gather(%t, %i) : f32[20, 5, 7]", 0, 3),
        ("%u = Unsqueeze(%i, %one) : i32[20, 1]\n %y = GatherND(%t, %u) : f32[20, 5, 7]", 0, 3),
        ("%y = OneHot(%i, %depth, %values) : f32[20, 6]", 0, 6),
        ("%y = Custom(%i) : i32[20]", 0, 2),
        ("%y = Slice(%t, %i, %i) : f32[3, 5, 7]", 0, 8),
        ("%m = Mul(%i, %two) : i32[20]\n %y = Gather(%t, %m) {axis=2} : f32[3, 5, 20]", 0, 4),
        ("%y = Expand(%t, %i) : f32[3, 5, 7]", 0, 2),
    ],
)
def test_indices_stay_in_range(use: str, low: int, high: int) -> None:
    graph = module(f"""
        graph @g(%t: f32[3, 5, 7], %i: i32[20]) -> (%y) opset 21 {{
          %s = constant : i64[2] [4, 5]
          %one = constant : i64[1] [1]
          %two = constant : i32[] 2
          %depth = constant : i64[] 6
          %values = constant : f32[2] [0.0, 1.0]
          {use}
        }}
    """).graph
    specs = input_specs(graph)
    seen = np.concatenate([random_inputs(specs, graph, seed)["i"] for seed in range(20)])
    assert seen.dtype == np.int32
    assert (seen.min(), seen.max()) == (low, high - 1)


@pytest.mark.parametrize(
    ("use", "seen"),
    [
        # Beside what is compared, and what lies between.
        ("%y = Equal(%i, %two) : bool[1000]", {1, 2, 3}),
        (
            "%c = Cast(%i) {to=7} : i64[1000]\n %p = Add(%c, %one) : i64[1000]\n %y = Less(%p, %far) : bool[1000]",
            {15999},
        ),
        ("%c = Cast(%i) {to=1} : f32[1000]\n %y = GreaterOrEqual(%c, %half) : bool[1000]", {-1, 0, 1}),
        # Lengths are compared with places.
        ("%y = Less(%i, %places) : bool[1000]", {0, 1, 999, 1000, 1001}),
    ],
)
def test_integers_that_are_compared(use: str, seen: set[int]) -> None:
    inputs = drawn(f"""
        graph @g(%i: i32[1000], %places: i32[1000]) -> (%y) opset 21 {{
          %two = constant : i32[] 2
          %one = constant : i64[] 1
          %far = constant : i64[] 16000
          %half = constant : f32[] 0.5
          {use}
        }}
    """)
    assert seen <= set(inputs["i"].tolist())


def test_integers_that_only_arithmetic_reads_are_wide() -> None:
    text = "graph @g(%i: i32[1000], %d: i32[1000]) -> (%y) opset 21 {\n %y = Div(%i, %d) : i32[1000]\n}"
    inputs = drawn(text)
    assert inputs["i"].min() < -900
    assert inputs["i"].max() > 900
    assert 0 not in inputs["d"]
    narrow = random_inputs(input_specs(module(text).graph), module(text).graph, narrow=True)
    assert set(narrow["i"].tolist()) == {0, 1}
    assert set(narrow["d"].tolist()) == {1}


def test_classes_lie_in_their_number() -> None:
    inputs = drawn("""
        graph @g(%s: f32[500, 7], %l: i64[500]) -> (%y) opset 21 {
          %y = SoftmaxCrossEntropyLoss(%s, %l) : f32[]
        }
    """)
    assert set(inputs["l"].tolist()) == set(range(7))


def test_masks_are_zeros_and_ones_with_a_one_in_each_row() -> None:
    inputs = drawn("""
        graph @g(%m: i64[40, 2]) -> (%y) opset 21 {
          %one = constant : i64[1] [1]
          %u = Unsqueeze(%m, %one) : i64[40, 1, 2]
          %y = Cast(%u) {to=1} : f32[40, 1, 2]
        }
    """)
    assert set(inputs["m"].ravel().tolist()) == {0, 1}
    assert inputs["m"][:, 0].tolist() == [1] * 40


@pytest.mark.parametrize(
    "steps",
    [
        # Models of exporters leave out the types of what is between: the attribute of Cast says what it makes.
        "%f = Cast(%m) {to=1} : ?\n %s = Sub(%one, %f) : ?\n %y = Mul(%s, %far) : ?",
        "%s = Sub(%whole, %m) : ?\n %f = Cast(%s) {to=1} : ?\n %y = Mul(%f, %far) : ?",
        "%s = Add(%m, %whole) : ?\n %u = Unsqueeze(%s, %axis) : ?\n %f = Cast(%u) {to=10} : ?\n %y = Neg(%f) : ?",
    ],
)
def test_masks_that_become_floats_beside_arithmetic(steps: str) -> None:
    inputs = drawn(f"""
        graph @g(%m: i64[40, 3]) -> (%y) opset 21 {{
          %one = constant : f32[] 1.0
          %far = constant : f32[] -10000.0
          %whole = constant : i64[] 1
          %axis = constant : i64[1] [1]
          {steps}
        }}
    """)
    assert set(inputs["m"].ravel().tolist()) == {0, 1}
    assert inputs["m"][:, 0].tolist() == [1] * 40


def test_token_ids_of_models() -> None:
    graph = to_module(models.build("gpt", vocab=50)).graph
    found = index_bounds(graph.inputs[0])
    assert (found.low, found.high) == (0, 50)


def test_what_cannot_be_made_up() -> None:
    text = "graph @g(%x: f32['n', 2]) -> (%x) opset 21 {\n}"
    with pytest.raises(IrparError, match=r"(?s)cannot make up input x f32.*inputs=\{.*bind=\{"):
        drawn(text)
    with (
        pytest.raises(IrparError, match=r"--inputs FILE\), or bind all symbols \(--bind NAME=SIZE\)"),
        asked_by_command(),
    ):
        drawn(text)
