"""Sums stay in parts through runs of linear operators, as long as something smaller follows."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import irpar
from irpar.analysis.completion.node_placement import rule_view
from irpar.analysis.cost.network import BYTES
from irpar.passes.complete_sharding.choice_memory import alike_nodes

from .golden import check, read, run

HEAD = """
mesh @m = ["tp"=4]
graph @g(%r: f32[16, 8, 64@tp]) -> (%NAME) opset 21 {
  %w = constant : f32[64@tp, 32] data("w.bin", 0, 8192)
"""
FREE = HEAD.replace("NAME", "y")
SCATTERED = HEAD.replace("NAME", 'y_1 as "y"')
PRODUCT = "  %o = MatMul(%r, %w) : f32[16, 8, 32]"
DOC = 'doc "MatMul of %o sums over tp, which shards %r and %w"'
SCATTER = f"""
  %y_1 = irpar.ReduceScatter(%y) {{axes=["tp"], dim=0, reduce="sum", id=0}} : f32[16@tp, 32] {DOC}
}}
"""
PIPELINE = "complete-sharding,insert-redistribution"


def test_a_sum_is_scaled_before_it_is_reduced() -> None:
    constants = """  %half = constant : f32[]WHOLE 0.5
  %one = constant : i64[1]WHOLE [1]
"""
    before = f"""{FREE}{constants.replace("WHOLE", "")}{PRODUCT}
  %p = Mul(%o, %half) : f32[16, 8, 32]
  %y = ReduceSum(%p, %one) {{keepdims=0}} : f32[16, 32]
}}
"""
    after = f"""{SCATTERED}{constants.replace("WHOLE", " replicated")}{PRODUCT} partial(sum: tp)
  %p = Mul(%o, %half) : f32[16, 8, 32] partial(sum: tp)
  %y = ReduceSum(%p, %one) {{keepdims=0}} : f32[16, 32] partial(sum: tp){SCATTER}"""
    check(PIPELINE, before, after)


def test_a_bias_counts_once_beside_parts() -> None:
    """Of the sum one row in eight is read."""
    constants = """  %b = constant : f32[32]WHOLE data("w.bin", 8192, 128)
  %zero = constant : i64[]WHOLE 0
"""
    before = f"""{FREE}{constants.replace("WHOLE", "")}{PRODUCT}
  %p = Add(%o, %b) : f32[16, 8, 32]
  %y = Gather(%p, %zero) {{axis=1}} : f32[16, 32]
}}
"""
    once = "Add of %p takes it beside parts over tp, so that it counts once"
    told = f'%b_1 = irpar.MakePartial(%b) {{axes=["tp"], reduce="sum"}} : f32[32] partial(sum: tp) doc "{once}"'
    after = f"""{SCATTERED}{constants.replace("WHOLE", " replicated")}{PRODUCT} partial(sum: tp)
  {told}
  %p = Add(%o, %b_1) : f32[16, 8, 32] partial(sum: tp)
  %y = Gather(%p, %zero) {{axis=1}} : f32[16, 32] partial(sum: tp){SCATTER}"""
    check(PIPELINE, before, after)


def test_a_sum_is_weighed_by_gates_before_it_is_reduced() -> None:
    before = f"""{FREE.replace("tp])", "tp], %x: f32[16, 8])")}  %one = constant : i64[1] [1]
{PRODUCT}
  %s = Softmax(%x) : f32[16, 8]
  %g = Unsqueeze(%s, %one) : f32[16, 1, 8]
  %p = MatMul(%g, %o) : f32[16, 1, 32]
  %y = Squeeze(%p, %one) : f32[16, 32]
}}
"""
    reduced = f"""irpar.ReduceScatter(%p) {{axes=["tp"], dim=0, reduce="sum", id=0}} : f32[16@tp, 1, 32] {DOC}"""
    after = f"""{FREE.replace("tp])", "tp], %x: f32[16, 8] replicated)")}  %one = constant : i64[1] replicated [1]
{PRODUCT} partial(sum: tp)
  %s = Softmax(%x) : f32[16, 8] replicated
  %g = Unsqueeze(%s, %one) : f32[16, 1, 8] replicated
  %p = MatMul(%g, %o) : f32[16, 1, 32] partial(sum: tp)
  %p_1 = {reduced}
  %y = Squeeze(%p_1, %one) : f32[16@tp, 32]
}}
"""
    check(PIPELINE, before, after)


def test_where_the_other_factor_may_be_infinite_a_sum_is_reduced_first() -> None:
    """Parts of different signs times infinity add up to no number."""
    text = f"""{FREE.replace("tp])", "tp], %x: f32[16, 1, 8])")}{PRODUCT}
  %g = Exp(%x) : f32[16, 1, 8]
  %y = MatMul(%g, %o) : f32[16, 1, 32]
}}
"""
    assert not run(PIPELINE, text).graph.names.table["y"].sharding.partial  # type: ignore[union-attr]


TAILS = {
    "scaled, summed": "p = Mul (o, half) y = ReduceSum <keepdims = 0> (p, one)",
    "bias, row": "p = Add (o, b) y = Gather <axis = 1> (p, zero)",
    "bias, scaled, halves": "p = Sub (b, o) q = Mul (p, half) t = Transpose <perm = [1, 0, 2]> (q) y = Slice (t, lo, one)",
    "gates": "p = Softmax (gates) y = MatMul (p, o)",
    "gates of experts": "p = Softmax (gates) k, i = TopK (p, two) j = Transpose <perm = [0, 2, 1]> (i) q = GatherND <batch_dims = 1> (o, j) "
    "t = Transpose <perm = [0, 2, 1]> (k) m = Mul (q, t) y = ReduceSum <keepdims = 0> (m, one)",
    "shares": "p = Sigmoid (gates) q = ReduceSum <keepdims = 1> (p, last) k = Div (p, q) "
    'y = Einsum <equation = "bij,bjd->bd"> (k, o)',
    "bias that is looked up": "i = ArgMax <axis = 2, keepdims = 0> (x) e = Gather (table, i) p = Add (o, e) "
    "y = ReduceSum <keepdims = 0> (p, one)",
    "scattered": 'y = ScatterElements <axis = 1, reduction = "add"> (data, places, o)',
    "bias, scattered": 'p = Add (o, b) y = ScatterND <reduction = "add"> (rows, at, p)',
    "narrower weights": "p = MatMul (o, v) y = Add (p, c)",
}


def model(tail: str) -> onnx.ModelProto:
    random = np.random.default_rng(5)
    made = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (float[16, 8, 32] x, float[16, 1, 8] gates) => (float y) '
        f"{{ h = MatMul (x, w) r = Relu (h) o = MatMul (r, u) {tail} }}"
    )
    floats = {
        "w": (32, 64),
        "u": (64, 32),
        "b": (32,),
        "v": (32, 4),
        "c": (4,),
        "data": (16, 4, 32),
        "rows": (4, 8, 32),
        "table": (32, 32),
    }
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in floats.items()}
    arrays["half"] = np.asarray(0.5, np.float32)
    arrays |= {
        "zero": np.asarray(0),
        "one": np.asarray([1]),
        "lo": np.asarray([0]),
        "two": np.asarray([2]),
        "last": np.asarray([-1]),
    }
    arrays["places"] = random.integers(0, 4, (16, 8, 32))
    arrays["at"] = random.integers(0, 4, (16, 1))
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_what_comes_out_is_what_onnxruntime_gives(tail: str) -> None:
    """One reduction, of what is smaller than the sum; the second weight is sharded like the first."""
    proto = model(tail)
    module = irpar.load(proto)
    irpar.annotate(module, {"w": [None, "tp"]})
    partition = irpar.partition(module, "tp=4")
    assert partition.plan.totals["collectives"] == 1
    assert partition.plan.totals["sent_bytes"] < 16 * 8 * 32 * 4 * 3 // 4
    random = np.random.default_rng(6)
    feeds = {
        "x": random.standard_normal((16, 8, 32)).astype(np.float32),
        "gates": random.standard_normal((16, 1, 8)).astype(np.float32),
    }
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, feeds)
    np.testing.assert_allclose(partition.run(feeds)["y"], expected, rtol=1e-3, atol=1e-3)


def test_what_is_scattered_to_counts_once_beside_parts_over_several_axes() -> None:
    """Updates are in parts over tp, and of each of two devices along dp half."""
    proto = model(TAILS["scattered"])
    module = irpar.load(proto)
    irpar.annotate(module, {"x": [None, "dp", None], "w": [None, "tp"]})
    partition = irpar.partition(module, "dp=2,tp=2")
    kinds = {axis for each in partition.plan.collectives for axis in each["axes"]}
    assert kinds == {"dp", "tp"}
    assert partition.verify().result == "equal"


@pytest.mark.parametrize("annotated", [["tp", None, None], [None, None, "tp"]], ids=["experts", "inner"])
def test_experts_that_are_looked_up_for_each_token_are_reduced_behind_their_gates(annotated: list[str | None]) -> None:
    """Beside their biases, and also where the weights are annotated otherwise than they are then sharded."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (float[16, 32] x) => (float[16, 32] y) {
          s = MatMul(x, r)  k, i = TopK(s, two)  g = Softmax(k)
          e = Gather(w1, i)  b = Gather(b1, i)  t = Unsqueeze(x, one)  t3 = Unsqueeze(t, one)
          m = MatMul(t3, e)  n = Squeeze(m, two)  h = Add(n, b)  f = Relu(h)  f3 = Unsqueeze(f, two)
          d = Gather(w2, i)  c = Gather(b2, i)  o = MatMul(f3, d)  q = Squeeze(o, two)  a = Add(q, c)
          u = Unsqueeze(g, two)  v = Mul(a, u)  z = ReduceSum<keepdims = 0>(v, one)  y = Add(x, z) }"""
    )
    random = np.random.default_rng(3)
    shapes = {"r": (32, 4), "w1": (4, 32, 96), "b1": (4, 96), "w2": (4, 96, 32), "b2": (4, 32)}
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays |= {"one": np.asarray([1]), "two": np.asarray([2])}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    module = irpar.load(proto)
    irpar.annotate(module, {"w1": annotated})
    partition = irpar.partition(module, "tp=4")
    ((kind, sent),) = ((each["kind"], each["bytes"]) for each in partition.plan.collectives)
    assert (kind, sent) == ("reduce_scatter", 16 * 32 * 4)
    x = random.standard_normal((16, 32)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(partition.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("order", [1, -1])
def test_gates_and_other_factors_of_their_shape(order: int) -> None:
    """What is known of products with gates does not hold for those that look alike: one of the others is infinite."""
    nodes = ["a = MatMul(s, o)", "b = MatMul(g, o)"][::order]
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[16, 8, 32] x, float[16, 1, 8] g) => (float[16, 1, 32] a, float[16, 1, 32] b) {{
      h = MatMul(x, w1)  r = Relu(h)  o = MatMul(r, w2)  s = Softmax(g)  {"  ".join(nodes)}
    }}"""
    random = np.random.default_rng(0)
    made = onnx.parser.parse_model(text)
    for name, shape in (("w1", (32, 64)), ("w2", (64, 32))):
        made.graph.initializer.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name))
    gates = random.normal(size=(16, 1, 8)).astype(np.float32)
    gates[0, 0, 0] = -np.inf
    inputs = {"x": random.normal(size=(16, 8, 32)).astype(np.float32), "g": gates}
    expected = onnxruntime.InferenceSession(made.SerializeToString()).run(None, inputs)
    module = irpar.load(made)
    irpar.annotate(module, {"w1": [None, "tp"]})
    for found, wanted in zip(irpar.partition(module, "tp=4").run(inputs).values(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, 1e-4, 1e-4)


def test_what_is_known_of_biases_that_are_looked_up_holds_for_no_others() -> None:
    """Both are of the same shapes; what is computed on each device would count as often as there are devices."""
    known = []
    for bias in ("Gather(%t, %i) : f32[8, 4]", "Relu(%p) : f32[8, 4]"):
        graph = read(
            f"""
            mesh @m = ["tp"=4]
            graph @g(%o: f32[8, 4], %p: f32[8, 4], %i: i64[8]) -> (%y) opset 21 {{
              %t = constant : f32[6, 4] data("w.bin", 0, 96)
              %e = {bias}
              %y = Add(%o, %e) : f32[8, 4]
            }}
            """
        )
        view = rule_view(graph.graph.outputs[0].node, graph.mesh)
        known.append(alike_nodes(view, view.none_free, None, BYTES))
    assert known[0] is not known[1]


def test_parts_through_many_diamonds_are_planned_in_no_time() -> None:
    """As many ways lead back to the product as 2 to the power of the gates."""
    gates = "  ".join(f"g{n} = Mul(y{n}, h)  y{n + 1} = Add(y{n}, g{n})" for n in range(60))
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[4, 6] x, float[4, 4] s) => (float[4, 1] z) <int64[1] one = {{1}}> {{
      h = Sigmoid(s)  y0 = MatMul(x, w)  {gates}  z = ReduceSum(y60, one)
    }}"""
    made = onnx.parser.parse_model(text)
    made.graph.initializer.append(numpy_helper.from_array(np.ones((6, 4), np.float32), "w"))
    module = irpar.load(made)
    irpar.annotate(module, {"w": ["tp", None]})
    assert irpar.partition(module, "tp=2").plan.totals["collectives"] == 1
