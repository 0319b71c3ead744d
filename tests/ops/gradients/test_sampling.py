"""Gradients of sampling, transforms and matrices with all of their attributes."""

import itertools
from typing import Any

import numpy as np
import pytest

from irpar.passes.autodiff import GradientError
from tests.budget import pairs
from tests.ops.gradients.proof import check_sample, feeds_of, gradients_of, module_of, run
from tests.ops.rule_proof import Constant, Sample


def floats(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def scalar(number: int) -> Constant:
    return Constant(np.int64(number))


def constant(*numbers: int) -> Constant:
    return Constant(np.asarray(numbers, np.int64))


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample(mode: str, padding: str, align: int) -> None:
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    # Places inside the image and far outside of it.
    check_sample(Sample("GridSample", (floats(2, 3, 5, 4), 1.3 * floats(2, 4, 3, 2, seed=1)), attributes, version=20))
    if mode != "cubic":
        volume = (floats(2, 2, 3, 4, 5), 1.3 * floats(2, 2, 3, 2, 3, seed=1))
        check_sample(Sample("GridSample", volume, attributes, version=20))


def test_an_image_of_one_element_that_is_reflected() -> None:
    attributes = {"mode": "linear", "padding_mode": "reflection", "align_corners": 1}
    check_sample(Sample("GridSample", (floats(2, 3, 1, 4), floats(2, 4, 3, 2, seed=1)), attributes, version=20))


@pytest.mark.parametrize(("mode", "half"), pairs(["avg", "max"], ["half_pixel", "output_half_pixel"]))
def test_roi_align(mode: str, half: str) -> None:
    regions = np.float32([[0.3, 0.2, 5.1, 6.3], [2.2, 1.1, 2.7, 9.4], [1.3, 0.4, 3.9, 3.3]])
    size = {"output_height": 2, "output_width": 3, "sampling_ratio": 2, "spatial_scale": 0.9}
    attributes = {**size, "mode": mode, "coordinate_transformation_mode": half}
    check_sample(Sample("RoiAlign", (floats(2, 3, 7, 6), regions, np.int64([1, 0, 1])), attributes, version=16))


def test_regions_that_decide_how_many_samples_they_have_are_refused() -> None:
    drawn = Sample("RoiAlign", (floats(2, 3, 7, 6), np.float32([[0, 0, 3, 3]]), np.int64([1])), version=16)
    with pytest.raises(GradientError, match="sampling_ratio"):
        gradients_of(module_of(drawn), ["x0"])


@pytest.mark.parametrize("size", [(2, 3), (1, 4), (3, 1)])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_crop_and_resize(mode: str, size: tuple[int, int]) -> None:
    boxes = np.float32([[0.13, 0.21, 0.77, 0.91], [0.31, -0.41, 1.27, 0.63]])
    operands = (floats(2, 3, 6, 5), boxes, np.int32([1, 0]), constant(*size))
    check_sample(Sample("CropAndResize", operands, {"mode": mode}, domain="com.microsoft", version=1))


@pytest.mark.parametrize("attributes", [{}, {"strides": (2, 1), "pads": (1, 0, 2, 1), "dilations": (1, 2)}])
def test_col2im(attributes: dict[str, Any]) -> None:
    count = (5 - 1) * (6 - 1) if not attributes else ((5 + 3 - 2) // 2 + 1) * (6 + 1 - 3 + 1)
    check_sample(Sample("Col2Im", (floats(2, 3 * 4, count), constant(5, 6), constant(2, 2)), attributes, version=18))


@pytest.mark.parametrize(("sizes", "axes"), [((7, 2, 4), None), ((2, 8), (-1, 0))])
def test_center_crop_pad(sizes: tuple[int, ...], axes: tuple[int, ...] | None) -> None:
    attributes = {} if axes is None else {"axes": axes}
    check_sample(Sample("CenterCropPad", (floats(4, 5, 3), constant(*sizes)), attributes, version=18))


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("length", [None, 4, 7, 9])
@pytest.mark.parametrize("version", [17, 20])
def test_dft(version: int, length: int | None, parts: int, inverse: int) -> None:
    words = (floats(2, 7, 3, parts), None if length is None else scalar(length))
    if version == 17:
        check_sample(Sample("DFT", words, {"inverse": inverse, "axis": 1}, version=17))
    else:
        check_sample(Sample("DFT", (*words, scalar(1)), {"inverse": inverse}, version=20))


@pytest.mark.parametrize("length", [None, 5, 6, 8])
def test_dft_of_which_half_is_kept(length: int | None) -> None:
    words = (floats(2, 7, 1), None if length is None else scalar(length))
    check_sample(Sample("DFT", words, {"onesided": 1}, version=20))


@pytest.mark.parametrize(("window", "length"), [(6, None), (None, 5), (4, 4)])
@pytest.mark.parametrize(("parts", "onesided"), [(1, 1), (1, 0), (2, 0)])
def test_stft(window: int | None, length: int | None, parts: int, onesided: int) -> None:
    words = (floats(2, 17, parts), scalar(3), None if window is None else floats(window, seed=1))
    check_sample(
        Sample("STFT", (*words, None if length is None else scalar(length)), {"onesided": onesided}, version=17)
    )


@pytest.mark.parametrize("half", [2, 3, 5])
def test_irfft(half: int) -> None:
    check_sample(Sample("Irfft", (floats(2, half, 2),), {"signal_ndim": 1}, domain="com.microsoft", version=1))


@pytest.mark.parametrize(("reverse", "exclusive"), [*itertools.product([0, 1], [0, 1])])
def test_cumulative_products(reverse: int, exclusive: int) -> None:
    x = floats(3, 5)
    x[0, 2] = x[1, 0] = x[1, 3] = 0
    for axis in (0, 1):
        check_sample(Sample("CumProd", (x, scalar(axis)), {"reverse": reverse, "exclusive": exclusive}, version=26))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_determinants(size: int) -> None:
    check_sample(Sample("Det", (floats(3, size, size),), version=11))


def test_a_determinant_of_zero() -> None:
    x = floats(2, 4, 4)
    x[0, 1] = 2 * x[0, 3]
    check_sample(Sample("Det", (x,), version=11))


def test_ranges_of_floats() -> None:
    drawn = Sample("Range", tuple(np.asarray(number, np.float32) for number in (1.5, 4.2, 0.5)), version=11)
    made = gradients_of(module_of(drawn), ["x0", "x1", "x2"])
    g = np.arange(6.0) + 1
    found = run(made, {**feeds_of(drawn), "grad.y0": g})
    assert [float(found[f"grad.x{place}"]) for place in range(3)] == [g.sum(), 0, (g * np.arange(6)).sum()]
