"""What kernels take beside their results lies in memory that they are lent, of the size that they declare."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from irpar.kernels import Kernel, Shaped, lookup
from irpar.kernels.scratch import SCRATCH, Scratch
from tests.ops.rule_proof import Sample

from .conformance import results_of_calls
from .test_out import check_same

Array = np.ndarray[Any, Any]


def declared(kernel: Kernel, operands: list[Array | None], results: list[Array], attributes: Mapping[str, Any]) -> int:
    known = [None if x is None else Shaped(x.shape, x.dtype, not x.flags.c_contiguous) for x in operands]
    return kernel.scratch_bytes(known, [Shaped(x.shape, x.dtype) for x in results], attributes)


def check(kernel: Kernel, operands: list[Array | None], attributes: Mapping[str, Any], n_outputs: int = 1) -> int:
    """Compare a call in lent memory, of any content, with one without; gives how much was lent."""
    expected = kernel(np, operands, attributes, n_outputs)
    nbytes = declared(kernel, operands, list(expected), attributes)
    outs = tuple(np.full(x.shape, 7).astype(x.dtype) for x in expected)
    SCRATCH._memory.clear()
    lent = np.full(nbytes, 255, np.uint8)
    found = kernel(np, operands, attributes, n_outputs, outs[0] if n_outputs == 1 else outs, scratch=lent)
    assert not SCRATCH._memory, f"{kernel.op_type} takes more than it says"
    for result, wanted in zip(found, expected, strict=True):
        check_same(result, wanted, kernel.op_type)
        assert not np.shares_memory(result, lent)
    return nbytes


def convolutions(count: int) -> Iterator[tuple[str, list[Array | None], dict[str, Any]]]:
    drawn = random.Random(1)
    numbers = np.random.default_rng(1)
    for number in range(count):
        rank = drawn.choice((1, 2, 2, 2, 3))
        group = drawn.choice((1, 1, 2, 5))
        depth, features = drawn.choice(((1, 1), (1, 2), (3, 2), (4, 6)))
        if number % 7 == 0:
            rank, group, depth, features = 2, 1, 70, 65
        elif number % 7 == 1:
            rank, group, depth, features = 2, 400, 1, 1
        size = tuple(drawn.randrange(5, 40 if rank < 3 else 9) for _ in range(rank))
        kernel = (3,) * rank if number % 7 < 2 else tuple(drawn.choice((1, 2, 3, 5)) for _ in range(rank))
        attributes = {
            "group": group,
            "strides": tuple(1 if number % 7 < 2 else drawn.choice((1, 1, 2)) for _ in range(rank)),
            "dilations": tuple(1 if number % 7 < 2 else drawn.choice((1, 1, 2)) for _ in range(rank)),
            "pads": tuple(drawn.choice((0, 1, 2)) for _ in range(2 * rank)),
        }
        if any((k - 1) * d + 1 > n for k, d, n in zip(kernel, attributes["dilations"], size, strict=True)):
            continue
        x = numbers.standard_normal((drawn.choice((1, 3)), group * depth, *size)).astype(np.float32)
        weight = numbers.standard_normal((group * features, depth, *kernel)).astype(np.float32)
        yield "Conv", [x, weight], attributes
        if number % 7 > 1:
            spread = numbers.standard_normal((group * depth, features, *kernel)).astype(np.float32)
            if min((n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(size, attributes["strides"], kernel, attributes["dilations"], strict=True)) > 4:  # fmt: skip
                yield "ConvTranspose", [x, spread], attributes


def test_convolutions_take_what_they_declare() -> None:
    taken = [check(lookup("", op_type, 22), operands, attributes) for op_type, operands, attributes in convolutions(40)]  # type: ignore[arg-type]
    assert sum(map(bool, taken)) > 20


@pytest.mark.parametrize("is_strided", [False, True])
def test_sums_and_products_take_what_they_declare(is_strided: bool) -> None:
    numbers = np.random.default_rng(2)

    def drawn(*shape: int) -> Array:
        x = numbers.standard_normal(shape[::-1] if is_strided else shape).astype(np.float32)
        return x.T if is_strided else x

    x, y, labels = drawn(4, 30, 20), drawn(4, 20, 30), numbers.integers(0, 30, (4, 20))
    for op_type in ("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare"):
        nbytes = check(lookup("", op_type, 18), [x, np.array([1])], {})  # type: ignore[arg-type]
        assert bool(nbytes) == (is_strided or op_type not in ("ReduceSum", "ReduceMean"))
    for op_type in ("Softmax", "LogSoftmax"):
        assert bool(check(lookup("", op_type, 13), [x], {"axis": 1})) == is_strided  # type: ignore[arg-type]
    check(lookup("", "SoftmaxCrossEntropyLoss", 13), [x, labels], {}, 2)  # type: ignore[arg-type]
    check(lookup("", "OneHot", 11), [labels, np.array(30), np.array([0, 1], np.float32)], {})  # type: ignore[arg-type]
    for equation in ("bij,bkj->bik", "bij,bjk->kib", "bij,bjk->ik", "bij,bkl->bijkl"):
        operands = [x, drawn(4, 7, 20) if equation == "bij,bkj->bik" else y]
        if equation == "bij,bkl->bijkl":
            operands = [operand[:, :3, :3] for operand in operands]
        check(lookup("", "Einsum", 12), operands, {"equation": equation})  # type: ignore[arg-type]


@pytest.mark.parametrize(("op_type", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_recurrent_layers_take_what_they_declare(op_type: str, gates: int, direction: str) -> None:
    numbers, directions = np.random.default_rng(3), 1 if direction == "forward" else 2
    x, w, r = (
        numbers.standard_normal(shape).astype(np.float32)
        for shape in ((7, 3, 5), (directions, gates * 6, 5), (directions, gates * 6, 6))
    )
    nbytes = check(lookup("", op_type, 22), [x, w, r], {"direction": direction, "hidden_size": 6}, 2)  # type: ignore[arg-type]
    assert nbytes >= 7 * 3 * gates * 6 * 4


@pytest.mark.parametrize("sizes", [(2, 3, 8, 10), (2, 3, 8, 5), (2, 6, 2, 10), (4, 6, 8, 10), (2, 3, 4, 5)])
def test_the_nearest_of_places_are_taken_axis_by_axis(sizes: tuple[int, ...]) -> None:
    x = np.random.default_rng(4).standard_normal((2, 3, 4, 5)).astype(np.float32)
    nbytes = check(lookup("", "Resize", 18), [x, None, None, np.array(sizes)], {"mode": "nearest"})  # type: ignore[arg-type]
    changed = sum(size != length for size, length in zip(sizes, x.shape, strict=True))
    assert bool(nbytes) == (changed > 1)
    repeated = x
    for axis, size in enumerate(sizes):
        places = np.clip(np.ceil((np.arange(size) + 0.5) * x.shape[axis] / size - 1), 0, x.shape[axis] - 1).astype(int)
        repeated = np.take(repeated, places, axis)
    (found,) = lookup("", "Resize", 18)(np, [x, None, None, np.array(sizes)], {"mode": "nearest"}, 1)  # type: ignore[misc]
    np.testing.assert_array_equal(found, repeated)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.float16])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_sums_of_neighbours_take_what_they_declare(mode: str, dtype: type) -> None:
    numbers = np.random.default_rng(6)
    x = (40 * numbers.random((2, 3, 9, 8))).astype(dtype)
    for sizes in ((2, 3, 18, 11), (2, 3, 9, 4), (2, 5, 4, 16)):
        operands = [x, None, None, np.array(sizes)]
        nbytes = check(lookup("", "Resize", 18), operands, {"mode": mode})  # type: ignore[arg-type]
        assert nbytes >= x.itemsize
    # One axis keeps its size and is taken from other places: of that nothing is foreseen, and the numbers are right.
    scales = np.array([1, 1, 2, 1.1], np.float32)
    first, second = (
        lookup("", "Resize", 18)(np, [x, None, scales], {"mode": mode}, 1, out, scratch=lent)[0]  # type: ignore[misc]
        for out, lent in ((None, None), (np.empty((2, 3, 18, 8), dtype), np.zeros(1 << 20, np.uint8)))
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_means_of_windows_take_what_they_declare_and_are_onnx_runtimes(dtype: type) -> None:
    x = np.random.default_rng(7).standard_normal((2, 3, 9, 8)).astype(dtype)
    for attributes in (
        {"kernel_shape": (3, 2)},
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)},
        {"kernel_shape": (3, 3), "pads": (1, 0, 1, 2), "strides": (2, 3), "ceil_mode": 1, "count_include_pad": 1},
        {"kernel_shape": (2, 2), "auto_pad": "SAME_UPPER", "strides": (2, 3)},
        {"kernel_shape": (2, 2), "pads": (1, 0, 0, 1), "dilations": (2, 1)},
    ):
        nbytes = check(lookup("", "AveragePool", 19), [x], attributes)  # type: ignore[arg-type]
        assert nbytes > 0
        if dtype == np.float32:
            sample = Sample("AveragePool", (x,), attributes, version=19)
            (found,) = lookup("", "AveragePool", 19)(np, [x], attributes, 1)  # type: ignore[misc]
            np.testing.assert_allclose(found, sample.whole[0], rtol=1e-5, atol=1e-6)


def test_the_greatest_of_windows_take_what_they_declare() -> None:
    x = np.random.default_rng(8).standard_normal((3, 40, 70, 60)).astype(np.float32)
    for attributes in (
        {"kernel_shape": (3, 2)},
        {"kernel_shape": (3, 3), "pads": (1, 0, 1, 2), "strides": (2, 3), "ceil_mode": 1},
        {"kernel_shape": (2, 1), "dilations": (3, 1)},
    ):
        nbytes = check(lookup("", "MaxPool", 12), [x], attributes)  # type: ignore[arg-type]
        assert nbytes > 0
        sample = Sample("MaxPool", (x,), attributes)
        (found,) = lookup("", "MaxPool", 12)(np, [x], attributes, 1)  # type: ignore[misc]
        np.testing.assert_array_equal(found, sample.whole[0])


def test_cases_of_onnx_take_what_they_declare() -> None:
    for call, operands, _ in results_of_calls():
        if call.kernel.scratch is not None and len(call.outputs) == 1:
            check(call.kernel, operands, call.attributes)


def test_lent_memory_is_given_back_and_more_is_found_elsewhere() -> None:
    scratch, kind = Scratch(), np.dtype(np.float32)
    lent = np.zeros(256, np.uint8)
    with scratch.lent(lent):
        first = scratch.array("a", (10,), kind)
        assert np.shares_memory(first, lent)
        assert np.shares_memory(scratch.array("a", (4,), kind), first)
        second = scratch.array("b", (40,), kind)
        assert np.shares_memory(second, lent)
        assert not np.shares_memory(first, second)
        assert not np.shares_memory(scratch.array("c", (40,), kind), lent)
    assert not np.shares_memory(scratch.array("a", (10,), kind), lent)


def test_memory_like_an_array_lies_as_it_does() -> None:
    x = np.zeros((2, 3, 4)).transpose(1, 2, 0)
    assert SCRATCH.like("x", x).strides == x.strides
