"""Models of bfloat16, which ONNX Runtime has no kernels of: verified beside the same in float32."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import irpar
from irpar.ir import ArrayTensor
from irpar.verification import original
from irpar.verification.original import VerificationError
from irpar.verification.widened import widen_model

NOTE = "ONNX Runtime, which has no CPU kernels of bfloat16, ran the original in float32"


def narrow(*shape: int) -> np.ndarray:
    numbers = np.random.default_rng(sum(shape)).standard_normal(shape) / 4
    return numbers.astype(ml_dtypes.bfloat16)


def perceptron() -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (bfloat16[8, 16] x) => (bfloat16[8, 4] y, float[8, 4] z) {
          h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, u)  z = Cast<to = 1>(y) }"""
    )
    made.graph.initializer.extend(
        [numpy_helper.from_array(narrow(16, 32), "w"), numpy_helper.from_array(narrow(32, 4), "u")]
    )
    return made


def partitioned(model: onnx.ModelProto | str | Path) -> irpar.Partition:
    module = irpar.load(model)
    irpar.annotate(module, {"w": [None, "tp"], "u": ["tp", None]})
    return irpar.partition(module, "tp=2")


def test_results_are_judged_by_the_rounding_of_bfloat16() -> None:
    found = partitioned(perceptron()).verify(engine="numpy")
    assert found.result == "equal"
    assert NOTE in found.notes


def test_what_is_wrong_by_more_is_found() -> None:
    partition = partitioned(perceptron())
    for graph in partition.module.graphs:
        weight = next(value for value in graph.constants if value.source_name == "u")
        numbers = weight.data.numpy().copy()
        numbers[3] *= ml_dtypes.bfloat16(1.5)
        weight.data = ArrayTensor(numbers)
    found = partition.verify(engine="numpy")
    assert found.result == "different"


def test_a_model_that_is_narrow_inside_alone() -> None:
    made = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (float[8, 16] x) => (float[8, 4] y)
        { a = Cast<to = 16>(x)  b = Cast<to = 16>(w)  p = MatMul(a, b)  y = Cast<to = 1>(p) }"""
    )
    made.graph.initializer.append(numpy_helper.from_array(narrow(16, 4).astype(np.float32), "w"))
    assert irpar.partition(irpar.load(made), "x=1").verify(engine="numpy").result == "equal"


def test_weights_beside_the_model(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(perceptron(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    partition = partitioned(path)
    partition.save(tmp_path / "out")
    assert irpar.Partition.open(tmp_path / "out").verify(engine="numpy").result == "equal"


def test_a_model_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original, "_MOST_IN_MEMORY", 1000)
    with pytest.raises(VerificationError, match=r"in float32 the weights are more than 2 GB") as caught:
        partitioned(perceptron()).verify(engine="numpy")
    assert "verify a float32 version of the model" in caught.value.do


def test_all_that_names_the_type_is_widened() -> None:
    """Bodies, constants, attributes, sequences, functions."""
    made = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (bfloat16[4] x, bool c) => (seq(bfloat16[4]) s, bfloat16[4] y) {
          k = Cast<to = 16>(c)  a = f.twice(x)  n = ConstantOfShape(four)
          b = If(c) <then_branch = t () => (bfloat16[4] p) { p = Mul(a, k) },
                     else_branch = e () => (bfloat16[4] q) { q = Sub(a, n) }>
          s = SequenceConstruct(b)  y = Add(b, w) }
        <domain: "f", opset_import: ["": 18]> twice (x) => (y) { two = Cast<to = 16>(one)  y = Mul(x, two)  one = Constant<value = float {2}>() }"""
    )
    made.functions[0].node.insert(0, made.functions[0].node.pop())
    made.graph.initializer.extend(
        [numpy_helper.from_array(narrow(4), "w"), numpy_helper.from_array(np.array([4]), "four")]
    )
    filled = next(node for node in made.graph.node if node.op_type == "ConstantOfShape")
    filled.attribute.append(
        onnx.helper.make_attribute("value", numpy_helper.from_array(np.full(1, 2, ml_dtypes.bfloat16)))
    )
    widen_model(made)
    onnx.checker.check_model(made, full_check=True)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    x = np.arange(4, dtype=np.float32)
    for condition, wanted in ((True, 2 * x), (False, 2 * x - 2)):
        listed, y = session.run(None, {"x": x, "c": np.array(condition)})
        np.testing.assert_array_equal(listed[0], wanted)
        np.testing.assert_array_equal(y, wanted + narrow(4).astype(np.float32))
