"""inline-functions: bodies take the place of calls, with attributes, names and scopes; refusals."""

import numpy as np
import pytest

from irpar.ir import Function, Graph, Module
from irpar.ir.text.files import parse_module
from irpar.passes.inline_functions import InlineError, InlineFunctions


def test_a_call_becomes_its_body_with_attributes_and_provenance(check_golden):
    check_golden(
        "inline-functions",
        """
        function @my.Scale(%p, %bias) -> (%q) attributes {axis, slope=0.5} opset 21 {
          %k = constant : f32[] 3.0
          %s = Softmax(%p) {axis=ref("axis", int)} : ? from "soft"
          %l = LeakyRelu(%s) {alpha=ref("slope", float)} : ?
          %q = Clip(%l, %bias, %k) : ?
        }
        graph @g(%x: f32[2, 4]) -> (%y) opset 21, "my" 1 {
          %a = call @my.Scale(%x) {axis=0, slope=0.25} : f32[2, 4] from "/a"
          %y = call @my.Scale(%a, _) {axis=1} : f32[2, 4]
        }
        """,
        """
        graph @g(%x: f32[2, 4]) -> (%y) opset 21, "my" 1 {
          %k = constant : f32[] 3.0
          %k_1 = constant : f32[] 3.0
          %s = Softmax(%x) {axis=0} : ? from "/a/soft" as "/a/s"
          %l = LeakyRelu(%s) {alpha=0.25} : ? from "/a" as _
          %a = Clip(%l, _, %k) : f32[2, 4] from "/a"
          %s_1 = Softmax(%a) {axis=1} : ? from "soft" as "s"
          %l_1 = LeakyRelu(%s_1) {alpha=0.5} : ?
          %y = Clip(%l_1, _, %k_1) : f32[2, 4]
        }
        """,
    )


def test_functions_in_functions_and_calls_in_branches(check_numbers):
    module = check_numbers(
        """
        <ir_version: 10, opset_import: ["" : 21, "my" : 1]>
        g (float[3] x, bool c) => (float[3] y) {
          y = If (c) <
            then_branch = t () => (float[3] t1) { t1 = my.Outer<power=3.0>(x) },
            else_branch = e () => (float[3] e1) { e1 = my.Inner<power=2.0>(x) }>
        }
        <domain: "my", opset_import: ["" : 21, "my" : 1]>
        Outer <power>(a) => (b) {
          h = my.Inner<power: float = @power>(a)
          b = my.Inner<power = 2.0>(h)
        }
        <domain: "my", opset_import: ["" : 21]>
        Inner <power>(a) => (b) {
          p = Constant<value_float: float = @power>()
          positive = Greater(a, p)
          any = Cast<to = 9>(a)
          first = ReduceMax<keepdims = 0>(a)
          big = Greater(first, p)
          b = If (big) <
            then_branch = big () => (r1) { r1 = Pow(a, p) },
            else_branch = small () => (r2) { r2 = Add(a, p) }>
        }
        """,
        "inline-functions,infer-types,fold-constants,dce",
        {"x": np.array([1, 2, 2.5], np.float32), "c": np.array(True)},
    )
    assert not module.functions
    assert not any(node.callee for graph in module.all_graphs() for node in graph)


def test_scope_phase_and_place_come_from_the_call():
    module = parse_module(
        """
        function @my.F(%p) -> (%q) opset 21 {
          %q = Neg(%p) : ?
        }
        graph @g(%x: f32[2]) -> (%y) opset 21, "my" 1 {
          %y = call @my.F(%x) {| phase=backward, stage=2} : f32[2]
        }
        """
    )
    (call,) = module.graph
    call.scope = "model/layer"
    (inner,) = next(iter(module.functions.values())).graph
    inner.scope = "act"
    InlineFunctions().run(module)
    (node,) = module.graph
    assert (node.scope, node.phase, node.stage) == ("model/layer/act", "backward", 2)


TWO = """
function @my.F(%p) -> (%q) opset 21 {{
  %q = {body} : ?
}}
function @my.G(%p) -> (%q) opset 21 {{
  %q = call @my.F(%p) : ?
}}
graph @g(%x: f32[2]) -> (%z) opset 21, "my" 1 {{
  %y = call @my.G(%x) : f32[2]
  %z = call @my.F(%y) : f32[2]
}}
"""


@pytest.mark.parametrize("only", ["F", "my.F", "*.F"])
def test_only_the_named_functions_are_opened(rewritten, only):
    text = rewritten(f"inline-functions{{only=[{only}]}}", TWO.format(body="Neg(%p)"))
    assert "@my.F" not in text
    assert "%y = call @my.G(%x)" in text
    assert "%z = Neg(%y)" in text


def test_a_function_that_gives_back_its_operand(rewritten):
    text = rewritten(
        "inline-functions",
        """
        function @my.Same(%p) -> (%p) opset 21 {
        }
        graph @g(%x: f32[2]) -> (%y) opset 21, "my" 1 {
          %y = call @my.Same(%x) : f32[2]
        }
        """,
    )
    assert '-> (%x as "y")' in text


def test_recursion_is_refused():
    f, g = Function("my", "F", Graph("F")), Function("my", "G", Graph("G"))
    for function, other in ((f, g), (g, f)):
        operand = function.graph.add_input("p")
        function.graph.append(other.call([operand], results=0))
    module = Module(opsets={"": 21})
    module.functions = {f.key: f, g.key: g}
    with pytest.raises(InlineError, match=r"in a circle: my\.[FG] -> my\.[GF] -> my\.[FG]"):
        InlineFunctions().run(module)


def versions(function_opset, body):
    return parse_module(
        f"""
        function @my.F(%p) -> (%q) opset {function_opset} {{
          %q = {body} : ?
        }}
        graph @g(%x: f32[2]) -> (%y) opset 21, "my" 1 {{
          %y = call @my.F(%x) : f32[2]
        }}
        """
    )


def test_an_op_that_means_the_same_in_both_opsets_is_opened():
    module = versions(17, "Relu(%p)")
    InlineFunctions().run(module)
    assert [node.version for node in module.graph] == [21]


def test_an_op_that_changed_between_the_opsets_is_refused():
    with pytest.raises(InlineError, match=r"my.F follows opset 17 of ai.onnx, its caller 21; ReduceMean is not known"):
        InlineFunctions().run(versions(17, "ReduceMean(%p)"))


def test_overloads_are_told_apart(check_numbers):
    check_numbers(
        """
        <ir_version: 10, opset_import: ["" : 21, "my" : 1]>
        g (float[3] x) => (float[3] y) {
          a = my.F:one(x)
          y = my.F:two(a)
        }
        <domain: "my", overload: "one", opset_import: ["" : 21]>
        F (a) => (b) { b = Neg(a) }
        <domain: "my", overload: "two", opset_import: ["" : 21]>
        F (a) => (b) { b = Exp(a) }
        """,
        "inline-functions",
        {"x": np.array([1, 2, 3], np.float32)},
    )
