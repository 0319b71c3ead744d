"""fold-constants: shape arithmetic goes away; weights, annotated and random values stay; branches are taken."""

import numpy as np
import onnx
import pytest

from irpar.ir import Module
from irpar.ir.text.files import parse_module
from irpar.passes.fold_constants import FoldConstants, evaluate


def test_shape_chains_fold_in_one_sweep(check_golden):
    check_golden(
        "fold-constants,dce",
        """
        graph @g(%x: f32[2, 4, 8]) -> (%y) opset 21 {
          %zero = constant : i64[] 0
          %two = constant : i64[] 2
          %axes = constant : i64[1] [0]
          %heads = constant : i64[2] [4, 2]
          %s = Shape(%x) : ?
          %b = Gather(%s, %zero) : ?
          %d = Gather(%s, %two) : ?
          %h = Div(%d, %two) : ?
          %b1 = Unsqueeze(%b, %axes) : ?
          %h1 = Unsqueeze(%h, %axes) : ?
          %t = Concat(%b1, %h1, %heads) {axis=0} : ?
          %tail = Shape(%x) {start=-2} : ?
          %r = Expand(%x, %tail) : ?
          %y = Reshape(%r, %t) : ?
        }
        """,
        """
        graph @g(%x: f32[2, 4, 8]) -> (%y) opset 21 {
          %t = constant : i64[4] [2, 4, 4, 2]
          %tail = constant : i64[2] [4, 8]
          %r = Expand(%x, %tail) : f32[2, 4, 8]
          %y = Reshape(%r, %t) : f32[2, 4, 4, 2]
        }
        """,
    )


def test_a_size_that_depends_on_a_folded_shape_folds_too(rewritten):
    text = rewritten(
        "fold-constants,dce",
        """
        graph @g(%x: f32[2, 6]) -> (%n) opset 21 {
          %flat = constant : i64[1] [-1]
          %axes = constant : i64[1] [0]
          %s = Shape(%x) : ?
          %r = Reshape(%s, %flat) : ?
          %p = ReduceProd(%r) {keepdims=0} : ?
          %q = Unsqueeze(%p, %axes) : ?
          %e = Expand(%x, %s) : ?
          %f = Reshape(%e, %q) : ?
          %n = Size(%f) : ?
        }
        """,
    )
    assert "%n = constant : i64[] 12" in text


def test_names_and_sources_stay(rewritten):
    text = rewritten(
        "fold-constants,dce",
        """
        graph @g(%x: f32[2]) -> (%y) opset 21 {
          %a = constant : f32[] 2.0 from "a"
          %h = Sqrt(%a) : f32[] from "/sqrt" as "sqrt_out"
          %y = Mul(%x, %h) : f32[2]
        }
        """,
    )
    assert '%h = constant : f32[] 1.4142135 from "sqrt_out"' in text


def test_a_cast_like_reads_a_dtype_alone(check_golden):
    """Exporters write `type_as` so; what lies as another tensor does would be moved for it."""
    check_golden(
        "fold-constants,dce",
        """
        graph @g(%x: f32[2, 4], %h: f16[4, 2]) -> (%y) opset 21 {
          %a = Abs(%h) : f16[4, 2]
          %c = CastLike(%x, %a) : f16[2, 4] from "/type_as"
          %y = Neg(%c) : f16[2, 4]
        }
        """,
        """
        graph @g(%x: f32[2, 4], %h: f16[4, 2]) -> (%y) opset 21 {
          %c = Cast(%x) {to=10} : f16[2, 4] for "/type_as" as "c"
          %y = Neg(%c) : f16[2, 4]
        }
        """,
    )


def test_what_is_taken_of_a_list_is_a_piece(check_golden):
    """Exporters write `torch.split` as a list; a list is held in full, and has no gradient."""
    check_golden(
        "fold-constants,dce",
        """
        graph @g(%x: f32[2, 10], %n: i64[]) -> (%y, %z, %u, %v) opset 21 {
          %four = constant : i64[] 4
          %first = constant : i64[] 0
          %last = constant : i64[] -1
          %s = SplitToSequence(%x, %four) {axis=1} : seq<f32[2, _]>
          %a = SequenceAt(%s, %first) : ?
          %b = SequenceAt(%s, %last) : ?
          %y = Neg(%a) : ?
          %z = Abs(%b) : ?
          %rows = SplitToSequence(%x) {keepdims=0} : seq<f32[10]>
          %r = SequenceAt(%rows, %last) : ?
          %u = Neg(%r) : ?
          %v = SequenceAt(%rows, %n) : f32[10]
        }
        """,
        """
        graph @g(%x: f32[2, 10], %n: i64[]) -> (%y, %z, %u, %v) opset 21 {
          %sizes = constant : i64[3] [4, 4, 2]
          %sizes_1 = constant : i64[2] [1, 1]
          %shape = constant : i64[1] [10]
          %a, %s_2, %b = Split(%x, %sizes) {axis=1} : f32[2, 4], f32[2, 4], f32[2, 2]
          %y = Neg(%a) : f32[2, 4]
          %z = Abs(%b) : f32[2, 2]
          %rows_1, %rows_2 = Split(%x, %sizes_1) {axis=0} : f32[1, 10], f32[1, 10]
          %r = Reshape(%rows_2, %shape) : f32[10]
          %rows = SplitToSequence(%x) {keepdims=0} : seq<f32[10]>
          %u = Neg(%r) : f32[10]
          %v = SequenceAt(%rows, %n) : f32[10]
        }
        """,
    )


def test_a_list_whose_pieces_runtimes_differ_about_stays(check_golden):
    """Of one size for all, ONNX Runtime drops the dim where that is 1; ONNX's text keeps it."""
    text = """
        graph @g(%x: f32[2, 3]) -> (%y) opset 18 {
          %one = constant : i64[] 1
          %first = constant : i64[] 0
          %s = SplitToSequence(%x, %one) {axis=1, keepdims=0} : seq<f32[2, 1]>
          %y = SequenceAt(%s, %first) : f32[2, 1]
        }
        """
    check_golden("fold-constants,dce", text, text)


def test_weights_stay_whole(check_golden):
    text = """
        graph @g(%x: f32[2, 4]) -> (%y, %z) opset 21 {
          %w = constant : f32[3, 4] [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
          %q = constant : i8[2, 2] [[1, 2], [3, 4]]
          %t = Transpose(%w) {perm=[1, 0]} : f32[4, 3]
          %c = Cast(%q) {to=1} : f32[2, 2]
          %y = MatMul(%x, %t) : f32[2, 3]
          %z = Relu(%c) : f32[2, 2]
        }
        """
    check_golden("fold-constants", text, text)


def test_what_folding_made_is_no_weight(rewritten):
    text = rewritten(
        "fold-constants,dce",
        """
        graph @g(%x: f32[3, 3]) -> (%y) opset 21 {
          %shape = constant : i64[2] [3, 3]
          %ones = ConstantOfShape(%shape) {value=tensor(f32[1] [1.0])} : ?
          %mask = Trilu(%ones) {upper=0} : ?
          %y = Add(%x, %mask) : ?
        }
        """,
    )
    assert "%mask = constant : f32[3, 3] [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]" in text


def test_results_over_the_limit_stay(rewritten):
    text = """
        graph @g() -> (%y) opset 21 {
          %shape = constant : i64[1] [1000]
          %y = ConstantOfShape(%shape) : f32[1000]
        }
        """
    assert "ConstantOfShape" in rewritten("fold-constants{max-bytes=3999}", text)
    assert "ConstantOfShape" not in rewritten("fold-constants{max-bytes=4000}", text)


def test_random_numbers_are_never_folded(check_golden):
    text = """
        graph @g() -> (%y, %z, %d) opset 21 {
          %a = constant : f32[2] [0.5, 0.5]
          %ratio = constant : f32[] 0.5
          %train = constant : bool[] true
          %y = RandomNormal() {shape=[2]} : f32[2]
          %z = Bernoulli(%a) : f32[2]
          %d = Dropout(%a, %ratio, %train) : f32[2]
        }
        """
    check_golden("fold-constants", text, text)


def test_annotated_constants_stay():
    module = parse_module(
        """
        graph @g() -> (%y) opset 21 {
          %b = constant : f32[2] [1.0, 2.0] from "bias"
          %y = Neg(%b) : f32[2]
        }
        """
    )
    module.shard("bias", [None])
    assert not FoldConstants().run(module).changed


def test_a_known_branch_is_taken(check_golden):
    check_golden(
        "fold-constants,dce",
        """
        graph @g(%x: f32[2, 3]) -> (%y) opset 21 {
          %zero = constant : i64[] 0
          %two = constant : i64[] 2
          %s = Shape(%x) : i64[2]
          %n = Gather(%s, %zero) : ?
          %c = Equal(%n, %two) : ?
          %y = If(%c) {then_branch=graph @t() -> (%t) {
            %k = constant : f32[] 3.0
            %m = Mul(%x, %k) : ?
            %u = Shape(%m) : ?
            %t = Expand(%m, %u) : ?
          }, else_branch=graph @e() -> (%e) {
            %e = Neg(%x) : ?
          }} : ? from "/if"
        }
        """,
        """
        graph @g(%x: f32[2, 3]) -> (%t as "y") opset 21 {
          %k = constant : f32[] 3.0
          %u = constant : i64[2] [2, 3]
          %m = Mul(%x, %k) : f32[2, 3]
          %t = Expand(%m, %u) : f32[2, 3] as "y"
        }
        """,
    )


def test_bodies_are_folded_with_what_holds_in_every_trip(rewritten):
    text = rewritten(
        "fold-constants,dce",
        """
        graph @g(%x: f32[1, 4]) -> (%last) opset 21 {
          %trips = constant : i64[] 3
          %go = constant : bool[] true
          %axis = constant : i64[] 1
          %last = Loop(%trips, %go, %x) {body=graph @b(%i: ?, %c: ?, %v: ?) -> (%c2, %v2) {
            %c2 = Identity(%c) : ?
            %s = Shape(%v) : ?
            %width = Gather(%s, %axis) : ?
            %tail = Shape(%x) {start=1} : ?
            %w = Expand(%v, %tail) : ?
            %v2 = Concat(%w, %x) {axis=0} : ?
          }} : ?
        }
        """,
    )
    assert "%s = Shape(%v) : i64[2]" not in text  # unused, so dce takes it
    assert "%tail = constant : i64[1] [4]" in text
    assert "f32[_, 4]" in text


def test_larger_nodes_share_one_session(monkeypatch, check_numbers):
    sessions = []
    real = evaluate._run_onnxruntime
    monkeypatch.setattr(evaluate, "_run_onnxruntime", lambda model: sessions.append(model) or real(model))
    module = check_numbers(
        """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[100,100] x) => (float[100,100] y) <int64[2] shape = {100, 100}, float two = {2.0}> {
          ones = ConstantOfShape<value = float[1] {1.0}>(shape)
          twos = Mul(ones, two)
          roots = Sqrt(twos)
          y = Mul(x, roots)
        }
        """,
        "fold-constants,dce",
        {"x": np.full((100, 100), 3, np.float32)},
    )
    assert len(sessions) == 1
    assert len(module.graph) == 1
    assert [value.name for value in module.graph.constants] == ["roots"]


def test_what_onnxruntime_cannot_compute_the_reference_does():
    module = parse_module(
        """
        graph @g() -> (%y) opset 21 {
          %shape = constant : i64[2] [100, 100]
          %a = ConstantOfShape(%shape) {value=tensor(bf16[1] [1.5])} : bf16[100, 100]
          %y = Mul(%a, %a) : bf16[100, 100]
        }
        """
    )
    FoldConstants().run(module)
    (y,) = module.graph.outputs
    assert y.data is not None
    assert float(y.data.numpy()[3, 4]) == 2.25


def test_what_nothing_can_compute_stays():
    module = parse_module(
        """
        graph @g() -> (%y) opset 21 {
          %data = constant : f32[2] [1.0, 2.0]
          %at = constant : i64[1] [7]
          %y = Gather(%data, %at) : f32[1]
        }
        """
    )
    FoldConstants().run(module)
    assert [node.op_type for node in module.graph] == ["Gather"]


@pytest.mark.parametrize(
    "body",
    [
        "s = Shape(x)\n n = Gather<axis=0>(s, i)\n r = Range(zero, n, one)\n f = Cast<to=1>(r)\n y = Mul(f, f)",
        "s = Shape(x)\n n = ConstantOfShape<value = int64[1] {-1}>(rank)\n e = Equal(s, n)\n w = Where(e, n, s)\n"
        " y = Expand(x, w)",
        "s = Shape<start=1>(x)\n c = Concat<axis=0>(s, two)\n z = Size(x)\n q = Cast<to=1>(c)\n y = Sqrt(q)",
        "nz = NonZero(two)\n t = Tile(nz, reps)\n y = ReduceSum<keepdims=0>(t)",
    ],
)
def test_numbers_stay_the_same(check_numbers, body):
    header = """
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[3,4] x) => (OUT y) <int64 i = {1}, int64 zero = {0}, int64 one = {1}, int64[2] two = {3, 4},
                                     int64[2] reps = {2, 2}, int64[1] rank = {2}> {
    """
    dtype = "int64" if "NonZero" in body else "float"
    text = header.replace("OUT", f"{dtype}[N]" if "Expand" not in body else "float[N, M]") + body + "\n}"
    if "NonZero" in body:
        text = text.replace("int64[N] y", "int64 y")
    model = onnx.parser.parse_model(text)
    module = check_numbers(model, "fold-constants,cse,dce", {"x": np.arange(12, dtype=np.float32).reshape(3, 4)})
    assert isinstance(module, Module)
    assert not any(node.op_type in ("Shape", "Range", "NonZero", "Where") for node in module.graph)


def test_what_is_empty_is_not_joined(check_golden):
    # Rotary embeddings of all features: exporters cut off the rest, which is empty, and join it again.
    check_golden(
        "fold-constants,dce",
        """
        graph @g(%x: f32[2, 8], %z: f32[2, 4]) -> (%y, %w, %e) opset 21 {
          %start = constant : i64[1] [8]
          %end = constant : i64[1] [99]
          %axes = constant : i64[1] [1]
          %rest = Slice(%x, %start, %end, %axes) : f32[2, 0]
          %more = Neg(%rest) : f32[2, 0]
          %y = Concat(%x, %more) {axis=1} : f32[2, 8]
          %w = Concat(%rest, %z, %x) {axis=1} : f32[2, 12]
          %e = Concat(%rest, %more) {axis=1} : f32[2, 0]
        }
        """,
        """
        graph @g(%x: f32[2, 8], %z: f32[2, 4]) -> (%y, %w, %e) opset 21 {
          %e = constant : f32[2, 0] []
          %y = Identity(%x) : f32[2, 8]
          %w = Concat(%z, %x) {axis=1} : f32[2, 12]
        }
        """,
    )


def test_a_list_of_sizes_joined_with_nothing_is_folded(check_golden):
    # unflatten of a last dim, as PyTorch exports it: what follows the dim in the shape is empty.
    check_golden(
        "fold-constants,dce",
        """
        graph @g(%x: f32[5, 4, 6]) -> (%y) opset 21 {
          %shape = Shape(%x) : i64[3]
          %zero = constant : i64[1] [0]
          %last = constant : i64[1] [2]
          %after = constant : i64[1] [3]
          %end = constant : i64[1] [99]
          %three = constant : i64[2] [3, 2]
          %before = Slice(%shape, %zero, %last) : i64[2]
          %rest = Slice(%shape, %after, %end) : i64[0]
          %sizes = Concat(%before, %three, %rest) {axis=0} : i64[4]
          %y = Reshape(%x, %sizes) : f32[_, _, _, _]
        }
        """,
        """
        graph @g(%x: f32[5, 4, 6]) -> (%y) opset 21 {
          %sizes = constant : i64[4] [5, 4, 3, 2]
          %y = Reshape(%x, %sizes) : f32[5, 4, 3, 2]
        }
        """,
    )


def test_a_node_with_too_few_operands_is_left_to_who_checks_nodes(check_golden):
    text = """
        graph @g(%x: i64[2]) -> (%y) opset 21 {
          %c = constant : i64[2] [1, 2]
          %t = Add(%c) : i64[2]
          %y = Neg(%t) : i64[2]
        }
        """
    check_golden("fold-constants", text, text)
