"""Gradients of convolutions and pooling where strides, padding and groups meet; ties."""

from typing import Any

import numpy as np
import pytest

import irpar
from irpar.ir import Node
from irpar.ops.gradients import convolution, pooling
from tests.ops.gradients.proof import check_module, check_sample, feeds_of, gradients_of, module_of, run
from tests.ops.rule_proof import Sample


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def sample(op: str, *operands: np.ndarray[Any, Any], **attributes: Any) -> Sample:
    return Sample(op, operands, attributes)


CONVOLUTIONS = [
    sample("Conv", floats(2, 4, 7, 8), floats(6, 2, 3, 2), floats(6), group=2, strides=(2, 3), pads=(1, 0, 2, 1), dilations=(2, 1)),
    sample("Conv", floats(2, 3, 9), floats(4, 3, 4), strides=(3,)),
    sample("Conv", floats(2, 3, 9), floats(4, 3, 4), strides=(3,), auto_pad="SAME_UPPER"),
    sample("Conv", floats(2, 3, 10), floats(4, 3, 4), strides=(3,), auto_pad="SAME_LOWER"),
    sample("Conv", floats(2, 3, 9), floats(4, 3, 2), strides=(4,)),
    sample("Conv", floats(2, 6, 5, 6), floats(6, 1, 3, 3), group=6, pads=(1, 1, 1, 1)),
    sample("Conv", floats(1, 2, 4, 5, 6), floats(3, 2, 2, 2, 2), strides=(1, 2, 1)),
    sample("ConvTranspose", floats(2, 4, 5), floats(4, 3, 3), floats(6), group=2, strides=(2,), pads=(1, 0), output_padding=(1,)),
    sample("ConvTranspose", floats(2, 4, 5, 4), floats(4, 3, 3, 2), strides=(2, 3), dilations=(2, 1)),
    sample("ConvTranspose", floats(2, 4, 5), floats(4, 3, 3), strides=(2,), auto_pad="SAME_UPPER"),
    sample("ConvTranspose", floats(2, 4, 5), floats(4, 3, 3), strides=(2,), auto_pad="SAME_LOWER"),
    sample("ConvTranspose", floats(2, 4, 5), floats(4, 3, 4), strides=(3,), output_shape=(14,)),
    sample("ConvTranspose", floats(2, 4, 5), floats(4, 3, 2), strides=(3,)),
]  # fmt: skip
MANY_CHANNELS = [
    sample("Conv", floats(2, 2, 5, 4), floats(28, 2, 2, 2), strides=(2, 1), pads=(1, 0, 0, 1)),
    sample("Conv", floats(2, 2, 7), floats(14, 2, 2), dilations=(2,), pads=(1, 0)),
    sample("Conv", floats(2, 2, 6, 7), floats(14, 2, 3, 2), strides=(2, 3), pads=(1, 0, 2, 1), dilations=(2, 1)),
    sample("Conv", floats(2, 4, 4, 5), floats(28, 2, 3, 2), group=2, dilations=(1, 2), pads=(0, 1, 1, 1)),
    sample("Conv", floats(1, 2, 3, 4, 5), floats(14, 2, 2, 2, 2), strides=(1, 2, 1)),
    sample("ConvTranspose", floats(2, 14, 3, 4), floats(14, 1, 3, 2), strides=(2, 1), pads=(1, 0, 0, 1)),
]  # fmt: skip
"""So many that a Conv copies their windows: whole ones, and those of the last dim."""
POOLS = [
    sample("MaxPool", floats(2, 3, 7, 8), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    sample("MaxPool", floats(2, 3, 7, 8), kernel_shape=(2, 3), strides=(2, 2), ceil_mode=1),
    sample("MaxPool", floats(2, 3, 8, 9), kernel_shape=(2, 3), strides=(2, 3)),
    sample("MaxPool", floats(2, 3, 9), kernel_shape=(3,), dilations=(2,)),
    sample("MaxPool", floats(1, 2, 6, 6), kernel_shape=(5, 5), pads=(2, 2, 2, 2)),
    sample("MaxPool", floats(1, 2, 4, 4, 6), kernel_shape=(2, 2, 2), strides=(2, 2, 2)),
    sample("AveragePool", floats(2, 3, 7, 8), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    sample("AveragePool", floats(2, 3, 7, 8), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), count_include_pad=1),
    sample("AveragePool", floats(2, 3, 7), kernel_shape=(3,), strides=(2,), ceil_mode=1, pads=(1, 0)),
    sample("AveragePool", floats(2, 3, 8), kernel_shape=(2,), strides=(2,)),
    sample("LpPool", floats(2, 3, 7), kernel_shape=(3,), strides=(2,), p=3),
]  # fmt: skip


@pytest.mark.parametrize("drawn", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("most", [convolution.MOST_SHIFTS, 0], ids=["by shifts", "by convolution"])
def test_convolutions(drawn: Sample, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "MOST_SHIFTS", most)
    check_sample(drawn)


def _constant_kernel(node: Node) -> np.ndarray[Any, Any] | None:
    kernel = node.operands[1] if node.op_type == "Conv" else None
    return None if kernel is None or kernel.data is None else kernel.data.numpy()


@pytest.mark.parametrize("drawn", MANY_CHANNELS, ids=str)
def test_windows_that_a_convolution_copies(drawn: Sample) -> None:
    check_sample(drawn)
    made = gradients_of(module_of(drawn), ["x1"])
    (kernel,) = (array for array in map(_constant_kernel, made.graph) if array is not None)
    assert set(np.unique(kernel)) == {0, 1}


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("channels", [4, 16, 32, 64, 128, 512])
def test_copies_of_windows_take_a_seventh_of_the_gradient_s_flops(channels: int, size: int) -> None:
    data, kernel = floats(2, 3, 12, 12), floats(channels, 3, size, size)
    drawn = sample("Conv", data, kernel, strides=(2, 2), pads=(size // 2,) * 4)
    made = gradients_of(module_of(drawn), ["x1"])
    g = next(value for value in made.graph.inputs if value.name == "grad.y0")
    windows = g.shape[0] * g.shape[2] * g.shape[3]
    flops = irpar.partition(made, "d=1").plan.original["flops"]
    assert flops <= (1 + 1 / convolution.LEAST_CHANNELS) * 2 * windows * kernel.size


@pytest.mark.parametrize("drawn", POOLS, ids=str)
@pytest.mark.parametrize("most", [pooling.MOST_COMPARED, 0, 99], ids=["as it is", "by index", "compared"])
def test_pooling(drawn: Sample, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "MOST_COMPARED", most)
    check_sample(drawn)


@pytest.mark.parametrize("most", [99, 0], ids=["compared", "by index"])
def test_of_equal_maxima_the_first_gets_all(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "MOST_COMPARED", most)
    drawn = sample("MaxPool", np.float32([[[2, 2, 1, 3, 3, 3]]]), kernel_shape=(3,), strides=(3,))
    made = gradients_of(module_of(drawn), ["x0"])
    found = run(made, {**feeds_of(drawn), "grad.y0": np.array([[[5.0, 7.0]]])})
    np.testing.assert_array_equal(found["grad.x0"], [[[5, 0, 0, 7, 0, 0]]])


def test_the_first_of_equal_maxima_of_a_whole_image_gets_all() -> None:
    drawn = sample("GlobalMaxPool", np.float32([[[[1, 4], [4, 0]]]]))
    found = run(gradients_of(module_of(drawn), ["x0"]), {**feeds_of(drawn), "grad.y0": np.array([[[[5.0]]]])})
    np.testing.assert_array_equal(found["grad.x0"], [[[[0, 5], [0, 0]]]])


def test_a_weight_of_a_convolution_alone() -> None:
    drawn = CONVOLUTIONS[0]
    check_module(module_of(drawn), feeds_of(drawn), ["x1"])
