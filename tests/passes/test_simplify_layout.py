import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.ir import Builder, DType, Graph, Ints, Module, TensorType
from irpar.ir.text.files import parse_module
from irpar.ir.verifier import verify
from irpar.passes.simplify_layout import SimplifyLayout
from tests.budget import budget

from .golden import check, through_text


def test_merged_batch_and_heads_are_taken_apart_again() -> None:
    check(
        "simplify-layout",
        """
        graph @g(%x: f32[2, 8, 64]) -> (%k) opset 21 {
          %s1 = constant : i64[4] [2, 8, 4, 16]
          %s2 = constant : i64[3] [8, 8, 16]
          %s3 = constant : i64[4] [2, 4, 16, 8]
          %a = Reshape(%x, %s1) : f32[2, 8, 4, 16]
          %b = Transpose(%a) {perm=[0, 2, 1, 3]} : f32[2, 4, 8, 16]
          %c = Reshape(%b, %s2) : f32[8, 8, 16]
          %d = Transpose(%c) {perm=[0, 2, 1]} : f32[8, 16, 8]
          %k = Reshape(%d, %s3) : f32[2, 4, 16, 8] from "/k/Reshape"
        }
        """,
        """
        graph @g(%x: f32[2, 8, 64]) -> (%k) opset 21 {
          %shape = constant : i64[4] [2, 4, 16, 8]
          %k_1 = Transpose(%x) {perm=[0, 2, 1]} : f32[2, 64, 8] for "/k/Reshape"
          %k = Reshape(%k_1, %shape) : f32[2, 4, 16, 8] for "/k/Reshape" as "k"
        }
        """,
    )


def test_a_transpose_and_its_inverse_vanish() -> None:
    module = check(
        "simplify-layout",
        """
        graph @g(%x: f32[2, 3]) -> (%z) opset 21 {
          %y = Transpose(%x) {perm=[1, 0]} : f32[3, 2]
          %z = Transpose(%y) {perm=[1, 0]} : f32[2, 3]
        }
        """,
        """
        graph @g(%x: f32[2, 3]) -> (%x as "z") opset 21 {
        }
        """,
    )
    assert len(module.graph) == 0


def test_a_value_that_others_read_stays() -> None:
    check(
        "simplify-layout",
        """
        graph @g(%x: f32[2, 3]) -> (%y, %z) opset 21 {
          %y = Transpose(%x) {perm=[1, 0]} : f32[3, 2]
          %z = Transpose(%y) {perm=[1, 0]} : f32[2, 3]
        }
        """,
        """
        graph @g(%x: f32[2, 3]) -> (%y, %x as "z") opset 21 {
          %y = Transpose(%x) {perm=[1, 0]} : f32[3, 2]
        }
        """,
    )


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    steps: list[tuple[str, tuple[int, ...]]] = []
    current = shape
    for _ in range(draw(st.integers(2, 6))):
        if draw(st.booleans()):
            perm = tuple(draw(st.permutations(range(len(current)))))
            steps.append(("Transpose", perm))
            current = tuple(current[dim] for dim in perm)
        else:
            primes = [p for size in current for p in (2, 3) for _ in range(_power(size, p))]
            parts = draw(st.lists(st.integers(0, 4), min_size=len(primes), max_size=len(primes)))
            rank = draw(st.integers(1, 5))
            current = tuple(
                math.prod(p for p, part in zip(primes, parts, strict=True) if part % rank == place)
                for place in range(rank)
            )
            steps.append(("Reshape", current))
    return shape, steps


def _power(size: int, prime: int) -> int:
    count = 0
    while size % prime == 0:
        size //= prime
        count += 1
    return count


@given(chains())
@settings(max_examples=budget(300), deadline=None)
def test_random_chains_keep_the_numbers(problem: tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]]) -> None:
    shape, steps = problem
    module = Module(Graph("g"), opsets={"": 21})
    builder = Builder(module.graph, module.opsets)
    value = module.graph.add_input("x", TensorType(DType.F32, shape))
    expected = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    for op_type, argument in steps:
        if op_type == "Transpose":
            expected = expected.transpose(argument)
            operands, attributes = [value], {"perm": Ints(argument)}
        else:
            expected = expected.reshape(argument)
            operands, attributes = [value, builder.constant(Ints(argument))], {}
        value = builder.op(op_type, operands, attributes, type=TensorType(DType.F32, expected.shape))
    module.graph.set_outputs([value])
    SimplifyLayout().run(module)
    verify(module)
    through_text(module)
    assert len(module.graph) <= min(3, len(steps)) or len(module.graph) == len(steps)
    held = {module.graph.inputs[0]: np.arange(math.prod(shape), dtype=np.float32).reshape(shape)}
    for node in module.graph:
        array = held[node.inputs[0]]
        held[node.result] = (
            array.transpose(node.attributes["perm"])
            if node.op_type == "Transpose"
            else array.reshape(node.result.shape)
        )
        assert held[node.result].shape == node.result.shape
    np.testing.assert_array_equal(held[module.graph.outputs[0]], expected)


ANNOTATED = """
mesh @m = ["tp"=2]
graph @g(%x: f32[2, 8, 64]) -> (%y) opset 21 {
  %s = constant : i64[4] [2, 8, 4, 16]
  %a = Reshape(%x, %s) : f32[2, 8, 4, 16]
  %b = Transpose(%a) {perm=[0, 2, 1, 3]} : f32[2, 4, 8, 16]
  %c = Transpose(%b) {perm=[0, 1, 3, 2]} : f32[2, 4, 16, 8]
  %y = Relu(%c) : f32[2, 4, 16, 8]
}
"""
INVERSE = """
mesh @m = ["tp"=2]
graph @g(%x: f32[2, 8]) -> (%y) opset 21 {
  %r = Relu(%x) : f32[2, 8]
  %t = Transpose(%r) {perm=[1, 0]} : f32[8, 2]
  %c = Transpose(%t) {perm=[1, 0]} : f32[2, 8]
  %y = Neg(%c) : f32[2, 8]
}
"""


@pytest.mark.parametrize(("text", "spec"), [(ANNOTATED, [None, "tp", None, None]), (INVERSE, ["tp", None])])
def test_the_reason_of_an_annotated_value_stays_with_it(text: str, spec: list) -> None:
    module = parse_module(text)
    module.shard("c", spec)
    module.set_mesh(module.mesh)
    SimplifyLayout().run(module)
    verify(module)
    (reader,) = [node for node in module.graph if node.results[0].name == "y"]
    value = reader.inputs[0]
    assert value.sharding is not None
    decision = module.decision(value.name)
    assert decision is not None
    assert decision.why == 'annotated "c"'
    assert module.annotated[value.name].pattern == "c"
    assert set(module.decisions) <= {value.name for value in module.graph.values()}


def test_rows_that_are_counted_are_batch_dims() -> None:
    """As in `x[arange(4), last]`, which picks the last token of each row."""
    check(
        "simplify-layout",
        """
        graph @g(%x: f32[4, 6, 8], %last: i64[4, 1]) -> (%y) opset 21 {
          %rows = constant : i64[4, 1] [[0], [1], [2], [3]]
          %at = Concat(%rows, %last) {axis=-1} : i64[4, 2]
          %y = GatherND(%x, %at) : f32[4, 8]
        }
        """,
        """
        graph @g(%x: f32[4, 6, 8], %last: i64[4, 1]) -> (%y) opset 21 {
          %rows = constant : i64[4, 1] [[0], [1], [2], [3]]
          %y = GatherND(%x, %last) {batch_dims=1} : f32[4, 8]
        }
        """,
    )


@pytest.mark.parametrize(
    ("rows", "size"), [("[[0], [1], [3], [2]]", 4), ("[[0], [1], [2], [3]]", 5)], ids=["out of order", "not all"]
)
def test_rows_that_are_not_counted_stay(rows: str, size: int) -> None:
    text = f"""
        graph @g(%x: f32[{size}, 6, 8], %last: i64[4, 1]) -> (%y) opset 21 {{
          %rows = constant : i64[4, 1] {rows}
          %at = Concat(%rows, %last) {{axis=-1}} : i64[4, 2]
          %y = GatherND(%x, %at) : f32[4, 8]
        }}
        """
    check("simplify-layout", text, text)


def test_several_dims_are_counted() -> None:
    check(
        "simplify-layout",
        """
        graph @g(%x: f32[2, 3, 6, 8], %a: i64[2, 3, 1], %b: i64[2, 3, 1]) -> (%y) opset 21 {
          %rows = constant : i64[2, 3, 1] [[[0], [0], [0]], [[1], [1], [1]]]
          %columns = constant : i64[2, 3, 1] [[[0], [1], [2]], [[0], [1], [2]]]
          %at = Concat(%rows, %columns, %a, %b) {axis=2} : i64[2, 3, 4]
          %y = GatherND(%x, %at) : f32[2, 3]
        }
        """,
        """
        graph @g(%x: f32[2, 3, 6, 8], %a: i64[2, 3, 1], %b: i64[2, 3, 1]) -> (%y) opset 21 {
          %rows = constant : i64[2, 3, 1] [[[0], [0], [0]], [[1], [1], [1]]]
          %columns = constant : i64[2, 3, 1] [[[0], [1], [2]], [[0], [1], [2]]]
          %at_1 = Concat(%a, %b) {axis=-1} : i64[2, 3, 2]
          %y = GatherND(%x, %at_1) {batch_dims=2} : f32[2, 3]
        }
        """,
    )


def test_rows_of_constant_tuples_are_counted() -> None:
    check(
        "simplify-layout",
        """
        graph @g(%x: f32[3, 6, 8]) -> (%y) opset 21 {
          %at = constant : i64[3, 2] [[0, 5], [1, 0], [2, 4]]
          %y = GatherND(%x, %at) : f32[3, 8]
        }
        """,
        """
        graph @g(%x: f32[3, 6, 8]) -> (%y) opset 21 {
          %at = constant : i64[3, 2] [[0, 5], [1, 0], [2, 4]]
          %at_1 = constant : i64[3, 1] [[5], [0], [4]]
          %y = GatherND(%x, %at_1) {batch_dims=1} : f32[3, 8]
        }
        """,
    )


def test_rows_that_are_expanded_are_counted() -> None:
    """Exporters broadcast `arange(2)[:, None]` to the shape of the other indices; and one index is left."""
    check(
        "simplify-layout",
        """
        graph @g(%x: f32[2, 3, 6], %last: i64[2, 3, 1]) -> (%y) opset 21 {
          %rows = constant : i64[2, 1, 1] [[[0]], [[1]]]
          %shape = constant : i64[3] [2, 3, 1]
          %wide = Expand(%rows, %shape) : i64[2, 3, 1]
          %at = Concat(%wide, %last) {axis=-1} : i64[2, 3, 2]
          %y = GatherND(%x, %at) : f32[2, 3, 6]
        }
        """,
        """
        graph @g(%x: f32[2, 3, 6], %last: i64[2, 3, 1]) -> (%y) opset 21 {
          %rows = constant : i64[2, 1, 1] [[[0]], [[1]]]
          %shape = constant : i64[3] [2, 3, 1]
          %wide = Expand(%rows, %shape) : i64[2, 3, 1]
          %y = GatherND(%x, %last) {batch_dims=1} : f32[2, 3, 6]
        }
        """,
    )


def test_tuples_that_are_expanded_in_their_own_dim_are_read() -> None:
    """Each is [row, row]: the second does not count along the second dim."""
    text = """
        graph @g(%x: f32[2, 3, 6]) -> (%y) opset 21 {
          %rows = constant : i64[2, 1, 1] [[[0]], [[1]]]
          %shape = constant : i64[3] [2, 3, 2]
          %at = Expand(%rows, %shape) : i64[2, 3, 2]
          %y = GatherND(%x, %at) : f32[2, 3, 6]
        }
        """
    after = """
        graph @g(%x: f32[2, 3, 6]) -> (%y) opset 21 {
          %rows = constant : i64[2, 1, 1] [[[0]], [[1]]]
          %shape = constant : i64[3] [2, 3, 2]
          %at_1 = constant : i64[2, 3, 1] [[[0], [0], [0]], [[1], [1], [1]]]
          %y = GatherND(%x, %at_1) {batch_dims=1} : f32[2, 3, 6]
        }
        """
    check("simplify-layout", text, after)
