"""Copies of rows that begin anywhere, on a processor."""

import numpy as np
import pytest

from irpar.kernels.cuda import padding

from .emulation import NEEDS_COMPILER, EmulatedGpu


@pytest.mark.slow
@NEEDS_COMPILER
def test_rows_are_copied_from_anywhere_to_anywhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    gpu, numbers = EmulatedGpu(tmp_path_factory.mktemp("emulated")), np.random.default_rng()
    for length in (1, 7, 8, 9, 40, 2500):
        for source, target in ((0, 0), (1, 0), (0, 1), (3, 6), (5, 5), (7, 2)):
            for gaps in ((0, 0), (3, 0), (0, 8)):
                x, y = (
                    gpu.empty((offset + 3 * (length + gap) + 8,), np.dtype(np.uint16))
                    for offset, gap in zip((source, target), gaps, strict=True)
                )
                x[...] = numbers.integers(0, 2**16, x.shape)
                before = y.copy()
                rows = [
                    memory[offset : offset + 3 * (length + gap)].reshape(3, length + gap)[:, :length]
                    for memory, offset, gap in zip((x, y), (source, target), gaps, strict=True)
                ]
                padding.copy_rows(gpu, *rows)  # type: ignore[arg-type]
                np.testing.assert_array_equal(rows[1], rows[0])
                rows[1][...] = 0xFFFF
                np.testing.assert_array_equal(y, before)
