"""Convolutions with channels last on an emulated device, against float64; how they are divided, what they leave."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irpar.kernels.cuda import channels_last
from irpar.kernels.cuda.channels_last import TILES, plan_of

from .convolution_cases import CASES, DTYPES, Case, found, padded
from .emulation import NEEDS_COMPILER, EmulatedGpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def check(gpu: EmulatedGpu, case: Case, dtype: str) -> None:
    operands = case.operands(dtype)
    given = [None if each is None else gpu.empty(each.shape, each.dtype) for each in operands]
    for target, source in zip(given, operands, strict=True):
        if target is not None and source is not None:
            target[...] = source
    case.check(found(gpu, case, given), operands, dtype)


@NEEDS_COMPILER
def test_one_of_them(folder: Path) -> None:
    gpu = EmulatedGpu(folder)
    check(gpu, CASES[0], "f16")
    assert gpu.launched[0] == "convolve"


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(folder: Path, case: Case, dtype: str) -> None:
    check(EmulatedGpu(folder), case, dtype)


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "arch"), [("bf16", 80), ("bf16", 90), ("f32", 90)])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_each_tile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tile: channels_last.Tile, splits: int, dtype: str, arch: int
) -> None:
    def plan(*_: Any) -> channels_last.Plan:
        steps = -(-9 * 40 * (4 if dtype == "f32" else 2) // 128)
        return channels_last.Plan(tile, splits, -(-steps // splits))

    monkeypatch.setattr(channels_last, "plan_of", plan)
    gpu = EmulatedGpu(folder, is_backwards=splits > 1)
    gpu.arch = arch
    check(gpu, Case((2, 9, 10, 40), (136, 3, 3, 40), padded(1, 1, 1, 1, activation="Relu")), dtype)
    check(gpu, Case((1, 5, 6, 40), (67, 3, 3, 40), padded(1, 1, 1, 1)), dtype)
    assert gpu.launched == ["convolve"] * 2


@NEEDS_COMPILER
@pytest.mark.slow
def test_operands_that_lie_anywhere(folder: Path) -> None:
    """Strided ones are copied; from odd addresses fewer bytes are copied at once, or channels are padded."""
    gpu, case = EmulatedGpu(folder), CASES[0]
    operands = case.operands("f16")
    for offset in (1, 2, 4):
        given = []
        for each in operands:
            assert each is not None
            memory = gpu.empty((each.size + 8,), each.dtype)
            place = memory[offset : offset + each.size].reshape(each.shape)
            place[...] = each
            given.append(place)
        case.check(found(gpu, case, given), operands, "f16")
    turned = [None if each is None else np.asfortranarray(each) for each in operands]
    case.check(found(gpu, case, turned), operands, "f16")


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 9, 8, 3), (2, 9, 1, 3), (1, 7, 6, 1), (2, 5, 6, 9), (1, 4, 5, 7, 3)])
@pytest.mark.parametrize(("stride", "before"), [(1, 1), (2, 1), (2, 2), (4, 3), (2, -1)])
def test_channels_that_are_padded_are_read_where_they_lie(
    folder: Path, shape: tuple[int, ...], stride: int, before: int
) -> None:
    """Also where pixels become channels: those of a line, where windows begin with whole ones."""
    spatial = len(shape) - 2
    pads = (*[1] * (spatial - 1), before, *[2] * spatial)
    attributes = padded(*pads, strides=(1,) * (spatial - 1) + (stride,))
    gpu, case = EmulatedGpu(folder), Case(shape, (16, *[3] * spatial, shape[-1]), attributes, "bias")
    if not all(case.result_shape()):
        pytest.skip("no windows")
    operands = case.operands("f16")
    assert operands[0] is not None
    first = np.ascontiguousarray(np.moveaxis(operands[0], -1, 1))
    case.check(found(gpu, case, [np.moveaxis(first, 1, -1), *operands[1:]]), operands, "f16")
    assert gpu.launched == ["pad_channels", "pad_channels", "convolve"]


@NEEDS_COMPILER
@pytest.mark.slow
def test_a_result_goes_where_it_is_wanted(folder: Path) -> None:
    case = CASES[1]
    operands = case.operands("bf16")
    out = np.empty(case.result_shape(), DTYPES["bf16"])
    assert found(EmulatedGpu(folder), case, operands, out) is out
    case.check(out, operands, "bf16")


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("activation", ["", "Relu", "Clip", "Sigmoid", "HardSwish", "Silu"])
def test_what_is_no_number_stays(folder: Path, activation: str) -> None:
    case = Case((1, 3, 4, 8), (8, 3, 3, 8), padded(1, 1, 1, 1, activation=activation))
    operands = case.operands("f16")
    assert operands[0] is not None
    operands[0][0, 0, 0, 3] = np.nan
    result = found(EmulatedGpu(folder), case, operands)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(case.expected(operands)))


def test_how_they_are_divided() -> None:
    large = plan_of(16 * 56 * 56, 256, 1, 9, True, 132)
    assert large.splits == 1
    assert large.tile.rows == 128
    small = plan_of(49, 512, 1, 72, True, 132)
    assert small.splits > 1
    assert small.splits * small.steps >= 72 > (small.splits - 1) * small.steps


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case((1, 4, 4, 8), (8, 3, 3, 4)), "groups that do not fit"),
        (Case((1, 4, 4, 8), (8, 3, 3, 8), {"activation": "Tanh"}), "another activation"),
        (Case((1, 2, 2, 8), (8, 3, 3, 8)), "no places"),
        (Case((1, 2, 2, 2, 2, 8), (8, 1, 1, 1, 1, 8)), "four spatial dims"),
    ],
    ids=str,
)
def test_what_is_left_to_others(tmp_path: Path, case: Case, why: str) -> None:
    given = [np.zeros(case.x, np.float16), np.zeros(case.weight, np.float16)]
    assert found(EmulatedGpu(tmp_path), case, given) is None, why


def test_other_dtypes_are_left_to_others(tmp_path: Path) -> None:
    case = Case((1, 4, 4, 8), (8, 3, 3, 8))
    wide = [np.zeros(case.x), np.zeros(case.weight)]
    assert found(EmulatedGpu(tmp_path), case, wide) is None
    mixed = [np.zeros(case.x, np.float16), np.zeros(case.weight, np.float32)]
    assert found(EmulatedGpu(tmp_path), case, mixed) is None
