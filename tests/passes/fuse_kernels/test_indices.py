"""fuse-kernels: halves that are turned and one-hot rows are indices."""

from typing import Any

import numpy as np
import onnx
import pytest

from irpar.onnx_io import to_module, to_proto

from ..golden import read, run_pipeline
from .texts import computed, graph

ROTARY = {
    "slices": (
        "%first = Slice(%x, %zero, %four, %last) : f32[64, 4]",
        "%second = Slice(%x, %four, %eight, %last) : f32[64, 4]",
    ),
    "split": ("%first, %second = Split(%x) {axis=-1, num_outputs=2} : f32[64, 4], f32[64, 4]",),
}


@pytest.mark.parametrize("cut", sorted(ROTARY))
def test_halves_that_are_turned_are_an_index(cut: str) -> None:
    takes = "%x: f32[64, 8], %cos: f32[64, 8], %sin: f32[64, 8]"
    ints = (
        f"%{name} = constant : i64[1] [{value}]"
        for name, value in {"zero": 0, "four": 4, "eight": 8, "last": 1}.items()
    )
    text = graph(
        *ints,
        *ROTARY[cut],
        "%negated = Neg(%second) : f32[64, 4]",
        "%turned = Concat(%negated, %first) {axis=-1} : f32[64, 8]",
        "%a = Mul(%x, %cos) : f32[64, 8]",
        "%b = Mul(%turned, %sin) : f32[64, 8]",
        "%y = Add(%a, %b) : f32[64, 8]",
        takes=takes,
    )
    module, plain = read(text), read(text)
    run_pipeline("fuse-kernels", module)
    (node,) = module.graph
    assert node.attributes["expression"] == (
        "t0 = RotateHalf(x0)",
        "t1 = Mul(x0, x1)",
        "t2 = Mul(t0, x2)",
        "y0 = Add(t1, t2)",
    )
    inputs = [np.random.default_rng(place).normal(size=(64, 8)).astype("f4") for place in range(3)]
    np.testing.assert_array_equal(computed(module, inputs)[0], computed(plain, inputs)[0])
    model = to_proto(module)
    onnx.checker.check_model(model, full_check=True)
    again = computed(to_module(model), inputs)
    np.testing.assert_array_equal(again[0], computed(plain, inputs)[0])


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("values", [(0.0, 1.0), (-0.5, 2.0)])
def test_one_hot_rows_are_an_index(axis: int, values: tuple[float, float]) -> None:
    shape = [64, 3]
    shape.insert(axis % 3, 5)
    sizes = ", ".join(map(str, shape))
    text = graph(
        "%depth = constant : i64[] 5",
        f"%values = constant : f32[2] {list(values)}",
        f"%hot = OneHot(%i, %depth, %values) {{axis={axis}}} : f32[{sizes}]",
        f"%y = Sub(%x, %hot) : f32[{sizes}]",
        takes=f"%i: i64[64, 3], %x: f32[{sizes}]",
    )
    module, plain = read(text), read(text)
    run_pipeline("fuse-kernels", module)
    assert [node.op_type for node in module.graph] == ["Fused"]
    random = np.random.default_rng(0)
    inputs = [random.integers(-5, 5, (64, 3)), random.normal(size=shape).astype("f4")]
    np.testing.assert_allclose(computed(module, inputs)[0], computed(plain, inputs)[0], rtol=1e-6)
    model = to_proto(module)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(computed(to_module(model), inputs)[0], computed(plain, inputs)[0], rtol=1e-6)


@pytest.mark.parametrize("values", [(-np.inf, 0.0), (-1e9, 1.0)])
def test_one_hot_values_that_no_step_leads_to_stay(rewritten: Any, values: tuple[float, float]) -> None:
    lines = (
        "%depth = constant : i64[] 8",
        f"%values = constant : f32[2] [{', '.join(map(repr, values))}]",
        "%hot = OneHot(%i, %depth, %values) {axis=-1} : f32[64, 8]",
        "%y = Add(%hot, %x) : f32[64, 8]",
    )
    assert "OneHot(%i" in rewritten("fuse-kernels", graph(*lines, takes="%i: i64[64], %x: f32[64, 8]"))
