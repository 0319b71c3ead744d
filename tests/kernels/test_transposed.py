"""Transposed convolutions on a processor: image by image, the same bits in less memory."""

import tracemalloc

import numpy as np
import pytest

from irpar.kernels import convolution, lookup
from irpar.kernels.scratch import SCRATCH
from tests.strict_device import STRICT, StrictArray

CASES = [
    ((6, 4, 5, 5), (4, 3, 3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((5, 4, 7), (4, 2, 3), {"group": 2, "dilations": (2,), "output_padding": (0,)}),
    ((0, 4, 5, 5), (4, 3, 3, 3), {}),
]


@pytest.mark.parametrize(("x", "weight", "attributes"), CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_pieces_of_a_batch_give_the_same_bits(monkeypatch, x, weight, attributes, dtype):
    kernel = lookup("", "ConvTranspose", 22)
    random = np.random.default_rng(0)
    operands = [random.standard_normal(shape).astype(dtype) for shape in (x, weight)]
    monkeypatch.setattr(convolution, "SPREAD_BYTES", 2**30)
    (whole,) = kernel(np, operands, attributes, 1)
    for nbytes in (1, 2000):
        monkeypatch.setattr(convolution, "SPREAD_BYTES", nbytes)
        (pieces,) = kernel(np, operands, attributes, 1)
        np.testing.assert_array_equal(pieces, whole, strict=True)
        out = np.full_like(whole, np.nan)
        (written,) = kernel(np, operands, attributes, 1, out=out)
        np.testing.assert_array_equal(written, whole, strict=True)
        assert (written is out) == (dtype != np.float16)


def test_a_batch_takes_no_more_memory_than_an_image():
    kernel = lookup("", "ConvTranspose", 22)
    weight = np.ones((16, 16, 3, 3), np.float32)

    def peak(images: int) -> int:
        x = np.ones((images, 16, 16, 16), np.float32)
        out = np.empty((images, 16, 18, 18), np.float32)
        kernel(np, [x, weight], {}, 1, out=out)
        SCRATCH._memory.clear()
        tracemalloc.start()
        kernel(np, [x, weight], {}, 1, out=out)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(32) < 1.1 * peak(1)


@pytest.mark.parametrize(("x", "weight", "attributes"), CASES)
@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_a_device_makes_columns_piece_by_piece(monkeypatch, operator, x, weight, attributes):
    kernel = lookup("", operator, 22)
    random = np.random.default_rng(0)
    attributes = {name: value for name, value in attributes.items() if operator != "Conv" or "output" not in name}
    if operator == "Conv":
        weight = (4, 4 // attributes.get("group", 1), *weight[2:])
    operands = [random.standard_normal(shape).astype(np.float32) for shape in (x, weight)]
    (expected,) = kernel(np, operands, attributes, 1)
    for nbytes in (1, 2**28):
        monkeypatch.setattr(convolution, "COLUMN_BYTES", nbytes)
        out = StrictArray(np.full_like(expected, np.nan))
        (found,) = kernel(STRICT, [StrictArray(x) for x in operands], attributes, 1, out=out)
        assert np.may_share_memory(found._array, out._array) or not out.size
        np.testing.assert_allclose(found._array, expected, rtol=1e-5, atol=1e-5)


def test_columns_on_a_device_take_no_more_than_operands_and_result():
    x = np.empty((8, 4, 6, 6), np.float32)
    assert convolution.images_at_once(x[0].nbytes * 9, x, x) == 1
    assert convolution.images_at_once(x[0].nbytes * 4, x, x) == 4
    assert convolution.images_at_once(0, x) == x.nbytes
