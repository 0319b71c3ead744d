"""infer-types: operator definitions, ONNX's inference, control flow, calls; wrong declarations and refusals."""

import pytest

from irpar.analysis.types.inference import Inference
from irpar.analysis.types.type_merge import TypeInferenceError, common, fits, merge
from irpar.ir import UNKNOWN, DType, SequenceType, TensorType, symbol
from irpar.ir.text.files import parse_module
from irpar.ops import OpDef, define, definitions
from irpar.ops.op_def import DEFINITIONS
from irpar.passes.infer_types import InferTypes


def types_after(text):
    module = parse_module(text)
    result = InferTypes().run(module)
    return {value.name: str(value.type) for graph in module.all_graphs() for value in graph.values()}, result


def f32(*dims):
    return TensorType(DType.F32, dims)


def test_types_flow_in_one_sweep_symbols_included(check_golden):
    check_golden(
        "infer-types",
        """
        graph @g(%x: f32[batch, 4, 8]) -> (%y) opset 21 {
          %w = constant : f32[8, 2] data("w", 0, 64)
          %h = MatMul(%x, %w) : ?
          %t = Transpose(%h) {perm=[0, 2, 1]} : ?
          %y = Softmax(%t) : ?
        }
        """,
        """
        graph @g(%x: f32[batch, 4, 8]) -> (%y) opset 21 {
          %w = constant : f32[8, 2] data("w", 0, 64)
          %h = MatMul(%x, %w) : f32[batch, 4, 2]
          %t = Transpose(%h) {perm=[0, 2, 1]} : f32[batch, 2, 4]
          %y = Softmax(%t) : f32[batch, 2, 4]
        }
        """,
    )


def test_onnx_infers_what_irpar_does_not_define():
    types, _ = types_after(
        """
        graph @g(%x: f32[2, n, 6], %i: i64[1, 2]) -> (%y) opset 21 {
          %k = constant : i64[1] [3]
          %a, %b = TopK(%x, %k) {axis=-1} : ?, ?
          %y = GatherND(%a, %i) : ?
        }
        """
    )
    assert types["a"] == "f32[2, n, 3]"
    assert types["b"] == "i64[2, n, 3]"
    assert types["y"] == "f32[1, 3]"


def test_stale_symbols_give_way_to_numbers_and_numbers_fill_what_cannot_be_inferred():
    types, result = types_after(
        """
        graph @g(%x: f32[2, 8]) -> (%y) opset 21, "my" 1 {
          %a = Relu(%x) : f32[stale, 8]
          %b = my.Op(%a) : f32[7, 9]
          %y = Neg(%b) : ?
        }
        """
    )
    assert types["a"] == "f32[2, 8]"
    assert types["b"] == types["y"] == "f32[7, 9]"
    assert result.notes == (
        "warning: no engine can run my.Op (node Op of %b): neither ONNX Runtime nor irpar's kernels know it",
    )


def test_a_wrong_declared_shape_is_replaced_with_a_note_that_names_both():
    types, result = types_after("graph @g(%x: f32[2, 8]) -> (%y) opset 21 {\n  %y = Relu(%x) : f32[3, 8]\n}")
    assert types["y"] == "f32[2, 8]"
    assert result.notes == ("%y of Relu of %y is declared f32[3, 8], but is f32[2, 8]",)
    assert result.statistics["contradictions"] == 1


def test_a_wrong_declared_dtype_is_refused():
    with pytest.raises(TypeInferenceError, match=r"%y is declared i64\[2\], but Relu produces f32\[2\]"):
        types_after("graph @g(%x: f32[2]) -> (%y) opset 21 {\n  %y = Relu(%x) : i64[2]\n}")


def test_operands_that_do_not_fit_are_refused_with_their_types():
    with pytest.raises(TypeInferenceError) as error:
        types_after("graph @g(%x: f32[2, 8], %w: f32[7, 3]) -> (%y) opset 21 {\n  %y = MatMul(%x, %w) : ?\n}")
    message = str(error.value)
    assert "the operands of MatMul do not fit" in message
    assert "operand %x : f32[2, 8]" in message
    assert "operand %w : f32[7, 3]" in message


def test_branches_are_merged():
    types, _ = types_after(
        """
        graph @g(%x: f32[4, 8], %z: f32[5, 8], %c: bool[]) -> (%y) opset 21 {
          %y = If(%c) {then_branch=graph @t() -> (%t) {
            %t = Relu(%x) : ?
          }, else_branch=graph @e() -> (%e) {
            %e = Neg(%z) : ?
          }} : ?
        }
        """
    )
    assert types["t"] == "f32[4, 8]"
    assert types["y"] == "f32[_, 8]"


LOOP = """
graph @g(%x: f32[1, 4]) -> (%last, %all) opset 21 {{
  %trips = constant : i64[] 3
  %go = constant : bool[] true
  %last, %all = Loop(%trips, %go, %x) {{body=graph @b(%i: ?, %c: ?, %v: ?) -> (%c2, %v2, %s) {{
    %c2 = Identity(%c) : ?
    %r = Relu(%v) : ?
    %v2 = {step} : ?
    %s = Neg(%r) : ?
  }}}} : ?, ?
}}
"""


def test_a_loop_gives_carried_and_collected_types():
    types, _ = types_after(LOOP.format(step="Exp(%r)"))
    assert (types["i"], types["c"], types["v"]) == ("i64[]", "bool[]", "f32[1, 4]")
    assert types["last"] == "f32[1, 4]"
    assert types["all"] == "f32[3, 1, 4]"


def test_a_carried_dim_that_grows_is_unknown_everywhere_in_the_body():
    types, result = types_after(LOOP.format(step="Concat(%r, %x) {axis=0}"))
    assert types["v"] == types["r"] == types["s"] == "f32[_, 4]"
    assert types["last"] == "f32[_, 4]"
    assert types["all"] == "f32[3, _, 4]"
    assert not result.notes


def test_a_loop_whose_condition_is_computed_has_an_unknown_trip_count():
    text = LOOP.format(step="Exp(%r)").replace("%c2 = Identity(%c)", "%c2 = Not(%c)")
    types, _ = types_after(text)
    assert types["all"] == "f32[_, 1, 4]"


def test_scan_moves_axes():
    types, _ = types_after(
        """
        graph @g(%h: f32[4], %x: f32[4, 7]) -> (%last, %ys) opset 21 {
          %last, %ys = Scan(%h, %x) {body=graph @b(%s: ?, %e: ?) -> (%s2, %o) {
            %s2 = Add(%s, %e) : ?
            %o = Neg(%s2) : ?
          }, num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[-1]} : ?, ?
        }
        """
    )
    assert types["e"] == "f32[4]"
    assert types["last"] == "f32[4]"
    assert types["ys"] == "f32[4, 7]"


def test_calls_are_inferred_with_their_operands_and_attributes():
    types, _ = types_after(
        """
        function @my.Turn(%p) -> (%q) attributes {perm} opset 21 {
          %q = Transpose(%p) {perm=ref("perm", ints)} : ?
        }
        graph @g(%x: f32[2, 3, 4]) -> (%a, %b) opset 21, "my" 1 {
          %a = call @my.Turn(%x) {perm=[1, 0, 2]} : ?
          %b = call @my.Turn(%a) {perm=[2, 1, 0]} : ?
        }
        """
    )
    assert types["a"] == "f32[3, 2, 4]"
    assert types["b"] == "f32[4, 2, 3]"
    assert types["q"] == "?"


def test_merge_takes_the_more_specific_dims():
    batch = symbol("batch")
    assert merge(f32(8, None, batch), f32(batch, 64, 16)) == f32(8, 64, 16)
    assert merge(f32(batch, None), f32(None, batch)) == f32(batch, batch)
    assert merge(f32(2), f32(3)) == f32(2)
    assert merge(UNKNOWN, f32(3)) == f32(3)
    assert merge(TensorType(DType.F32, None), f32(3)) == f32(3)
    assert merge(SequenceType(f32(None)), SequenceType(f32(3))) == SequenceType(f32(3))


def test_fits_and_common():
    assert fits(f32(2, None), f32(None, 3))
    assert not fits(f32(2), f32(2, 2))
    assert common([f32(2, 3), f32(2, 4)]) == f32(2, None)
    assert common([f32(2), f32(2, 4)]) == TensorType(DType.F32, None)
    with pytest.raises(TypeInferenceError):
        common([f32(2), TensorType(DType.I64, (2,))])


def test_a_loop_that_starts_with_an_optional_keeps_the_declared_result():
    types, _ = types_after(
        """
        graph @g(%n: i64[], %x: optional<seq<f32[2]>>) -> (%last) opset 21 {
          %last = Loop(%n, _, %x) {body=graph @b(%i: ?, %c: ?, %v: optional<seq<f32[2]>>) -> (%c, %w) {
            %w = SequenceEmpty() {dtype=1} : seq<f32[*]>
          }} : seq<f32[2]>
        }
        """
    )
    assert types["last"] == "seq<f32[2]>"


def test_a_baked_target_shape_that_does_not_fit_is_refused():
    module = parse_module(
        """
        graph @g(%x: f32[4, 256, 6, 6]) -> (%y) opset 21 {
          %s = constant : i64[2] [1, 9216]
          %y = Reshape(%x, %s) : ?
        }
        """
    )
    with pytest.raises(
        TypeInferenceError, match=r"Reshape of f32\[4, 256, 6, 6\] \(36864 elements\) to f32\[1, 9216\]"
    ):
        InferTypes().run(module)


def test_equal_nodes_ask_once_and_lists_that_are_computed_are_looked_for(monkeypatch):
    asked = []
    ask = Inference._asked
    monkeypatch.setattr(Inference, "_asked", lambda self, node: asked.append(node.op_type) or ask(self, node))
    types, _ = types_after(
        """
        graph @g(%x: f32[2, 3, 4], %z: f32[4, 3, 2]) -> (%y, %u, %v) opset 21 {
          %w1 = constant : f32[4, 5] data("w", 0, 80)
          %w2 = constant : f32[4, 5] data("w", 80, 80)
          %a = MatMul(%x, %w1) : ?
          %b = MatMul(%x, %w2) : ?
          %y = Add(%a, %b) : ?
          %s = Shape(%x) : ?
          %t = Shape(%z) : ?
          %u = Reshape(%x, %s) : ?
          %v = Reshape(%x, %t) : ?
        }
        """
    )
    assert asked == ["MatMul", "Add", "Shape", "Shape", "Reshape", "Reshape"]
    assert [types[name] for name in "yuv"] == ["f32[2, 3, 5]", "f32[2, 3, 4]", "f32[4, 3, 2]"]


def test_types_that_another_package_infers_are_asked_of_each_node(monkeypatch):
    asked = []

    def infer(node):
        asked.append(node.result.name)
        return [node.inputs[0].type]

    definitions()
    made = define(OpDef("", "OfAnother", infer=infer))
    del DEFINITIONS["", "OfAnother"]
    monkeypatch.setitem(DEFINITIONS, ("", "OfAnother"), made)
    types_after(
        """
        graph @g(%x: f32[2]) -> (%y, %z) opset 21 {
          %y = OfAnother(%x) : ?
          %z = OfAnother(%x) : ?
        }
        """
    )
    assert asked == ["y", "z"]


def test_equal_types_become_one_object():
    module = parse_module(
        """
        graph @g(%x: f32[2, 3], %z: f32[2, 3]) -> (%y, %u) opset 21 {
          %a = Relu(%x) : f32[2, 3]
          %y = Add(%a, %z) : ?
          %u = Transpose(%y) {perm=[1, 0]} : f32[3, 2]
        }
        """
    )
    InferTypes().run(module)
    types = {value.name: value.type for value in module.graph.values()}
    assert types["x"] is types["z"] is types["a"] is types["y"]
    assert [str(types[name]) for name in "xu"] == ["f32[2, 3]", "f32[3, 2]"]
