"""Operators that carry partial values, proven both ways on the samples of the rules."""

from collections.abc import Iterator
from typing import get_args

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from irpar.ir import DType, Graph, Node, clone_node
from irpar.onnx_io import to_module
from irpar.ops.linear import carriers
from irpar.pass_manager import PassManager
from irpar.sharding import Reduction

from .rule_proof import REDUCTIONS, Array, Constant, Sample, run
from .samples import SAMPLES

REDUCES: tuple[Reduction, ...] = get_args(Reduction)
BOOLEAN = ("and", "or")

KEPT = {
    "a division of floats by numbers that are computed: they could be zero": {("Div", 0)},
    "a product with numbers that are computed: they could be infinite": {
        *(("Mul", 0), ("Mul", 1), ("MatMul", 0), ("MatMul", 1), ("Einsum", 0), ("Einsum", 1), ("Einsum", 2)),
        *(("Gemm", 0), ("Gemm", 1), ("Conv", 0), ("Conv", 1), ("ConvTranspose", 0), ("ConvTranspose", 1)),
        *(("com.microsoft.FusedMatMul", 0), ("com.microsoft.FusedMatMul", 1), ("com.microsoft.MatMulNBits", 0)),
        *(("com.microsoft.ComplexMul", 0), ("com.microsoft.ComplexMul", 1), ("com.microsoft.MatMulBnb4", 0)),
        *(("com.microsoft.ComplexMulConj", 0), ("com.microsoft.ComplexMulConj", 1)),
    },
    "rarely after what gives partial values, and not worth a line": {
        *(("DequantizeLinear", 1), ("Dropout", 0), ("OneHot", 2), ("RMSNormalization", 1), ("Resize", 0)),
        *(("RotaryEmbedding", 0), ("AffineGrid", 0), ("GridSample", 0), ("NegativeLogLikelihoodLoss", 0), ("STFT", 2)),
        *(("SwiGLU", 1), ("Upsample", 0), ("ai.onnx.ml.ArrayFeatureExtractor", 0), ("com.microsoft.CropAndResize", 0)),
        *(("com.microsoft.DequantizeLinear", 1), ("com.microsoft.GridSample", 0), ("com.microsoft.MatMulBnb4", 2)),
        *(("com.microsoft.RotaryEmbedding", 0), ("com.microsoft.MRotaryEmbedding", 0), ("com.microsoft.QGemm", 1)),
        *(("com.microsoft.QGemm", 4), ("com.microsoft.GatherBlockQuantized", 2), ("com.microsoft.GatedRMSNorm", 1)),
        *(("com.microsoft.BranchwiseRMSNorm", 1), ("com.microsoft.SkipSimplifiedLayerNormalization", 2)),
        ("com.microsoft.QMoE", 6),
    },
}
"""Operands that could be partial by their numbers alone, and why they may not."""


def parts_of(array: Array, reduce: Reduction) -> list[Array]:
    """Two arrays whose reduction is the array."""
    random = np.random.default_rng(array.size)
    if reduce in ("sum", "prod"):
        other = np.asarray(random.uniform(0.3, 3, array.shape), array.dtype)
        return [np.asarray(array - other), other] if reduce == "sum" else [np.asarray(array / other), other]
    if reduce in BOOLEAN:
        other = random.integers(0, 2, array.shape).astype(bool)
        return [array, array | other] if reduce == "and" else [array, array & other]
    other = np.asarray(random.uniform(0, 3, array.shape), array.dtype)
    return [array, np.asarray(array - other if reduce == "max" else array + other)]


def is_splittable(array: Array | None, reduce: Reduction) -> bool:
    if array is None or array.dtype != (bool if reduce in BOOLEAN else np.float32):
        return False
    return bool(np.isfinite(array).all())


def with_operands(sample: Sample, arrays: dict[int, Array]) -> list[Array]:
    """The results of a sample with other numbers in some operands."""
    graph = Graph("parts")
    values = {}
    feeds = {}
    for index, operand in enumerate(sample.node.operands):
        if operand is None:
            continue
        if isinstance(sample.operands[index], Constant) and index not in arrays:
            assert operand.data is not None
            values[operand] = graph.add_constant(operand.data, operand.name)
        else:
            values[operand] = graph.add_input(operand.name, operand.type)
            array = arrays.get(index, sample.arrays[index])
            assert array is not None
            feeds[values[operand].name] = array
    node = graph.append(clone_node(sample.node, values, graph.names))
    graph.set_outputs(node.results)
    return run(graph, feeds, sample.opsets)


def carries(sample: Sample, operands: tuple[int, ...], reduce: Reduction) -> bool:
    """Whether results for parts of operands are parts of the results."""
    split = {index: parts_of(array, reduce) for index in operands if (array := sample.arrays[index]) is not None}
    found = [with_operands(sample, {index: parts[part] for index, parts in split.items()}) for part in (0, 1)]
    whole = sample.whole
    reduced = [REDUCTIONS[reduce](one, other) for one, other in zip(*found, strict=True)]
    return all(
        a.shape == b.shape and np.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(reduced, whole, strict=True)
    )


def cases() -> Iterator[tuple[Sample, Reduction]]:
    for sample in SAMPLES:
        for reduce in REDUCES:
            sets = carriers(sample.node, reduce)
            if any(all(is_splittable(sample.arrays[index], reduce) for index in operands) for operands in sets):
                yield sample, reduce


@pytest.mark.parametrize(("sample", "reduce"), list(cases()), ids=str)
def test_what_is_carried_is_right(sample: Sample, reduce: Reduction) -> None:
    for operands in carriers(sample.node, reduce):
        if all(is_splittable(sample.arrays[index], reduce) for index in operands):
            assert carries(sample, operands, reduce), operands


def test_nothing_linear_is_forgotten() -> None:
    """No float operand could be partial alone, in all samples of its operator, but those that are listed or kept."""
    could: dict[tuple[str, int], bool] = {}
    for sample in SAMPLES:
        for index, array in enumerate(sample.arrays):
            if not is_splittable(array, "sum") or any(found.dtype != np.float32 for found in sample.whole):
                continue
            place = sample.operator, index
            if (index,) not in carriers(sample.node, "sum") and could.get(place, True):
                try:
                    could[place] = carries(sample, (index,), "sum")
                except Exception:  # numbers that the operator refuses
                    could[place] = False
    listed = {place for places in KEPT.values() for place in places}
    assert {place for place, works in could.items() if works} <= listed


@pytest.mark.parametrize(("to", "sets"), [(DType.F64, ((0,),)), (DType.F16, ()), (DType.I32, ())])
def test_only_a_cast_that_keeps_every_number_carries(to: DType, sets: tuple) -> None:
    node = Sample("Cast", (np.zeros(3, np.float32),), {"to": to.value}).node
    assert carriers(node, "sum") == sets


def product(gates: str, kind: str = "float") -> Node:
    """The product of o and gates, as it is read from a model."""
    made = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g ({kind}[8, 8] o, {kind}[8, 8] x, bool[8, 8] m) '
        f"=> ({kind}[8, 8] y) {{ {gates} y = Mul (o, g) }}"
    )
    dtype = np.float32 if kind == "float" else np.float16
    numbers = {"one": np.asarray([1]), "half": dtype(0.5), "less": dtype(-1), "endless": dtype(np.inf)}
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(n), name) for name, n in numbers.items())
    module = to_module(made)
    PassManager.parse("infer-types").run(module)
    node = module.graph.outputs[0].node
    assert node is not None
    return node


@pytest.mark.parametrize(
    ("gates", "is_carried"),
    [
        ("g = Softmax (x)", True),
        ("s = Sigmoid (x) g = Transpose <perm = [1, 0]> (s)", True),
        ("g = Cast <to = 1> (m)", True),
        ("s = Softmax (x) t = ReduceSum <keepdims = 1> (s, one) g = Div (s, t)", True),
        ("s = Tanh (x) t = ReduceSum <keepdims = 1> (s, one) g = Div (s, t)", False),
        ("t = ReduceSum <keepdims = 1> (x, one) g = Div (x, t)", False),
        ("s = Softmax (x) t = ReduceSum <keepdims = 1> (x, one) g = Div (s, t)", False),
        ("s = Softmax (x) t = ReduceSum <keepdims = 1> (s, one) u = Add (t, half) g = Div (s, u)", True),
        ("s = Softmax (x) t = ReduceSum <keepdims = 1> (s, one) u = Add (t, less) g = Div (s, u)", False),
        ("s = Softmax (x) t = ReduceSum <keepdims = 0> (s, one) g = Div (s, t)", False),
        ("g = Exp (x)", False),
        ("g = LogSoftmax (x)", False),
        ("g = Relu (x)", False),
        ("s = Softmax (x) g = Mul (s, half)", True),
        ("s = Softmax (x) g = Mul (s, endless)", False),
    ],
)
def test_parts_are_multiplied_with_what_is_finite(gates: str, is_carried: bool) -> None:
    """Zero divided by zero is no number either way; a sum of numbers of both signs may be zero where they are not."""
    assert ((0,) in carriers(product(gates), "sum")) == is_carried


@pytest.mark.parametrize(("number", "is_carried"), [("half", True), ("endless", False)])
def test_small_numbers_of_a_file_are_looked_at(number: str, is_carried: bool) -> None:
    node = product("g = Identity (half)")
    value = next(value for value in node.graph.constants if value.name == number)  # type: ignore[union-attr]
    node.set_operand(1, value)
    assert ((0,) in carriers(node, "sum")) == is_carried


def test_f16_may_overflow_in_parts() -> None:
    assert (0,) not in carriers(product("g = Softmax (x)", "float16"), "sum")
