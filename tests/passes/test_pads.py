"""simplify-layout: zeros around places, and places that are cut off, become the pads of convolutions and means."""

import math
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper, parser

import irpar
from irpar.onnx_io import to_module, to_proto
from tests.budget import budget

from .conftest import run_model
from .golden import body, check, read, run_pipeline


def test_zeros_before_a_convolution() -> None:
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[2, 16, 64], %w: f32[16, 16, 3]) -> (%y) opset 21 {
          %p = constant : i64[6] [0, 0, 4, 0, 0, 0]
          %a = Pad(%x, %p) : f32[2, 16, 68]
          %y = Conv(%a, %w) {dilations=[2], kernel_shape=[3]} : f32[2, 16, 64] from "/conv"
        }
        """,
        """
        graph @g(%x: f32[2, 16, 64], %w: f32[16, 16, 3]) -> (%y) opset 21 {
          %y = Conv(%x, %w) {dilations=[2], kernel_shape=[3], pads=[4, 0]} : f32[2, 16, 64] from "/conv"
        }
        """,
    )


def test_places_that_are_cut_off_a_convolution() -> None:
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[2, 16, 64], %w: f32[16, 16, 3]) -> (%z) opset 21 {
          %start = constant : i64[1] [0]
          %end = constant : i64[1] [-4]
          %axis = constant : i64[1] [2]
          %y = Conv(%x, %w) {dilations=[2], kernel_shape=[3], pads=[4, 4]} : f32[2, 16, 68] from "/conv"
          %c = Slice(%y, %start, %end, %axis) : f32[2, 16, 64] from "/chomp"
          %z = Relu(%c) : f32[2, 16, 64]
        }
        """,
        """
        graph @g(%x: f32[2, 16, 64], %w: f32[16, 16, 3]) -> (%z) opset 21 {
          %c = Conv(%x, %w) {dilations=[2], kernel_shape=[3], pads=[4, 0]} : f32[2, 16, 64] for "/conv" as "c"
          %z = Relu(%c) : f32[2, 16, 64]
        }
        """,
    )


def test_what_a_transposed_convolution_gives_too_much() -> None:
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[1, 3, 8], %w: f32[3, 2, 4]) -> (%c as "y") opset 21 {
          %start = constant : i64[1] [1]
          %end = constant : i64[1] [16]
          %axis = constant : i64[1] [2]
          %h = ConvTranspose(%x, %w) {pads=[0, 1], strides=[2]} : f32[1, 2, 17]
          %c = Slice(%h, %start, %end, %axis) : f32[1, 2, 15]
        }
        """,
        """
        graph @g(%x: f32[1, 3, 8], %w: f32[3, 2, 4]) -> (%c as "y") opset 21 {
          %c = ConvTranspose(%x, %w) {strides=[2], pads=[1, 2]} : f32[1, 2, 15]
        }
        """,
    )


def test_zeros_that_are_joined_with_the_places() -> None:
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[1, 2, 8, 8], %w: f32[4, 2, 3, 3]) -> (%y) opset 21 {
          %a = constant : f32[1, 2, 1, 8] [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
          %z = Concat(%a, %a, %x, %a) {axis=2} : f32[1, 2, 11, 8]
          %y = Conv(%z, %w) {auto_pad="SAME_UPPER"} : f32[1, 4, 11, 8]
        }
        """,
        """
        graph @g(%x: f32[1, 2, 8, 8], %w: f32[4, 2, 3, 3]) -> (%y) opset 21 {
          %y = Conv(%x, %w) {pads=[3, 1, 2, 1]} : f32[1, 4, 11, 8]
        }
        """,
    )


def test_a_mean_counts_the_zeros() -> None:
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[1, 2, 8]) -> (%y) opset 21 {
          %p = constant : i64[2] [1, 1]
          %v = constant : f32[] 0.0
          %axes = constant : i64[1] [-1]
          %a = Pad(%x, %p, %v, %axes) : f32[1, 2, 10]
          %y = AveragePool(%a) {kernel_shape=[3]} : f32[1, 2, 8]
        }
        """,
        """
        graph @g(%x: f32[1, 2, 8]) -> (%y) opset 21 {
          %y = AveragePool(%x) {kernel_shape=[3], pads=[1, 1], count_include_pad=1} : f32[1, 2, 8]
        }
        """,
    )


def test_annotations_of_what_is_cut_off_stay() -> None:
    check(
        "simplify-layout,dce",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[2, 16, 64@tp], %w: f32[16, 16, 3]) -> (%c as "y") opset 21 {
          %start = constant : i64[1] [2]
          %end = constant : i64[1] [9223372036854775807]
          %axis = constant : i64[1] [2]
          %h = Conv(%x, %w) {pads=[2, 0]} : f32[2, 16, 64]
          %c = Slice(%h, %start, %end, %axis) : f32[2, 16, 62@tp]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[2, 16, 64@tp], %w: f32[16, 16, 3]) -> (%c as "y") opset 21 {
          %c = Conv(%x, %w) {pads=[0, 0]} : f32[2, 16, 62@tp]
        }
        """,
    )


_PADDED = """
    graph @g(%x: f32[2, 4, 8], %w: f32[4, 4, 3]{more}) -> ({outputs}) opset 21 {{
      %p = constant : i64[6] {pads}
      %a = Pad(%x, %p{value}) : f32{shape}
      {body}
    }}"""


def _padded(body: str, pads: str = "[0, 0, 2, 0, 0, 0]", shape: str = "[2, 4, 10]", **other: str) -> str:
    given = {"more": "", "outputs": "%y", "value": ""} | other
    return _PADDED.format(body=body, pads=pads, shape=shape, **given)


def _cut(attributes: str, size: int, numbers: str = "[0], [-2], [2], [1]", outputs: str = "%c", left: str = "") -> str:
    starts, ends, axes, steps = numbers.split(", ")
    return f"""
        graph @g(%x: f32[2, 4, 8], %w: f32[4, 4, 3]) -> ({outputs}) opset 21 {{
          %start = constant : i64[1] {starts}
          %end = constant : i64[1] {ends}
          %axis = constant : i64[1] {axes}
          %step = constant : i64[1] {steps}
          %y = Conv(%x, %w) {attributes} : f32[2, 4, {size}]
          %c = Slice(%y, %start, %end, %axis, %step) : f32{left}
        }}"""


_CONV = "%y = Conv(%a, %w) : f32[2, 4, 8]"

UNCHANGED = {
    "another number": _padded(_CONV, value=", %v", more=", %v: f32[]"),
    "something else reads it": _padded(f"{_CONV}\n%z = Relu(%a) : f32[2, 4, 10]", outputs="%y, %z"),
    "it is a result": _padded(_CONV, outputs="%y, %a"),
    "it is annotated": 'mesh @m = ["tp"=2]' + _padded(_CONV, shape="[2, 4, 10@tp]"),
    "it is the kernel": _padded("%y = Conv(%z, %a) : f32[2, 2, 1]", more=", %z: f32[2, 4, 10]"),
    "it takes places away": _padded("%y = Conv(%a, %w) : f32[2, 4, 5]", "[0, 0, -1, 0, 0, 0]", "[2, 4, 7]"),
    "channels too": _padded(
        "%y = Conv(%a, %k) : f32[2, 4, 8]", "[0, 1, 2, 0, 0, 0]", "[2, 5, 10]", more=", %k: f32[4, 5, 3]"
    ),
    "a maximum": _padded("%y = MaxPool(%a) {kernel_shape=[3]} : f32[2, 4, 8]"),
    "a mean that does not count its own": _padded(
        "%y = AveragePool(%a) {kernel_shape=[3], pads=[0, 2]} : f32[2, 4, 10]"
    ),
    "windows of zeros alone": _padded("%y = AveragePool(%a) {kernel_shape=[2]} : f32[2, 4, 9]"),
    "windows beyond the end": _padded(
        "%y = AveragePool(%a) {ceil_mode=1, kernel_shape=[3], strides=[2]} : f32[2, 4, 5]"
    ),
    "what is repeated": _padded(_CONV).replace("(%x, %p)", '(%x, %p) {mode="edge"}'),
    "more than what is padded is cut off": _cut("{pads=[1, 1]}", 8, left="[2, 4, 6]"),
    "each second place": _cut("{pads=[2, 2]}", 10, "[0], [-2], [2], [2]", left="[2, 4, 4]"),
    "channels are cut off": _cut("{pads=[2, 2]}", 10, "[0], [-2], [1], [1]", left="[2, 2, 10]"),
    "what is cut off is read": _cut("{pads=[2, 2]}", 10, outputs="%c, %y", left="[2, 4, 8]"),
    "a stride makes more of it": _cut("{pads=[1, 1], strides=[2]}", 4, "[0], [-1], [2], [1]", left="[2, 4, 3]"),
}


@pytest.mark.parametrize("why", UNCHANGED)
def test_what_stays(why: str) -> None:
    check("simplify-layout", UNCHANGED[why], body(read(UNCHANGED[why])))


# -- numbers --------------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    """Zeros around an image, windows over it, and a part of what they give."""
    rank = draw(st.integers(1, 2))
    sizes = draw(st.lists(st.integers(7, 9), min_size=rank, max_size=rank))
    few = st.lists(st.integers(0, 3), min_size=2 * rank, max_size=2 * rank)
    kernel, strides, dilations = (
        draw(st.lists(st.integers(1, most), min_size=rank, max_size=rank)) for most in (3, 2, 2)
    )
    constants: dict[str, Any] = {"w": np.linspace(-1, 1, 6 * math.prod(kernel)).reshape(2, 3, *kernel)}
    lines = []
    pads = draw(few)
    if draw(st.booleans()):
        constants["p"] = np.asarray([0, 0, *pads[:rank], 0, 0, *pads[rank:]])
        lines.append("a = Pad(x, p)")
    else:
        axis = draw(st.integers(0, rank - 1))
        for name, count in (("before", pads[axis]), ("after", pads[axis + rank])):
            constants[name] = np.zeros([1, 3, *sizes[:axis], count, *sizes[axis + 1 :]])
        lines.append(f"a = Concat<axis={axis + 2}>(before, x, after)")
    how = f"kernel_shape={kernel}, strides={strides}"
    own = draw(few) if draw(st.booleans()) else [0] * (2 * rank)
    op = draw(st.sampled_from(["Conv", "ConvTranspose", "AveragePool"]))
    if op == "ConvTranspose":
        constants["w"] = constants["w"].reshape(3, 2, *kernel)
        lines.append(f"c = ConvTranspose<{how}, dilations={dilations}, pads={own}>(a, w)")
    elif op == "Conv":
        is_same = draw(st.booleans()) and strides == dilations == [1] * rank
        how += f", dilations={dilations}, " + ('auto_pad="SAME_LOWER"' if is_same else f"pads={own}")
        lines.append(f"c = Conv<{how}>(a, w)")
    else:
        own = [min(pad, size - 1) for pad, size in zip(own, [*kernel, *kernel], strict=True)]
        how += f", pads={own}, count_include_pad={draw(st.integers(0, 1))}"
        lines.append(f"c = AveragePool<{how}>(a)")
    constants["starts"], constants["ends"] = (np.asarray(draw(few)[:rank]) for _ in range(2))
    constants["ends"] = -constants["ends"] - (constants["ends"] == 0) * -(2**40)
    constants["axes"] = np.arange(2, 2 + rank)
    lines.append("y = Slice(c, starts, ends, axes)")
    text = f"g (float{[1, 3, *sizes]} x) => (float y) {{ {'  '.join(lines)} }}"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    for name, array in constants.items():
        typed = array.astype(np.float32 if array.dtype == np.float64 else np.int64)
        model.graph.initializer.append(numpy_helper.from_array(typed, name))
    return onnx.shape_inference.infer_shapes(model)


@given(models())
@settings(max_examples=budget(150), deadline=None)
def test_random_pads_keep_the_numbers(model: onnx.ModelProto) -> None:
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    feed = {"x": np.random.default_rng(5).normal(size=shape).astype(np.float32)}
    module = to_module(model)
    run_pipeline("infer-types,fold-constants,simplify-layout,dce", module)
    made = to_proto(module)
    onnx.checker.check_model(made, full_check=True)
    (expected,), (found,) = run_model(model, feed), run_model(made, feed)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# -- plans ----------------------------------------------------------------------------------------------------------


CAUSAL = {
    "pads": "h = Conv<dilations=[2], pads=[4, 0]>(x, w)",
    "Pad": "p = Pad(x, pads)  h = Conv<dilations=[2]>(p, w)",
    "zeros": "p = Concat<axis=2>(zeros, x)  h = Conv<dilations=[2]>(p, w)",
    "Slice": "c = Conv<dilations=[2], pads=[4, 4]>(x, w)  h = Slice(c, start, end, axis)",
}


@pytest.mark.parametrize("spelling", CAUSAL)
def test_a_causal_convolution_sends_its_border_once(spelling: str) -> None:
    text = f"g (float[2, 16, 64] x) => (float[2, 16, 64] y) {{ {CAUSAL[spelling]}  y = Relu(h) }}"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    lists = {"pads": [0, 0, 4, 0, 0, 0], "start": [0], "end": [-4], "axis": [2]}
    constants = {name: np.asarray(numbers) for name, numbers in lists.items()}
    constants["zeros"] = np.zeros((2, 16, 4), np.float32)
    constants["w"] = np.random.default_rng(0).normal(size=(16, 16, 3)).astype(np.float32)
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in constants.items() if name in text
    )
    module = irpar.load(model)
    irpar.annotate(module, {"x": [None, None, "tp"], "y": [None, None, "tp"]})
    partition = irpar.partition(module, "tp=4")
    totals = partition.plan.totals
    assert (totals["collectives"], totals["sent_bytes"]) == (1, 2 * 16 * 4 * 4)
    partition.verify().check()
