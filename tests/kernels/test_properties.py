"""Random operands and attributes against ONNX Runtime or plain Python."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import budget

from .reference import assert_same, run_kernel

VERSION = 21
FEW = settings(max_examples=budget(40), deadline=None, derandomize=True)
sizes = st.integers(1, 5)
bounds = st.integers(-7, 7)
steps = st.sampled_from([-3, -2, -1, 1, 2, 3])


def floats(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@st.composite
def broadcastable(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full = draw(st.lists(sizes, min_size=0, max_size=4))
    shapes = []
    for _ in range(2):
        kept = full[draw(st.integers(0, len(full))) :]
        shapes.append(tuple(1 if draw(st.booleans()) else size for size in kept))
    return shapes[0], shapes[1]


@FEW
@given(broadcastable(), st.sampled_from(["Add", "Sub", "Mul", "Div", "Pow", "Max", "Less"]))
def test_broadcasting(shapes, op_type):
    a, b = (np.abs(floats(*shape, seed=seed)) + 0.5 for seed, shape in enumerate(shapes))
    assert_same(op_type, [np.asarray(a, np.float32), np.asarray(b, np.float32)], VERSION)


@FEW
@given(st.lists(st.tuples(sizes, bounds, bounds, steps), min_size=1, max_size=3))
def test_slice(dims):
    shape, starts, ends, strides = zip(*dims, strict=True)
    axes = ints(*range(-len(shape), 0))
    assert_same("Slice", [floats(*shape), ints(*starts), ints(*ends), axes, ints(*strides)], VERSION)


@FEW
@given(
    st.lists(sizes, min_size=1, max_size=4),
    st.data(),
    st.sampled_from(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp"]),
)
def test_reduction(shape, data, op_type):
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    keepdims = data.draw(st.integers(0, 1))
    assert_same(op_type, [floats(*shape), ints(*axes)], VERSION, keepdims=keepdims)


@FEW
@given(st.integers(0, 12), st.integers(1, 5))
def test_uneven_split_joins_again(length, parts):
    x = floats(2, length)
    block = math.ceil(length / parts)
    pieces = run_kernel("Split", [x], VERSION, parts, axis=1, num_outputs=parts)
    assert [piece.shape[1] for piece in pieces[:-1]] == [
        max(0, min(block, length - index * block)) for index in range(parts - 1)
    ]
    (joined,) = run_kernel("Concat", pieces, VERSION, axis=1)
    np.testing.assert_array_equal(joined, x)


@FEW
@given(st.integers(-128, 127), st.integers(-128, 127).filter(bool))
def test_integer_division_truncates(a, b):
    operands = [np.array([value], dtype=np.int8) for value in (a, b)]
    (quotient,) = run_kernel("Div", operands, VERSION)
    assert quotient.dtype == np.int8
    assert quotient[0] == np.int64(math.trunc(a / b)).astype(np.int8)


@FEW
@given(
    channels=st.integers(1, 3),
    features=st.integers(1, 3),
    group=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pads=st.tuples(*[st.integers(0, 2)] * 4),
)
def test_convolution(channels, features, group, kernel, strides, dilations, pads):
    attributes = {"group": group, "strides": strides, "dilations": dilations, "pads": pads}
    weight, bias = floats(features * group, channels, *kernel, seed=1), floats(features * group, seed=2)
    assert_same("Conv", [floats(2, channels * group, 7, 6), weight, bias], VERSION, **attributes)
    weight = floats(channels * group, features, *kernel, seed=1)
    assert_same("ConvTranspose", [floats(2, channels * group, 4, 5), weight, bias], VERSION, **attributes)


@FEW
@given(
    kernel=st.tuples(st.integers(2, 3), st.integers(2, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    pads=st.tuples(*[st.integers(0, 1)] * 4),
    ceil_mode=st.integers(0, 1),
    count_include_pad=st.integers(0, 1),
)
def test_pools(kernel, strides, pads, ceil_mode, count_include_pad):
    attributes = {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": ceil_mode}
    x = floats(2, 2, 7, 6)
    assert_same("MaxPool", [x], VERSION, 2, **attributes)
    assert_same("AveragePool", [x], VERSION, **attributes, count_include_pad=count_include_pad)


@FEW
@given(
    st.lists(st.tuples(st.integers(2, 4), st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=3),
    st.sampled_from(["constant", "reflect", "edge", "wrap"]),
)
def test_pad(dims, mode):
    shape, before, after = zip(*dims, strict=True)
    assert_same("Pad", [floats(*shape), ints(*before, *after), np.array(2.5, np.float32)], VERSION, mode=mode)


@FEW
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-5, 5), st.integers(0, 3)), min_size=1, max_size=3))
def test_pad_of_more_than_the_dim_moves_it_out(dims):
    shape, before, _ = zip(*dims, strict=True)
    after = [result - start - size for size, start, result in dims]
    assert_same("Pad", [floats(*shape), ints(*before, *after), np.array(2.5, np.float32)], VERSION)


@FEW
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=2),
    st.sampled_from(["nearest", "linear", "cubic"]),
    st.sampled_from(["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"]),
)
def test_resize(resized, mode, coordinates):
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    target = ints(1, 1, *resized)
    assert_same("Resize", [floats(1, 1, 4, 6), None, None, target], 19, **attributes)


@FEW
@given(st.integers(1, 6), st.integers(0, 1), st.data())
def test_top_k_keeps_the_order_of_equals(length, largest, data):
    values = data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
    k = data.draw(st.integers(0, length))
    (_, places) = run_kernel("TopK", [np.array(values, np.float32), ints(k)], VERSION, 2, largest=largest)
    expected = sorted(range(length), key=lambda place: (-values[place] if largest else values[place], place))
    assert places.tolist() == expected[:k]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_small_floats_accumulate_in_float32(dtype):
    # 4096 ones: in float16 the sum of squares overflows, in bfloat16 adding one at a time stops at 256
    a, b = np.full((1, 4096), 8, dtype=dtype), np.full((4096, 1), 1 / 8, dtype=dtype)
    (product,) = run_kernel("MatMul", [a, b], VERSION)
    assert product.dtype == dtype
    assert float(product[0, 0]) == 4096
    (mean,) = run_kernel("ReduceMean", [a * a], VERSION)
    assert mean.dtype == dtype
    assert float(mean[0, 0]) == 64


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 3e-7), (np.float64, 1e-13)])
def test_erf_is_good_to_rounding(dtype, tolerance):
    x = np.concatenate([np.linspace(-7, 7, 40_001), [0.0, np.inf, -np.inf]]).astype(dtype)
    (y,) = run_kernel("Erf", [x], VERSION)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, [math.erf(value) for value in x], rtol=0, atol=tolerance)
    assert np.isnan(run_kernel("Erf", [np.array([np.nan], dtype=dtype)], VERSION)[0][0])


@pytest.mark.parametrize(
    ("shape", "target", "expected"),
    [
        ((0, 4), [-1, 4], (0, 4)),
        ((0, 4, 8), [0, -1], (0, 32)),
        ((0, 32), [0, 4, -1], (0, 4, 8)),
        ((2, 0, 8), [-1, 8], (0, 8)),
    ],
)
def test_empty_block_reshapes_like_a_full_one(shape, target, expected):
    (result,) = run_kernel("Reshape", [floats(*shape), ints(*target)], VERSION)
    assert result.shape == expected


def test_empty_blocks_pass_through_what_engines_refuse():
    weight = floats(4, 2, 3, 3)
    (y,) = run_kernel("Conv", [floats(0, 2, 5, 5), weight], VERSION, pads=(1, 1, 1, 1))
    assert y.shape == (0, 4, 5, 5)
    heads = floats(0, 2, 3, 4)
    (y,) = run_kernel("Attention", [heads, heads, heads], 23)
    assert y.shape == (0, 2, 3, 4)
    (y,) = run_kernel("ReduceMax", [floats(0, 3), ints(0)], VERSION)
    assert y.tolist() == [[-np.inf] * 3]
    (y,) = run_kernel("InstanceNormalization", [floats(2, 3, 0), floats(3), floats(3)], VERSION)
    assert y.shape == (2, 3, 0)
