"""What simplify-layout does with merged dims around the operators that read them."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.ir import Builder, DType, Graph, Ints, Module, TensorType, Value, clone_module
from irpar.ir.verifier import verify
from irpar.passes.dce import Dce
from irpar.passes.infer_types import InferTypes
from irpar.passes.simplify_layout import SimplifyLayout
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh
from tests.budget import budget

from .golden import check, read, run_pipeline, through_text


def test_attention_of_merged_batch_and_heads() -> None:
    check(
        "simplify-layout,dce",
        """
        graph @g(%q: f32[4, 8, 6, 16], %k: f32[4, 8, 16, 6], %m: f32[1, 6, 6]) -> (%o) opset 21 {
          %s1 = constant : i64[3] [32, 6, 16]
          %s2 = constant : i64[3] [32, 16, 6]
          %s3 = constant : i64[4] [4, 8, 6, 6]
          %a = Reshape(%q, %s1) : f32[32, 6, 16]
          %b = Reshape(%k, %s2) : f32[32, 16, 6]
          %s = MatMul(%a, %b) : f32[32, 6, 6] from "/qk"
          %t = Add(%s, %m) : f32[32, 6, 6]
          %p = Softmax(%t) {axis=2} : f32[32, 6, 6]
          %o = Reshape(%p, %s3) : f32[4, 8, 6, 6]
        }
        """,
        """
        graph @g(%q: f32[4, 8, 6, 16], %k: f32[4, 8, 16, 6], %m: f32[1, 6, 6]) -> (%p_1 as "o") opset 21 {
          %s_1 = MatMul(%q, %k) : f32[4, 8, 6, 6] for "/qk"
          %t_1 = Add(%s_1, %m) : f32[4, 8, 6, 6]
          %p_1 = Softmax(%t_1) {axis=-1} : f32[4, 8, 6, 6]
        }
        """,
    )


def test_rows_of_batch_and_sequence_before_a_weight() -> None:
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[4, 6, 16], %w: f32[16, 8]) -> (%o) opset 21 {
          %s1 = constant : i64[2] [24, 16]
          %s2 = constant : i64[3] [4, 6, 8]
          %a = Reshape(%x, %s1) : f32[24, 16]
          %h = MatMul(%a, %w) : f32[24, 8]
          %g = Relu(%h) : f32[24, 8]
          %o = Reshape(%g, %s2) : f32[4, 6, 8]
        }
        """,
        """
        graph @g(%x: f32[4, 6, 16], %w: f32[16, 8]) -> (%g_1 as "o") opset 21 {
          %h_1 = MatMul(%x, %w) : f32[4, 6, 8]
          %g_1 = Relu(%h_1) : f32[4, 6, 8]
        }
        """,
    )


def test_a_gemm_of_rows_of_sequence_and_batch() -> None:
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[6, 4, 16], %w: f32[8, 16], %b: f32[8]) -> (%o) opset 21 {
          %s1 = constant : i64[2] [24, 16]
          %s2 = constant : i64[3] [6, 4, 8]
          %a = Reshape(%x, %s1) : f32[24, 16]
          %h = Gemm(%a, %w, %b) {transB=1} : f32[24, 8]
          %o = Reshape(%h, %s2) : f32[6, 4, 8]
        }
        """,
        """
        graph @g(%x: f32[6, 4, 16], %w: f32[8, 16], %b: f32[8]) -> (%h_1 as "o") opset 21 {
          %w_1 = Transpose(%w) {perm=[1, 0]} : f32[16, 8]
          %h_product = MatMul(%x, %w_1) : f32[6, 4, 8]
          %h_1 = Add(%h_product, %b) : f32[6, 4, 8]
        }
        """,
    )


def test_the_norm_of_groups_of_channels() -> None:
    """As exporters write it below opset 21: rows and columns are dims of their own again, which can be sharded."""
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[2, 8, 6, 5], %g: f32[4], %h: f32[4]) -> (%o) opset 18 {
          %s1 = constant : i64[3] [2, 4, -1]
          %s2 = constant : i64[4] [2, 8, 6, 5]
          %a = Reshape(%x, %s1) : f32[2, 4, 60]
          %n = InstanceNormalization(%a, %g, %h) {epsilon=1e-06} : f32[2, 4, 60]
          %o = Reshape(%n, %s2) : f32[2, 8, 6, 5]
        }
        """,
        """
        graph @g(%x: f32[2, 8, 6, 5], %g: f32[4], %h: f32[4]) -> (%o) opset 18 {
          %shape = constant : i64[5] [2, 4, 2, 6, 5]
          %shape_2 = constant : i64[4] [2, 8, 6, 5]
          %a_1 = Reshape(%x, %shape) : f32[2, 4, 2, 6, 5]
          %n_1 = InstanceNormalization(%a_1, %g, %h) {epsilon=1e-06} : f32[2, 4, 2, 6, 5]
          %o = Reshape(%n_1, %shape_2) : f32[2, 8, 6, 5]
        }
        """,
    )


def test_the_norm_of_heads() -> None:
    """As onnxruntime-genai writes Qwen3: steps and heads are dims of their own again."""
    check(
        "simplify-layout,dce",
        """
        graph @g(%q: f32[2, 6, 128], %w: f32[16]) -> (%o) opset 21 {
          %s1 = constant : i64[3] [2, 48, 16]
          %s2 = constant : i64[3] [2, 6, 128]
          %a = Reshape(%q, %s1) : f32[2, 48, 16]
          %n = SimplifiedLayerNormalization(%a, %w) {epsilon=1e-06} : f32[2, 48, 16]
          %o = Reshape(%n, %s2) : f32[2, 6, 128]
        }
        """,
        """
        graph @g(%q: f32[2, 6, 128], %w: f32[16]) -> (%o) opset 21 {
          %shape = constant : i64[4] [2, 6, 8, 16]
          %shape_2 = constant : i64[3] [2, 6, 128]
          %a_1 = Reshape(%q, %shape) : f32[2, 6, 8, 16]
          %n_1 = SimplifiedLayerNormalization(%a_1, %w) {epsilon=1e-06, axis=-1} : f32[2, 6, 8, 16]
          %o = Reshape(%n_1, %shape_2) : f32[2, 6, 128]
        }
        """,
    )


UNCHANGED = {
    "a Gemm that scales": """
        graph @g(%x: f32[4, 6, 8], %w: f32[8, 2]) -> (%y) opset 21 {
          %s = constant : i64[2] [24, 8]
          %a = Reshape(%x, %s) : f32[24, 8]
          %y = Gemm(%a, %w) {alpha=0.5} : f32[24, 2]
        }""",
    "a Gemm with a bias of its own for each row": """
        graph @g(%x: f32[4, 6, 8], %w: f32[8, 2], %b: f32[24, 1]) -> (%y) opset 21 {
          %s = constant : i64[2] [24, 8]
          %a = Reshape(%x, %s) : f32[24, 8]
          %y = Gemm(%a, %w, %b) : f32[24, 2]
        }""",
    "the features stay merged": """
        graph @g(%x: f32[4, 6, 8, 2]) -> (%y) opset 21 {
          %s = constant : i64[3] [4, 6, 16]
          %a = Reshape(%x, %s) : f32[4, 6, 16]
          %y = Relu(%a) : f32[4, 6, 16]
        }""",
    "another operand is not merged": """
        graph @g(%x: f32[4, 6, 8], %z: f32[24, 8]) -> (%y) opset 21 {
          %s = constant : i64[2] [24, 8]
          %a = Reshape(%x, %s) : f32[24, 8]
          %y = Add(%a, %z) : f32[24, 8]
        }""",
    "two operands merge other dims": """
        graph @g(%x: f32[4, 6, 8], %z: f32[2, 12, 8]) -> (%y) opset 21 {
          %s = constant : i64[2] [24, 8]
          %a = Reshape(%x, %s) : f32[24, 8]
          %b = Reshape(%z, %s) : f32[24, 8]
          %y = Add(%a, %b) : f32[24, 8]
        }""",
    "Softmax up to opset 12 takes all dims from its axis on": """
        graph @g(%x: f32[4, 6, 8]) -> (%y) opset 12 {
          %s = constant : i64[2] [24, 8]
          %a = Reshape(%x, %s) : f32[24, 8]
          %y = Softmax(%a) {axis=0} : f32[24, 8]
        }""",
    "the axis itself is merged": """
        graph @g(%x: f32[4, 6, 8]) -> (%y) opset 21 {
          %s = constant : i64[2] [24, 8]
          %a = Reshape(%x, %s) : f32[24, 8]
          %y = Softmax(%a) {axis=0} : f32[24, 8]
        }""",
    "the merged value is annotated": """
        mesh @m = ["x"=2]
        graph @g(%x: f32[4, 6, 8]) -> (%y) opset 21 {
          %s = constant : i64[2] [24, 8]
          %a = Reshape(%x, %s) : f32[24@x, 8]
          %y = Relu(%a) : f32[24, 8]
        }""",
}


@pytest.mark.parametrize("why", UNCHANGED)
def test_what_stays(why: str) -> None:
    check("simplify-layout", UNCHANGED[why], UNCHANGED[why])


OPS = (
    *("Add", "Where", "Relu", "Clip", "Cast", "MatMul", "Rows", "Gemm", "Softmax", "LayerNormalization", "Concat"),
    *("InstanceNormalization", "CumSum", "Max", "Sorted", "Halves", "LookUp", "Tile"),
)


@st.composite
def programs(draw: st.DrawFn) -> Module:
    """An input merged in some way, some operators on it, and its dims apart again."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 4, 1]), min_size=3, max_size=5))
    cuts = sorted(draw(st.sets(st.integers(2, len(sizes) - 1), min_size=1, max_size=3)))
    merged = tuple(math.prod(sizes[a:b]) for a, b in zip([0, *cuts], [*cuts, len(sizes)], strict=True))
    module = Module(Graph("g"), opsets={"": 21})
    graph, builder = module.graph, Builder(module.graph, module.opsets)

    def reshape(value: Value, shape: tuple[int, ...]) -> Value:
        target = builder.constant(Ints(shape), "shape")
        return builder.op("Reshape", [value, target], type=TensorType(value.dtype, shape))

    def transpose(value: Value, order: list[int]) -> Value:
        type_ = TensorType(value.dtype, tuple(value.shape[dim] for dim in order))
        return builder.op("Transpose", [value], {"perm": Ints(order)}, type=type_)

    def fresh(shape: tuple[int, ...], merges: bool) -> Value:
        """Another operand of a shape: merged too where it has that of the first, or a constant, or an input."""
        if merges and shape == merged:
            order = draw(st.permutations(range(len(sizes))))
            whole = graph.add_input(
                "", TensorType(DType.F32, tuple(sizes[order.index(dim)] for dim in range(len(sizes))))
            )
            return reshape(transpose(whole, order), merged)
        if draw(st.booleans()):
            return builder.constant(np.linspace(-1, 1, math.prod(shape)).astype(np.float32).reshape(shape))
        return graph.add_input("", TensorType(DType.F32, shape))

    value = fresh(merged, True)
    for _ in range(draw(st.integers(1, 4))):
        value = _operator(draw, builder, value, fresh)
    outputs = [value]
    if value.shape == merged:
        outputs.append(reshape(value, tuple(sizes)))
    graph.set_outputs(outputs)
    InferTypes().run(module)
    return module


def _operator(draw: st.DrawFn, builder: Builder, value: Value, fresh: Any) -> Value:
    op, shape = draw(st.sampled_from(OPS)), value.shape
    rank = len(shape)
    if op in ("Add", "Where"):
        thin = tuple(draw(st.sampled_from([size, 1])) for size in shape)[draw(st.integers(0, rank - 1)) :]
        other = fresh(shape, True) if draw(st.booleans()) else fresh(thin, False)
        if op == "Add":
            return builder.op(op, [other, value] if draw(st.booleans()) else [value, other], type=value.type)
        is_less = builder.op("Less", [value, other], type=TensorType(DType.BOOL, shape))
        return builder.op(op, [is_less, value, other], type=value.type)
    if op in ("Relu", "Clip", "Cast"):
        more = [builder.constant(np.float32(-0.5)), None] if op == "Clip" else []
        return builder.op(op, [value, *more], {"to": 1} if op == "Cast" else None, type=value.type)
    if op == "MatMul" and rank > 1:
        other = fresh((*shape[:-2], shape[-1], shape[-2]), False)
        square = builder.op(op, [value, other], type=TensorType(DType.F32, (*shape[:-1], shape[-2])))
        return builder.op(op, [square, value], type=value.type)
    if op == "Rows" and rank > 1:
        return builder.op("MatMul", [value, fresh((shape[-1], shape[-1]), False)], type=value.type)
    if op == "Gemm" and rank == 2:
        bias = fresh(draw(st.sampled_from([(), (1,), (shape[-1],), (1, shape[-1]), (shape[0], 1)])), False)
        operands = [value, fresh((shape[-1], shape[-1]), False), *([bias] if draw(st.booleans()) else [])]
        return builder.op(op, operands, {"transB": draw(st.integers(0, 1))}, type=value.type)
    if op == "InstanceNormalization" and rank > 2:
        return builder.op(op, [value, *(fresh(shape[1:2], False) for _ in range(2))], type=value.type)
    axis = draw(st.integers(-rank, rank - 1))
    if op == "CumSum":
        return builder.op(op, [value, builder.constant(np.int64(axis))], type=value.type)
    if op == "Max":
        axes = sorted({axis % rank, draw(st.integers(0, rank - 1))})
        thin = TensorType(DType.F32, tuple(1 if dim in axes else size for dim, size in enumerate(shape)))
        largest = builder.op("ReduceMax", [value, builder.constant(Ints(axes))], type=thin)
        return builder.op("Sub", [value, largest], type=value.type)
    if op == "Sorted":
        count = builder.constant(Ints((shape[axis],)))
        largest, places = builder.node("TopK", [value, count], {"axis": axis}, results=2).results
        largest.type, places.type = value.type, TensorType(DType.I64, shape)
        again = builder.op("GatherElements", [value, places], {"axis": axis}, type=value.type)
        return builder.op("Add", [largest, again], type=value.type)
    if op == "LookUp" and shape[-1] > 1:
        last = rank - 1
        where = builder.op("ArgMax", [value], {"axis": last, "keepdims": 0}, type=TensorType(DType.I64, shape[:-1]))
        found = builder.op("Gather", [fresh((shape[-1], shape[-1]), False), where], type=value.type)
        return builder.op("Add", [value, found], type=value.type)
    if op == "Tile":
        wide = TensorType(DType.F32, (*shape[: axis % rank], 2 * shape[axis], *shape[axis % rank + 1 :]))
        twice = [1] * rank
        twice[axis] = 2
        tiled = builder.op(op, [value, builder.constant(Ints(twice))], type=wide)
        ends = [builder.constant(Ints((number,))) for number in (0, shape[axis], axis)]
        return builder.op("Slice", [tiled, *ends], type=value.type)
    if op == "Halves" and shape[axis] % 2 == 0:
        halves = builder.node("Split", [value], {"axis": axis, "num_outputs": 2}, results=2).results
        for half in halves:
            half.type = TensorType(DType.F32, (*shape[: axis % rank], shape[axis] // 2, *shape[axis % rank + 1 :]))
        return builder.op("Concat", halves[::-1], {"axis": axis}, type=value.type)
    if op == "LayerNormalization":
        scale = fresh(shape[axis:], False)
        return builder.op(op, [value, scale], {"axis": axis}, type=value.type)
    if op == "Concat":
        longer = (*shape[: axis % rank], 2 * shape[axis], *shape[axis % rank + 1 :])
        twice = builder.op(op, [value, value], {"axis": axis}, type=TensorType(DType.F32, longer))
        ends = [builder.constant(Ints((number,))) for number in (0, shape[axis], axis)]
        return builder.op("Slice", [twice, *ends], type=value.type)
    return builder.op("Softmax", [value], {"axis": axis}, type=value.type)


@given(programs())
@settings(max_examples=budget(150), deadline=None)
def test_random_programs_keep_the_numbers(module: Module) -> None:
    random = np.random.default_rng(0)
    feeds = {value.name: random.standard_normal(value.shape).astype(np.float32) for value in module.graph.inputs}
    changed = clone_module(module)
    SimplifyLayout().run(changed)
    Dce().run(changed)
    verify(changed)
    through_text(changed)
    with Executor(module, Mesh({"x": 1}), engine="numpy") as executor:
        expected = executor.run(feeds)
        near = executor.run({name: array * np.float32(1 + 1e-6) for name, array in feeds.items()})
    with Executor(changed, Mesh({"x": 1}), engine="numpy") as executor:
        found = executor.run({name: feeds[name] for name in (value.name for value in changed.graph.inputs)})
    for name, array in expected.items():
        # Large numbers that cancel leave the rounding of the large ones, which what comes after may make larger still.
        largest = max(1.0, float(np.abs(array).max()), 1e6 * float(np.abs(near[name] - array).max()))
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5 * largest)


def test_a_result_that_nothing_reads_keeps_the_dims_that_its_annotation_has():
    module = read(
        """
        mesh @m = ["tp"=2]
        graph @g(%p: f32[2, 4, 12]) -> (%a) opset 21 {
          %rows = constant : i64[2] [8, 12]
          %q = Reshape(%p, %rows) : f32[8, 12]
          %a, %b = Split(%q) {axis=1, num_outputs=2} : f32[8, 6], f32[8, 6@tp]
        }
        """
    )
    run_pipeline("simplify-layout,complete-sharding,insert-redistribution,localize", module)
    (annotated,) = (value for value in module.graph.values() if value.name == "b")
    assert annotated.global_shape == (8, 6)
