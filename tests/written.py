"""Small models in ONNX's text form, with seeded weights and inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.parser

import irpar

from .random_programs import Program, Spec


def model_of_text(
    text: str, weights: Sequence[str] = (), integers: Mapping[str, Any] | None = None, opset: int = 18
) -> onnx.ModelProto:
    """The model of a graph in ONNX's text form.

    Args:
        text: the graph; weights stand among its inputs.
        weights: inputs that become initializers of seeded normals, scaled by the root of their first dim.
        integers: further int64 initializers by name.
        opset: of ai.onnx.
    """
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')
    kept = []
    for index, value in enumerate(model.graph.input):
        if value.name not in weights:
            kept.append(value)
            continue
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        numbers = np.random.default_rng(index).standard_normal(shape).astype(np.float32)
        numbers /= np.sqrt(shape[0] if len(shape) > 1 else 1)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, value.name))
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for name, numbers in (integers or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(numbers, np.int64), name))
    return model


Specs = dict[str, Spec]


@dataclass(frozen=True)
class Written:
    """A program in ONNX's text form.

    Attributes:
        text: the graph; its weights stand among its inputs.
        weights: their names.
        integers: int64 initializers by name.
        below: integer inputs, and what their elements stay below.
    """

    text: str
    weights: tuple[str, ...] = ()
    integers: dict[str, Any] = field(default_factory=dict)
    below: dict[str, int] = field(default_factory=dict)

    def program(self, mesh: irpar.Mesh, specs: Specs) -> Program:
        """With a mesh, annotations, and seeded inputs."""
        model = model_of_text(self.text, self.weights, self.integers)
        rng = np.random.default_rng(0)
        inputs: dict[str, Any] = {}
        for value in model.graph.input:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            if value.name in self.below:
                inputs[value.name] = rng.integers(0, self.below[value.name], shape)
            else:
                inputs[value.name] = rng.standard_normal(shape).astype(np.float32)
        return Program(model, mesh, specs, inputs)


PROGRAMS = {
    "matmul": Written(
        """g (float[10,12] x, float[12,14] w1, float[14] b, float[14,6] w2) => (float[10,6] y) {
          p = MatMul(x, w1)  h = Add(p, b)  a = Relu(h)  y = MatMul(a, w2) }""",
        ("w1", "b", "w2"),
    ),
    "attention": Written(
        """g (float[3,5,12] x, float[12,12] wq, float[12,12] wk, float[12,12] wv, float[12,12] wo)
          => (float[3,5,12] y) {
          q0 = MatMul(x, wq)  q1 = Reshape(q0, heads)  q = Transpose<perm=[0,2,1,3]>(q1)
          k0 = MatMul(x, wk)  k1 = Reshape(k0, heads)  k = Transpose<perm=[0,2,3,1]>(k1)
          v0 = MatMul(x, wv)  v1 = Reshape(v0, heads)  v = Transpose<perm=[0,2,1,3]>(v1)
          s = MatMul(q, k)  p = Softmax<axis=-1>(s)  c = MatMul(p, v)
          c1 = Transpose<perm=[0,2,1,3]>(c)  c2 = Reshape(c1, merged)  y = MatMul(c2, wo) }""",
        ("wq", "wk", "wv", "wo"),
        {"heads": [0, 0, 6, 2], "merged": [0, 0, 12]},
    ),
    "conv": Written(
        """g (float[3,6,9,7] x, float[10,6,3,3] w, float[10] b) => (float[3,10,1,1] y, float[3,10,9,7] z) {
          c = Conv<pads=[1,1,1,1]>(x, w, b)  z = Relu(c)  y = GlobalAveragePool(z) }""",
        ("w", "b"),
    ),
    "reduce": Written(
        """g (float[5,7,6] x, float[1,7,1] scale, float[6] shift) => (float[5,7,6] n, float[5,6] t) {
          m = ReduceMean(x, last)  d = Sub(x, m)  e = Mul(d, scale)  n = Add(e, shift)
          t = ReduceMax<keepdims=0>(n, middle) }""",
        ("scale", "shift"),
        {"last": [-1], "middle": [1]},
    ),
    "reshape": Written(
        """g (float[6,20] x, float[1,4] gate) => (float[5,24] y) {
          a = Reshape(x, apart)  t = Transpose<perm=[1,0,2]>(a)  s = Mul(t, gate)  y = Reshape(s, together) }""",
        ("gate",),
        {"apart": [6, 5, 4], "together": [5, 24]},
    ),
    "gather": Written(
        """g (int64[3,5] ids, float[11,6] table, float[1,5,6] position) => (float[3,5,6] y, float[3,2,6] z) {
          e = Gather(table, ids)  y = Add(e, position)  z = Gather<axis=1>(y, chosen) }""",
        ("table", "position"),
        {"chosen": [3, 0]},
        {"ids": 11},
    ),
}
