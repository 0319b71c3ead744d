"""Optimizers of ONNX Runtime that would give wrong numbers do not run, of partitions and of the original."""

import numpy as np
import onnx
import onnx.parser
import pytest

import irpar

TEXTS = {
    "a matrix": "g (float[4, 6] a, float[4] b) => (float[6] y) { t = Transpose<perm = [1, 0]>(a)  y = MatMul(t, b) }",
    "several": "g (float[3, 4, 6] a, float[4] b) => (float[3, 6] y) { t = Transpose<perm = [0, 2, 1]>(a)  y = MatMul(t, b) }",
    "in a branch": """g (float[4, 6] a, float[4] b, bool c) => (float[6] y) {
        y = If(c) <then_branch = p () => (float[6] q) { t = Transpose<perm = [1, 0]>(a)  q = MatMul(t, b) },
                   else_branch = r () => (float[6] s) { u = Transpose<perm = [1, 0]>(a)  v = MatMul(u, b)  s = Neg(v) }> }""",
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_transposed_matrix_times_a_vector(case: str) -> None:
    """Of ONNX Runtime 1.32 the product of a and b as they lie, without a word: verify found that equal."""
    module = irpar.load(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {TEXTS[case]}'))
    random = np.random.default_rng(0)
    partition = irpar.partition(module, "x=1")
    feeds = {
        spec.name: np.array(True) if spec.name == "c" else random.standard_normal(spec.shape).astype(np.float32)
        for spec in partition.executor().inputs
    }
    wanted = np.swapaxes(feeds["a"], -1, -2) @ feeds["b"]
    for engine in ("ort", "numpy"):
        np.testing.assert_allclose(partition.run(feeds, engine=engine)["y"], wanted, rtol=1e-5, atol=1e-6)
        assert partition.verify(feeds, engine=engine).largest < 1e-5


QUANTIZED = """<ir_version: 10, opset_import: ["": 20]>
g (float[4, 16] x) => (float[4, 16] y) <float first = {0.06}, float second = {0.05}, int8 zero = {0}> {
  a = QuantizeLinear(x, first, zero)  b = DequantizeLinear(a, first, zero)
  d = QuantizeLinear(b, second, zero)  y = DequantizeLinear(d, second, zero) }"""


def test_pairs_of_quantisers_one_behind_the_other() -> None:
    """As they are once a Split between them is taken out: ONNX Runtime leaves one pair, of other steps."""
    partition = irpar.partition(irpar.load(onnx.parser.parse_model(QUANTIZED)), "x=1")
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    steps = np.float32(0.06), np.float32(0.05)
    wanted = x
    for step in steps:
        wanted = np.clip(np.rint(wanted / step), -128, 127).astype(np.float32) * step
    for engine in ("ort", "numpy"):
        np.testing.assert_allclose(partition.run({"x": x}, engine=engine)["y"], wanted, atol=1e-6)


def test_a_weight_with_scales_and_zero_points_of_rows() -> None:
    """ONNX Runtime makes a product of integers of it, which takes those of columns alone, and refuses to run it."""
    made = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        g (float[4, 3] x, int8[3, 2] w) => (float[4, 2] y)
        <float[3] s = {0.1, 0.2, 0.3}, int8[3] z = {1, 2, 3}, float t = {0.05},
         uint8 u = {128}> {
          q = QuantizeLinear(x, t, u)  p = DequantizeLinear(q, t, u)  d = DequantizeLinear<axis = 0>(w, s, z)
          y = MatMul(p, d) }"""
    )
    partition = irpar.partition(irpar.load(made), "x=1")
    assert partition.verify(engine="ort").result == "equal"


def test_a_turned_weight_with_scales_of_its_rows() -> None:
    made = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        g (float[4, 3] x, int8[2, 3] w) => (float[4, 2] y)
        <float[3] s = {0.1, 0.2, 0.3}, int8[3] z = {1, 2, 3}, float t = {0.05}, uint8 u = {128}> {
          q = QuantizeLinear(x, t, u)  p = DequantizeLinear(q, t, u)  d = DequantizeLinear<axis = 1>(w, s, z)
          e = Transpose<perm = [1, 0]>(d)  y = MatMul(p, e) }"""
    )
    assert irpar.partition(irpar.load(made), "x=1").verify(engine="ort").result == "equal"
