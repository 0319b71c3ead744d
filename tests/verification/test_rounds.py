"""Inputs that reach what was partitioned: branches, trips, and what is told of those that nothing reaches."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import irpar
from irpar.verification import Verification
from tests.written import model_of_text

W = "float[8,8] w"


def partitioned(folder: Path, text: str, opset: int = 21, mesh: str = "tp=2", **integers: Any) -> irpar.Partition:
    onnx.save(model_of_text(text, ("w",), integers, opset), folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    module.shard("w", ["tp", None])
    return irpar.partition(module, mesh)


def missed(verified: Verification) -> list[tuple[str, str]]:
    return [(body.holder, body.attribute) for body in verified.not_run]


BRANCHES = (
    "<then_branch = a () => (float[4,8] u) { u = MatMul(x, w) }, else_branch = b () => (float[4,8] v) { v = Neg(x) }>"
)

REACHED = {
    "an integer that is compared with a number": f"""g (float[4,8] x, {W}, int64 sr) => (float[4,8] y)
      <int64 k = {{16000}}> {{ q = Equal(sr, k)  y = If(q) {BRANCHES} }}""",
    "an integer in a range": f"""g (float[4,8] x, {W}, int32[1] n) => (float[4,8] y)
      <int32 low = {{700}}, int32 high = {{710}}> {{ s = Squeeze(n)  a = Greater(s, low)  b = Less(s, high)
      q = And(a, b)  y = If(q) {BRANCHES} }}""",
    "a text": f"""g (float[4,8] x, {W}, string lang) => (float[4,8] y)
      <string k = {{"en"}}> {{ q = Equal(lang, k)  y = If(q) {BRANCHES} }}""",
    "a truth value": f"g (float[4,8] x, {W}, bool p) => (float[4,8] y) {{ y = If(p) {BRANCHES} }}",
    "many truth values": f"""g (float[4,8] x, {W}, bool[64] p) => (float[4,8] y) <int64 n = {{64}}> {{
      i = Cast<to=7>(p)  s = ReduceSum<keepdims=0>(i)  q = Equal(s, n)  y = If(q) {BRANCHES} }}""",
    "the sign of a sum": f"""g (float[4,8] x, {W}) => (float[4,8] y) <float z = {{0}}> {{
      s = ReduceSum<keepdims=0>(x)  q = Greater(s, z)  y = If(q) {BRANCHES} }}""",
    "a far threshold": f"""g (float[4,8] x, {W}) => (float[4,8] y) <float far = {{250}}> {{
      s = ReduceMax<keepdims=0>(x)  q = Greater(s, far)  y = If(q) {BRANCHES} }}""",
}


@pytest.mark.parametrize("name", REACHED)
def test_both_branches_run(name: str, tmp_path: Path) -> None:
    verified = partitioned(tmp_path, REACHED[name]).verify()
    assert verified.result == "equal"
    assert len(verified.bodies) == 2
    assert "2 runs" in verified.inputs


def test_loops_run_0_1_and_more_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = partitioned(
        tmp_path,
        f"""g (float[4,8] x, {W}, int64 n, bool on) => (float[4,8] y) {{
          y = Loop(n, on, x) <body = b (int64 i, bool c, float[4,8] s) => (bool d, float[4,8] z) {{
            d = Identity(c)  z = MatMul(s, w) }}> }}""",
    )
    executor = made.executor()
    plain, trips = executor.run, set()

    def watched(inputs: Any, *, fetch: Any = (), check_replicas: bool = False) -> dict[str, Any]:
        trips.add(min(int(inputs["n"]) * int(inputs["on"]), 2))
        return plain(inputs, fetch=fetch)

    monkeypatch.setattr(executor, "run", watched)
    assert made.verify().result == "equal"
    assert trips == {0, 1, 2}


TWO_OF_FIVE = f"""g (float[4,8] x, {W}, bool p, bool q, int64 n) => (float[4,8] y) <bool on = {{1}}> {{
  a = If(p) {BRANCHES}
  b = If(q) <then_branch = c () => (float[4,8] r) {{ r = Exp(a) }}, else_branch = d () => (float[4,8] t) {{ t = Abs(a) }}>
  y = Loop(n, on, b) <body = e (int64 i, bool c, float[4,8] s) => (bool d, float[4,8] z) {{
    d = Identity(c)  z = MatMul(s, w) }}> }}"""


def test_branches_that_given_inputs_do_not_reach_are_told(tmp_path: Path) -> None:
    made = partitioned(tmp_path, TWO_OF_FIVE)
    verified = made.verify()
    assert (verified.result, missed(verified)) == ("equal", [])
    given = {"p": np.array(True), "q": np.array(False), "n": np.array(2)}
    verified = made.verify(given)
    assert verified.result == "equal, but"
    assert missed(verified) == [("a", "else_branch"), ("b", "then_branch")]
    assert verified.but == (
        "2 of 5 branches and loop bodies did not run: else_branch of If a (1 node); then_branch of If b (1 node)",
    )
    assert verified
    verified = made.verify({**given, "n": np.array(0)})
    assert missed(verified)[-1] == ("y", "body")
    with pytest.raises(irpar.IrparError, match="not all was compared"):
        verified.check(strict=True)


def test_a_branch_that_no_input_reaches_is_told(tmp_path: Path) -> None:
    # No square is negative; irpar cannot know.
    made = partitioned(
        tmp_path,
        f"""g (float[4,8] x, {W}) => (float[4,8] y) <float z = {{0}}> {{
          m = Mul(x, x)  s = ReduceSum<keepdims=0>(m)  q = Less(s, z)  y = If(q) {BRANCHES} }}""",
    )
    verified = made.verify()
    assert verified.result == "equal, but"
    assert verified.but == ("1 of 2 branches did not run: then_branch of If y (1 node)",)


def test_branches_that_passes_took_out_do_not_have_to_run(tmp_path: Path) -> None:
    made = partitioned(
        tmp_path,
        f"""g (float[4,8] x, {W}) => (float[4,8] y) <int64 four = {{4}}> {{
          s = Shape<start=0, end=1>(x)  d = Squeeze(s)  q = Equal(d, four)  y = If(q) {BRANCHES} }}""",
    )
    verified = made.verify()
    assert (verified.result, verified.bodies) == ("equal", ())


def test_bodies_in_bodies_and_in_functions(tmp_path: Path) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21, "my": 1]>
      g (float[4,8] x, {W}, bool p, int64 n) => (float[4,8] y) <bool on = {{1}}> {{
        h = my.F(x, p)  a = MatMul(h, w)
        y = Loop(n, on, a) <body = e (int64 i, bool c, float[4,8] s) => (bool d, float[4,8] z) {{
          d = Identity(c)  k = CastLike(i, n)  f = Equal(k, n)
          z = If(f) <then_branch = t () => (float[4,8] zt) {{ zt = Neg(s) }},
                     else_branch = o () => (float[4,8] ze) {{ ze = Abs(s) }}> }}> }}
      <domain: "my", opset_import: ["": 21]> F (v, p) => (r) {{
        r = If(p) <then_branch = ft () => (float[4,8] rt) {{ rt = Neg(v) }},
                   else_branch = fe () => (float[4,8] re) {{ re = Abs(v) }}> }}"""
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    del model.graph.input[1]
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("w", ["tp", None])
    verified = irpar.partition(module, "tp=2").verify()
    assert len(verified.bodies) == 5
    # A trip's number is below the number of trips.
    assert missed(verified) == [("z", "then_branch")]


def test_wide_integers_give_way_to_what_the_original_takes(tmp_path: Path) -> None:
    # Nobody can tell what bounds i: twice i is an index, less 2 in places.
    made = partitioned(
        tmp_path,
        f"""g (float[4,8] x, {W}, int64[5] i, float[4] t) => (float[4,8] y, float[5] z) {{
          y = MatMul(x, w)  j = Mul(i, i)  z = Gather(t, j) }}""",
    )
    assert made.verify().result == "equal"


def test_an_output_of_nans_tells_nothing(tmp_path: Path) -> None:
    made = partitioned(
        tmp_path,
        f"g (float[4,8] x, {W}) => (float[4,8] y) {{ m = MatMul(x, w)  n = Abs(m)  o = Neg(n)  y = Log(o) }}",
    )
    verified = made.verify()
    assert verified.result == "equal, but"
    assert verified.but == ("y: it is all NaN on these inputs, which tells nothing of it",)


def test_a_profile_that_ends_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irpar.verification.reached._MOST_EVENTS", 5)
    verified = partitioned(tmp_path, REACHED["a truth value"]).verify()
    assert verified.result == "equal, but"
    assert verified.but[0].startswith("which branches and loop bodies ran cannot be told: ONNX Runtime's profile ends")


def test_scans_and_sequence_maps_have_bodies(tmp_path: Path) -> None:
    made = partitioned(
        tmp_path,
        f"""g (float[4,8] x, {W}, bool p) => (float[4,8] y) <float[8] zero = {{0,0,0,0,0,0,0,0}}> {{
          h = MatMul(x, w)
          l, y = Scan<num_scan_inputs=1, body = b (float[8] s, float[8] r) => (float[8] t, float[8] o) {{
            t = Add(s, r)
            o = If(p) <then_branch = a () => (float[8] u) {{ u = Neg(t) }}, else_branch = e () => (float[8] v) {{ v = Abs(t) }}>
          }}>(zero, h) }}""",
    )
    verified = made.verify()
    assert (verified.result, len(verified.bodies)) == ("equal", 3)
    assert missed(made.verify({"p": np.array(True)})) == [("o", "else_branch")]
