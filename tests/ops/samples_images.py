"""Sample nodes of operators on images, signals and their places."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .draws import const, floats, ints, scalar
from .rule_proof import Array, Constant, Sample


def _positions(batch: int, channels: int, before: int, after: int) -> Array:
    """For each of `before` places of each channel a position of its own among `after` places, counted through all."""
    random = np.random.default_rng(3)
    inside = np.sort(random.permuted(np.tile(np.arange(after), (batch * channels, 1)), axis=1)[:, :before], axis=1)
    return (inside + np.arange(batch * channels)[:, None] * after).reshape(batch, channels, before)


def _sampling() -> Iterator[Sample]:
    yield Sample("AffineGrid", (floats(5, 2, 3), const(5, 3, 4, 6)), version=20)
    yield Sample("AffineGrid", (floats(5, 3, 4), const(5, 3, 4, 6, 2)), {"align_corners": 1}, version=20)
    grid = floats(3, 5, 6, 2, low=-1, high=1)
    for domain, version, mode in (("", 20, "linear"), ("", 16, "bicubic"), ("com.microsoft", 1, "nearest")):
        attributes = {"mode": mode, "padding_mode": "border"}
        yield Sample("GridSample", (floats(3, 4, 6, 5), grid), attributes, version=version, domain=domain)
    corners = np.abs(floats(6, 2, low=0, high=4))
    regions = np.concatenate([corners, corners + 3], 1).astype(np.float32)
    of = np.asarray([0, 2, 1, 1, 0, 2])
    size = {"output_height": 2, "output_width": 3, "sampling_ratio": 2}
    yield Sample("RoiAlign", (floats(3, 5, 8, 7), regions, of), size)
    yield Sample(
        "RoiAlign", (floats(3, 5, 8, 7), regions, of), {**size, "mode": "max", "sampling_ratio": 1}, version=16
    )
    pooled = np.concatenate([of[:, None], regions], 1).astype(np.float32)
    yield Sample("MaxRoiPool", (floats(3, 5, 8, 7), pooled), {"pooled_shape": [2, 3]})
    boxes = np.sort(floats(6, 2, 2, low=0, high=1), axis=1).reshape(6, 4)
    crop = Constant(np.asarray([2, 3], np.int32))
    operands = (floats(3, 5, 8, 7), boxes, of.astype(np.int32), crop)
    yield Sample("CropAndResize", operands, domain="com.microsoft", version=1)


def _places() -> Iterator[Sample]:
    yield Sample("Col2Im", (floats(3, 6 * 4, 6), const(3, 4), const(2, 2)))
    yield Sample("Col2Im", (floats(3, 6 * 2, 5), const(1, 6), const(1, 2)))
    yield Sample("CenterCropPad", (floats(5, 6, 4), const(3, 6, 7)))
    yield Sample("CenterCropPad", (floats(5, 6, 4), const(4, 3)), {"axes": [2, 1]})
    yield Sample("Det", (floats(3, 5, 4, 4),))
    yield Sample("Inverse", (floats(3, 5, 4, 4),), domain="com.microsoft", version=1, tolerance=1e-2)
    values, places = floats(4, 6, 5), _positions(4, 6, 5, 10)
    attributes = {"kernel_shape": [2], "strides": [2]}
    yield Sample("MaxUnpool", (values.copy(), Constant(places.copy())), attributes)
    # windows that overlap have the same greatest element
    values[:, :, 4], places[:, :, 4] = values[:, :, 0], places[:, :, 0]
    yield Sample("MaxUnpool", (values, Constant(places), const(4, 6, 10)), attributes)


def _deformed() -> Iterator[Sample]:
    """Kernels of 3 places over 6: 4 places of the result, 3 offsets for each."""

    def operands(channels: int, groups: int, outputs: int, moves: int, rest: int) -> tuple[Array, ...]:
        found = (
            floats(3, channels, 6, 5),
            floats(outputs, channels // groups, 3, 1),
            floats(3, moves * 3 * 2, 4, 5, low=-0.9, high=0.9),
            floats(outputs),
            floats(3, moves * 3, 4, 5),
        )
        return found[:rest]

    for channels, groups, outputs, moves, rest in (
        (4, 1, 5, 1, 3),
        (4, 1, 5, 1, 5),
        (6, 1, 5, 3, 4),
        (6, 3, 6, 1, 4),
        (8, 2, 4, 2, 5),
    ):
        attributes = {"group": groups, "offset_group": moves}
        yield Sample("DeformConv", operands(channels, groups, outputs, moves, rest), attributes, version=19)


def _signals() -> Iterator[Sample]:
    yield Sample("DFT", (floats(5, 6, 1),), version=20)
    yield Sample("DFT", (floats(5, 6, 4, 2), None, scalar(1)), version=20)
    yield Sample("DFT", (floats(5, 6, 1), scalar(4), scalar(0)), {"onesided": 1}, version=20)
    yield Sample("DFT", (floats(5, 6, 2), scalar(8)), {"inverse": 1, "axis": 1}, version=17)
    yield Sample("STFT", (floats(5, 16, 1), scalar(4), floats(6)))
    yield Sample("STFT", (floats(5, 16, 1), scalar(3), None, scalar(8)))
    yield Sample("Rfft", (floats(5, 3, 6),), {"signal_ndim": 1}, domain="com.microsoft", version=1)
    yield Sample("Irfft", (floats(5, 3, 4, 2),), {"signal_ndim": 1}, domain="com.microsoft", version=1)


def _convolutions() -> Iterator[Sample]:
    small = {"dtype": np.uint8, "low": 0}
    point = Constant(np.asarray(3, np.uint8))
    yield Sample("ConvInteger", (ints(3, 4, 6, **small), ints(5, 4, 3, **small)))
    yield Sample("ConvInteger", (ints(3, 4, 6, **small), ints(5, 4, 3, **small), point, point), {"pads": [1, 1]})
    yield Sample("ConvInteger", (ints(3, 8, 6, **small), ints(12, 2, 3, **small), point), {"group": 4})
    scale, zero = Constant(np.asarray(0.1, np.float32)), Constant(np.asarray(2, np.int8))
    data, kernel = ints(3, 4, 6, **small), ints(5, 4, 3, dtype=np.int8)
    scales, zeros = floats(5, low=0.1, high=0.5), np.zeros(5, np.int8)
    last = (Constant(np.asarray(0.02, np.float32)), Constant(np.asarray(100, np.uint8)))
    for domain, version in (("", 21), ("com.microsoft", 1)):
        where = {"domain": domain, "version": version}
        yield Sample("QLinearConv", (data, scale, point, kernel, scale, zero, *last), **where)
        bias = ints(5, dtype=np.int32, low=-99, high=99)
        yield Sample("QLinearConv", (data, scale, point, kernel, scales, zeros, *last, bias), **where)
        grouped = (ints(3, 8, 6, **small), scale, point, ints(12, 2, 3, dtype=np.int8), scale, zero, *last)
        yield Sample("QLinearConv", grouped, {"group": 4}, **where)
    turned = (ints(3, 6, 7, 4, **small), scale, point, ints(6, 4, 3, 3, dtype=np.int8), scale, zero, *last)
    image: dict[str, Any] = {"channels_last": 1, "pads": [1, 1, 1, 1], "strides": [2, 1]}
    yield Sample("QLinearConv", turned, image, **where)
    grouped = (ints(3, 6, 5, 8, **small), scale, point, ints(8, 2, 3, 3, dtype=np.int8), scale, zero, *last)
    yield Sample("QLinearConv", grouped, {"channels_last": 1, "group": 4}, **where)


IMAGES = [*_sampling(), *_places(), *_deformed(), *_signals(), *_convolutions()]
