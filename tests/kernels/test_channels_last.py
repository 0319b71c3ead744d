"""Operators of images with channels last against those with channels first, and what is told of wrong ones."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.kernels import KernelError, lookup

Array = np.ndarray

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "": lambda x: x,
    "Relu": lambda x: np.maximum(x, 0),
    "Clip": lambda x: np.clip(x, -0.5, 2.0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Silu": lambda x: x / (1 + np.exp(-x)),
}
CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 7, 6, 5), (4, 3, 3, 5), {"pads": (1, 0, 2, 1), "strides": (2, 1)}),
    ((1, 9, 8, 6), (6, 3, 2, 1), {"group": 6, "dilations": (2, 1), "pads": (1, 1, 1, 1)}),
    ((1, 5, 5, 6), (4, 1, 1, 3), {"group": 2}),
    ((2, 11, 4), (3, 4, 4), {"pads": (3, 0)}),
    ((1, 3, 4, 3, 2), (2, 2, 2, 2, 2), {"pads": (0, 1, 0, 0, 1, 1)}),
    ((2, 6, 6, 3), (2, 3, 3, 3), {"pads": (-1, -1, 0, -1)}),
]


def kernel_of(domain: str, op_type: str) -> Any:
    found = lookup(domain, op_type, 22 if not domain else 1)
    assert found is not None
    return found


def expected(x: Array, weight: Array, addends: list[Array], activation: str, attributes: dict[str, Any]) -> Array:
    """In float64, by ONNX's own Conv."""
    wide = [np.moveaxis(each.astype(np.float64), -1, 1) for each in (x, weight)]
    sums = np.moveaxis(kernel_of("", "Conv")(np, wide, attributes, 1)[0], 1, -1)
    for addend in addends:
        sums = sums + addend.astype(np.float64)
    return ACTIVATIONS[activation](sums)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_those_of_channels_first(case: tuple[Any, Any, dict[str, Any]], dtype: Any) -> None:
    random = np.random.default_rng(5)
    shape, weight_shape, attributes = case
    x, weight = (random.standard_normal(size).astype(dtype) for size in (shape, weight_shape))
    kernel, unit = kernel_of("irpar", "ConvChannelsLast"), float(ml_dtypes.finfo(dtype).eps)
    # Sums in float32 of so many numbers are at most that far off, in whichever order they are added (Higham, section 3.1).
    terms = math.prod(weight_shape[1:]) + 2
    summed = terms * float(np.finfo(np.float32).eps) / 2
    (plain,) = kernel(np, [x, weight], attributes, 1)
    bias, residual = (random.standard_normal(size).astype(dtype) for size in (weight_shape[:1], plain.shape))
    bounds = {"min": -0.5, "max": 2.0}
    for activation in ACTIVATIONS:
        for addends in ([], [bias], [None, residual], [bias, residual]):
            given = attributes | {"activation": activation} | (bounds if activation == "Clip" else {})
            out = np.full(plain.shape, np.nan, dtype)
            (found,) = kernel(np, [x, weight, *addends], given, 1, out)
            assert found is out
            added = [each for each in addends if each is not None]
            wanted = expected(x, weight, added, activation, attributes)
            sizes = expected(abs(x), abs(weight), [abs(each) for each in added], "", attributes)
            off = abs(found.astype(np.float64) - wanted)
            assert (off <= 2 * unit * abs(wanted) + 8 * unit + summed * sizes).all(), (activation, off.max())


def test_what_is_no_number_stays() -> None:
    x, weight = np.full((1, 2, 2, 1), math.nan, np.float32), np.ones((1, 1, 1, 1), np.float32)
    for activation in ACTIVATIONS:
        (found,) = kernel_of("irpar", "ConvChannelsLast")(np, [x, weight], {"activation": activation}, 1)
        assert np.isnan(found).all(), activation


@pytest.mark.parametrize(
    ("shapes", "attributes", "message"),
    [
        ([(1, 4, 4, 3), (2, 3, 3, 2)], {}, r"1 groups of a kernel \[2, 3, 3, 2\] do not fit an image \[1, 4, 4, 3\]"),
        ([(1, 4, 4, 4), (3, 3, 3, 2)], {"group": 2}, "2 groups"),
        ([(4, 3), (2, 3)], {}, "do not fit an image"),
        ([(1, 4, 4, 3), (2, 3, 3, 3)], {"kernel_shape": (3, 2)}, "kernel_shape"),
        ([(1, 4, 4, 3), (2, 3, 3, 3)], {"activation": "Tanh"}, "activation='Tanh'"),
        ([(1, 4, 4, 3), (2, 3, 3, 3), (3,)], {}, r"a bias \[3\] does not fit"),
        ([(1, 4, 4, 3), (2, 3, 3, 3), (2,), (1, 2, 2, 3)], {}, r"a residual \[1, 2, 2, 3\] does not fit"),
    ],
)
def test_a_wrong_call_is_told(shapes: list[tuple[int, ...]], attributes: dict[str, Any], message: str) -> None:
    operands = [np.zeros(shape, np.float32) for shape in shapes]
    with pytest.raises(KernelError, match=message):
        kernel_of("irpar", "ConvChannelsLast")(np, operands, attributes, 1)


POOLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 7, 6, 5), {"kernel_shape": (3, 3), "pads": (1, 0, 1, 1), "strides": (2, 1)}),
    ((1, 9, 8, 3), {"kernel_shape": (2, 2), "strides": (2, 3), "ceil_mode": 1}),
    ((2, 11, 4), {"kernel_shape": (3,), "pads": (1, 1), "count_include_pad": 1}),
    ((1, 3, 4, 3, 2), {"kernel_shape": (3, 4, 3)}),
    ((1, 9, 9, 3), {"kernel_shape": (3, 2), "dilations": (2, 3)}),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(("shape", "attributes"), POOLS, ids=str)
def test_pools_are_those_of_channels_first(shape: tuple[int, ...], attributes: dict[str, Any], dtype: Any) -> None:
    x = np.random.default_rng(5).standard_normal(shape).astype(dtype)
    kernel = kernel_of("irpar", "PoolChannelsLast")
    for mode, op_type in (("max", "MaxPool"), ("average", "AveragePool")):
        own = {name: value for name, value in attributes.items() if mode == "average" or name != "count_include_pad"}
        (wanted,) = kernel_of("", op_type)(np, [np.moveaxis(x, -1, 1)], own, 1)
        wanted = np.moveaxis(wanted, 1, -1)
        out = np.zeros(wanted.shape, dtype)
        (found,) = kernel(np, [x], {"mode": mode, **own}, 1, out)
        assert found is out
        np.testing.assert_array_equal(found, wanted)


def test_a_wrong_pool_is_told() -> None:
    with pytest.raises(KernelError, match="mode='sum'"):
        kernel_of("irpar", "PoolChannelsLast")(np, [np.zeros((1, 2, 2, 1))], {"mode": "sum", "kernel_shape": (1, 1)}, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
def test_groups_are_standardised_as_with_channels_first(dtype: Any) -> None:
    random = np.random.default_rng(5)
    x = random.standard_normal((2, 5, 3, 8)).astype(dtype)
    scale, bias = (random.standard_normal(8).astype(dtype) for _ in range(2))
    given, kernel = {"num_groups": 4, "epsilon": 0.1}, kernel_of("irpar", "GroupNormChannelsLast")
    wide = [np.moveaxis(x, -1, 1).astype(np.float64), scale.astype(np.float64), bias.astype(np.float64)]
    wanted = np.moveaxis(kernel_of("", "GroupNormalization")(np, wide, given, 1)[0], 1, -1)
    out = np.zeros(x.shape, dtype)
    (found,) = kernel(np, [x, scale, bias], {**given, "activation": "Silu"}, 1, out)
    assert found is out
    unit = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(found.astype(np.float64), ACTIVATIONS["Silu"](wanted), rtol=2 * unit, atol=8 * unit)
    (plain,) = kernel(np, [x], given, 1)
    ones, zeros = np.ones(8, np.float64), np.zeros(8, np.float64)
    wanted = np.moveaxis(kernel_of("", "GroupNormalization")(np, [wide[0], ones, zeros], given, 1)[0], 1, -1)
    np.testing.assert_allclose(plain.astype(np.float64), wanted, rtol=2 * unit, atol=8 * unit)


def test_a_wrong_norm_is_told() -> None:
    with pytest.raises(KernelError, match="8 channels do not divide into 3 groups"):
        kernel_of("irpar", "GroupNormChannelsLast")(np, [np.zeros((1, 2, 8))], {"num_groups": 3}, 1)
