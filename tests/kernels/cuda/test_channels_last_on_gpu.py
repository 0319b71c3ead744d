"""Convolutions with channels last on a device: poisoned results between guard words, odd sizes, captured."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from irpar.kernels.cuda import Gpu, Program, channels_last
from tests.gpu import NEEDS_GPU, cupy

from .convolution_cases import CASES, DTYPES, Case, found, padded
from .test_kernels_on_gpu import Guarded, to_device, to_host

pytestmark = NEEDS_GPU

LARGE = [
    Case((4, 56, 56, 64), (64, 3, 3, 64), padded(1, 1, 1, 1, activation="Relu"), "bias"),
    Case((2, 56, 56, 256), (128, 1, 1, 256), {"strides": (2, 2)}, "bias"),
    Case((1, 7, 7, 512), (512, 3, 3, 512), padded(1, 1, 1, 1, activation="Relu")),
    Case((2, 112, 112, 3), (64, 7, 7, 3), padded(3, 3, 3, 3, strides=(2, 2), activation="Relu"), "bias"),
    Case((2, 28, 28, 512), (128, 1, 1, 512), {"activation": "Relu"}, "bias"),
    Case((1, 56, 56, 96), (96, 5, 5, 1), padded(2, 2, 2, 2, group=96, activation="Silu"), "bias"),
    Case((2, 31, 29, 136), (72, 3, 3, 136), padded(1, 1, 1, 1)),
]


class Asked(Gpu):
    """Launches nothing, but notes what would be launched."""

    def __init__(self) -> None:
        super().__init__(cupy())
        self.functions: set[tuple[Program, str]] = set()

    def launch(self, program: Program, function: str, *_: Any) -> None:
        self.functions.add((program, function))


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    """The device, with programs that were compiled side by side: one after the other they would take most of the time."""
    asked, made = Asked(), Gpu(cupy())
    for dtype in DTYPES:
        for case in [*CASES, *LARGE]:
            found(asked, case, [None if each is None else to_device(each) for each in case.operands(dtype)])
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda each: made.function(*each), sorted(asked.functions, key=str)))
    return made


def check(gpu: Gpu, case: Case, dtype: str) -> None:
    operands = case.operands(dtype)
    given = [None if each is None else to_device(each) for each in operands]
    out = Guarded(case.result_shape(), DTYPES[dtype])
    assert found(gpu, case, given, out.array) is out.array
    first = to_host(out.array).copy()
    case.check(first, operands, dtype)
    out.check()
    assert found(gpu, case, given, out.array) is out.array
    assert to_host(out.array).tobytes() == first.tobytes(), f"{case}: another result at the next run"


@pytest.mark.parametrize("dtype", DTYPES)
def test_cases(gpu: Gpu, dtype: str) -> None:
    for case in [*CASES, *LARGE]:
        check(gpu, case, dtype)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("tile", channels_last.TILES, ids=str)
def test_each_tile(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tile: channels_last.Tile, dtype: str) -> None:
    steps = -(-9 * 40 * (4 if dtype == "f32" else 2) // 128)
    for splits in (1, 3):
        plan = channels_last.Plan(tile, splits, -(-steps // splits))
        monkeypatch.setattr(channels_last, "plan_of", lambda *_, plan=plan: plan)
        check(gpu, Case((2, 19, 10, 40), (136, 3, 3, 40), padded(1, 1, 1, 1, activation="Relu")), dtype)
        check(gpu, Case((1, 15, 16, 40), (67, 3, 3, 40), padded(1, 1, 1, 1)), dtype)


def test_they_are_captured(gpu: Gpu) -> None:
    for case in (LARGE[0], LARGE[2], LARGE[3], LARGE[5]):
        operands = case.operands("f16")
        given = [None if each is None else to_device(each) for each in operands]
        out: Any = cupy().zeros(case.result_shape(), np.float16)
        found(gpu, case, given, out)
        stream = cupy().cuda.Stream(non_blocking=True)
        with stream:
            found(gpu, case, given, out)
            stream.synchronize()
            stream.begin_capture()
            found(gpu, case, given, out)
            graph = stream.end_capture()
            out[...] = 0
            graph.launch(stream)
            stream.synchronize()
        case.check(to_host(out), operands, "f16")
