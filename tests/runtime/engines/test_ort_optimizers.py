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
