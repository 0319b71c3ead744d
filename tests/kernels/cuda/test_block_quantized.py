"""Products with weights of a few bits on a processor, against numpy in double precision."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.kernels import lookup
from irpar.kernels.cuda import block_quantized
from irpar.kernels.cuda import lookup as cuda_lookup

from .emulation import NEEDS_COMPILER, EmulatedGpu

F16, BF16, F32 = (np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32))
UNIT = {F16: 2.0**-10, BF16: 2.0**-7, F32: 2.0**-19}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    return EmulatedGpu(tmp_path_factory.mktemp("emulated"), multiprocessors=2)


class Weights:
    """Random weights.

    Args:
        depth, columns, block, bits: K, N, block_size and bits.
        points: "none", "packed" or "floats".
        dtype: of scales, and of zero points that are floats.
    """

    def __init__(self, depth: int, columns: int, block: int, bits: int, points: str, dtype: Any) -> None:
        numbers = np.random.default_rng()
        blocks = -(-depth // block)
        self.attributes = {"K": depth, "N": columns, "block_size": block, "bits": bits}
        self.data = numbers.integers(0, 256, (columns, blocks, block * bits // 8), dtype=np.uint8)
        self.scales = numbers.uniform(0.5, 1.5, columns * blocks).astype(dtype)
        self.points: np.ndarray | None = None
        if points == "packed":
            self.points = numbers.integers(0, 256, columns * -(-blocks * bits // 8), dtype=np.uint8)
        elif points == "floats":
            self.points = numbers.uniform(0, 2**bits, columns * blocks).astype(dtype)

    def exact(self) -> np.ndarray:
        """[N, K] in double precision, number by number."""
        depth, columns, block, bits = self.attributes.values()
        blocks, each = -(-depth // block), 8 // bits

        def taken(packed: np.ndarray, column: int, place: int) -> int:
            byte = int(packed.reshape(columns, -1)[column, place // each])
            return byte >> place % each * bits & 2**bits - 1

        made = np.empty((columns, depth))
        for column in range(columns):
            for place in range(depth):
                of = place // block
                point: float = 2 ** (bits - 1)
                if self.points is not None and self.points.dtype == np.uint8:
                    point = taken(self.points, column, of)
                elif self.points is not None:
                    point = float(self.points[column * blocks + of])
                made[column, place] = (taken(self.data, column, place) - point) * float(
                    self.scales[column * blocks + of]
                )
        return made


CASES = [
    *(
        (1, 64, 9, 32, 4, "none"),
        (2, 96, 17, 16, 4, "packed"),
        (3, 200, 33, 32, 4, "packed"),
        (8, 256, 5, 64, 4, "floats"),
    ),
    *(
        (4, 2048, 6, 128, 4, "none"),
        (1, 130, 40, 32, 8, "none"),
        (5, 256, 10, 16, 8, "packed"),
        (2, 300, 7, 256, 8, "floats"),
    ),
    *((9, 64, 24, 32, 4, "packed"), (11, 90, 8, 16, 8, "none")),
]
"""Rows, K, N, block_size, bits, zero points."""


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, dtype: np.dtype, case: tuple[Any, ...]) -> None:
    rows, depth, columns, *how = case
    of = Weights(depth, columns, *how, dtype)
    numbers = np.random.default_rng()
    a = gpu.empty((rows, depth), dtype)
    a[...] = numbers.standard_normal((rows, depth))
    bias = numbers.standard_normal(columns).astype(dtype) if rows % 2 else None
    wanted = a.astype(np.float64) @ of.exact().T + (0 if bias is None else bias.astype(np.float64))
    room = abs(a.astype(np.float64)) @ abs(of.exact().T) + 4
    seen: list[np.ndarray] = []

    def plain(xp: Any, a: np.ndarray, b: np.ndarray, out: np.ndarray, *, bias: np.ndarray | None) -> np.ndarray:
        seen.append(b)
        out[...] = a.astype(np.float64) @ b.astype(np.float64) + (0 if bias is None else bias.astype(np.float64))
        return out

    monkeypatch.setattr(block_quantized, "matmul", plain)
    kernel = cuda_lookup("com.microsoft", "MatMulNBits", 1)
    assert kernel is not None
    data = gpu.empty(of.data.shape, np.dtype(np.uint8))
    data[...] = of.data
    memory = gpu.empty((rows * columns + 64,), dtype)
    guards = memory.view(np.uint8).copy()
    out = memory[32 : 32 + rows * columns].reshape(rows, columns)
    found = kernel(gpu, [a, data, of.scales, of.points, None, bias], of.attributes, 1, out)  # type: ignore[arg-type]
    assert found is not None
    assert found[0] is out
    assert (abs(out.astype(np.float64) - wanted) <= UNIT[dtype] * room).all()
    raw, edge = memory.view(np.uint8), 32 * dtype.itemsize
    np.testing.assert_array_equal(raw[:edge], guards[:edge])
    np.testing.assert_array_equal(raw[-edge:], guards[-edge:])
    column_bytes = data[0].nbytes
    is_read_once = (
        rows <= block_quantized.MOST_ROWS and column_bytes % 16 == 0 and (rows == 1 or depth * dtype.itemsize % 16 == 0)
    )
    assert len(seen) == (0 if is_read_once else 1)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("case", [*CASES, (3, 64, 5, 32, 2, "packed"), (2, 48, 5, 16, 2, "none")], ids=str)
def test_products_of_numpy(dtype: np.dtype, case: tuple[Any, ...]) -> None:
    rows, depth, columns, *how = case
    of = Weights(depth, columns, *how, dtype)
    a = np.random.default_rng().standard_normal((2, rows, depth)).astype(dtype)
    kernel = lookup("com.microsoft", "MatMulNBits", 1)
    assert kernel is not None
    (found,) = kernel(np, [a, of.data, of.scales, of.points], of.attributes, 1)
    wanted = a.astype(np.float64) @ of.exact().T
    room = abs(a.astype(np.float64)) @ abs(of.exact().T) + 4
    assert found.dtype == dtype
    assert (abs(found.astype(np.float64) - wanted) <= UNIT[dtype] * room).all()


def test_what_is_left_to_the_other_kernel(gpu: EmulatedGpu) -> None:
    kernel = cuda_lookup("com.microsoft", "MatMulNBits", 1)
    assert kernel is not None
    of = Weights(64, 8, 32, 4, "none", F32)
    a = np.ones((1, 64), F32)
    order = np.zeros(64, np.int32)
    for operands, attributes in (
        ([a, of.data, of.scales, None, order], of.attributes),
        ([a, of.data, of.scales], of.attributes | {"bits": 2}),
        ([a.astype(np.float64), of.data, of.scales.astype(np.float64)], of.attributes),
        ([a, of.data, of.scales[:-1]], of.attributes),
    ):
        assert kernel(gpu, operands, attributes, 1) is None  # type: ignore[arg-type]
