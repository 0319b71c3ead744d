"""Which bodies run on which draw, as ONNX Runtime's profile tells."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import irpar
from irpar.verification import Original
from irpar.verification.reached import Control, ProfileError, _by_draw, _Calls, _End
from passes.inline_functions import InlineFunctions
from tests.written import model_of_text


def control(model: onnx.ModelProto) -> Control:
    module = irpar.onnx_io.to_module(model)
    return Control(Original.of_module(module), [module.graph])


# Only n = 4 is a shape that p can have: what refuses others is needed to tell which branch runs.
PARTICULAR = """g (float[4,8] x, bool[4] p, int64[1] n) => (float[4,8] y) {
  r = Reshape(p, n)  i = Cast<to=7>(r)  m = ReduceMax<keepdims=0>(i)  q = Cast<to=9>(m)
  y = If(q) <then_branch = a () => (float[4,8] u) { u = Neg(x) },
             else_branch = b () => (float[4,8] v) { v = Abs(x) }> }"""


def draw(condition: bool, shape: int, batch: int = 4) -> dict[str, Any]:
    return {
        "x": np.ones((batch, 8), np.float32),
        "p": np.full(batch, condition),
        "n": np.array([shape], np.int64),
    }


def test_counts_belong_to_the_draws_that_gave_them() -> None:
    # Every other draw fails in a node, and one does not get past the checks of the inputs.
    found = control(model_of_text(PARTICULAR, (), {}, 21)).counts(
        [draw(True, 4), draw(True, 3), draw(False, 4), draw(False, 3), draw(True, 4, batch=5), draw(True, 4)]
    )
    assert found == [(1, 0), None, (0, 1), None, None, (1, 0)]


def test_a_profile_of_other_runs_is_refused() -> None:
    ends = [_End.DONE, _End.REFUSED, _End.IN_A_NODE, _End.REFUSED, _End.DONE]
    counts = [(number,) for number in range(5)]
    assert _by_draw(counts, ends) == [(0,), None, None, None, (4,)]
    assert _by_draw(counts[:3], ends) == [(0,), None, None, None, (2,)]
    for runs in (0, 2, 4):
        with pytest.raises(ProfileError, match=f"has {runs} runs of 3"):
            _by_draw(counts[:runs], ends)


CALLS = """<ir_version: 10, opset_import: ["": 21, "my": 1]>
g (float[4,8] x, bool p, bool q) => (float[4,8] y) {
  a = Exp(x)
  h = my.G(a, p)
  y = If(q) <then_branch = t () => (float[4,8] zt) { [in] k = my.F(h, p)  zt = Neg(k) },
             else_branch = o () => (float[4,8] ze) { [alone] ze = my.F(h, p) }> }
<domain: "my", opset_import: ["": 21, "my": 1]> G (v, p) => (r) { [first] s = my.F(v, p)  r = Abs(s) }
<domain: "my", opset_import: ["": 21]> F (v, p) => (r) {
  i = If(p) <then_branch = ft () => (float[4,8] rt) { rt = Neg(v) },
             else_branch = fe () => (float[4,8] re) { re = Abs(v) }>
  r = Identity(i) }
<domain: "my", opset_import: ["": 21]> Unused (v, p) => (r) {
  i = If(p) <then_branch = ut () => (float[4,8] rt) { rt = Neg(v) },
             else_branch = ue () => (float[4,8] re) { re = Abs(v) }>
  r = Identity(i) }"""


def test_functions_that_bodies_and_functions_call(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(CALLS)
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("x", ["tp", None])
    made = irpar.partition(module, "tp=2")
    found = Control(Original.of_module(irpar.onnx_io.to_module(model)), [part.graph for part in made.executor().parts])
    # Not those of the function that nothing calls. The result of a call in a body or function has the path before it.
    names = ("in/i", "alone/i", "first/i")
    assert [body.results for body in found.bodies][:2] == [("y",)] * 2
    assert [set(body.results) for body in found.bodies][2:] == [set(names)] * 2
    x = np.ones((4, 8), np.float32)
    given = [{"x": x, "p": np.array(p), "q": np.array(q)} for p, q in ((True, True), (False, False))]
    # F is called by G too. A branch that only calls a function is reported as others are.
    assert found.counts(given) == [(1, 0, 2, 0), (0, 1, 0, 2)]
    verified = made.verify()
    assert (verified.result, len(verified.bodies)) == ("equal", 4)


def test_the_path_of_calls_stands_before_a_name() -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "my": 1]>
      g (float[4,8] x) => (float[4,8] y, float[4,8] z) { [a] y = my.H(x)  [b] z = my.G(x) }
      <domain: "my", opset_import: ["": 21, "my": 1]> H (v) => (r) { [c] r = my.G(v) }
      <domain: "my", opset_import: ["": 21, "my": 1]> G (v) => (r) { [d] s = my.F(v)  r = Abs(s) }
      <domain: "my", opset_import: ["": 21]> F (v) => (r) { i = Neg(v)  r = Exp(i) }"""
    model = onnx.parser.parse_model(text)
    calls, functions = _Calls(model), {function.name: function for function in model.functions}
    assert sorted(calls.outside(functions["F"], "i")) == ["a/c/d/i", "b/d/i"]
    assert sorted(calls.outside(functions["F"], "r")) == ["a/c/s", "b/s"]
    assert sorted(calls.outside(functions["G"], "r")) == ["y", "z"]
    module = irpar.onnx_io.to_module(model)
    InlineFunctions().run(module)
    assert {value.source for value in module.graph.values()} == {"x", "y", "z", "a/c/d/i", "b/d/i", "a/c/s", "b/s"}


def test_a_branch_of_constants_is_counted() -> None:
    text = """g (bool q) => (float[1] y) {
      y = If(q) <then_branch = t () => (float[1] a) { a = Constant<value = float[1] {1}>() },
                 else_branch = o () => (float[1] b) { b = Constant<value = float[1] {2}>() }> }"""
    found = control(model_of_text(text, (), {}, 21))
    assert found.counts([{"q": np.array(True)}, {"q": np.array(False)}]) == [(1, 0), (0, 1)]
